"""Tests how places are shared, by examples; `tests/property/test_fetch_shares.py` walks through all histories."""

from __future__ import annotations

import itertools

import pytest

from fabric.contracts import Overloaded
from router.fetch.fair_shares import SHARED_TENANT, FairShares, Party


class Crowd:
    """A `Crowd` makes fetches of parties."""

    def __init__(self, shares: FairShares) -> None:
        self.shares = shares
        self._numbers = itertools.count(1)
        self.party_of: dict[int, Party] = {}

    def come(self, tenant: str, host: str = "host") -> int:
        number = next(self._numbers)
        self.party_of[number] = Party(tenant, host)
        self.shares.enter(number, self.party_of[number], 1)
        return number

    def num_held(self, tenant: str, host: str = "") -> int:
        return sum(
            self.shares.holds(number) and party.tenant == tenant and (not host or party.host == host)
            for number, party in self.party_of.items()
        )


@pytest.mark.parametrize(("num_tenants", "expected"), [(1, [32]), (2, [22, 21]), (3, [16, 16, 16])])
def test_greedy_tenants_leave_a_part_of_the_places_to_others(num_tenants: int, expected: list[int]) -> None:
    crowd = Crowd(FairShares(64))
    tenants = [f"tenant {number}" for number in range(num_tenants)]
    for turn in range(40):
        for tenant in tenants:
            crowd.come(tenant, f"host {turn}")
    assert [crowd.num_held(tenant) for tenant in tenants] == expected
    newcomer = crowd.come("newcomer")
    assert crowd.shares.holds(newcomer)


def test_one_slow_host_leaves_places_to_the_other_hosts_of_its_tenant() -> None:
    crowd = Crowd(FairShares(64))
    for _ in range(40):
        crowd.come("tenant", "slow")
    assert crowd.num_held("tenant") == 22
    assert crowd.shares.holds(crowd.come("tenant", "other"))


def test_without_tenants_the_hosts_share_all_places() -> None:
    crowd = Crowd(FairShares(64))
    for _ in range(40):
        crowd.come(SHARED_TENANT, "slow")
    assert crowd.num_held(SHARED_TENANT) == 32
    for _ in range(40):
        crowd.come(SHARED_TENANT, "other")
    assert crowd.num_held(SHARED_TENANT, "other") == 16
    assert crowd.shares.holds(crowd.come(SHARED_TENANT, "third"))


def test_a_single_place_is_used() -> None:
    crowd = Crowd(FairShares(1))
    first, second = crowd.come("a"), crowd.come("b")
    assert crowd.shares.holds(first)
    assert crowd.shares.leave(first) == [second]


def test_a_free_place_goes_to_the_tenant_that_holds_least() -> None:
    crowd = Crowd(FairShares(2))
    first, second = crowd.come("a"), crowd.come("b")
    for _ in range(3):
        crowd.come("a")
    late = crowd.come("c")
    assert crowd.shares.leave(second) == [late]
    assert crowd.shares.leave(first) != []


def test_one_tenant_does_not_fill_the_line() -> None:
    crowd = Crowd(FairShares(1, max_waiting=10))
    crowd.come("a")
    for _ in range(5):
        crowd.come("a")
    with pytest.raises(Overloaded, match="too many fetches of media wait already"):
        crowd.come("a")
    assert crowd.shares.num_waiting == 5
    for _ in range(3):
        crowd.come("b")
    with pytest.raises(Overloaded):
        crowd.come("b")
    crowd.come("c")
    assert crowd.shares.num_waiting == 9


def test_a_large_amount_leaves_room_for_small_ones() -> None:
    shares = FairShares(512, quantum=1, greed=2)
    assert shares.enter(1, Party(SHARED_TENANT, "slow"), 256)
    assert not shares.enter(2, Party(SHARED_TENANT, "slow"), 256)
    assert not shares.enter(3, Party(SHARED_TENANT, "other"), 256)
    assert shares.enter(4, Party(SHARED_TENANT, "third"), 10)
    assert shares.leave(1) == [2]
    assert shares.leave(2) == [3]


def test_what_grows_follows_the_same_rule() -> None:
    shares = FairShares(100)
    assert shares.enter(1, Party("a", "host"), 10)
    assert shares.grow(1, 20)
    assert not shares.grow(1, 40)
    assert shares.used == 30
    assert shares.leave(1) == []
    assert shares.used == 0
