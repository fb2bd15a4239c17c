"""Checks for random costs and steps that a worker learns a sudden change of its speed from a few steps of any kind, and
that a single pause moves no prediction by much."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fabric.contracts import CHANGE_RUN
from llm_workers.scheduling import StepCosts, StepWork

Costs = tuple[float, float, float]
costs_of_machines = st.tuples(st.floats(1e-4, 0.1), st.floats(1e-6, 1e-3), st.floats(1e-7, 1e-3))
decodes = st.builds(StepWork, st.integers(1, 256), st.just(0.0))
prompts = st.builds(StepWork, st.integers(0, 256), st.floats(1.0, 20_000.0))
works = st.one_of(decodes, prompts)
factors = st.one_of(st.floats(1.8, 4.0), st.floats(0.25, 0.55))
KINDS = [StepWork(0, 16.0), StepWork(0, 512.0), StepWork(1, 0.0), StepWork(32, 0.0)]


def true_s(costs: Costs, work: StepWork) -> float:
    return sum(cost * amount for cost, amount in zip(costs, work.amounts, strict=True))


def experienced(costs: Costs) -> StepCosts:
    """Returns what a worker knows of its costs after many steps of both kinds, the last of which ended at 1 s."""
    learned = StepCosts()
    learned.fit([(work, true_s(costs, work)) for work in KINDS])
    for number in range(100):
        learned.observe(KINDS[number % 4], true_s(costs, KINDS[number % 4]), 0.01 * (number + 1))
    return learned


@given(costs_of_machines, factors, st.lists(works, min_size=CHANGE_RUN, max_size=CHANGE_RUN), works)
def test_a_few_steps_of_any_kind_show_what_all_kinds_take_after_a_change(
    costs: Costs, factor: float, seen: list[StepWork], asked: StepWork
) -> None:
    learned = experienced(costs)
    for number, work in enumerate(seen):
        learned.observe(work, factor * true_s(costs, work), 1.0 + 0.01 * number)
    ratio = learned.seconds(asked) / (factor * true_s(costs, asked))
    assert 0.8 <= ratio <= 1.25, ratio


@given(costs_of_machines, works, st.floats(1e-3, 1e3), st.floats(0.0, 1e4), works)
def test_no_single_step_moves_a_prediction_by_much(
    costs: Costs, work: StepWork, factor: float, silence_s: float, asked: StepWork
) -> None:
    learned = experienced(costs)
    before_s = learned.seconds(asked)
    learned.observe(work, factor * true_s(costs, work), 1.0 + silence_s)
    assert 1.0 / 1.15 <= learned.seconds(asked) / before_s <= 1.15


@given(costs_of_machines, works, st.floats(1e-3, 1e3), st.floats(0.0, 1e4))
def test_a_step_moves_its_own_prediction_by_a_tenth_at_most(
    costs: Costs, work: StepWork, factor: float, silence_s: float
) -> None:
    learned = experienced(costs)
    before_s = learned.seconds(work)
    learned.observe(work, factor * true_s(costs, work), 1.0 + silence_s)
    assert 1.0 / 1.1 <= learned.seconds(work) / before_s <= 1.1
