"""Tests a request from `add` to its end: cache hits, choices, migration, stops, aborts and failing steps."""

from __future__ import annotations

import numpy as np
import pytest
from scheduling_cases import Bench, attempt_id, positions, request, sequence_id, unit

from fabric.contracts import (
    WEFT_KV,
    FeatureMismatch,
    KvScheme,
    ProtocolError,
    SamplingParams,
    StopConditions,
    UnitKey,
)
from kv_index import prompt_block_hashes
from llm_workers.scheduling import NO_BLOCK, StepEvents, StepResult
from llm_workers.scheduling.sequence import MAX_HELD_SPANS, Stopwatch


def finish(bench: Bench, token: int = 7) -> StepEvents:
    """Runs steps until something finishes, and returns the events of the last step."""
    for _ in range(200):
        events = bench.commit(bench.plan(), token)
        if events.finished:
            return events
    raise AssertionError("nothing finished")


def test_a_second_prompt_hits_the_blocks_of_the_first() -> None:
    bench = Bench()
    prompt = list(range(40))
    bench.add(request("a", prompt))
    bench.step()
    assert bench.add(request("b", [*prompt, 99])).num_cached_tokens == 32
    assert bench.add(request("c", prompt, cache_salt="tenant")).num_cached_tokens == 0
    assert bench.step() == {"a": 1, "b": 9, "c": 40}


def test_a_full_hit_is_cut_by_one_token() -> None:
    bench = Bench()
    bench.add(request("a", list(range(32))))
    bench.step()
    assert bench.add(request("b", list(range(32)))).num_cached_tokens == 31
    plan = bench.plan()
    second = plan.chunks[1]
    assert (second.start, second.num_tokens, second.draw_index) == (31, 1, 0)
    assert second.sampling is not None
    assert second.block_ids.tolist() == plan.chunks[0].block_ids.tolist()[:2]
    bench.commit(plan)
    assert bench.plan().chunks[1].block_ids[2] != plan.chunks[0].block_ids[2]


@pytest.mark.parametrize(("num_image_tokens", "missing"), [(20, ()), (28, (unit("image"),))])
def test_units_that_lie_in_cached_kv_are_not_needed(num_image_tokens: int, missing: tuple[UnitKey, ...]) -> None:
    """The prompt hits 32 of its 40 tokens: an image in [8, 28) is not needed, and one in [8, 36) is needed for its
    rest."""
    images = [("image", 8, num_image_tokens)]
    first = request("a", 40, images)
    bench = Bench()
    bench.add(first, landed=True)
    bench.step()
    admission = bench.add(request("b", [*first.token_ids[:38], 1, 2], images))
    assert (admission.num_cached_tokens, admission.missing_units) == (32, missing)


def test_another_image_in_the_same_place_is_no_hit() -> None:
    bench = Bench()
    bench.add(request("a", 40, [("cat", 4, 20)]), landed=True)
    bench.step()
    tokens = list(request("a", 40, [("cat", 4, 20)]).token_ids)
    assert bench.add(request("b", tokens, [("dog", 4, 20)])).num_cached_tokens == 0
    assert bench.add(request("c", tokens, [("cat", 4, 20)])).num_cached_tokens == 32


def test_findable_blocks_have_the_hashes_that_routers_compute() -> None:
    bench = Bench()
    prompt = request("a", 50, [("cat", 10, 20)], cache_salt="tenant")
    bench.add(prompt, landed=True)
    bench.step()
    _, (stored,) = bench.scheduler.drain_kv_events()
    scheme = KvScheme(WEFT_KV, 16)
    hashes = prompt_block_hashes(scheme, prompt.token_ids, prompt.placeholders, prompt.media, "tenant")
    assert stored.hashes == hashes
    assert len(hashes) == 3 * 16


