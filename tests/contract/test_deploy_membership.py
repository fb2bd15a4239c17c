"""Checks what a member believes about the other members while the directory restarts."""

from __future__ import annotations

from fabric.contracts import ManualClock, Member, MemberId
from fabric.transport import Membership, ViewChange


def member(name: str) -> Member:
    return Member(MemberId(name), "worker", f"tcp://{name}", "host", 1)


A, B, C = member("a"), member("b"), member("c")


def whole(version: int, *members: Member) -> ViewChange:
    return ViewChange(version, None, members)


def test_changes_are_handed_on_once() -> None:
    membership = Membership(ManualClock(), lease_s=5)
    assert membership.known() is None
    assert membership.update(1, whole(1, A, B)) == (A, B)
    assert membership.update(1, whole(1, B, A)) is None
    assert membership.update(1, ViewChange(2, 1, (), (B.member_id,))) == (A,)
    assert membership.update(1, ViewChange(2, 2)) is None
    assert membership.known() == (1, 2)


def test_a_change_that_does_not_follow_the_known_view_is_ignored() -> None:
    membership = Membership(ManualClock(), lease_s=5)
    membership.update(1, whole(3, A, B))
    assert membership.update(1, ViewChange(3, 2, (C,))) is None, "an answer to an earlier question"
    assert membership.update(2, ViewChange(4, 3, (C,))) is None, "another directory counts its own versions"
    assert membership.known() == (1, 3)


def test_a_restarted_directory_takes_nobody_out_until_all_had_time_to_call() -> None:
    clock = ManualClock()
    membership = Membership(clock, lease_s=5)
    membership.update(1, whole(7, A, B))
    assert membership.update(2, whole(1, A)) is None
    assert set(membership.update(2, ViewChange(2, 1, (C,))) or ()) == {A, B, C}
    clock.advance(4.9)
    assert membership.update(2, ViewChange(2, 2)) is None
    clock.advance(0.2)
    assert set(membership.update(2, ViewChange(2, 2)) or ()) == {A, C}


def test_a_member_that_leaves_a_restarted_directory_is_out_at_once() -> None:
    membership = Membership(ManualClock(), lease_s=5)
    membership.update(1, whole(7, A, B))
    membership.update(2, whole(1, A))
    assert membership.update(2, ViewChange(3, 1, (), (B.member_id,))) == (A,)
