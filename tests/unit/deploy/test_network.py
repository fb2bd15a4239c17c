"""Tests which address of a node its members advertise, and what UCX, gloo and NCCL are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.config import ClusterConfig, NetworkSection
from deploy.config_file import check_config
from deploy.network import (
    NodeAddress,
    bind_transports,
    check_devices,
    choose_address,
    local_interfaces,
    own_address,
)
from fabric.contracts import ConfigError

NODE = {
    "docker0": ("172.17.0.1",),
    "eth0": ("192.0.2.7", "2001:db8::7"),
    "eth1": ("10.1.0.7",),
    "ib0": ("10.2.0.7",),
    "lo": ("127.0.0.1", "::1"),
}


def chosen(ray_address: str = "192.0.2.7", forced: str = "", **section: object) -> NodeAddress:
    return choose_address(NetworkSection.model_validate(section), NODE, ray_address, {"WEFT_NODE_ADDRESS": forced})


def test_rays_address_is_taken_unless_the_config_says_otherwise() -> None:
    assert chosen() == ("192.0.2.7", "eth0")
    assert chosen("127.0.0.1") == ("127.0.0.1", "lo")
    assert chosen("2001:db8::7") == ("2001:db8::7", "eth0")


def test_the_first_pattern_of_an_interface_wins() -> None:
    assert chosen(interface="ib*") == ("10.2.0.7", "ib0")
    assert chosen(interface=["ib9", "eth1", "ib*"]) == ("10.1.0.7", "eth1")
    assert chosen(interface="eth*") == ("192.0.2.7", "eth0"), "Ray's own address goes first"
    assert chosen("10.1.0.7", interface="eth*") == ("10.1.0.7", "eth1")


def test_a_subnet_chooses_among_all_interfaces_and_within_one() -> None:
    assert chosen(subnet="10.2.0.0/16") == ("10.2.0.7", "ib0")
    assert chosen(subnet="2001:db8::/32") == ("2001:db8::7", "eth0")
    assert chosen(interface="eth*", subnet=["10.0.0.0/8"]) == ("10.1.0.7", "eth1")


def test_the_environment_of_a_node_wins() -> None:
    assert chosen(forced="10.1.0.7", interface="ib*") == ("10.1.0.7", "eth1")


def test_a_pattern_does_not_mean_the_loopback_but_its_name_does() -> None:
    assert choose_address(NetworkSection(interface=("*",)), {"lo": ("127.0.0.1",), "z0": ("10.3.0.1",)}, "", {}) == (
        "10.3.0.1",
        "z0",
    )
    assert chosen(interface="lo") == ("127.0.0.1", "lo")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"interface": "ib9"}, r"no address of the node fits network\.interface \(ib9\)"),
        ({"interface": "eth1", "subnet": "10.2.0.0/16"}, r"network\.interface \(eth1\) and network\.subnet"),
        ({"forced": "10.9.9.9"}, "WEFT_NODE_ADDRESS is 10.9.9.9, which is no address of the node itself"),
        ({"ray_address": "203.0.113.5"}, "Ray's address of the node is 203.0.113.5.*network.subnet"),
    ],
)
def test_an_error_lists_the_addresses_of_the_node(arguments: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        chosen(**arguments)
    assert "10.1.0.7 (eth1), 10.2.0.7 (ib0), 127.0.0.1 (lo)" in caught.value.message


def rdma_port(root: Path, device: str, state: str) -> None:
    folder = root / "class" / "infiniband" / device / "ports" / "1"
    folder.mkdir(parents=True)
    (folder / "state").write_text(state)


def test_transports_use_the_interface_of_the_address_and_every_active_rdma_device(tmp_path: Path) -> None:
    rdma_port(tmp_path, "mlx5_0", "4: ACTIVE")
    rdma_port(tmp_path, "mlx5_1", "1: DOWN")
    environment: dict[str, str] = {}
    bind_transports(NetworkSection(ports="21000-21999"), NodeAddress("10.1.0.7", "eth1"), environment, tmp_path)
    assert environment == {
        "UCX_NET_DEVICES": "eth1,mlx5_0:1",
        "UCX_TCP_PORT_RANGE": "21000-21999",
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "=eth1",
    }


def test_the_loopback_takes_no_rdma_device_and_ipv6_is_preferred_where_the_address_is_ipv6(tmp_path: Path) -> None:
    rdma_port(tmp_path, "mlx5_0", "4: ACTIVE")
    loopback: dict[str, str] = {}
    bind_transports(NetworkSection(), NodeAddress("127.0.0.1", "lo"), loopback, tmp_path)
    assert loopback["UCX_NET_DEVICES"] == "lo"
    six: dict[str, str] = {}
    bind_transports(NetworkSection(), NodeAddress("2001:db8::7", "eth0"), six, tmp_path)
    assert six["UCX_TCP_AF_PRIO"] == "inet6,inet"


def test_what_the_environment_of_a_node_says_stays(tmp_path: Path) -> None:
    environment = {"UCX_NET_DEVICES": "mlx5_3:1", "UCX_TLS": "rc"}
    section = NetworkSection(ucx_net_devices="mlx5_0:1", ucx_tls="tcp")
    bind_transports(section, NodeAddress("10.1.0.7", "eth1"), environment, tmp_path)
    assert (environment["UCX_NET_DEVICES"], environment["UCX_TLS"]) == ("mlx5_3:1", "rc")
    empty: dict[str, str] = {}
    bind_transports(section, NodeAddress("10.1.0.7", "eth1"), empty, tmp_path)
    assert (empty["UCX_NET_DEVICES"], empty["UCX_TLS"]) == ("mlx5_0:1", "tcp")


def test_one_machine_uses_its_loopback_whatever_the_section_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_NODE_ADDRESS", "10.9.9.9")
    assert own_address(NetworkSection(interface=("ib9",)), None).address == "127.0.0.1"
    assert "127.0.0.1" in {address for each in local_interfaces().values() for address in each}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("network: {ports: 5}", "network.ports"),
        ("network: {ports: 500-600}", "from 1024 to 65535"),
        ("network: {subnet: 10.0.0.0/99}", "is not a network"),
        ("network: {interface: []}", "network.interface"),
        ("workers: {ray_resources: {GPU: 1}}", "gpus_per_replica"),
        ("encoders: {ray_resources: {rack: 0}}", "encoders.ray_resources"),
    ],
)
def test_wrong_values_are_refused_with_their_key(text: str, said: str) -> None:
    config, problems = check_config(text)
    assert config is None
    assert said in " ".join(map(str, problems))


def test_one_interface_or_subnet_needs_no_list() -> None:
    section = ClusterConfig.model_validate({"network": {"interface": "eth1", "subnet": "10.1.0.7/16"}}).network
    assert (section.interface, section.subnet) == (("eth1",), ("10.1.0.0/16",))


def test_devices_that_are_not_there_are_refused() -> None:
    check_devices("mlx5_0:1, eth1", ("eth1", "lo"))
    check_devices("all", ("lo",))
    with pytest.raises(ConfigError, match=r"UCX_NET_DEVICES is eth9 .*devices are eth1, lo"):
        check_devices("eth9", ("lo", "eth1"))
