"""Checks fusing together with the measured costs of forward passes: if the batcher stops fusing, it can still find out
later that fusing pays.

The tests run on a clock of plain numbers: the real batcher drains a queue, and each forward pass takes as long as the
test says.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_pool.planning import ForwardCosts, QueuedUnit, choose_batch
from encoder_pool.planning.batcher import CostEstimate, is_alike
from fabric.contracts import CallTurn, MmHash, UnitKey

COST = 1024
"""This is the number of patches of a picture of 448 x 448, and of every tile of a model with fixed tiles."""
MAX_BATCH_COST = 16 * COST
NUM_WAITING = 64
WORN = [0, 1, 6, 37, 480]
"""Counts the pictures of one size that are encoded alone before any picture waits."""

ForwardSeconds = Callable[[int], float]
"""Maps the number of pictures in a forward pass to the seconds that it takes."""


def with_overhead(num_pictures: int) -> float:
    """Returns seconds that follow a measurement: 307 ms for 64 pictures alone, 67 ms for 64 in four forward passes."""
    return 0.0038 + 0.001 * num_pictures


def linear(num_pictures: int) -> float:
    return 0.01 * num_pictures


def crowded(num_pictures: int) -> float:
    """Returns the seconds of a device that one picture fills, and that is slower with more."""
    return 0.01 * num_pictures**1.2


def wear(costs: ForwardCosts, num_forwards: int, forward_s: ForwardSeconds, size: int = 1) -> None:
    for _ in range(num_forwards):
        costs.observe("image", size * COST, forward_s(size))


def calibrate(costs: ForwardCosts, forward_s: ForwardSeconds) -> None:
    """Observes what calibration leaves: two sizes, twice each."""
    for size in (1, 1, 2, 2):
        costs.observe("image", size * COST, forward_s(size))


WAITING = [
    QueuedUnit(
        CallTurn(number, (0.0, f"{number:04}"), 0.0).rank(1.0, 4.0, 0),
        UnitKey(MmHash(f"{number}"), 0),
        "image",
        COST,
        4,
    )
    for number in range(NUM_WAITING)
]
"""Holds pictures of different requests, in order of rank."""


def drain(costs: ForwardCosts, forward_s: ForwardSeconds) -> list[int]:
    """Drains the waiting pictures and returns how many went into each forward pass."""
    queue, sizes = WAITING, []
    while queue:
        batch = choose_batch(queue, MAX_BATCH_COST, costs.estimate)
        costs.observe("image", sum(unit.cost for unit in batch), forward_s(len(batch)))
        sizes.append(len(batch))
        queue = queue[len(batch) :]
    return sizes


@pytest.mark.parametrize(("cost", "other"), [(0, 0.0), (COST, 0.0), (0, inf), (COST, inf)])
def test_no_size_is_like_none_or_an_infinite_one(cost: int, other: float) -> None:
    assert not is_alike(cost, other)


@pytest.mark.parametrize(("cost", "is_like"), [(895, False), (922, True), (1024, True), (1126, True), (1152, False)])
def test_sizes_are_alike_within_a_tenth(cost: int, is_like: bool) -> None:
    assert is_alike(cost, 1024.0) == is_like


@pytest.mark.parametrize("is_calibrated", [True, False])
@pytest.mark.parametrize("num_worn", WORN)
def test_equal_pictures_before_do_not_switch_fusing_off(num_worn: int, is_calibrated: bool) -> None:
    costs = ForwardCosts()
    if is_calibrated:
        calibrate(costs, with_overhead)
    wear(costs, num_worn, with_overhead)
    sizes = drain(costs, with_overhead)
    assert sum(sizes) == NUM_WAITING
    assert NUM_WAITING // 16 <= len(sizes) <= 8, f"forwards of {sizes}"


@pytest.mark.parametrize("num_worn", WORN)
def test_fusing_stays_on_for_as_long_as_it_pays(num_worn: int) -> None:
    """Alternates single pictures with a queue of waiting ones, while each forward pass corrects the costs."""
    costs = ForwardCosts()
    wear(costs, num_worn, with_overhead)
    for number in range(50):
        sizes = drain(costs, with_overhead)
        assert len(sizes) <= 8, f"round {number}: forwards of {sizes}"
        wear(costs, number * 3 % 100, with_overhead)


@settings(deadline=None, max_examples=30)
@given(
    share=st.floats(0.05, 20.0),
    tokens_s=st.floats(1e-4, 1.0),
    before=st.sampled_from([linear, crowded]),
    num_before=st.integers(0, 300),
    gap_s=st.sampled_from([None, 0.01, 1.0, 100.0]),
)
def test_where_fusing_pays_it_is_found_out_within_a_bounded_number_of_forwards(
    share: float, tokens_s: float, before: ForwardSeconds, num_before: int, gap_s: float | None
) -> None:
    """Holds for any earlier measurements, which come from a machine with another curve, and for any gaps between
    forward passes. With a small overhead, fewer pictures than fit share a pass (`is_fusing_worthwhile`)."""
    best = len(choose_batch(WAITING, MAX_BATCH_COST, lambda _: CostEstimate(tokens_s / COST, share * tokens_s)))
    costs, now_s = ForwardCosts(), 0.0
    wear(costs, num_before, before)
    sizes: list[int] = []
    for _ in range(400):
        now_s += gap_s or 0.0
        batch = choose_batch(WAITING, MAX_BATCH_COST, costs.estimate)
        seconds = tokens_s * (share + len(batch))
        costs.observe("image", len(batch) * COST, seconds, None if gap_s is None else now_s)
        sizes.append(len(batch))
    late = sizes[350:]
    assert sum(late) / len(late) > 0.75 * best, f"forwards of {late} where {best} pay"


@settings(deadline=None, max_examples=20)
@given(
    forward_s=st.sampled_from([linear, crowded]),
    num_before=st.integers(0, 300),
    is_believed=st.booleans(),
    gap_s=st.sampled_from([None, 0.01, 1.0, 10.0, 100.0]),
)
def test_where_fusing_does_not_pay_a_bounded_share_is_lost(
    forward_s: ForwardSeconds, num_before: int, is_believed: bool, gap_s: float | None
) -> None:
    """Trying another size costs a forward pass of two pictures now and then; `is_believed` says that fusing paid
    before."""
    costs, now_s = ForwardCosts(), 0.0
    if is_believed:
        calibrate(costs, with_overhead)
    wear(costs, num_before, forward_s)
    sizes: list[int] = []
    for _ in range(400):
        now_s += gap_s or 0.0
        batch = choose_batch(WAITING, MAX_BATCH_COST, costs.estimate)
        costs.observe("image", len(batch) * COST, forward_s(len(batch)), None if gap_s is None else now_s)
        sizes.append(len(batch))
    late = sizes[100:]
    assert sum(size > 1 for size in late) <= len(late) / 25, f"forwards of {late}"
    assert max(late) <= 2


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000), num_worn=st.sampled_from(WORN))
def test_noise_of_the_measurement_does_not_switch_fusing_off(seed: int, num_worn: int) -> None:
    """Times scatter by a tenth and the overhead is worth four pictures: a long queue still goes in large forward
    passes."""
    noise = random.Random(seed)

    def forward_s(num_pictures: int) -> float:
        return with_overhead(num_pictures) * noise.uniform(0.9, 1.1)

    costs = ForwardCosts()
    wear(costs, num_worn, forward_s)
    num_forwards = sum(len(drain(costs, forward_s)) for _ in range(20))
    assert num_forwards <= 20 * 8


def test_a_device_that_slows_down_keeps_the_shape_of_its_line() -> None:
    """The encoder sees one size alone if tiles are fixed; a busy machine slows down all of a forward pass, not only the
    work per picture."""
    costs = ForwardCosts()
    calibrate(costs, with_overhead)
    wear(costs, 100, with_overhead)
    wear(costs, 480, lambda size: 3 * with_overhead(size))
    estimate = costs.estimate("image")
    assert estimate.overhead_s == pytest.approx(3 * 0.0038)
    assert estimate.seconds_per_cost == pytest.approx(3 * 0.001 / COST)


def test_a_long_queue_of_equal_batches_tries_a_smaller_one() -> None:
    """Covers the opposite case: forward passes of 16 alone never show that fusing no longer pays."""
    costs = ForwardCosts()
    calibrate(costs, with_overhead)
    sizes: list[int] = []
    for _ in range(200):
        batch = choose_batch(WAITING, MAX_BATCH_COST, costs.estimate)
        costs.observe("image", len(batch) * COST, with_overhead(len(batch)))
        sizes.append(len(batch))
    assert set(sizes) == {16, 8}
    assert 1 <= sizes.count(8) <= 200 / 25
