"""Tests the directory: versions count changes, leases expire by themselves, and reading the view changes nothing."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fabric.contracts import ManualClock, Member, MemberId
from fabric.transport import Directory

LEASE_S = 3.0


def member(name: str, epoch: int = 1, address: str = "tcp://a") -> Member:
    return Member(MemberId(name), "worker", address, "host", epoch)


def test_joining_and_leaving_change_the_version_and_heartbeats_do_not() -> None:
    directory = Directory(ManualClock(), LEASE_S)
    assert directory.view() == (0, ())
    first = directory.heartbeat(member("b"))
    assert first == (1, (member("b"),))
    assert directory.heartbeat(member("b")) == first
    assert directory.heartbeat(member("a")) == (2, (member("a"), member("b")))
    assert directory.leave(MemberId("b")) == (3, (member("a"),))
    assert directory.leave(MemberId("b")).version == 3


def test_a_silent_member_is_out_when_its_lease_ends_and_not_before() -> None:
    clock = ManualClock()
    directory = Directory(clock, LEASE_S)
    directory.heartbeat(member("a"))
    clock.advance(LEASE_S - 0.5)
    directory.heartbeat(member("b"))
    assert [m.member_id for m in directory.view().members] == ["a", "b"]
    clock.advance(0.5)
    assert directory.view() == (3, (member("b"),))
    assert directory.view() == (3, (member("b"),)), "looking again changes nothing"
    assert directory.heartbeat(member("b")).version == 3, "sweeping is not another change"


def test_one_that_comes_back_is_a_leave_and_a_join() -> None:
    clock = ManualClock()
    directory = Directory(clock, LEASE_S)
    directory.heartbeat(member("a"))
    clock.advance(LEASE_S)
    assert directory.heartbeat(member("a")) == (3, (member("a"),))


def test_a_new_record_replaces_the_old_and_an_older_epoch_is_ignored() -> None:
    directory = Directory(ManualClock(), LEASE_S)
    directory.heartbeat(member("a", epoch=1))
    moved = member("a", epoch=2, address="tcp://b")
    assert directory.heartbeat(moved) == (2, (moved,))
    assert directory.heartbeat(member("a", epoch=1)) == (2, (moved,))


def test_a_heartbeat_of_an_older_epoch_does_not_renew() -> None:
    clock = ManualClock()
    directory = Directory(clock, LEASE_S)
    directory.heartbeat(member("a", epoch=2))
    clock.advance(LEASE_S - 1)
    directory.heartbeat(member("a", epoch=1))
    clock.advance(1)
    assert directory.view().members == ()


class DirectoryModel(RuleBasedStateMachine):
    """Compares the directory with a dict of deadlines, and checks that any two different views have different
    versions."""

    names = st.sampled_from(["a", "b", "c"])

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.directory = Directory(self.clock, LEASE_S)
        self.deadlines: dict[str, float] = {}
        self.records: dict[str, Member] = {}
        self.seen: dict[int, tuple[Member, ...]] = {}
        self.last_version = 0

    @rule(name=names, address=st.sampled_from(["x", "y"]))
    def heartbeat(self, name: str, address: str) -> None:
        self.records[name] = msgspec.structs.replace(member(name), address=address)
        self.deadlines[name] = self.clock.now() + LEASE_S
        self.directory.heartbeat(self.records[name])

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.deadlines.pop(name, None)
        self.directory.leave(MemberId(name))

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def view_is_the_model(self) -> None:
        view = self.directory.view()
        alive = sorted(name for name, deadline in self.deadlines.items() if deadline > self.clock.now())
        assert view.members == tuple(self.records[name] for name in alive)
        assert view.version >= self.last_version
        self.last_version = view.version
        assert self.seen.setdefault(view.version, view.members) == view.members


TestDirectoryModel = DirectoryModel.TestCase
TestDirectoryModel.settings = settings(deadline=None, max_examples=40, stateful_step_count=25)
