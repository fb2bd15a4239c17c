"""Tests how outputs of a prompt are collected over chunks, and what the scheduler does with requests that want some."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling_cases import Bench, request, sequence_id

from fabric.contracts import GenerateRequest, PromptOutputs, StopConditions
from llm_workers.scheduling import Chunk, PromptRows, ScoredRows, StepEvents, StepPlan, StepResult
from llm_workers.scheduling.prompt_reader import PromptReader

MEAN, LAST = PromptOutputs("mean"), PromptOutputs("last")
SCORES = PromptOutputs(num_top_logprobs=1)
NOTHING = StopConditions(max_tokens=0)


def rows_of(chunk: Chunk) -> PromptRows | None:
    """Returns what a model gives whose hidden state at position p is (p, 1), and which scores the target t at position
    p with -t, rank p, and the token p as the most probable one."""
    reading = chunk.reading
    if reading is None:
        return None
    hidden = np.stack([np.arange(chunk.start, chunk.end), np.ones(chunk.num_tokens)], axis=1).astype(np.float32)
    pooled = {"": None, "last": hidden[-1], "mean": hidden.sum(axis=0)}[reading.pooling]
    if not len(reading.targets):
        return PromptRows(pooled, None)
    at, targets = np.arange(chunk.start, chunk.start + len(reading.targets)), reading.targets
    token_ids = np.stack([targets, at], axis=1)[:, : 1 + reading.num_top]
    return PromptRows(pooled, ScoredRows(token_ids, -token_ids.astype(np.float32), at))


def commit(bench: Bench, plan: StepPlan) -> StepEvents:
    """Commits a step with the results of that model."""
    drawn = {chunk.sequence_id: (7,) for chunk in plan.chunks if chunk.sampling is not None}
    readings = {chunk.sequence_id: rows for chunk in plan.chunks if (rows := rows_of(chunk)) is not None}
    events = bench.scheduler.commit(plan, StepResult(drawn, readings=readings))
    bench.scheduler.check_invariants()
    return events


def finish(bench: Bench) -> list[StepEvents]:
    """Runs steps until nothing is left, and returns their events."""
    found = []
    while bench.scheduler.num_sequences:
        found.append(commit(bench, bench.plan()))
    return found


def embedding(events: Sequence[StepEvents]) -> list[float]:
    (outputs,) = [one for each in events for one in each.prompt_outputs]
    return np.frombuffer(outputs.embedding, "<f4").tolist()


# ---------------------------------------------------------------- the reader alone


@given(
    st.sampled_from((MEAN, LAST, SCORES, PromptOutputs("mean", num_top_logprobs=0), PromptOutputs("last", False, 1))),
    st.lists(st.integers(0, 50), min_size=1, max_size=30),
    st.sets(st.integers(1, 29)),
    st.integers(0, 29),
)
def test_any_chunks_give_what_one_chunk_gives(
    wanted: PromptOutputs, prompt: list[int], cuts: set[int], num_lost: int
) -> None:
    """The reader is also reset once in between, as after a preemption."""

    def read(reader: PromptReader, ends: list[int]) -> None:
        start = 0
        for end in ends:
            reading = reader.reading(start, end)
            tokens = np.array(prompt[start:end])
            positions = np.arange(start, end)[None]
            chunk = Chunk(sequence_id("a"), start, end - start, tokens, positions, tokens, (), None, reading=reading)
            reader.take(end, rows_of(chunk))
            start = end

    reader, whole = (PromptReader(wanted, np.array(prompt)) for _ in range(2))
    read(whole, [len(prompt)])
    ends = [*sorted(cut for cut in cuts if cut < len(prompt)), len(prompt)]
    read(reader, ends[:num_lost])
    reader.reset()
    assert not reader.is_complete
    read(reader, ends)
    assert np.frombuffer(reader.embedding(), "<f4") == pytest.approx(np.frombuffer(whole.embedding(), "<f4"))
    assert reader.logprobs() == whole.logprobs()
    if wanted.num_top_logprobs is not None:
        assert [token.token_id for token in reader.logprobs().tokens()] == prompt[1:]


def test_an_embedding_is_divided_by_its_norm_if_that_is_wanted() -> None:
    for wanted, expected in ((PromptOutputs("last"), [0.6, 0.8]), (PromptOutputs("last", False), [3.0, 4.0])):
        reader = PromptReader(wanted, np.array([5, 6]))
        reader.take(2, PromptRows(np.array([3.0, 4.0], np.float32), None))
        assert np.frombuffer(reader.embedding(), "<f4").tolist() == pytest.approx(expected)


def test_a_hidden_state_of_zeros_stays_zero() -> None:
    reader = PromptReader(MEAN, np.array([5]))
    reader.take(1, PromptRows(np.zeros(2, np.float32), None))
    assert np.frombuffer(reader.embedding(), "<f4").tolist() == [0.0, 0.0]


# ---------------------------------------------------------------- in the scheduler


def embed(name: str, length: int | list[int], wanted: PromptOutputs = MEAN, **fields: object) -> GenerateRequest:
    return request(name, length, stop=NOTHING, prompt_outputs=wanted, **fields)


def test_a_request_for_an_embedding_ends_with_its_prompt() -> None:
    bench = Bench(max_step_tokens=16, block_size=4)
    bench.add(embed("a", 40, PromptOutputs("mean", is_normalised=False)))
    events = finish(bench)
    assert len(events) == 3
    assert [each.tokens for each in events] == [()] * 3
    (ended,) = events[-1].finished
    assert (ended.sequence_id, ended.finish_reason, ended.num_tokens) == (sequence_id("a"), "length", 0)
    assert embedding(events) == [39 / 2, 1.0]
    stats = bench.scheduler.stats()
    assert (stats.kv_blocks_used, stats.tokens_generated, stats.prompt_tokens_computed) == (0, 0, 40)


def test_only_the_last_chunk_is_read_for_the_last_token() -> None:
    bench = Bench(max_step_tokens=16, block_size=4)
    bench.add(embed("a", 40, PromptOutputs("last", is_normalised=False)))
    readings = []
    events = []
    for _ in range(3):
        plan = bench.plan()
        readings.append(plan.chunks[0].reading)
        assert plan.chunks[0].sampling is None
        events.append(commit(bench, plan))
    assert readings[:2] == [None, None]
    assert not readings[2].needs_all_rows
    assert embedding(events) == [39.0, 1.0]


def test_who_reads_the_whole_prompt_fills_the_cache_and_hits_nothing() -> None:
    bench = Bench(block_size=4, num_blocks=64)
    prompt = list(range(40))
    assert bench.add(embed("first", prompt)).num_cached_tokens == 0
    finish(bench)
    assert bench.add(embed("last", prompt, LAST)).num_cached_tokens == 39
    finish(bench)
    for name, wanted in (("mean", MEAN), ("scores", SCORES)):
        assert bench.add(embed(name, prompt, wanted)).num_cached_tokens == 0
        events = finish(bench)
        assert sum(each.end - each.start for event in events for each in event.prefill) == 40


def test_scores_end_with_the_prompt_and_the_sequence_goes_on() -> None:
    bench = Bench(max_step_tokens=16, block_size=4)
    prompt = list(range(100, 140))
    bench.add(request("a", prompt, max_tokens=3, prompt_outputs=SCORES))
    events = finish(bench)
    assert [len(each.prompt_outputs) for each in events] == [0, 0, 1, 0, 0]
    logprobs = events[2].prompt_outputs[0].logprobs
    assert [token.token_id for token in logprobs.tokens()] == prompt[1:]
    assert [token.rank for token in logprobs.tokens()] == list(range(39))
    assert [token.logprobs.top[0][0] for token in logprobs.tokens()] == list(range(39))
    assert sum(len(tokens.token_ids) for each in events for tokens in each.tokens) == 3


def test_a_sequence_that_was_read_decodes_plainly() -> None:
    bench = Bench()
    bench.add(request("a", 20, prompt_outputs=SCORES))
    commit(bench, bench.plan())
    plan = bench.plan()
    assert (plan.others, plan.num_decodes) == ((), 1)


def test_a_step_that_failed_is_not_added() -> None:
    bench = Bench(max_step_tokens=16, block_size=4)
    bench.add(embed("a", 40, PromptOutputs("mean", is_normalised=False)))
    events = [commit(bench, bench.plan())]
    for _ in range(2):
        bench.scheduler.rollback(bench.plan())
        bench.scheduler.check_invariants()
    assert embedding(events + finish(bench)) == [39 / 2, 1.0]


def test_choices_share_what_the_first_has_read() -> None:
    bench = Bench()
    bench.add(request("a", 20, max_tokens=2, num_choices=3, prompt_outputs=SCORES))
    events = finish(bench)
    assert [one.sequence_id.choice for each in events for one in each.prompt_outputs] == [0]
    assert sorted(one.sequence_id.choice for each in events for one in each.finished) == [0, 1, 2]


def test_the_next_choice_reads_the_prompt_if_the_first_leaves_too_early() -> None:
    bench = Bench(max_step_tokens=16)
    sent = request("a", 40, max_tokens=2, num_choices=2, prompt_outputs=SCORES)
    bench.add(sent)
    commit(bench, bench.plan())
    bench.scheduler.abort(sequence_id("a").attempt_id, (0,))
    events = finish(bench)
    (outputs,) = [one for each in events for one in each.prompt_outputs]
    assert outputs.sequence_id.choice == 1
    assert [token.rank for token in outputs.logprobs.tokens()] == list(range(39))


def test_a_prompt_of_one_token_has_no_scores() -> None:
    bench = Bench()
    bench.add(request("a", 1, max_tokens=1, prompt_outputs=PromptOutputs(num_top_logprobs=2)))
    (events,) = finish(bench)
    logprobs = events.prompt_outputs[0].logprobs
    assert (logprobs.num_top, list(logprobs.tokens())) == (2, [])
