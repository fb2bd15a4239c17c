"""Tests which addresses may be connected to."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fetch import AddressRules
from router.fetch.address_rules import FORBIDDEN, GLOBAL_V6

PUBLIC = ["1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255"]
PUBLIC += ["128.0.0.0", "169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0", "192.167.255.255"]
PUBLIC += ["198.17.255.255", "198.20.0.0", "223.255.255.255", "2606:4700:4700::1111", "2a00::1", "2003::1"]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address: str) -> None:
    assert AddressRules().allows(ipaddress.ip_address(address))


@pytest.mark.parametrize("network", FORBIDDEN, ids=str)
def test_both_ends_of_each_forbidden_network_are_forbidden(network: ipaddress.IPv4Network) -> None:
    assert not AddressRules().allows(network[0])
    assert not AddressRules().allows(network[-1])
    assert AddressRules([str(network)]).allows(network[-1])


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_inside_of_ipv6_is_never_allowed(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    forms = [number, 0xFFFF << 32 | number, 0x64FF9B << 96 | number, 0x64FF9B0001 << 80 | number]
    forms += [0x2002 << 112 | number << 80, 0x2001 << 112 | number, 0xFFFF << 48 | number]
    rules = AddressRules(["0.0.0.0/0"])
    assert not any(rules.allows(ipaddress.IPv6Address(form)) for form in forms)


@given(st.ip_addresses())
def test_nothing_that_the_standard_library_calls_private_is_allowed(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    special = not address.is_global or address.is_multicast or address.is_reserved or address.is_loopback
    assert not (special and AddressRules().allows(address))
    if address.version == 6 and address not in GLOBAL_V6:
        assert not AddressRules().allows(address)


def test_a_zone_is_never_allowed() -> None:
    assert not AddressRules(["::/0"]).allows(ipaddress.ip_address("fe80::1%lo"))


def test_networks_of_the_operator_are_allowed_and_no_others() -> None:
    rules = AddressRules(["10.1.0.0/16", "fd00:1::/32"])
    assert rules.allows(ipaddress.ip_address("10.1.2.3"))
    assert rules.allows(ipaddress.ip_address("fd00:1::7"))
    assert not rules.allows(ipaddress.ip_address("10.2.0.1"))
    assert not rules.allows(ipaddress.ip_address("::ffff:10.1.2.3"))
    with pytest.raises(ValueError, match="host bits"):
        AddressRules(["10.1.2.3/16"])


def test_networks_that_the_operator_denies_are_forbidden_even_if_they_are_allowed() -> None:
    rules = AddressRules(["10.0.0.0/8"], ["10.1.0.0/16", "2606:4700:64::/96", "1.1.1.0/24"])
    assert rules.allows(ipaddress.ip_address("10.2.0.1"))
    assert not rules.allows(ipaddress.ip_address("10.1.2.3"))
    assert not rules.allows(ipaddress.ip_address("2606:4700:64::7f00:1"))
    assert not rules.allows(ipaddress.ip_address("1.1.1.1"))
    assert rules.allows(ipaddress.ip_address("2606:4700:65::1"))
    with pytest.raises(ValueError, match="host bits"):
        AddressRules([], ["10.1.2.3/16"])
