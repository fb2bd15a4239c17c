"""Tests prompt lookup: what it proposes, what is computed for it, and what is left when it was wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling_cases import Bench, positions, request

from fabric.contracts import ConfigError, SamplingParams, StopConditions
from llm_workers.scheduling import StepEvents, StepPlan, StepResult, TokenCounts
from llm_workers.scheduling.step_planner import propose
from llm_workers.worker_config import Speculation

THREE = Speculation(max_tokens=3, min_ngram=2, max_ngram=4)
ECHO = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
"""Lookup continues this prompt with 3, 4, 5."""


def proposed(token_ids: list[int], num_tokens: int = 3, min_ngram: int = 2, max_ngram: int = 4) -> list[int]:
    return propose(np.array(token_ids, dtype=np.int64), num_tokens, min_ngram, max_ngram).tolist()


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        (ECHO, [3, 4, 5]),
        ([5, 1, 2, 9, 4, 1, 2, 8, 8, 1, 2], [8, 8, 1]),  # The last of equal matches counts.
        # The longer match counts, though it is further away.
        ([7, 1, 2, 9, 9, 9, 3, 1, 2, 8, 8, 8, 7, 1, 2], [9, 9, 9]),
        ([4, 7, 7, 4, 7, 7], [4, 7, 7]),
        ([6, 6, 6], [6, 6, 6]),  # One token follows, and it repeats.
        ([1, 2, 3, 9, 2], []),  # One token matches, but two are required.
        ([1, 2, 3], []),
        ([3], []),
    ],
)
def test_what_followed_the_last_of_the_longest_matches(token_ids: list[int], expected: list[int]) -> None:
    assert proposed(token_ids) == expected


@given(
    token_ids=st.lists(st.integers(0, 3), max_size=40),
    num_tokens=st.integers(0, 6),
    min_ngram=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_against_a_plain_search(token_ids: list[int], num_tokens: int, min_ngram: int, more: int) -> None:
    expected: list[int] = []
    for length in range(min_ngram, min_ngram + more + 1):
        for end in range(length, len(token_ids)):
            if token_ids[end - length : end] == token_ids[len(token_ids) - length :]:
                following = token_ids[end:]
                expected = (following * (num_tokens + 1))[:num_tokens]
    assert proposed(token_ids, num_tokens, min_ngram, min_ngram + more) == expected


def decoding(bench: Bench, token: int = 3, **fields: object) -> None:
    """Adds one sequence, computes its prompt and draws its first token."""
    bench.add(request("a", ECHO, **fields))
    bench.step(token)


def answer(bench: Bench, plan: StepPlan, *tokens: int) -> StepEvents:
    (chunk,) = plan.chunks
    events = bench.scheduler.commit(plan, StepResult({chunk.sequence_id: tuple(chunk.accepted(tokens))}))
    bench.scheduler.check_invariants()
    return events


def test_drafts_are_computed_behind_the_last_token_and_right_ones_go_out_together() -> None:
    bench = Bench(speculation=THREE, block_size=4)
    decoding(bench)
    plan = bench.plan()
    (chunk,) = plan.chunks
    assert (chunk.start, chunk.token_ids.tolist(), chunk.num_drafts) == (10, [3, 4, 5, 6], 3)
    assert chunk.positions.tolist() == [[10, 11, 12, 13]]
    events = answer(bench, plan, 4, 5, 9, 0)
    assert [(tokens.first_index, tokens.token_ids) for tokens in events.tokens] == [(1, (4, 5, 9))]
    stats = bench.scheduler.stats()
    assert (stats.drafts_proposed, stats.drafts_accepted, stats.tokens_generated) == (3, 2, 4)
    assert stats.kv_blocks_used == 4, "the block that only the wrong draft reached is given back"


def test_guesses_are_counted_over_all_steps() -> None:
    bench = Bench(speculation=THREE, block_size=4)
    decoding(bench)
    num_guessed = 0
    for tokens in ((4, 5, 6, 7), (8, 1, 2, 3)):
        plan = bench.plan()
        num_guessed += plan.chunks[0].num_drafts
        answer(bench, plan, *tokens)
    assert num_guessed == 6
    assert bench.scheduler.stats().drafts_proposed == num_guessed


def test_a_block_is_found_by_others_only_with_accepted_tokens() -> None:
    bench = Bench(speculation=THREE, block_size=4)
    decoding(bench)
    answer(bench, bench.plan(), 9, 0, 0, 0)
    assert bench.add(request("b", [*ECHO, 3, 4, 5, 6])).num_cached_tokens == 8
    assert bench.scheduler.stats().drafts_accepted == 0


def test_a_run_ends_where_the_sequence_does() -> None:
    bench = Bench(speculation=THREE)
    decoding(bench, stop=StopConditions(20, eos_token_ids=(5,)))
    events = answer(bench, bench.plan(), 4, 5, 6, 7)
    assert events.tokens[0].token_ids == (4, 5)
    assert [(ended.finish_reason, ended.num_tokens) for ended in events.finished] == [("stop", 3)]
    assert bench.scheduler.stats().kv_blocks_used == 0


def test_no_more_is_guessed_than_may_be_said() -> None:
    bench = Bench(speculation=THREE)
    decoding(bench, stop=StopConditions(3, ignore_eos=True))
    assert [chunk.num_drafts for chunk in bench.plan().chunks] == [1]


def test_drafts_take_what_is_left_of_the_budget() -> None:
    """A waiting prompt comes before drafts, and no sequence is preempted for a draft."""
    bench = Bench(speculation=THREE, max_step_tokens=12)
    decoding(bench)
    bench.add(request("b", 9))
    plan = bench.plan()
    assert [(chunk.sequence_id.request_id, chunk.num_tokens) for chunk in plan.chunks] == [("a", 3), ("b", 9)]
    tight = Bench(speculation=THREE, block_size=4, num_blocks=3)
    decoding(tight)
    assert [chunk.num_drafts for chunk in tight.plan().chunks] == [1], "two tokens fit into the last block"


def test_a_failed_step_leaves_no_guess_behind() -> None:
    bench = Bench(speculation=THREE, block_size=4)
    decoding(bench)
    plan = bench.plan()
    bench.scheduler.rollback(plan)
    bench.scheduler.check_invariants()
    assert bench.scheduler.stats().kv_blocks_used == 3
    assert bench.plan().chunks[0].token_ids.tolist() == plan.chunks[0].token_ids.tolist()


def test_min_tokens_bars_as_many_draws_as_are_left() -> None:
    bench = Bench(speculation=THREE)
    decoding(bench, stop=StopConditions(20, eos_token_ids=(5,), min_tokens=3))
    (chunk,) = bench.plan().chunks
    assert (chunk.barred, chunk.num_barred, chunk.num_drafts) == ((5,), 2, 3)


@given(prompt=st.lists(st.integers(0, 4)), said=st.lists(st.integers(0, 6)), ahead=st.lists(st.integers(0, 8)))
def test_counts_ahead_are_those_of_the_longer_text(prompt: list[int], said: list[int], ahead: list[int]) -> None:
    def as_dict(counts: TokenCounts) -> dict[int, int]:
        return dict(zip(counts.ids.tolist(), counts.num_generated.tolist(), strict=True))

    counts = TokenCounts(np.array(prompt, dtype=np.int64), np.array(said, dtype=np.int64))
    before = as_dict(counts)
    longer = TokenCounts(np.array(prompt, dtype=np.int64), np.array([*said, *ahead], dtype=np.int64))
    assert as_dict(counts.after(ahead)) == as_dict(longer)
    assert as_dict(counts) == before


@pytest.mark.parametrize("numbers", [(-1, 2, 4), (3, 0, 4), (3, 3, 2)])
def test_numbers_that_mean_nothing_are_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="speculation"):
        Speculation(*numbers)


def test_a_sequence_with_a_grammar_does_not_guess() -> None:
    class Anything:
        def fork(self) -> Self:
            return self

        def advance(self, token_ids: Sequence[int]) -> None:
            pass

    bench = Bench(speculation=THREE)
    prompt = request("a", ECHO, sampling=SamplingParams(grammar="any"))
    bench.scheduler.add(bench.scheduler.prepare(prompt, positions(prompt), Anything()))
    bench.step(3)
    assert [chunk.num_drafts for chunk in bench.plan().chunks] == [0]