@pytest.mark.parametrize("is_prefix_cache_enabled", [True, False])
def test_choices_wait_for_the_first_and_take_over_its_blocks(is_prefix_cache_enabled: bool) -> None:
    """The prompt is computed once; the other choices compute only the last token, for its logits. They share the block
    of that token too, until a choice writes behind the prompt: then the block is copied."""
    bench = Bench(is_prefix_cache_enabled=is_prefix_cache_enabled)
    admission = bench.add(request("a", 40, num_choices=3))
    assert admission.sequence_ids == tuple(sequence_id("a", choice) for choice in range(3))
    plan = bench.plan()
    assert [chunk.sequence_id.choice for chunk in plan.chunks] == [0]
    bench.commit(plan)
    following = bench.plan()
    assert [(chunk.sequence_id.choice, chunk.start, chunk.num_tokens) for chunk in following.chunks] == [
        (0, 40, 1),
        (1, 39, 1),
        (2, 39, 1),
    ]
    first, second, third = (chunk.block_ids.tolist() for chunk in following.chunks)
    assert second == third
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert [chunk.copied_from for chunk in following.chunks] == [second[2], NO_BLOCK, NO_BLOCK]
    bench.commit(following)
    own = bench.plan()
    assert [chunk.copied_from for chunk in own.chunks] == [NO_BLOCK, second[2], second[2]]
    assert len({int(chunk.block_ids[2]) for chunk in own.chunks} - {second[2]}) == 3
    bench.commit(own)
    assert bench.scheduler.stats().kv_blocks_used == 2 + 3


def test_the_last_choice_that_holds_a_shared_block_writes_into_it() -> None:
    bench = Bench(is_prefix_cache_enabled=False)
    bench.add(request("a", 40, num_choices=2))
    bench.step()
    bench.scheduler.abort(attempt_id("a"), (0,))
    bench.step()
    (chunk,) = bench.plan().chunks
    assert (chunk.start, chunk.copied_from) == (40, NO_BLOCK)


def test_a_choice_makes_room_for_the_copy_by_ending_the_sharing() -> None:
    """Three blocks hold the prompt and there is no fourth, so the younger choice gives up its part of them."""
    bench = Bench(num_blocks=3, is_prefix_cache_enabled=False)
    bench.add(request("a", 40, num_choices=2))
    bench.step()
    assert bench.step() == {"a": 1}
    stats = bench.scheduler.stats()
    assert (stats.num_preemptions, stats.kv_blocks_used) == (1, 3)


def test_a_copy_that_failed_is_made_again_from_the_shared_block() -> None:
    bench = Bench()
    bench.add(request("a", 40, num_choices=2))
    bench.step()
    failing = bench.plan()
    bench.scheduler.rollback(failing)
    bench.scheduler.check_invariants()
    again = bench.plan()
    assert [chunk.copied_from for chunk in again.chunks] == [chunk.copied_from for chunk in failing.chunks]
    assert again.chunks[0].copied_from != NO_BLOCK


def test_if_the_first_choice_leaves_the_next_one_leads() -> None:
    bench = Bench()
    bench.add(request("a", 40, num_choices=3))
    bench.scheduler.abort(attempt_id("a"), (0,))
    assert [chunk.sequence_id.choice for chunk in bench.plan().chunks] == [1]


def test_a_migrated_choice_goes_on_where_it_was() -> None:
    bench = Bench()
    admission = bench.add(request("a", 20, num_choices=2, max_tokens=4, emitted=((5, 6, 7), (5, 6, 7, 8))), delta=-3)
    assert admission.sequence_ids == (sequence_id("a", 0),)
    (ended,) = admission.finished
    assert (ended.sequence_id, ended.finish_reason, ended.num_tokens) == (sequence_id("a", 1), "length", 4)
    plan = bench.plan()
    (chunk,) = plan.chunks
    assert (chunk.num_tokens, chunk.draw_index, chunk.token_ids[-3:].tolist()) == (23, 3, [5, 6, 7])
    assert chunk.positions.tolist() == [[*range(20), 17, 18, 19]]
    assert chunk.positions.dtype == np.int64
    events = bench.commit(plan, token=9)
    assert [tuple(one) for one in events.tokens] == [(sequence_id("a", 0), 3, (9,), "length", ())]


