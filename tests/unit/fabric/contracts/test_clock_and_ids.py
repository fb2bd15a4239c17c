"""Tests that clocks never go back and that minted ids are fresh."""

from __future__ import annotations

import re

import pytest

from fabric.contracts import AttemptId, ManualClock, SequenceId, SystemClock, mint_member_id, mint_request_id


def test_a_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.advance(1.5)
    clock.advance(0.0)
    assert clock.now() == 6.5


def test_a_manual_clock_refuses_to_go_back() -> None:
    clock = ManualClock()
    with pytest.raises(ValueError, match="can't go back"):
        clock.advance(-0.1)
    assert clock.now() == 0.0


def test_the_system_clock_does_not_go_back() -> None:
    clock = SystemClock()
    readings = [clock.now() for _ in range(1000)]
    assert readings == sorted(readings)


def test_minted_ids_are_distinct_and_say_what_they_are() -> None:
    requests = {mint_request_id() for _ in range(1000)}
    assert len(requests) == 1000
    assert all(request.startswith("req-") for request in requests)
    members = {mint_member_id("worker") for _ in range(100)}
    assert len(members) == 100
    assert all(re.fullmatch("worker-[0-9a-f]{8}", member) for member in members)


def test_a_sequence_knows_its_attempt() -> None:
    assert SequenceId("r", 2, 1).attempt_id == AttemptId("r", 2)
