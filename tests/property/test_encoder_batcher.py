"""Order and batches: nobody starves, no batch is too large, nothing that fits is left out. On a clock of numbers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_pool.planning.batcher import QueuedUnit, choose_batch, rank, split_cost
from fabric.ids import MmHash, UnitKey

SECONDS_PER_COST = 0.01
PATIENCE = 4.0

units = st.lists(
    st.builds(
        lambda received_s, remaining, number, unit, modality, cost: QueuedUnit(
            rank(received_s, remaining, SECONDS_PER_COST, PATIENCE, (received_s, f"req-{number}"), 0),
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
        st.integers(0, 60),
    ),
    max_size=20,
    unique_by=lambda unit: unit.key,
)


@settings(deadline=None, max_examples=200)
@given(units, st.integers(1, 100))
def test_a_batch_is_led_by_the_first_and_filled_within_its_cost(queued: list[QueuedUnit], max_cost: int) -> None:
    batch = choose_batch(queued, max_cost)
    assert bool(batch) == bool(queued)
    if not batch:
        return
    assert batch[0].rank == min(unit.rank for unit in queued)
    assert {unit.modality for unit in batch} == {batch[0].modality}
    cost = sum(unit.cost for unit in batch)
    assert cost <= max_cost or len(batch) == 1 or cost == batch[0].cost
    assert len({unit.key for unit in batch}) == len(batch)
    for left in set(queued) - set(batch):
        assert left.modality != batch[0].modality or cost + left.cost > max_cost


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 10_000), st.lists(st.integers(1, 500), min_size=1, max_size=12))
def test_a_cost_is_split_without_loss(cost: int, tokens: list[int]) -> None:
    parts = split_cost(cost, tuple(tokens))
    assert sum(parts) == cost
    assert len(parts) == len(tokens)
    exact = [cost * one / sum(tokens) for one in tokens]
    assert all(abs(part - wanted) < 1 for part, wanted in zip(parts, exact, strict=True))


requests = st.lists(
    st.tuples(st.integers(0, 300), st.lists(st.integers(1, 40), min_size=1, max_size=8)), min_size=1, max_size=25
)


@settings(deadline=None, max_examples=100)
@given(requests, st.integers(1, 80))
def test_nobody_is_overtaken_by_who_came_long_after(arrivals: list[tuple[int, list[int]]], max_cost: int) -> None:
    """One encoder that is never idle while something waits. A request may lose the lead of a batch only to others
    that came within `PATIENCE` times its own encoding time: so its wait is bounded by what can come in that time."""
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    received_s = [at / 100 for at, _ in arrivals]
    left = [dict(enumerate(costs)) for _, costs in arrivals]
    now_s, num_done = 0.0, 0
    while any(left):
        present = [n for n, costs in enumerate(left) if costs and received_s[n] <= now_s]
        if not present:
            now_s = min(received_s[n] for n, costs in enumerate(left) if costs)
            continue
        batch = choose_batch([unit for n in present for unit in _units(n, received_s[n], left[n])], max_cost)
        leader = int(batch[0].key.mm_hash)
        for other in present:
            own_s = sum(arrivals[other][1]) * SECONDS_PER_COST
            assert received_s[leader] <= received_s[other] + PATIENCE * own_s + 1e-9
        for unit in batch:
            del left[int(unit.key.mm_hash)][unit.key.unit]
        now_s += sum(unit.cost for unit in batch) * SECONDS_PER_COST
        num_done += len(batch)
    assert num_done == sum(len(costs) for _, costs in arrivals)


def _units(number: int, received_s: float, left: dict[int, int]) -> list[QueuedUnit]:
    place = rank(received_s, sum(left.values()), SECONDS_PER_COST, PATIENCE, (received_s, f"{number:04}"), 0)
    return [QueuedUnit(place, UnitKey(MmHash(str(number)), unit), "image", cost, 4) for unit, cost in left.items()]