@pytest.mark.parametrize(
    ("stop", "reason", "num_tokens"),
    [
        (StopConditions(max_tokens=5, eos_token_ids=(7,)), "stop", 1),
        (StopConditions(max_tokens=5, eos_token_ids=(7,), ignore_eos=True), "length", 5),
        (StopConditions(max_tokens=5, eos_token_ids=(7,), min_tokens=3), "stop", 3),
        (StopConditions(max_tokens=5, stop_token_ids=(7,), ignore_eos=True), "stop", 1),
        (StopConditions(max_tokens=5), "length", 5),
        (StopConditions(max_tokens=5000), "length", 16),
    ],
)
def test_when_a_choice_ends(stop: StopConditions, reason: str, num_tokens: int) -> None:
    """The last case ends with the pool: 32 tokens have blocks, and the token drawn behind them needs none."""
    bench = Bench(num_blocks=2)
    bench.add(request("a", 17, stop=stop))
    events = finish(bench, token=7)
    assert [(one.finish_reason, one.num_tokens) for one in events.finished] == [(reason, num_tokens)]
    assert bench.scheduler.stats().kv_blocks_used == 0


def test_an_abort_in_flight_frees_at_once_and_the_commit_ignores_it() -> None:
    bench = Bench()
    bench.add(request("a", 40, [("image", 10, 5)]), landed=True)
    bench.add(request("b", 20))
    plan = bench.plan()
    assert bench.scheduler.abort(attempt_id("a")) == [sequence_id("a")]
    assert bench.scheduler.abort(attempt_id("a")) == []
    assert bench.scheduler.stats().kv_blocks_used == 2
    assert bench.scheduler.needs_unit(unit("image")), "the step still reads it"
    assert bench.release_unneeded() == []
    events = bench.commit(plan)
    assert [one.sequence_id for one in events.tokens] == [sequence_id("b")]
    assert bench.release_unneeded() == [unit("image")]


def test_an_attempt_added_again_in_flight_is_another_sequence() -> None:
    bench = Bench()
    bench.add(request("a", 20))
    plan = bench.plan()
    bench.scheduler.abort(attempt_id("a"))
    bench.add(request("a", 20))
    assert bench.commit(plan).tokens == ()
    assert bench.step() == {"a": 20}


def test_a_failed_step_leaves_no_trace() -> None:
    bench = Bench(max_step_tokens=24)
    bench.add(request("a", 40, [("image", 10, 5)]), landed=True)
    plan = bench.plan()
    bench.scheduler.rollback(plan)
    bench.scheduler.check_invariants()
    assert bench.scheduler.stats().kv_blocks_used == 0
    again = bench.plan()
    assert (again.chunks[0].start, again.chunks[0].num_tokens) == (0, 24)
    np.testing.assert_array_equal(again.chunks[0].token_ids, plan.chunks[0].token_ids)


def test_times_of_a_finished_sequence() -> None:
    bench = Bench()
    bench.add(request("a", 20, [("image", 10, 5)], max_tokens=1))
    bench.clock.advance(1.0)
    plan = bench.plan()
    bench.clock.advance(0.25)
    assert bench.commit(plan).at_doorstep == (sequence_id("a"),)
    assert (bench.scheduler.stats().queued_weighted_tokens, bench.scheduler.stats().behind_weighted_tokens) == (0, 10)
    bench.clock.advance(3.0)
    bench.land(unit("image"))
    assert (bench.scheduler.stats().queued_weighted_tokens, bench.scheduler.stats().behind_weighted_tokens) == (10, 0)
    plan = bench.plan()
    bench.clock.advance(0.5)
    (ended,) = bench.commit(plan).finished
    assert tuple(ended.times) == (1.0, 0.75, 3.0, 4.75, 4.75, ((1.25, 4.25),))
    assert (ended.num_prompt_tokens, ended.num_tokens, ended.num_cached_tokens) == (20, 1, 0)


