"""Tests which sequences a step serves first, which it passes over, and which give up blocks."""

from __future__ import annotations

import pytest
from scheduling_cases import Bench, attempt_id, request, sequence_id, unit

from fabric.contracts import ContextLengthExceeded
from llm_workers.scheduling.step_planner import NUM_TEXT_STEPS, TEXT_MEMORY_S, TextPrefills


def test_decodes_never_wait_for_a_long_prompt() -> None:
    bench = Bench(max_step_tokens=32)
    bench.add(request("long", 300, age=0))
    bench.add(request("short", 20, age=1))
    assert bench.step() == {"long": 32}
    bench.add(request("urgent", 8, age=2, priority=-1))
    assert bench.step() == {"urgent": 8, "long": 24}
    assert bench.step() == {"urgent": 1, "long": 31}


def test_ready_requests_come_before_those_that_wait_for_media() -> None:
    bench = Bench(max_step_tokens=30)
    bench.add(request("waits", 60, [("image", 40, 10)], age=0))
    bench.add(request("ready", 20, age=1))
    assert bench.step() == {"ready": 20, "waits": 10}


def test_at_its_doorstep_a_sequence_costs_nothing_until_the_unit_lands() -> None:
    bench = Bench()
    bench.add(request("a", 40, [("one", 10, 5), ("two", 20, 5)]))
    assert bench.step() == {"a": 10}
    assert bench.step() == {}
    bench.land(unit("two"))
    assert bench.step() == {}
    bench.land(unit("one"))
    plan = bench.plan()
    assert [(s.at, s.length, s.unit, s.row) for s in plan.chunks[0].splices] == [
        (0, 5, unit("one"), 0),
        (10, 5, unit("two"), 0),
    ]
    bench.commit(plan)
    assert bench.release_unneeded() == [unit("one"), unit("two")]


def test_beside_a_text_prompts_with_media_compute_no_more_than_texts_do() -> None:
    bench = Bench(max_step_tokens=32)
    bench.add(request("media", 200, [("image", 10, 5)], age=0), landed=True)
    assert bench.step() == {"media": 32}
    bench.add(request("text", 16, age=1, max_tokens=4))
    assert bench.step() == {"text": 16, "media": 16}
    assert bench.step() == {"text": 1, "media": 19}
    bench.add(request("other", 12, age=2, max_tokens=1))
    assert bench.step() == {"text": 1, "other": 12, "media": 16}
    assert bench.step() == {"text": 1, "media": 16}
    bench.clock.advance(TEXT_MEMORY_S)
    assert bench.step() == {"media": 16}
    bench.clock.advance(0.1)
    assert bench.step() == {"media": 32}


def test_of_the_steps_with_texts_nine_in_ten_do_not_exceed_the_limit() -> None:
    prefills = TextPrefills()
    assert prefills.usual_most == 0.0
    for num_tokens in (5.0, 0.0, 7.0):
        prefills.note(num_tokens)
    assert prefills.usual_most == 7.0
    for num_tokens in range(1, NUM_TEXT_STEPS + 1):
        prefills.note(float(num_tokens))
    assert sum(num_tokens < prefills.usual_most for num_tokens in range(1, NUM_TEXT_STEPS + 1)) == 57


def test_the_limit_of_prompts_with_media_can_be_set() -> None:
    bench = Bench(max_step_tokens=64, media_chunk_tokens=8)
    bench.add(request("media", 60, [("image", 10, 5)], age=0), landed=True)
    bench.add(request("text", 3, age=1))
    assert bench.step() == {"text": 3, "media": 7}
    assert bench.step() == {"text": 1, "media": 8}
    bench.add(request("second", 30, [("picture", 10, 5)], age=2), landed=True)
    assert bench.step() == {"text": 1, "media": 9}
    bench = Bench(max_step_tokens=64, media_chunk_tokens=0)
    bench.add(request("text", 4, age=1))
    bench.step()
    bench.add(request("media", 60, [("image", 10, 5)], age=0), landed=True)
    assert bench.step() == {"text": 1, "media": 60}


