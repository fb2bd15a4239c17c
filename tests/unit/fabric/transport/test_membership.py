"""Tests the directory: versions count changes, leases expire by themselves, and reading the view changes nothing."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fabric.contracts import ManualClock, Member, MemberId
from fabric.transport import Directory, Membership, ViewChange
from fabric.transport.membership import MAX_CHANGES, MAX_HEARTBEATS_PER_S, MIN_PERIOD_S

LEASE_S = 3.0


def member(name: str, epoch: int = 1, address: str = "tcp://a") -> Member:
    return Member(MemberId(name), "worker", address, "host", epoch)


def test_joining_and_leaving_change_the_version_and_heartbeats_do_not() -> None:
    directory = Directory(ManualClock(), LEASE_S)
    assert directory.view() == (0, ())
    first = directory.heartbeat(member("b"))
    assert first == ViewChange(1, None, (member("b"),))
    assert directory.heartbeat(member("b")) == first
    assert directory.heartbeat(member("a")) == ViewChange(2, None, (member("a"), member("b")))
    directory.leave(MemberId("b"))
    assert directory.view() == (3, (member("a"),))
    directory.leave(MemberId("b"))
    assert directory.view().version == 3


def test_a_heartbeat_returns_only_what_has_changed() -> None:
    directory = Directory(ManualClock(), LEASE_S)
    directory.heartbeat(member("a"))
    assert directory.heartbeat(member("a"), known=1) == ViewChange(1, 1)
    directory.heartbeat(member("b"))
    directory.heartbeat(member("c"))
    directory.leave(MemberId("c"))
    assert directory.heartbeat(member("a"), known=1) == ViewChange(4, 1, (member("b"),), (MemberId("c"),))
    assert directory.heartbeat(member("a"), known=4) == ViewChange(4, 4)
    assert directory.heartbeat(member("a"), known=9).since is None, "no view of this directory has that version"


def test_a_member_that_is_far_behind_gets_the_whole_view() -> None:
    directory = Directory(ManualClock(), LEASE_S)
    directory.heartbeat(member("a"))
    for epoch in range(2, 2 + MAX_CHANGES):
        directory.heartbeat(member("b", epoch))
    whole = (member("a"), member("b", 1 + MAX_CHANGES))
    assert directory.heartbeat(member("a"), known=0) == ViewChange(1 + MAX_CHANGES, None, whole)
    assert directory.heartbeat(member("a"), known=1) == ViewChange(1 + MAX_CHANGES, 1, whole[1:])


def test_many_members_call_less_often_and_have_longer_leases() -> None:
    clock = ManualClock()
    directory = Directory(clock, LEASE_S)
    for index in range(200):
        directory.heartbeat(member(f"m{index}"))
    assert directory.period_s == MIN_PERIOD_S
    for index in range(200, 2000):
        directory.heartbeat(member(f"m{index}"), known=0)
    assert directory.period_s * MAX_HEARTBEATS_PER_S == 2000
    clock.advance(2 * directory.period_s + LEASE_S)
    assert member("m1999") in directory.view().members, "two lost calls end no membership"
    clock.advance(2 * directory.period_s)
    assert directory.view().members == ()


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
    assert directory.heartbeat(member("a")) == ViewChange(3, None, (member("a"),))


def test_a_new_record_replaces_the_old_and_an_older_epoch_is_ignored() -> None:
    directory = Directory(ManualClock(), LEASE_S)
    directory.heartbeat(member("a", epoch=1))
    moved = member("a", epoch=2, address="tcp://b")
    assert directory.heartbeat(moved) == ViewChange(2, None, (moved,))
    assert directory.heartbeat(member("a", epoch=1)) == ViewChange(2, None, (moved,))


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


class FollowedDirectory(RuleBasedStateMachine):
    """Follows a directory by its changes, while answers are lost or come late and the directory restarts: a follower
    that has just had an answer has the directory's view, and beyond it only members that the previous directory named
    less than a lease ago."""

    names = st.sampled_from(["a", "b", "c", "d"])

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.epoch = 1
        self.directory = Directory(self.clock, LEASE_S)
        self.membership = Membership(self.clock, LEASE_S)
        self.followed: tuple[Member, ...] = ()
        self.late: list[tuple[int, ViewChange]] = []
        self.restarted_at_s = -LEASE_S
        self.before_restart: tuple[Member, ...] = ()

    def ask(self) -> tuple[int, ViewChange]:
        known = self.membership.known()
        version = known[1] if known is not None and known[0] == self.epoch else None
        return self.epoch, self.directory.heartbeat(member("own"), version)

    def take(self, epoch: int, change: ViewChange) -> None:
        before = self.followed
        members = self.membership.update(epoch, change)
        assert members is None or set(members) != set(before), "only changes are handed on"
        self.followed = before if members is None else members

    @rule(name=names, address=st.sampled_from(["x", "y"]))
    def another_calls(self, name: str, address: str) -> None:
        self.directory.heartbeat(msgspec.structs.replace(member(name), address=address))

    @rule(name=names)
    def another_leaves(self, name: str) -> None:
        self.directory.leave(MemberId(name))

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def restart(self) -> None:
        self.epoch += 1
        self.directory = Directory(self.clock, LEASE_S)
        self.before_restart, self.restarted_at_s = self.followed, self.clock.now()

    @rule()
    def lose_an_answer(self) -> None:
        self.late.append(self.ask())

    @rule()
    def take_a_late_answer(self) -> None:
        """An answer that comes after its call was given up changes nothing, unless it is still the newest news."""
        if self.late:
            epoch, change = self.late.pop()
            if change.since is not None:
                self.take(epoch, change)

    @rule()
    def call(self) -> None:
        asked_at_s = self.clock.now()
        self.take(*self.ask())
        view = set(self.directory.view().members)
        assert view <= set(self.followed)
        beyond = {each.member_id for each in set(self.followed) - view}
        if asked_at_s - self.restarted_at_s >= 2 * LEASE_S:
            # The follower keeps members for a lease from the first answer of the new directory on.
            self.take(*self.ask())
            beyond &= {each.member_id for each in set(self.followed) - view}
        assert beyond <= {each.member_id for each in self.before_restart}


TestFollowedDirectory = FollowedDirectory.TestCase
TestFollowedDirectory.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestDirectoryModel = DirectoryModel.TestCase
TestDirectoryModel.settings = settings(deadline=None, max_examples=40, stateful_step_count=25)
