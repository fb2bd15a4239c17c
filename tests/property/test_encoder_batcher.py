"""Checks order and batches on a clock of plain numbers: no request starves, no batch is too large, and nothing that
fits is left out."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_pool.planning import CostEstimate, QueuedUnit, choose_batch, split_cost
from encoder_pool.planning.batcher import place_in_line
from fabric.contracts import CallTurn, MmHash, UnitKey

SECONDS_PER_COST = 0.01
PATIENCE = 4.0

units = st.lists(
    st.builds(
        lambda received_s, remaining, number, unit, modality, cost: QueuedUnit(
            CallTurn(number, (received_s, f"req-{number}"), received_s).rank(remaining * SECONDS_PER_COST, PATIENCE, 0),
            UnitKey(MmHash(f"item-{number}"), unit),
            modality,
            cost,
            4,
        ),
        st.integers(0, 5).map(float),
        st.integers(1, 500),
        st.integers(0, 20),
        st.integers(0, 3),
        st.sampled_from(["image", "audio"]),
        st.integers(1, 60),
    ),
    max_size=20,
    unique_by=lambda unit: unit.key,
)
estimates = st.builds(CostEstimate, st.just(SECONDS_PER_COST), st.floats(0, 1), st.just(0.0))


@settings(deadline=None, max_examples=200)
@given(units, st.integers(1, 100), estimates)
def test_a_batch_is_led_by_the_first_and_filled_within_its_cost(
    queued: list[QueuedUnit], max_cost: int, estimate: CostEstimate
) -> None:
    batch = choose_batch(sorted(queued, key=place_in_line), max_cost, lambda _: estimate)
    assert bool(batch) == bool(queued)
    if not batch:
        return
    assert batch[0].rank == min(unit.rank for unit in queued)
    assert {unit.modality for unit in batch} == {batch[0].modality}
    cost = sum(unit.cost for unit in batch)
    assert cost <= max_cost or len(batch) == 1 or cost == batch[0].cost
    assert len({unit.key for unit in batch}) == len(batch)
    assert batch == chosen(sorted(queued, key=place_in_line), max_cost, estimate)


def chosen(line: list[QueuedUnit], max_cost: int, estimate: CostEstimate) -> list[QueuedUnit]:
    """Returns the batch by the two rules themselves: a unit of another request joins if the overhead that everything
    behind it is spared, twice over, makes up for the delay of everything in the batch, and a unit of the same request
    if the overhead makes up for the delay by all of that request's units that joined."""
    batch, along = line[:1], 0
    for place, unit in enumerate(line[1:], 1):
        is_same = any(unit.rank.age == one.rank.age for one in batch)
        own_s, joined_s = (estimate.seconds_per_cost * cost for cost in (unit.cost, along + unit.cost))
        spared_s = 2.0 * estimate.overhead_s * (len(line) - place)
        gains = estimate.overhead_s >= own_s or spared_s >= own_s * len(batch)
        gains = estimate.overhead_s >= joined_s if is_same else gains
        if gains and unit.modality == line[0].modality and sum(one.cost for one in batch) + unit.cost <= max_cost:
            along += is_same * unit.cost
            batch.append(unit)
    return batch


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 20), st.integers(1, 500))
def test_where_a_forward_costs_nothing_besides_the_first_in_line_waits_for_nobody(num: int, cost: int) -> None:
    queued = [
        QueuedUnit(
            CallTurn(n, (0.0, f"req-{n:02}"), 0.0).rank(1.0, PATIENCE, 0), UnitKey(MmHash(f"{n}"), 0), "image", cost, 4
        )
        for n in range(num)
    ]
    free = CostEstimate(SECONDS_PER_COST, 0.0)
    cheap = CostEstimate(SECONDS_PER_COST, 0.1001 * SECONDS_PER_COST * cost)
    dear = CostEstimate(SECONDS_PER_COST, 1.0001 * SECONDS_PER_COST * cost)
    assert len(choose_batch(queued, num * cost, lambda _: free)) == 1
    assert (len(choose_batch(queued, num * cost, lambda _: cheap)) > 1) == (num > 5), "only if enough others gain"
    assert len(choose_batch(queued, num * cost, lambda _: dear)) == num


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 500), min_size=2, max_size=12), estimates)
def test_units_of_one_request_are_fused_where_that_gains_more_than_it_delays(
    costs: list[int], estimate: CostEstimate
) -> None:
    """Compares the choice with the two schedules themselves: one forward pass for the pair, or two. If the units are
    fused, the second unit lands earlier by one overhead and the first lands later by the second unit's own work."""
    first, second = costs[:2]
    work_s = estimate.seconds_per_cost
    apart = (estimate.overhead_s + work_s * first, 2 * estimate.overhead_s + work_s * (first + second))
    fused_s = estimate.overhead_s + work_s * (first + second)
    gain_s, loss_s = apart[1] - fused_s, fused_s - apart[0]
    rank = CallTurn(1, (0.0, "req"), 0.0).rank(1.0, PATIENCE, 0)
    queued = [QueuedUnit(rank, UnitKey(MmHash("film"), n), "video", cost, 4) for n, cost in enumerate((first, second))]
    batch = choose_batch(queued, 1000, lambda _: estimate)
    if abs(gain_s - loss_s) > 1e-9:
        assert len(batch) == (2 if gain_s > loss_s else 1)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 10_000), st.lists(st.integers(1, 500), min_size=1, max_size=12))
def test_a_cost_is_split_without_loss(cost: int, tokens: list[int]) -> None:
    parts = split_cost(cost, tuple(tokens))
    assert sum(parts) == cost
    assert len(parts) == len(tokens)
    exact = [cost * one / sum(tokens) for one in tokens]
    assert all(abs(part - wanted) < 1 for part, wanted in zip(parts, exact, strict=True))
