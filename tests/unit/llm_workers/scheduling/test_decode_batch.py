"""Tests that sequences which decode plainly are rows of arrays, and that a sequence which is not plain, or does not
fit, is a chunk."""

from __future__ import annotations

import numpy as np
import pytest
from scheduling_cases import Bench, attempt_id, request, sequence_id

from fabric.contracts import SamplingParams, StopConditions
from llm_workers.scheduling import Chunk, StepPlan, StepResult

ROOMY = {"block_size": 4, "num_blocks": 64, "max_step_tokens": 64, "max_sequences": 8}


def decoding(*names: str, **config: object) -> Bench:
    """Returns a bench with sequences of nine prompt tokens that have drawn their first token."""
    bench = Bench(**{**ROOMY, **config})
    for age, name in enumerate(names):
        bench.add(request(name, 9, age=age))
    bench.step()
    return bench


def names_of(plan: StepPlan) -> list[str]:
    assert plan.decodes is not None
    return [one.request_id for one in plan.decodes.sequence_ids]


def drawn(plan: StepPlan, token: int = 7) -> StepResult:
    return StepResult({chunk.sequence_id: (token,) for chunk in plan.chunks if chunk.sampling is not None})


def assert_same(row: Chunk, chunk: Chunk) -> None:
    for name in Chunk.__dataclass_fields__:
        ours, theirs = getattr(row, name), getattr(chunk, name)
        if isinstance(theirs, np.ndarray):
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
        else:
            assert ours == theirs, name


def test_rows_say_what_chunks_would_say() -> None:
    plain, chunked = decoding("a", "b", "c"), decoding("a", "b", "c", speculation=_no_luck())
    for turn in range(12):
        rows, chunks = plain.plan(), chunked.plan()
        assert (rows.num_decodes, rows.others) == (3, ())
        assert chunks.decodes is None
        assert (rows.num_tokens, rows.num_sequences) == (3, 3)
        assert rows.work(100.0) == chunks.work(100.0)
        for row, chunk in zip(rows.chunks, chunks.chunks, strict=True):
            assert_same(row, chunk)
        token = 100 + turn
        assert plain.scheduler.commit(rows, drawn(rows, token)) == chunked.scheduler.commit(
            chunks, drawn(chunks, token)
        )


def _no_luck() -> object:
    """Returns settings with drafts on, so that every sequence is a chunk; no draft is found, because no ten tokens
    repeat."""
    from llm_workers.worker_config import Speculation

    return Speculation(max_tokens=1, min_ngram=10, max_ngram=10)


def test_only_what_asks_for_more_is_a_chunk() -> None:
    bench = Bench(**ROOMY)
    bench.add(request("plain", 9))
    bench.add(request("warm", 9, sampling=SamplingParams(temperature=0.8, top_p=0.9, seed=3)))
    special = {
        "penalised": {"sampling": SamplingParams(repetition_penalty=1.2)},
        "biased": {"sampling": SamplingParams(logit_bias=((3, 1.0),))},
        "scored": {"sampling": SamplingParams(num_top_logprobs=0)},
        "barred": {"stop": StopConditions(max_tokens=9, eos_token_ids=(1,), min_tokens=3)},
    }
    for name, fields in special.items():
        bench.add(request(name, 9, **fields))
    bench.step()
    plan = bench.plan()
    assert sorted(names_of(plan)) == ["plain", "warm"]
    assert sorted(chunk.sequence_id.request_id for chunk in plan.others) == sorted(special)
    for _ in range(2):
        bench.commit(plan)
        plan = bench.plan()
    assert "barred" in names_of(plan), "its third token is drawn: it may end now"


def test_a_row_ends_by_its_ids_and_by_its_counts() -> None:
    bench = Bench(**ROOMY)
    bench.add(request("by-id", 9, stop=StopConditions(max_tokens=50, stop_token_ids=(99,))))
    bench.add(request("by-count", 9, max_tokens=3))
    bench.add(request("never", 9, stop=StopConditions(max_tokens=50, eos_token_ids=(99,), ignore_eos=True)))
    bench.step()
    first = bench.commit(bench.plan(), token=5)
    assert [one.finish_reason for one in first.tokens] == [None] * 3
    second = bench.commit(bench.plan(), token=99)
    assert {one.sequence_id.request_id: one.finish_reason for one in second.finished} == {
        "by-id": "stop",
        "by-count": "length",
    }
    assert names_of(bench.plan()) == ["never"]


def test_the_context_ends_a_row() -> None:
    bench = decoding("a", num_blocks=3, max_sequences=1)
    finished = ()
    while not finished:
        plan = bench.plan()
        assert plan.num_decodes == 1
        finished = bench.commit(plan).finished
    assert (finished[0].finish_reason, finished[0].num_tokens) == ("length", 3 * 4 + 1 - 9)


