"""Tests leases: each is reported once, at its deadline and in the order of deadlines, and a dropped lease is never
reported."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fabric.contracts import ManualClock
from fabric.transport import LeaseTable


def test_a_lease_ends_at_its_deadline_and_is_reported_once() -> None:
    clock = ManualClock()
    leases: LeaseTable[str] = LeaseTable(clock)
    leases.renew("late", 2.0)
    leases.renew("early", 1.0)
    clock.advance(0.75)
    assert leases.expired() == []
    assert "early" in leases
    clock.advance(0.25)
    assert "early" not in leases
    assert len(leases) == 2
    clock.advance(1.0)
    assert leases.expired() == ["early", "late"]
    assert leases.expired() == []
    assert len(leases) == 0


def test_renewing_moves_the_deadline_both_ways() -> None:
    clock = ManualClock()
    leases: LeaseTable[str] = LeaseTable(clock)
    leases.renew("longer", 1.0)
    leases.renew("longer", 3.0)
    leases.renew("shorter", 3.0)
    leases.renew("shorter", 1.0)
    clock.advance(1.0)
    assert leases.expired() == ["shorter"]
    clock.advance(2.0)
    assert leases.expired() == ["longer"]


def test_a_dropped_lease_is_not_reported() -> None:
    clock = ManualClock()
    leases: LeaseTable[str] = LeaseTable(clock)
    leases.renew("a", 1.0)
    assert leases.drop("a") is True
    assert leases.drop("a") is False
    clock.advance(5.0)
    assert leases.expired() == []


class LeaseModel(RuleBasedStateMachine):
    keys = st.sampled_from(["a", "b", "c", "d"])

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.leases: LeaseTable[str] = LeaseTable(self.clock)
        self.model: dict[str, float] = {}

    @rule(key=keys, lease_s=st.sampled_from([0.5, 1.0, 2.0]))
    def renew(self, key: str, lease_s: float) -> None:
        self.leases.renew(key, lease_s)
        self.model[key] = self.clock.now() + lease_s

    @rule(key=keys)
    def drop(self, key: str) -> None:
        assert self.leases.drop(key) == (self.model.pop(key, None) is not None)

    @rule(seconds=st.sampled_from([0.25, 1.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def sweep(self) -> None:
        due = {key: at for key, at in self.model.items() if at <= self.clock.now()}
        expired = self.leases.expired()
        assert sorted(expired) == sorted(due)
        assert [due[key] for key in expired] == sorted(due.values())
        for key in due:
            del self.model[key]

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        for key in "abcd":
            assert (key in self.leases) == (self.model.get(key, -1.0) > self.clock.now())
        assert len(self.leases) == len(self.model)


TestLeaseModel = LeaseModel.TestCase
TestLeaseModel.settings = settings(deadline=None, max_examples=40, stateful_step_count=25)
