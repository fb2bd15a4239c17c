"""Tests the inbox: states, references by sequence, and four cases that other engines fixed late."""

from __future__ import annotations

import pytest
from scheduling_cases import sequence_id, unit

from fabric.errors import FeatureMismatch
from llm_workers.scheduling.inbox import Inbox, UnitState

A, A2, B = sequence_id("a"), sequence_id("a", choice=1), sequence_id("b")
U, V = unit("u"), unit("v")


def test_the_life_of_a_unit() -> None:
    inbox = Inbox()
    assert inbox.claim(A, {U: 5}) == [U]
    assert inbox.state(U) is UnitState.EXPECTED
    assert not inbox.is_complete(A)
    inbox.land(U)
    assert inbox.state(U) is UnitState.LANDED
    assert inbox.is_complete(A)
    inbox.merge(U)
    assert inbox.state(U) is UnitState.MERGED
    inbox.settle([U])
    assert inbox.state(U) is UnitState.LANDED
    inbox.drop(A, [U])
    assert inbox.drain_idle() == [U]
    assert inbox.state(U) is UnitState.DISCARDED
    inbox.check_invariants({})


def test_a_choice_that_leaves_does_not_drop_its_siblings_reference() -> None:
    inbox = Inbox()
    inbox.claim(A, {U: 5})
    inbox.claim(A2, {U: 5})
    inbox.land(U)
    inbox.drop(A, [U])
    inbox.drop(A, [U])
    assert inbox.drain_idle() == []
    assert inbox.is_needed(U)
    inbox.drop(A2, [U])
    assert inbox.drain_idle() == [U]


def test_what_is_claimed_again_in_the_same_pass_is_not_reported() -> None:
    inbox = Inbox()
    inbox.claim(A, {U: 5})
    inbox.land(U)
    inbox.drop(A, [U])
    assert inbox.claim(B, {U: 5}) == []
    assert inbox.drain_idle() == []
    assert inbox.is_here(U)


def test_another_size_fails_the_newcomer_alone() -> None:
    inbox = Inbox()
    inbox.claim(A, {U: 5})
    with pytest.raises(FeatureMismatch, match="has 5 tokens, not 6"):
        inbox.check_counts({U: 6})
    inbox.check_counts({U: 5, V: 6})
    inbox.check_invariants({A: {U}})


def test_a_unit_that_a_step_reads_is_not_given_away() -> None:
    inbox = Inbox()
    inbox.claim(A, {U: 5})
    inbox.land(U)
    inbox.merge(U)
    inbox.drop(A, [U])
    assert inbox.is_needed(U)
    assert inbox.drain_idle() == []
    inbox.settle([U])
    assert not inbox.is_needed(U)
    assert inbox.drain_idle() == [U]


def test_a_lost_unit_makes_its_sequences_wait_again() -> None:
    inbox = Inbox()
    inbox.claim(A, {U: 5, V: 1})
    inbox.claim(B, {U: 5})
    inbox.land(U)
    inbox.land(V)
    assert inbox.lose(U) == [A, B]
    assert not inbox.is_complete(A)
    assert inbox.state(U) is UnitState.EXPECTED
    inbox.check_invariants({A: {U, V}, B: {U}})
    inbox.land(U)
    assert inbox.is_complete(A)


def test_a_unit_lost_while_read_is_expected_after_the_step() -> None:
    inbox = Inbox()
    inbox.claim(A, {U: 5})
    inbox.land(U)
    inbox.merge(U)
    assert inbox.lose(U) == [A]
    inbox.settle([U])
    assert inbox.state(U) is UnitState.EXPECTED


def test_a_unit_may_land_before_anybody_claims_it() -> None:
    inbox = Inbox()
    inbox.land(U)
    inbox.check_invariants({})
    assert not inbox.is_needed(U)
    assert inbox.claim(A, {U: 5}) == []
    assert inbox.lose(V) == []


def test_an_unclaimed_unit_that_is_lost_is_forgotten() -> None:
    inbox = Inbox()
    inbox.land(U)
    assert inbox.lose(U) == []
    assert inbox.state(U) is UnitState.DISCARDED
    assert inbox.num_here == 0


def test_a_unit_that_never_landed_is_reported_when_nobody_waits_any_more() -> None:
    inbox = Inbox()
    inbox.claim(A, {U: 5})
    inbox.drop(A, [U])
    inbox.land(U)
    assert inbox.drain_idle() == [U]