@pytest.mark.parametrize("gone", ["a", "b", "c"])
def test_a_row_that_is_aborted_in_flight_leaves_the_others_as_they_were(gone: str) -> None:
    bench, alone = decoding("a", "b", "c"), decoding("a", "b", "c")
    plan, same = bench.plan(), alone.plan()
    bench.scheduler.abort(attempt_id(gone))
    events = bench.scheduler.commit(plan, drawn(plan))
    expected = alone.scheduler.commit(same, drawn(same))
    assert events.tokens == tuple(one for one in expected.tokens if one.sequence_id != sequence_id(gone))
    bench.scheduler.check_invariants()
    alone.scheduler.abort(attempt_id(gone))
    chunks = {chunk.sequence_id: chunk for chunk in alone.plan().chunks}
    following = bench.plan().chunks
    assert len(following) == 2
    for chunk in following:
        other = chunks[chunk.sequence_id]
        assert (chunk.start, chunk.draw_index) == (other.start, other.draw_index)
        assert chunk.token_ids.tolist() == other.token_ids.tolist()


def test_a_step_that_failed_is_planned_again_with_the_same_tokens() -> None:
    bench = decoding("a", "b")
    for _ in range(3):
        bench.commit(bench.plan())
    failing = bench.plan()
    num_used = bench.scheduler.stats().kv_blocks_used
    bench.scheduler.rollback(failing)
    assert bench.scheduler.stats().kv_blocks_used == num_used - 2, "13 tokens: each had taken a block"
    bench.scheduler.check_invariants()
    again = bench.plan()
    for row, chunk in zip(again.chunks, failing.chunks, strict=True):
        assert row.token_ids.tolist() == chunk.token_ids.tolist()
        assert (row.start, row.draw_index) == (chunk.start, chunk.draw_index)


def test_without_blocks_for_all_the_first_in_rank_decodes_as_a_chunk() -> None:
    """There are eight blocks: both sequences of nine tokens take four each, and the older one's seventeenth token takes
    one from the younger."""
    bench = decoding("old", "young", num_blocks=8)
    plan = bench.plan()
    while plan.decodes is not None:
        bench.commit(plan)
        plan = bench.plan()
    assert [chunk.sequence_id.request_id for chunk in plan.chunks] == ["old"]
    assert plan.chunks[0].start == 16
    bench.commit(plan)
    assert bench.scheduler.stats().num_preemptions == 1
    assert names_of(bench.plan()) == ["old"], "it is a row again"


def test_many_rows_come_and_go() -> None:
    bench = Bench(block_size=4, num_blocks=512, max_step_tokens=2048, max_sequences=100)
    names = [f"r{number}" for number in range(50)]
    for age, name in enumerate(names):
        bench.add(request(name, 9, age=age))
    bench.step()
    for turn, name in enumerate(names):
        plan = bench.plan()
        assert sorted(names_of(plan)) == sorted(names[turn:])
        bench.commit(plan, token=turn)
        bench.scheduler.abort(attempt_id(name))
        bench.scheduler.check_invariants()
    assert bench.plan().num_sequences == 0


def test_tokens_of_rows_are_counted_over_all_steps() -> None:
    bench = decoding("a", "b")
    for _ in range(3):
        bench.commit(bench.plan())
    assert bench.scheduler.stats().tokens_generated == 2 * 4


def test_a_block_that_a_row_has_filled_is_found_by_others() -> None:
    bench = decoding("a")
    for _ in range(3):
        bench.commit(bench.plan())
    prompt = [*request("a", 9).token_ids, 7, 7, 7]
    assert bench.add(request("again", [*prompt, 1])).num_cached_tokens == 12


def test_a_row_ends_by_its_own_count_when_another_was_aborted_in_flight() -> None:
    bench = Bench(**ROOMY)
    for age, (name, max_tokens) in enumerate((("gone", 50), ("last", 2), ("long", 50))):
        bench.add(request(name, 9, age=age, max_tokens=max_tokens))
    bench.step()
    plan = bench.plan()
    bench.scheduler.abort(attempt_id("gone"))
    events = bench.scheduler.commit(plan, drawn(plan))
    assert [(one.sequence_id, one.finish_reason) for one in events.finished] == [(sequence_id("last"), "length")]


def test_a_row_that_begins_does_not_stand_for_one_that_was_aborted_in_flight() -> None:
    """A migrated choice, of which all tokens but the last are cached, has a row once the step is planned. So there are
    as many rows as the step had, but not the same ones."""
    bench = decoding("old", "gone")
    known = request("old", 9).token_ids
    bench.add(request("moved", known[:8], age=2, emitted=((known[8],),)))
    plan = bench.plan()
    assert sorted(names_of(plan)) == ["gone", "old"]
    bench.scheduler.abort(attempt_id("gone"))
    events = bench.scheduler.commit(plan, drawn(plan))
    bench.scheduler.check_invariants()
    assert {one.sequence_id: one.first_index for one in events.tokens} == {
        sequence_id("old"): 1,
        sequence_id("moved"): 1,
    }


def test_ids_that_may_be_drawn_are_not_barred_below_min_tokens() -> None:
    bench = Bench(**ROOMY)
    stop = StopConditions(9, eos_token_ids=(1,), stop_token_ids=(2,), min_tokens=3, ignore_eos=True)
    bench.add(request("a", 9, stop=stop))
    (chunk,) = bench.plan().chunks
    assert chunk.barred == (2,)