def test_many_prompts_with_media_compute_an_eighth_of_what_is_open() -> None:
    bench = Bench(max_step_tokens=300, num_blocks=200)
    bench.add(request("text", 8, age=0))
    assert bench.step() == {"text": 8}
    for number in range(8):
        bench.add(request(f"media-{number}", 100, [(f"image-{number}", 10, 5)], age=1 + number), landed=True)
    assert bench.step() == {"text": 1, "media-0": 100}
    assert bench.step() == {"text": 1, "media-0": 1, "media-1": 87}


def test_a_token_after_a_long_context_counts_for_more() -> None:
    bench = Bench(context_scale_tokens=16.0, max_step_tokens=32, media_chunk_tokens=8)
    bench.add(request("media", 48, [("image", 1, 5)], age=0), landed=True)
    assert bench.step() == {"media": 32}
    bench.add(request("text", 1, age=1))
    assert bench.step() == {"text": 1, "media": 3}


def test_texts_of_less_urgent_priority_do_not_limit_prompts_with_media() -> None:
    bench = Bench(max_step_tokens=32, media_chunk_tokens=10)
    bench.add(request("media", 120, [("image", 10, 5)], age=1), landed=True)
    bench.add(request("batch", 60, age=0, priority=5))
    assert bench.step() == {"media": 32}
    bench.add(request("text", 2, age=2))
    assert bench.step() == {"text": 2, "media": 11, "batch": 19}


def test_a_crowd_of_texts_leaves_prompts_with_media_an_eighth_of_what_they_need() -> None:
    """It leaves them no more than half of a step, and none to those of less urgent priority."""
    bench = Bench(max_step_tokens=32, num_blocks=200)
    for number in range(8):
        bench.add(request(f"text-{number}", 100, age=number))
    bench.add(request("batch", 40, [("other", 10, 5)], age=8, priority=1), landed=True)
    assert bench.step() == {"text-0": 32}
    bench.add(request("media", 40, [("image", 10, 5)], age=9), landed=True)
    assert bench.step() == {"text-0": 22, "media": 10}
    bench.add(request("large", 200, [("film", 10, 5)], age=10), landed=True)
    assert bench.step() == {"text-0": 16, "media": 16}


def test_without_overlap_a_sequence_begins_when_all_its_media_are_here() -> None:
    bench = Bench(is_overlap_enabled=False, max_step_tokens=30, media_chunk_tokens=0)
    bench.add(request("a", 40, [("one", 10, 5), ("two", 20, 5)], age=0))
    bench.add(request("text", 8, age=1))
    assert bench.step() == {"text": 8}
    bench.land(unit("one"))
    assert bench.step() == {"text": 1}
    assert bench.scheduler.stats().num_at_doorstep == 1
    bench.land(unit("two"))
    assert bench.step() == {"text": 1, "a": 29}
    assert bench.step() == {"text": 1, "a": 11}


def test_tokens_behind_a_missing_feature_are_told_apart_from_those_that_can_be_computed() -> None:
    bench = Bench(max_step_tokens=30)
    bench.add(request("media", 40, [("image", 10, 5)], age=0))
    bench.add(request("text", 50, age=1))
    stats = bench.scheduler.stats()
    assert (stats.queued_tokens, stats.behind_tokens) == (10 + 50, 30)
    assert stats.behind_weighted_tokens >= 30
    assert bench.step() == {"text": 30}
    assert (bench.scheduler.stats().queued_tokens, bench.scheduler.stats().behind_tokens) == (30, 30)
    bench.land(unit("image"))
    stats = bench.scheduler.stats()
    assert (stats.queued_tokens, stats.behind_tokens, stats.behind_weighted_tokens) == (60, 0, 0.0)


def test_an_image_is_needed_until_its_last_occurrence_is_computed() -> None:
    bench = Bench(max_step_tokens=20)
    bench.add(request("a", 50, [("same", 10, 5), ("same", 30, 5)]), landed=True)
    bench.commit(bench.plan())
    assert bench.release_unneeded() == []
    assert bench.scheduler.needs_unit(unit("same"))
    bench.commit(bench.plan())
    assert bench.release_unneeded() == [unit("same")]
    assert not bench.scheduler.needs_unit(unit("same"))


def test_one_that_does_not_fit_is_passed_over() -> None:
    bench = Bench(num_blocks=10, block_size=4)
    bench.add(request("runs", 20, age=0))
    bench.step()
    bench.add(request("large", 32, age=1))
    bench.add(request("small", 4, age=2))
    assert bench.step() == {"runs": 1, "small": 4}


