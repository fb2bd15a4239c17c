"""Tests the engine's references to features: which units are readable and which sequences need them, and four cases
that other engines fixed late."""

from __future__ import annotations

import pytest
from scheduling_cases import attempt_id, reference, sequence_id, unit

from fabric.contracts import FeatureMismatch, UnitKey
from llm_workers.scheduling import FeatureReferences, NextRead
from llm_workers.scheduling.feature_references import ReadLog

A, A2, B = sequence_id("a"), sequence_id("a", choice=1), sequence_id("b")
U, V = unit("u"), unit("v")


def released(references: FeatureReferences) -> list[UnitKey]:
    return [one.unit for one in references.take_unneeded()]


def test_the_life_of_a_unit() -> None:
    references, held = FeatureReferences(), reference(U)
    assert references.claim(A, {U: 5}) == [U]
    assert not references.is_readable(U)
    assert not references.is_complete(A)
    assert references.hold(held) == [A]
    assert references.is_readable(U)
    assert references.feature(U) is held.feature
    assert references.is_complete(A)
    references.begin_read(U)
    references.end_reads([U])
    references.drop(A, [U])
    assert references.take_unneeded() == [(U, (held,), ())]
    assert not references.is_readable(U)
    assert references.num_readable == 0
    references.check_invariants({})


def test_every_reference_to_a_unit_is_given_back() -> None:
    references, held = FeatureReferences(), [reference(U) for _ in range(3)]
    references.claim(A, {U: 5})
    assert [references.hold(one) for one in held] == [[A], [], []]
    assert references.hold(held[0]) == [], "a reference that comes twice is held once"
    assert references.give_up(U) == (tuple(held), [A])
    assert references.give_up(U) == ((), [])
    references.check_invariants({A: {U}})


def test_a_choice_that_leaves_does_not_drop_its_siblings_claim() -> None:
    references = FeatureReferences()
    references.claim(A, {U: 5})
    references.claim(A2, {U: 5})
    references.hold(reference(U))
    references.drop(A, [U])
    references.drop(A, [U])
    assert released(references) == []
    assert references.is_needed(U)
    references.drop(A2, [U])
    assert released(references) == [U]


def test_what_is_claimed_again_in_the_same_pass_is_not_released() -> None:
    references = FeatureReferences()
    references.claim(A, {U: 5})
    references.hold(reference(U))
    references.drop(A, [U])
    assert references.claim(B, {U: 5}) == []
    assert released(references) == []
    assert references.is_readable(U)


def test_another_size_fails_the_newcomer_alone() -> None:
    references = FeatureReferences()
    references.claim(A, {U: 5})
    with pytest.raises(FeatureMismatch, match="has 6 tokens in this request, but 5 in another"):
        references.check_counts({U: 6})
    references.check_counts({U: 5, V: 6})
    references.check_invariants({A: {U}})


def test_a_unit_that_a_step_reads_is_not_released() -> None:
    references = FeatureReferences()
    references.claim(A, {U: 5})
    references.hold(reference(U))
    references.begin_read(U)
    references.drop(A, [U])
    assert references.is_needed(U)
    assert released(references) == []
    references.end_reads([U])
    assert not references.is_needed(U)
    assert released(references) == [U]


def test_a_unit_that_is_given_up_makes_its_sequences_wait_again() -> None:
    references = FeatureReferences()
    references.claim(A, {U: 5, V: 1})
    references.claim(B, {U: 5})
    held = reference(U)
    references.hold(held)
    references.hold(reference(V))
    assert references.give_up(U) == ((held,), [A, B])
    assert not references.is_complete(A)
    assert not references.is_readable(U)
    references.check_invariants({A: {U, V}, B: {U}})
    references.hold(reference(U))
    assert references.is_complete(A)


def test_a_unit_that_is_given_up_while_it_is_read_stays_unreadable_after_the_step() -> None:
    references = FeatureReferences()
    references.claim(A, {U: 5})
    references.hold(reference(U))
    references.begin_read(U)
    assert references.give_up(U)[1] == [A]
    references.end_reads([U])
    assert not references.is_readable(U)
    references.check_invariants({A: {U}})


def test_a_unit_may_be_readable_before_a_sequence_claims_it() -> None:
    references = FeatureReferences()
    references.hold(reference(U))
    references.check_invariants({})
    assert not references.is_needed(U)
    assert references.claim(A, {U: 5}) == []
    assert released(references) == []
    assert references.give_up(V) == ((), [])


def test_a_unit_that_no_sequence_claims_is_released_or_given_up() -> None:
    references, held = FeatureReferences(), reference(U)
    references.hold(held)
    assert references.give_up(U) == ((held,), [])
    assert released(references) == []
    references.hold(reference(V))
    assert released(references) == [V]
    assert references.num_readable == 0


def test_a_unit_that_lands_after_its_last_claim_is_released() -> None:
    references = FeatureReferences()
    references.claim(A, {U: 5})
    references.drop(A, [U])
    references.hold(reference(U))
    assert released(references) == [U]


def test_a_unit_that_never_landed_is_forgotten_without_a_release() -> None:
    references = FeatureReferences()
    references.claim(A, {U: 5})
    references.drop(A, [U])
    assert released(references) == []
    references.check_counts({U: 6})
    references.check_invariants({})


def test_the_log_of_reads_gives_each_change_once() -> None:
    log = ReadLog()
    log.note(A, [U, V])
    log.note(A2, [U])
    read = NextRead(0, 3)
    assert log.drain(lambda unit, _: read if unit == U else None) == {
        U: {attempt_id("a"): read},
        V: {attempt_id("a"): None},
    }
    assert log.drain(lambda *_: read) == {}
