"""Decides which addresses may be connected to. An address is public, or the operator has named its network, or it is
forbidden; the operator may forbid further networks.

`FORBIDDEN` lists every network of IANA's registries of special-purpose addresses (IPv4 and IPv6) whose packets stay
inside a site, or that carry an IPv4 address inside: a translator on the way would turn `64:ff9b::7f00:1` into
127.0.0.1. Of IPv6 only 2000::/3 is global at all. The list stands here in full, and does not follow the `is_private` of
the standard library, whose meaning has changed between versions. The module is pure and knows nothing of names.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

FORBIDDEN: tuple[Network, ...] = tuple(
    map(
        ipaddress.ip_network,
        (
            "0.0.0.0/8",  # this network
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # shared by the customers of a provider (CGNAT); clouds have metadata here too
            "127.0.0.0/8",  # loopback
            "168.63.129.16/32",  # Azure's platform, inside every virtual network
            "169.254.0.0/16",  # link-local, with the metadata of most clouds
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # protocol assignments, with the metadata of some clouds
            "192.0.2.0/24",  # documentation
            "192.31.196.0/24",  # AS112
            "192.52.193.0/24",  # automatic multicast tunnels
            "192.88.99.0/24",  # relays of 6to4
            "192.168.0.0/16",  # private
            "192.175.48.0/24",  # AS112
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, with the broadcast address
            "2001::/23",  # protocol assignments, with Teredo, ORCHID and benchmarks
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4
            "2620:4f:8000::/48",  # AS112
            "3fff::/20",  # documentation
        ),
    )
)
"""Lists what is forbidden of IPv4 and of `GLOBAL_V6`."""
GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
"""Holds all global unicast addresses. Loopback, mapped, NAT64, unique local, link-local and multicast addresses lie
outside."""


class AddressRules:
    """An `AddressRules` holds the networks that the operator allows in addition to the public ones, and those that the
    operator forbids in addition to `FORBIDDEN`: the public addresses of a site, or the prefix that its translator puts
    before IPv4 addresses (NAT64), which nobody else knows."""

    def __init__(self, allowed_networks: Iterable[str] = (), denied_networks: Iterable[str] = ()) -> None:
        """Takes networks in CIDR notation. What is denied is forbidden even if it is allowed too. Raises ValueError for
        what is no network."""
        self._allowed = tuple(ipaddress.ip_network(network) for network in allowed_networks)
        self._denied = tuple(ipaddress.ip_network(network) for network in denied_networks)

    def allows(self, address: Address) -> bool:
        """Returns whether a connection to the address may be made. An IPv4 address in the form of IPv6 may not, because
        no name has one; neither may an address with a zone."""
        if isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None:
            return False
        if any(address in network for network in self._denied if network.version == address.version):
            return False
        if any(address in network for network in self._allowed if network.version == address.version):
            return True
        if address.version == 6 and address not in GLOBAL_V6:
            return False
        return not any(address in network for network in FORBIDDEN if network.version == address.version)
