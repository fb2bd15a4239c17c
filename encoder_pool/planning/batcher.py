"""Which units go into the next forward: the first in line, and what is worth taking along.

An idle encoder starts at once, and what queues meanwhile shares the next forward (notes: 3.8 times the images per
second at 8 per forward come from that alone). Units of different requests are fused wherever a forward has a price of
its own: where it was measured to have none (a CPU is full with one picture), the first in line does not wait for the
others. Units of one request are fused only if that saves more than it delays: a feature that is there earlier is one
that the language model computes while the next is made. When all recent forwards had one size, which says nothing about
the price of a forward, the next one that has a choice is of another size. Knows nothing of clocks, memory or models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from encoder_pool.planning.cost import CostEstimate, is_alike
from encoder_pool.planning.turns import Rank
from fabric.ids import MemberId, MmHash, UnitKey


class QueuedUnit(NamedTuple):
    """A unit that is decoded and waits for its forward. `cost` in patches, or mel frames of a sound."""

    rank: Rank
    key: UnitKey
    modality: str
    cost: int
    num_tokens: int
    place: tuple[float, int] = (0.0, 0)
    """Share of its item's rows that come before it, and the item's index: the units of a video and of its sound track
    take turns."""
    worker_id: MemberId = MemberId("")
    """Of the call that the rank is of."""


def place_in_line(unit: QueuedUnit) -> tuple[Rank, tuple[float, int], int, MmHash]:
    """Units are ordered by this."""
    return unit.rank, unit.place, unit.key.unit, unit.key.mm_hash


class QueuedSound(NamedTuple):
    """A sound that is decoded and of which the device is to make units. `cost` in mel frames."""

    rank: Rank
    mm_hash: MmHash
    cost: int


LOOK_AHEAD = 64
"""So many units are passed over for a batch; those behind are not looked at. It bounds what one choice costs."""
MIN_GAIN = 0.02
"""Of a unit's own work that a forward of its own must cost besides; less is noise of the measurement."""


def is_fusing_worthwhile(estimate: CostEstimate, cost: int, *, is_same_request: bool) -> bool:
    """Whether a unit of `cost` should ride in a forward with one that goes before it.

    Alone it would start another forward: `overhead_s` for it and for all that come after. Along, it keeps the earlier
    unit from its worker for as long as its own patches take; that is weighed if both are of one request, which gains
    from one feature before the other. `cost` is then that of all its request's units that come along: the first waits
    for each of them, and so may a picture that comes meanwhile. Nothing measured yet: yes."""
    share = 1.0 if is_same_request else MIN_GAIN
    return estimate.overhead_s >= share * estimate.seconds_per_cost * cost


def choose_batch(
    units: Iterable[QueuedUnit], max_cost: int, estimate: Callable[[str], CostEstimate]
) -> list[QueuedUnit]:
    """The next forward: the first of `units`, which are in line, then what fits beside it within `max_cost`.
    `estimate` of a modality.

    All of one modality (a forward is packed from one encoder's inputs). A unit too large for the rest of the batch is
    passed over; it is not starved, for the first unit is taken whatever its cost. Where the units of a video share a
    forward, it takes less than twice what it would over one of them.
    """
    line = iter(units)
    first = next(line, None)
    if first is None:
        return []
    batch, passed_over = [first], list[QueuedUnit]()
    line_of_forward = estimate(first.modality)
    requests = {first.rank.age}
    cost, along_cost = first.cost, 0  # `along_cost`: of units that another of their request goes before
    while cost < max_cost and len(passed_over) < LOOK_AHEAD and (unit := next(line, None)) is not None:
        is_same_request = unit.rank.age in requests
        weighed = along_cost + unit.cost if is_same_request else unit.cost
        if (
            unit.modality != first.modality
            or cost + unit.cost > max_cost
            or not is_fusing_worthwhile(line_of_forward, weighed, is_same_request=is_same_request)
        ):
            passed_over.append(unit)
            continue
        along_cost = weighed if is_same_request else along_cost
        batch.append(unit)
        requests.add(unit.rank.age)
        cost += unit.cost
    if is_alike(cost, line_of_forward.worn_cost):
        return _other_size(batch, passed_over, max_cost)
    return batch


def _other_size(batch: list[QueuedUnit], passed_over: list[QueuedUnit], max_cost: int) -> list[QueuedUnit]:
    """Half of a batch of several units; one unit with the next that fits beside it. The batch itself if there is no
    choice."""
    if len(batch) > 1:
        return batch[: len(batch) // 2]
    (first,) = batch
    for unit in passed_over:
        if unit.modality == first.modality and first.cost + unit.cost <= max_cost:
            return [first, unit]
    return batch


def choose_sounds(sounds: Iterable[QueuedSound], max_cost: int) -> list[QueuedSound]:
    """Of which sounds units are made together: the first in line, then what fits beside it within `max_cost`. Always
    worthwhile: none of their units can be encoded before, and together they take hardly longer than one."""
    batch: list[QueuedSound] = []
    cost, num_passed_over = 0, 0
    for sound in sounds:
        if not batch or cost + sound.cost <= max_cost:
            batch.append(sound)
            cost += sound.cost
        else:
            num_passed_over += 1
        if cost >= max_cost or num_passed_over == LOOK_AHEAD:
            break
    return batch


def split_cost(cost: int, unit_tokens: tuple[int, ...]) -> list[int]:
    """An item's patches over its units, in proportion to their rows; whole numbers that sum to `cost`."""
    num_tokens = sum(unit_tokens)
    ends, done = [], 0
    for tokens in unit_tokens:
        done += tokens
        ends.append(cost * done // num_tokens)
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
