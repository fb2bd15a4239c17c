"""Which units go into the next forward, and in which order: shortest remaining request first, with aging.

A request's rank is `received + patience * (its remaining encoding time)`, so the shorter goes first, but a request
is overtaken only by ones received within `patience` times its own encoding time: nobody starves, without any timer.
Units are ranked, not requests, so a long video gives way to an image between two of its units. An idle encoder
starts at once (notes: 3.8 times the images per second at 8 per forward come from what queued meanwhile).
Knows nothing of clocks, memory or models.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fabric.ids import UnitKey


class Rank(NamedTuple):
    """Smaller goes first. Ties go by the age order of requests, then by the item's place in its request."""

    virtual_s: float
    age: tuple[float, str]
    item_index: int


class QueuedUnit(NamedTuple):
    """A unit that is decoded and waits for its forward. `cost` in patches."""

    rank: Rank
    key: UnitKey
    modality: str
    cost: int
    num_tokens: int


def rank(
    received_s: float,
    remaining_cost: int,
    seconds_per_cost: float,
    patience: float,
    age: tuple[float, str],
    item_index: int,
) -> Rank:
    """Rank of one item of a request that has `remaining_cost` patches left on this encoder."""
    return Rank(received_s + patience * remaining_cost * seconds_per_cost, age, item_index)


def choose_batch(units: Iterable[QueuedUnit], max_cost: int) -> list[QueuedUnit]:
    """The next forward: the first unit by rank, then what fits beside it within `max_cost` patches.

    All of one modality (a forward is packed from one encoder's inputs). A unit too large for the rest of the batch is
    passed over; it is not starved, for the first unit is taken whatever its cost.
    """
    ordered = sorted(units, key=lambda unit: (unit.rank, unit.key.unit, unit.key.mm_hash))
    batch = ordered[:1]
    cost = sum(unit.cost for unit in batch)
    for unit in ordered[1:]:
        if unit.modality == batch[0].modality and cost + unit.cost <= max_cost:
            batch.append(unit)
            cost += unit.cost
    return batch


def split_cost(cost: int, unit_tokens: tuple[int, ...]) -> list[int]:
    """An item's patches over its units, in proportion to their rows; whole numbers that sum to `cost`."""
    num_tokens = sum(unit_tokens)
    ends, done = [], 0
    for tokens in unit_tokens:
        done += tokens
        ends.append(cost * done // num_tokens)
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