def test_the_youngest_gives_up_its_blocks_and_begins_again() -> None:
    bench = Bench(num_blocks=8, block_size=4, is_prefix_cache_enabled=False)
    for name, age in (("old", 0), ("middle", 1), ("young", 2)):
        bench.add(request(name, 7, age=age))
    while bench.scheduler.stats().num_preemptions == 0:
        plan = bench.plan()
        events = bench.commit(plan)
    assert events.preempted == (sequence_id("young"),)
    assert {chunk.sequence_id.request_id for chunk in plan.chunks} == {"old", "middle"}
    assert bench.scheduler.stats().num_running == 2


def test_the_lowest_priority_gives_up_its_blocks_before_the_youngest() -> None:
    """The old sequence has a low priority (a higher number) and the young one a high priority; age alone would preempt
    the young one."""
    bench = Bench(num_blocks=8, block_size=4, is_prefix_cache_enabled=False)
    bench.add(request("old", 7, age=0, priority=5))
    bench.add(request("older", 7, age=1, priority=1))
    bench.add(request("young", 7, age=2, priority=0))
    preempted: list[str] = []
    for _ in range(12):
        preempted += [one.request_id for one in bench.commit(bench.plan()).preempted]
    assert preempted == ["old", "older"]
    assert bench.step() == {"young": 1}


def test_one_of_low_priority_never_takes_blocks_of_a_higher_one() -> None:
    bench = Bench(num_blocks=4, block_size=4, is_prefix_cache_enabled=False)
    bench.add(request("young", 8, age=1, priority=0))
    bench.step()
    bench.add(request("old", 12, age=0, priority=1))
    assert [bench.step() for _ in range(7)] == [{"young": 1}] * 7
    assert bench.scheduler.stats().num_preemptions == 0


def test_one_of_high_priority_begins_by_right_of_rank() -> None:
    bench = Bench(num_blocks=4, block_size=4, is_prefix_cache_enabled=False)
    bench.add(request("low", 12, age=0, priority=1))
    bench.step()
    bench.add(request("high", 12, age=1, priority=0))
    assert bench.step() == {"high": 12}


def test_priority_comes_before_readiness() -> None:
    bench = Bench(max_step_tokens=30)
    bench.add(request("low", 40, age=0, priority=1))
    bench.add(request("high", 60, [("image", 20, 10)], age=1, priority=0))
    assert bench.step() == {"high": 20, "low": 10}


def test_a_preempted_sequence_asks_for_the_units_it_needs_again() -> None:
    bench = Bench(num_blocks=8, block_size=4, is_prefix_cache_enabled=False)
    bench.add(request("old", 14, age=0))
    bench.add(request("young", 11, [("image", 2, 6)], age=1), landed=True)
    while bench.scheduler.stats().num_preemptions == 0:
        bench.step()
    assert [tuple(need) for need in bench.scheduler.drain_needed()] == [
        (sequence_id("young"), unit("image"), "preempted")
    ]
    assert bench.scheduler.drain_needed() == []
    assert bench.scheduler.needs_unit(unit("image"))
    assert bench.scheduler.stats().num_waiting == 1


def test_needs_of_an_aborted_sequence_are_not_reported() -> None:
    bench = Bench(num_blocks=8, block_size=4, is_prefix_cache_enabled=False)
    bench.add(request("old", 14, age=0))
    bench.add(request("young", 11, [("image", 2, 6)], age=1), landed=True)
    while bench.scheduler.stats().num_preemptions == 0:
        bench.step()
    bench.scheduler.abort(attempt_id("young"))
    assert bench.scheduler.drain_needed() == []


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    bench = Bench(num_blocks=4, block_size=4)
    with pytest.raises(ContextLengthExceeded, match="room for 16"):
        bench.add(request("a", 17))
    with pytest.raises(ContextLengthExceeded, match="the context of the model has 4096"):
        Bench(num_blocks=1024).add(request("a", 4096))
    bench.add(request("b", 16))
    assert bench.step() == {"b": 16}
    assert bench.scheduler.stats().kv_blocks_used == 0
