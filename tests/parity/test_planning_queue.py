"""Compares the predicted with the measured queue of a real engine at several loads, on a clock that only its steps
advance."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

import pytest
from queue_world import QueueWorld, Served

PROMPTS = (16, 48, 96, 200)
BOUND = 2.0
"""Limits the ratio between prediction and measurement, on average over a load."""


@pytest.fixture(scope="module")
def load_to_served() -> dict[str, list[Served]]:
    """Runs the same engine under one load after the other, the lightest first."""
    world, rng = QueueWorld(max_step_tokens=64, max_sequences=16), random.Random(3)
    step_s = world.reporter.costs.overhead_s
    apart = {"alone": 100.0, "some at once": 8.0, "many at once": 3.0, "a burst": 0.05}
    return {
        name: world.serve([(index * steps * step_s, rng.choice(PROMPTS), 4) for index in range(16)])
        for name, steps in apart.items()
    }


def mean(served: Sequence[Served], of: Callable[[Served], float]) -> float:
    return statistics.fmean(map(of, served))


def ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [float(order.index(index)) for index in range(len(values))]


def queue_predicted(one: Served) -> float:
    return one.predicted.queue_s


def queue_measured(one: Served) -> float:
    return one.measured.queue_s


def test_alone_nobody_waits_and_nobody_is_predicted_to(load_to_served: dict[str, list[Served]]) -> None:
    alone = load_to_served["alone"]
    assert all(one.predicted.queue_s == 0.0 for one in alone)
    assert mean(alone, queue_measured) < 0.2 * mean(alone, lambda one: one.measured.first_token_s)


def test_loads_are_predicted_in_their_order(load_to_served: dict[str, list[Served]]) -> None:
    several = [load_to_served[name] for name in ("alone", "some at once", "a burst")]
    assert ranks([mean(served, queue_predicted) for served in several]) == [0.0, 1.0, 2.0]
    assert ranks([mean(served, queue_measured) for served in several]) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("load", ["many at once", "a burst"])
def test_the_queue_is_what_was_predicted(load_to_served: dict[str, list[Served]], load: str) -> None:
    served = load_to_served[load]
    ratio = mean(served, queue_predicted) / mean(served, queue_measured)
    assert 1 / BOUND < ratio < BOUND
    predicted, measured = (ranks([of(one) for one in served]) for of in (queue_predicted, queue_measured))
    assert statistics.correlation(predicted, measured) > 0.5


@pytest.mark.parametrize("load", ["alone", "some at once", "many at once", "a burst"])
def test_the_first_token_is_when_it_was_predicted(load_to_served: dict[str, list[Served]], load: str) -> None:
    served = load_to_served[load]
    at_worker_s = mean(served, lambda one: one.predicted.ttft_s - one.predicted.delivery_s)
    ratio = at_worker_s / mean(served, lambda one: one.measured.first_token_s)
    assert 1 / BOUND < ratio < BOUND


def test_when_all_places_are_taken_the_wait_for_one_is_predicted() -> None:
    world = QueueWorld(max_step_tokens=64, max_sequences=4)
    step_s = world.reporter.costs.overhead_s
    world.serve([(index * 2 * step_s, 16, 12) for index in range(6)])
    served = world.serve([(index * 2 * step_s, 16, 12) for index in range(20)])
    early, late = served[:4], served[8:]
    assert mean(late, queue_predicted) > 3 * mean(early, queue_predicted)
    assert mean(late, queue_measured) > 3 * mean(early, queue_measured)
    # The planner knows how long sequences stay only from those that have ended, and the stay is longer the more
    # sequences there are.
    ratio = mean(late, queue_predicted) / mean(late, queue_measured)
    assert 1 / (2 * BOUND) < ratio < 2 * BOUND
