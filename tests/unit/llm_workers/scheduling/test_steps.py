"""Tests what a step computes: catching up, doorsteps (a sequence waits ahead of a medium that has not landed), order
and budget."""

from __future__ import annotations

import pytest
from scheduling_cases import Bench, request, sequence_id, unit

from fabric.contracts import weighted_tokens
from llm_workers.scheduling.scheduler_events import PrefillProgress


def test_three_prompts_with_an_image_share_a_step_up_to_their_doorsteps() -> None:
    """The case is from vLLM's own tests. Each prompt has 800 tokens with an image at 100 of length 600, and the budget
    of a step is 1024. Only the first request's image is here. The ready request goes first and whole, and the others
    compute their text up to the doorstep. Then the first decodes, the second computes the rest because its image has
    landed, and the third waits at its doorstep and costs nothing."""
    bench = Bench(max_step_tokens=1024, num_blocks=1024)
    for index, name in enumerate("abc"):
        bench.add(request(name, 800, [(f"image-{name}", 100, 600)], age=index))
    bench.land(unit("image-a"))
    assert bench.step() == {"a": 800, "b": 100, "c": 100}
    bench.land(unit("image-b"))
    assert bench.step() == {"a": 1, "b": 700}


def test_a_steps_work_is_its_decodes_and_what_else_it_computes() -> None:
    bench = Bench(max_step_tokens=100, num_blocks=1024)
    bench.add(request("a", 20))
    assert bench.plan().work(64.0) == (0, weighted_tokens(20, 0, 64.0))
    bench = Bench(max_step_tokens=100, num_blocks=1024)
    for name in "ab":
        bench.add(request(name, 20))
    bench.step()
    bench.add(request("c", 150, age=1.0))
    plan = bench.plan()
    assert plan.work(64.0) == (2, pytest.approx(weighted_tokens(98, 0, 64.0)))
    bench.commit(plan)
    assert bench.plan().work(64.0) == (2, pytest.approx(weighted_tokens(52, 98, 64.0))), "behind what it computed"


def test_a_prompt_of_several_chunks_says_how_far_each_has_come_and_counts_once() -> None:
    bench = Bench(max_step_tokens=100, num_blocks=1024)
    bench.add(request("a", 150))
    assert bench.commit(bench.plan()).prefill == (PrefillProgress(sequence_id("a"), 0, 100),)
    assert bench.commit(bench.plan()).prefill == (PrefillProgress(sequence_id("a"), 100, 150),)
    assert bench.commit(bench.plan()).prefill == ()
    assert bench.scheduler.stats().prompt_tokens_computed == 150
