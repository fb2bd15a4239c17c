"""The line through steps: what it learns, and that it never promises less than nothing."""

from __future__ import annotations

import pytest

from llm_workers.step_costs import StepCosts


def test_unknown_until_a_step_was_seen():
    costs = StepCosts()
    assert (costs.s_per_token, costs.overhead_s) == (0.0, 0.0)


def test_a_line_is_found():
    costs = StepCosts()
    for num_tokens in (1, 512, 16, 64, 1):
        costs.observe(num_tokens, 0.004 + 0.0005 * num_tokens)
    assert costs.s_per_token == pytest.approx(0.0005)
    assert costs.overhead_s == pytest.approx(0.004)


def test_one_size_alone_gives_the_cost_per_token():
    costs = StepCosts()
    for _ in range(3):
        costs.observe(8, 0.016)
    assert costs.s_per_token == pytest.approx(0.002)
    assert costs.overhead_s == 0.0


def test_a_falling_line_is_flat():
    costs = StepCosts()
    costs.observe(1, 0.010)
    costs.observe(100, 0.002)
    assert costs.s_per_token == 0.0
    assert costs.overhead_s > 0.0


def test_recent_steps_count_more():
    costs = StepCosts()
    for _ in range(300):
        costs.observe(1, 0.01)
        costs.observe(101, 0.11)
    for _ in range(300):
        costs.observe(1, 0.02)
        costs.observe(101, 0.22)
    assert costs.s_per_token == pytest.approx(0.002, rel=0.01)
