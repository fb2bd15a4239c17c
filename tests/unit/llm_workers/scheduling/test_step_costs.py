"""Tests what a step costs: the cost is fitted at boot, corrected by steps and forgotten with time, and is never less
than nothing."""

from __future__ import annotations

import random

import pytest

from fabric.contracts import CHANGE_RUN
from llm_workers.scheduling import StepCosts, StepWork
from llm_workers.scheduling.step_plan import HALF_LIFE_S, MAX_WEIGHT

TRUE = (0.004, 0.0002, 0.0001)
KINDS = [StepWork(0, 16.0), StepWork(0, 140.0), StepWork(1, 0.0), StepWork(8, 0.0)]


def true_s(work: StepWork, factor: float = 1.0) -> float:
    return factor * sum(cost * amount for cost, amount in zip(TRUE, work.amounts, strict=True))


def fitted(factor: float = 1.0) -> StepCosts:
    costs = StepCosts()
    costs.fit([(work, true_s(work, factor)) for work in KINDS])
    return costs


def numbers(costs: StepCosts) -> tuple[float, float, float]:
    return costs.overhead_s, costs.s_per_decode, costs.s_per_token


def predicted_s(costs: StepCosts, work: StepWork) -> float:
    return sum(cost * amount for cost, amount in zip(numbers(costs), work.amounts, strict=True))


def test_unknown_until_a_step_was_seen() -> None:
    assert numbers(StepCosts()) == (0.0, 0.0, 0.0)


def test_the_first_steps_are_fitted_exactly() -> None:
    assert numbers(fitted()) == pytest.approx(TRUE)


def test_steps_in_no_time_say_nothing() -> None:
    """A clock that stands still gives such steps."""
    costs = StepCosts()
    costs.fit([(work, 0.0) for work in KINDS])
    costs.observe(StepWork(1, 0.0), 0.0, 0.0)
    assert numbers(costs) == (0.0, 0.0, 0.0)
    costs.observe(StepWork(0, 16.0), 0.01, 1.0)
    costs.observe(StepWork(1, 0.0), 0.0, 1.0)
    assert predicted_s(costs, StepWork(0, 16.0)) == pytest.approx(0.01, rel=0.1)


def test_what_comes_out_negative_is_next_to_nothing_and_nothing_is_ever_zero() -> None:
    costs = StepCosts()
    costs.fit([(StepWork(0, 1.0), 0.010), (StepWork(0, 100.0), 0.002), (StepWork(4, 0.0), 0.010)])
    assert min(numbers(costs)) > 0.0
    assert costs.s_per_token < 1e-6


@pytest.mark.parametrize("work", [StepWork(1, 0.0), StepWork(0, 64.0), StepWork(3, 200.0)])
def test_a_worker_that_was_never_calibrated_learns_from_its_steps(work: StepWork) -> None:
    costs = StepCosts()
    for number in range(20):
        costs.observe(work, true_s(work), 0.1 * number)
    assert predicted_s(costs, work) == pytest.approx(true_s(work), rel=0.02)


def test_steps_of_one_kind_leave_what_is_known_of_the_others() -> None:
    costs = fitted()
    for number in range(5000):
        costs.observe(StepWork(1, 0.0), true_s(StepWork(1, 0.0)), 0.003 * number)
    assert numbers(costs) == pytest.approx(TRUE, rel=0.01)


def test_a_slower_machine_is_learned_from_any_mixture_of_steps() -> None:
    costs, rng = fitted(), random.Random(5)
    for number in range(400):
        work = StepWork(rng.choice([0, 1, 4, 16]), rng.choice([0.0, 30.0, 300.0]) + 1.0)
        costs.observe(work, true_s(work, factor=3.0), 0.02 * number)
    for work in (StepWork(1, 0.0), StepWork(16, 0.0), StepWork(0, 30.0), StepWork(0, 300.0), StepWork(16, 300.0)):
        assert predicted_s(costs, work) == pytest.approx(true_s(work, factor=3.0), rel=0.2)


def test_a_busy_minute_is_outweighed_by_a_few_steps_after_a_silence() -> None:
    """Ten thousand steps of a busy time count no more than their age permits."""
    costs, decode = fitted(), StepWork(1, 0.0)
    for number in range(10_000):
        costs.observe(decode, true_s(decode, factor=3.0), 0.006 * number)
    assert predicted_s(costs, decode) == pytest.approx(3 * true_s(decode), rel=0.01)
    later_s = 60.0 + 10 * HALF_LIFE_S
    for number in range(4):
        costs.observe(decode, true_s(decode), later_s + 0.003 * number)
    assert predicted_s(costs, decode) < 1.3 * true_s(decode)


