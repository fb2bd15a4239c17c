"""Tests tenants under one scheduler: in which order their requests come, in addition to age and priority."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_cases import Bench, request


@settings(deadline=None, max_examples=40)
@given(
    num_crowd=st.integers(5, 40),
    length=st.integers(4, 60),
    own=st.integers(4, 60),
    max_sequences=st.integers(2, 8),
    step_tokens=st.integers(8, 64),
)
def test_a_single_request_behind_a_crowd_comes_in_its_turn(
    num_crowd: int, length: int, own: int, max_sequences: int, step_tokens: int
) -> None:
    """The request waits for those that run and for as many tokens of the crowd as its own, but not for the whole
    crowd."""
    bench = Bench(block_size=4, num_blocks=700, max_step_tokens=step_tokens, max_sequences=max_sequences)
    for number in range(num_crowd):
        bench.add(request(f"crowd-{number}", length, age=number, max_tokens=2, cache_salt="crowd"))
    bench.step()
    bench.add(request("single", own, age=1000.0, max_tokens=2, cache_salt="alone"))
    num_crowd_tokens = 0
    for _ in range(10_000):
        computed = bench.step()
        num_crowd_tokens += sum(tokens for name, tokens in computed.items() if name != "single")
        if "single" in computed:
            break
    # The limit is the sum of one step that the others have filled, their decodes and the crowd's turn ahead of the
    # single request's.
    assert num_crowd_tokens <= 2 * step_tokens + 2 * max_sequences + length
    while bench.step():
        pass
    assert bench.scheduler.stats().num_running == 0


def test_without_tenants_age_decides() -> None:
    bench = Bench(max_step_tokens=8, max_sequences=8, block_size=4)
    for name, age in (("b", 2.0), ("a", 1.0), ("c", 3.0)):
        bench.add(request(name, 4, age=age))
    assert list(bench.step()) == ["a", "b"]


@pytest.mark.parametrize(("priority", "expected"), [(0, ["old", "young"]), (-1, ["young"])])
def test_priority_comes_before_turns(priority: int, expected: list[str]) -> None:
    bench = Bench(max_step_tokens=8, max_sequences=8, block_size=4)
    bench.add(request("old", 4, age=1.0, cache_salt="a"))
    bench.add(request("young", 8 if priority else 4, age=2.0, cache_salt="b", priority=priority))
    assert list(bench.step()) == expected