def test_who_waits_for_a_turn_stands_at_no_doorstep() -> None:
    bench = Bench(max_step_tokens=10)
    for number, name in enumerate(("a", "b")):
        bench.add(request(name, 20, age=number))
    plans = []
    for _ in range(3):
        plans.append(bench.plan())
        assert bench.commit(plans[-1]).at_doorstep == ()
    assert [plan.step for plan in plans] == [1, 2, 3]
    assert bench.scheduler.stats().num_at_doorstep == 0


def test_times_of_a_sequence_that_still_stands_at_its_doorstep() -> None:
    stopwatch = Stopwatch(1.0)
    stopwatch.begin(2.0)
    stopwatch.hold(True, 5.0)
    stopwatch.hold(False, 6.0)
    stopwatch.hold(True, 7.0)
    assert tuple(stopwatch.times(9.0)) == (1.0, 0.0, 1.0 + 2.0, 0.0, 8.0, ((5.0, 6.0), (7.0, 9.0)))


def test_a_stay_at_the_doorstep_before_the_first_step_is_no_part_of_the_queue() -> None:
    stopwatch = Stopwatch(1.0)
    stopwatch.hold(True, 1.5)
    assert stopwatch.times(4.0).queue_s == 0.5
    stopwatch.begin(5.0)
    stopwatch.hold(False, 5.0)
    times = stopwatch.times(6.0)
    assert (times.queue_s, times.held_s, times.held_spans) == (0.5, 3.5, ((1.5, 5.0),))


def test_many_stays_at_the_doorstep_are_summed_but_not_all_kept() -> None:
    stopwatch = Stopwatch(0.0)
    for at in range(MAX_HELD_SPANS + 8):
        stopwatch.hold(True, at)
        stopwatch.hold(False, at + 0.5)
    times = stopwatch.times(100.0)
    assert times.held_s == 0.5 * (MAX_HELD_SPANS + 8)
    assert len(times.held_spans) == MAX_HELD_SPANS


def test_contradictions_are_refused_and_nothing_changes() -> None:
    bench = Bench()
    bench.add(request("a", 40, [("image", 10, 5)]))
    with pytest.raises(ProtocolError, match="is already at this worker"):
        bench.add(request("a", 40))
    with pytest.raises(FeatureMismatch):
        bench.add(request("b", 40, [("image", 10, 6)]))
    with pytest.raises(ProtocolError, match="overlap others, or exceed"):
        bench.add(request("c", 40, [("x", 10, 5), ("y", 12, 5)]))
    short = request("d", 40)
    with pytest.raises(ProtocolError, match="positions"):
        bench.scheduler.prepare(short, positions(request("d", 39)))
    assert bench.scheduler.stats().num_waiting == 1


def test_what_became_unneeded_is_released_without_a_step() -> None:
    bench = Bench()
    bench.add(request("a", 40, [("image", 0, 5)]), landed=True)
    bench.scheduler.abort(attempt_id("a"))
    assert bench.release_unneeded() == [unit("image")]
    plan = bench.plan()
    assert plan.chunks == ()
    bench.scheduler.commit(plan, StepResult({}))
    assert bench.release_unneeded() == []
    assert bench.scheduler.stats().num_features == 0


def test_penalties_count_what_was_generated_and_the_prompt_as_seen_only() -> None:
    """This holds for a first attempt and for one that continues where another ended."""
    penalised = SamplingParams(frequency_penalty=0.5)
    for emitted, expected in (((), {}), (((6, 5, 5),), {5: 2, 6: 1})):
        bench = Bench()
        bench.add(request("a", [4, 5, 4, 7], sampling=penalised, emitted=emitted))
        for num_more in range(3):
            plan = bench.plan()
            counts = plan.chunks[0].counts
            assert counts is not None
            found = dict(zip(counts.ids.tolist(), counts.num_generated.tolist(), strict=True))
            assert found == {4: 0, 5: 0, 7: 0} | expected | ({7: num_more} if num_more else {})
            bench.commit(plan, token=7)