@pytest.mark.parametrize("factor", [2.0, 0.5, 3.0])
def test_steps_that_decode_show_that_prompts_take_longer_too(factor: float) -> None:
    """A worker that has only decoded since its machine changed predicts its next prompt."""
    costs, prompt, decode = fitted(), StepWork(0, 300.0), StepWork(4, 0.0)
    for number in range(500):
        costs.observe(decode, true_s(decode), 0.005 * number)
    for number in range(CHANGE_RUN):
        assert predicted_s(costs, decode) == pytest.approx(true_s(decode), rel=0.1)
        costs.observe(decode, true_s(decode, factor=factor), 2.5 + 0.01 * number)
    assert predicted_s(costs, decode) == pytest.approx(true_s(decode, factor=factor), rel=0.05)
    assert predicted_s(costs, prompt) == pytest.approx(true_s(prompt, factor=factor), rel=0.1)


@pytest.mark.parametrize("factor", [2.0, 0.5, 5.0])
def test_a_sudden_change_is_learned_in_a_few_prompts_among_many_steps_that_decode(factor: float) -> None:
    """Each of sixteen workers gets a dozen of two hundred requests, and decodes two hundred tokens of each of them."""
    costs, prompt, decode = fitted(), StepWork(3, 300.0), StepWork(4, 0.0)
    now_s = 0.0
    for number in range(24):
        times = factor if number >= 12 else 1.0
        for work in (prompt, *[decode] * 200):
            now_s += true_s(work, factor=times)
            costs.observe(work, true_s(work, factor=times), now_s)
    assert predicted_s(costs, prompt) == pytest.approx(true_s(prompt, factor=factor), rel=0.1)
    assert predicted_s(costs, decode) == pytest.approx(true_s(decode, factor=factor), rel=0.1)


def test_prompts_that_alone_take_longer_are_learned_beside_steps_that_decode() -> None:
    costs, prompt, decode = fitted(), StepWork(3, 300.0), StepWork(4, 0.0)
    now_s = 0.0
    for _ in range(60):
        for work in (prompt, *[decode] * 20):
            seconds = (2.0 if work is prompt else 1.0) * true_s(work)
            now_s += seconds
            costs.observe(work, seconds, now_s)
    assert predicted_s(costs, prompt) == pytest.approx(2.0 * true_s(prompt), rel=0.1)
    assert predicted_s(costs, decode) == pytest.approx(true_s(decode), rel=0.1)


@pytest.mark.parametrize("dearer", [StepWork(8, 0.0), StepWork(8, 1000.0)])
def test_runs_of_both_kinds_do_not_throw_the_costs_to_and_fro(dearer: StepWork) -> None:
    """One kind of step becomes dearer alone, and steps of each kind come in runs that are long enough to show a
    change: each run moves all costs, yet the costs of both kinds end where they belong."""
    costs, now_s = fitted(), 0.0
    for number in range(60):
        work = StepWork(8, 1000.0 * (number % 2))
        for _ in range(10):
            seconds = (2.0 if work == dearer else 1.0) * true_s(work)
            now_s += seconds
            costs.observe(work, seconds, now_s)
    for work in (StepWork(8, 0.0), StepWork(8, 1000.0)):
        assert predicted_s(costs, work) == pytest.approx((2.0 if work == dearer else 1.0) * true_s(work), rel=0.15)


@pytest.mark.parametrize("work", [StepWork(2, 0.0), StepWork(0, 300.0)])
def test_a_pause_in_one_step_moves_little(work: StepWork) -> None:
    costs = fitted()
    for number in range(100):
        costs.observe(work, true_s(work), 0.01 * number)
    costs.observe(work, 20.0, 1.0)
    assert predicted_s(costs, work) < 1.06 * true_s(work)


@pytest.mark.parametrize("work", [StepWork(2, 0.0), StepWork(0, 300.0)])
def test_a_pause_moves_an_estimate_by_a_tenth_at_most(work: StepWork) -> None:
    """After a silence a step counts for more than after many steps."""
    costs = fitted()
    for number in range(100):
        costs.observe(work, true_s(work), 0.01 * number)
    costs.observe(work, 20.0, 100.0)
    assert predicted_s(costs, work) < 1.1 * true_s(work)


def test_pauses_in_a_row_are_no_change_while_they_are_few() -> None:
    costs, decode = fitted(), StepWork(4, 0.0)
    for number in range(100):
        costs.observe(decode, true_s(decode), 0.005 * number)
    for number in range(CHANGE_RUN - 1):
        costs.observe(decode, true_s(decode, factor=10.0), 0.5 + 0.05 * number)
    assert predicted_s(costs, decode) < 1.1 * true_s(decode)


def test_a_small_change_takes_as_many_steps_as_are_remembered() -> None:
    costs, decode = fitted(), StepWork(1, 0.0)
    for number in range(1000):
        costs.observe(decode, true_s(decode, factor=1.3), 0.006 * number)
    for number in range(4):
        costs.observe(decode, true_s(decode), 6.0 + 0.003 * number)
    assert predicted_s(costs, decode) > 1.25 * true_s(decode)
    for number in range(int(3 * MAX_WEIGHT)):
        costs.observe(decode, true_s(decode), 6.1 + 0.003 * number)
    assert predicted_s(costs, decode) == pytest.approx(true_s(decode), rel=0.02)
