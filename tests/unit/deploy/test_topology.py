"""Tests what a member finds out about its place: RDMA devices as the kernel lists them, NVLink as nvidia-smi prints it,
and labels of the node."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from deploy import topology
from deploy.topology import find_place, nvlink_domain, parse_labels, rdma_fabric
from fabric.contracts import ConfigError


def port(
    root: Path, device: str, link_layer: str, state: str = "4: ACTIVE", gid: str = "fe80:0000:0000:0000:0002:c903:00:1"
) -> None:
    folder = root / "class" / "infiniband" / device / "ports" / "1"
    (folder / "gids").mkdir(parents=True)
    (folder / "state").write_text(f"{state}\n")
    (folder / "link_layer").write_text(f"{link_layer}\n")
    (folder / "gids" / "0").write_text(f"{gid}\n")


def test_no_rdma_device_means_no_fabric(tmp_path: Path) -> None:
    assert rdma_fabric(tmp_path, {}) == ""


def test_infiniband_and_roce_are_found_where_a_port_is_active(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", "Ethernet")
    assert rdma_fabric(tmp_path, {}) == "roce"
    port(tmp_path, "mlx5_1", "InfiniBand", state="1: DOWN")
    assert rdma_fabric(tmp_path, {}) == "roce"
    port(tmp_path, "mlx5_2", "InfiniBand")
    assert rdma_fabric(tmp_path, {}) == "infiniband"


def test_infiniband_subnets_with_prefixes_of_their_own_are_apart(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", "InfiniBand", gid="fec0:0000:0000:0007:0002:c903:00:1")
    assert rdma_fabric(tmp_path, {}) == "infiniband-fec0:0000:0000:0007"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"UCX_TLS": "all"}, "roce"),
        ({"UCX_TLS": "rc,cuda_copy"}, "roce"),
        ({"UCX_TLS": "self, sm, ib"}, "roce"),
        ({"UCX_TLS": "tcp,sm,self"}, ""),
        ({"UCX_TLS": "^ib"}, ""),
        ({"UCX_TLS": "^rc,ud,dc"}, ""),
        ({"UCX_TLS": "^tcp"}, "roce"),
        ({"UCX_NET_DEVICES": "all"}, "roce"),
        ({"UCX_NET_DEVICES": "eth0,mlx5_0:1"}, "roce"),
        ({"UCX_NET_DEVICES": "eth0"}, ""),
    ],
)
def test_what_ucx_may_not_use_does_not_count(tmp_path: Path, environment: Mapping[str, str], expected: str) -> None:
    port(tmp_path, "mlx5_0", "Ethernet")
    assert rdma_fabric(tmp_path, environment) == expected


# ------------------------------------------------------------ NVLink

GPUS = "0, GPU-aaa\n1, GPU-bbb\n2, GPU-ccc\n3, GPU-ddd\n"
PAIRS = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV4\tSYS\tSYS\tPIX\t0-31\t0\t\tN/A
GPU1\tNV4\t X \tSYS\tSYS\tPIX\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tPHB\tSYS\t32-63\t1\t\tN/A
GPU3\tSYS\tSYS\tPHB\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPIX\tPIX\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
SWITCH = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tNV18\tNV18\tNV18\t0-31
GPU1\tNV18\t X \tNV18\tNV18\t0-31
GPU2\tNV18\tNV18\t X \tNV18\t0-31
GPU3\tNV18\tNV18\tNV18\t X \t0-31
"""
DETAILS = """\
==============NVSMI LOG==============

GPU 00000000:0F:00.0
    Product Name                          : NVIDIA GB200
    Fabric
        State                             : {state}
        Status                            : Success
        CliqueId                          : 3
        ClusterUUID                       : {cluster}
    Processes                             : None
"""
NO_CLUSTER = "00000000-0000-0000-0000-000000000000"


def smi(matrix: str, state: str = "Completed", cluster: str = NO_CLUSTER) -> topology.RunNvidiaSmi:
    def run(arguments: list[str]) -> str:
        match arguments:
            case ["-q", "-i", _]:
                return DETAILS.format(state=state, cluster=cluster)
            case ["topo", "-m"]:
                return matrix
            case _:
                return GPUS

    return run


def test_devices_that_nvlink_joins_have_one_domain() -> None:
    assert nvlink_domain("GPU-aaa", smi(PAIRS)) == nvlink_domain("GPU-bbb", smi(PAIRS)) == "GPU-aaa"
    assert nvlink_domain("GPU-ccc", smi(PAIRS)) == nvlink_domain("GPU-ddd", smi(PAIRS)) == ""
    assert {nvlink_domain(uuid, smi(SWITCH)) for uuid in ("GPU-aaa", "GPU-bbb", "GPU-ccc", "GPU-ddd")} == {"GPU-aaa"}


def test_a_fabric_of_several_machines_names_the_domain() -> None:
    cluster = "2c1f3f9a-0000-4a5b-8000-000000000001"
    assert nvlink_domain("GPU-aaa", smi(SWITCH, cluster=cluster)) == f"{cluster}.3"
    assert nvlink_domain("GPU-aaa", smi(SWITCH, state="In Progress", cluster=cluster)) == "GPU-aaa"
    assert nvlink_domain("GPU-aaa", smi(SWITCH)) == "GPU-aaa", "NVSwitch within a machine has no id of its own"


def test_without_nvidia_smi_or_an_id_there_is_no_domain(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: list[str]) -> str:
        raise OSError("nvidia-smi is not there")

    assert nvlink_domain("GPU-aaa", fail) == ""
    assert "nvidia-smi is not there" in caplog.text
    assert nvlink_domain("", fail) == ""
    assert nvlink_domain("GPU-zzz", smi(SWITCH)) == ""


# ------------------------------------------------------------ the place


def test_labels_of_the_environment_replace_those_of_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(topology, "SYSTEM_ROOT", tmp_path)
    monkeypatch.setenv("WEFT_NODE_LABELS", "rack=r7, zone=a=b")
    place = find_place("cpu", node_labels={"rack": "old", "market": "spot"})
    assert place.labels == (("market", "spot"), ("rack", "r7"), ("zone", "a=b"))
    assert (place.nvlink_domain, place.rdma_fabric) == ("", "")
    assert place.hardware == find_place("cpu").hardware != ""


@pytest.mark.parametrize("text", ["rack", "rack=1,zone", "=x"])
def test_labels_that_are_written_otherwise_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="name=value"):
        parse_labels(text)
    assert parse_labels(" ") == {}
