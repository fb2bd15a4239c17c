"""Checks what a member believes about the other members while the directory restarts."""

from __future__ import annotations

from deploy.ray.directory import Membership
from fabric.contracts import ManualClock, Member, MemberId
from fabric.transport import View


def member(name: str) -> Member:
    return Member(MemberId(name), "worker", f"tcp://{name}", "host", 1)


A, B, C = member("a"), member("b"), member("c")


def test_changes_are_handed_on_once() -> None:
    membership = Membership(ManualClock(), lease_s=5)
    assert membership.update(1, View(1, (A, B))) == (A, B)
    assert membership.update(1, View(1, (B, A))) is None
    assert membership.update(1, View(2, (A,))) == (A,)


def test_a_restarted_directory_takes_nobody_out_until_all_had_time_to_call() -> None:
    clock = ManualClock()
    membership = Membership(clock, lease_s=5)
    membership.update(1, View(7, (A, B)))
    assert membership.update(2, View(1, (A,))) is None
    assert set(membership.update(2, View(2, (A, C))) or ()) == {A, B, C}
    clock.advance(4.9)
    assert membership.update(2, View(2, (A, C))) is None
    clock.advance(0.2)
    assert set(membership.update(2, View(2, (A, C))) or ()) == {A, C}
