"""Chooses the address at which the members on this node are reached, and binds the transports to its interface.

A node may be in several networks: one for management, one for storage, one that containers made up. `choose_address`
takes the address that the config's `network` section describes, or Ray's own address of the node. `bind_transports`
then keeps UCX, gloo and NCCL to the interface of that address, and to RDMA devices, because each of them would
otherwise make a choice of its own, and two nodes may choose networks that do not meet.

What a node's own environment says wins over the config, so that one odd node needs no config of its own. The module
knows nothing of Ray, and does not look whether others reach the address (`deploy.ray.node_check` does).
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import psutil

from deploy.config import NetworkSection
from deploy.topology import SYSTEM_ROOT, rdma_ports
from fabric.contracts import ConfigError

ADDRESS_VARIABLE = "WEFT_NODE_ADDRESS"
"""Names the variable with the address of one node, which replaces every other choice on it."""
LOOPBACK = "127.0.0.1"

Interfaces = Mapping[str, tuple[str, ...]]
"""Maps the names of a machine's interfaces to their addresses."""


class NodeAddress(NamedTuple):
    """Holds the address at which the members on this node are reached, and the interface that has it."""

    address: str
    interface: str


def local_interfaces() -> dict[str, tuple[str, ...]]:
    """Returns the addresses of this machine by interface, those of the link alone (fe80::) left out."""
    found: dict[str, tuple[str, ...]] = {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        kept = tuple(each for each in addresses if "%" not in each and not ipaddress.ip_address(each).is_link_local)
        if kept:
            found[name] = kept
    return found


def choose_address(
    section: NetworkSection, interfaces: Interfaces, ray_address: str, environment: Mapping[str, str]
) -> NodeAddress:
    """Returns the address of this node: that of the environment, or else the first that fits `section.interface` and
    `section.subnet`, where Ray's own address goes first and the order of the patterns decides among the others. Raises
    ConfigError, which lists the addresses of the node, if none fits."""
    if forced := environment.get(ADDRESS_VARIABLE):
        return _own(forced, interfaces, f"{ADDRESS_VARIABLE} is {forced}, which")
    if section.interface is None and section.subnet is None:
        return _own(ray_address, interfaces, f"Ray's address of the node is {ray_address}, which")
    fitting = list(_fitting(section, interfaces))
    if not fitting:
        asked = {"network.interface": section.interface, "network.subnet": section.subnet}
        wanted = " and ".join(f"{key} ({', '.join(value)})" for key, value in asked.items() if value is not None)
        raise ConfigError(f"no address of the node fits {wanted}; the node has {listed(interfaces)}")
    return next((each for each in fitting if each.address == ray_address), fitting[0])


def _own(address: str, interfaces: Interfaces, named: str) -> NodeAddress:
    for interface, addresses in interfaces.items():
        if address in addresses:
            return NodeAddress(address, interface)
    hint = "set network.interface or network.subnet to the network in which the nodes reach each other"
    raise ConfigError(
        f"{named} is no address of the node itself, so nothing can listen on it; the node has "
        f"{listed(interfaces)}; {hint}"
    )


def _fitting(section: NetworkSection, interfaces: Interfaces) -> Iterator[NodeAddress]:
    networks = [ipaddress.ip_network(text, strict=False) for text in section.subnet or ()]
    for pattern in section.interface or ("*",):
        for name in sorted(interfaces):
            if not fnmatchcase(name, pattern):
                continue
            for address in sorted(interfaces[name], key=lambda text: ":" in text):  # IPv4 goes before IPv6.
                parsed = ipaddress.ip_address(address)
                is_named = section.interface is not None and pattern == name
                if parsed.is_loopback and not networks and not is_named:
                    continue  # A pattern such as `*` does not mean the loopback, which no other node reaches.
                if not networks or any(parsed in network for network in networks):
                    yield NodeAddress(address, name)


def listed(interfaces: Interfaces) -> str:
    """Returns the addresses of a node for a message."""
    return ", ".join(f"{address} ({name})" for name, each in sorted(interfaces.items()) for address in each) or "none"


def bind_transports(
    section: NetworkSection,
    node: NodeAddress,
    environment: MutableMapping[str, str],
    system_root: Path = SYSTEM_ROOT,
) -> None:
    """Sets the variables that UCX, gloo and NCCL read, except those that the environment has already. Side effect: it
    changes `environment`. Call it before any of these libraries is loaded.

    NCCL takes a name as the beginning of a name unless `=` stands before it."""
    rdma = () if ipaddress.ip_address(node.address).is_loopback else rdma_ports(system_root)
    chosen = {
        "UCX_NET_DEVICES": section.ucx_net_devices or ",".join((node.interface, *rdma)),
        "UCX_TLS": section.ucx_tls,
        "UCX_TCP_PORT_RANGE": section.ports,
        "UCX_TCP_AF_PRIO": "inet6,inet" if ":" in node.address else None,
        "GLOO_SOCKET_IFNAME": node.interface,
        "NCCL_SOCKET_IFNAME": f"={node.interface}",
    }
    for name, value in chosen.items():
        if value is not None:
            environment.setdefault(name, value)


def own_address(section: NetworkSection, ray_address: str | None) -> NodeAddress:
    """Chooses the address of this node and binds this process's transports to it. `ray_address` is Ray's own address of
    the node, or None if all members are on this machine and use its loopback. Side effect: it changes environment
    variables. Raises ConfigError as `choose_address` does."""
    interfaces = local_interfaces()
    if ray_address is None:
        node = _own(LOOPBACK, interfaces, f"the address {LOOPBACK}")
    else:
        node = choose_address(section, interfaces, ray_address, os.environ)
    bind_transports(section, node, os.environ)
    check_devices(os.environ["UCX_NET_DEVICES"], (*interfaces, *rdma_ports(SYSTEM_ROOT)))
    return node


def check_devices(wanted: str, present: Sequence[str]) -> None:
    """Raises ConfigError if UCX may use none of the devices that are present, which it would say in its log only."""
    names = [name.strip() for name in wanted.split(",")]
    if "all" not in names and not set(names) & set(present):
        raise ConfigError(
            f"UCX_NET_DEVICES is {wanted} (from network.ucx_net_devices, or the node's environment), but the node's "
            f"devices are {', '.join(sorted(present))}"
        )
