"""Chooses which units go into the next forward pass: the first unit in the queue, and the units that are worth adding
to it.

A unit is the part of an item that one forward pass encodes as a whole. An idle encoder starts at once, and the units
that arrive during a pass share the next one. The OmniConnector article (docs/references.md) reports 3.8 times the
images per second at 8 images per pass from this alone. Units of different requests are fused into one pass wherever a
pass has a fixed overhead. Where the measured overhead is zero (one picture keeps a CPU fully busy), the first unit does
not wait for the others. Units of one request are fused only if that saves more time than it adds to the first unit,
because the language model can process an early feature while the encoder computes the next one. When all recent passes
had one size, they say nothing about the overhead of a pass, so the next batch that can have another size gets one.

This module knows nothing of clocks, memory or models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from encoder_pool.planning.cost import CostEstimate, is_alike
from encoder_pool.planning.turns import Rank
from fabric.ids import MemberId, MmHash, UnitKey


class QueuedUnit(NamedTuple):
    """A `QueuedUnit` is a decoded unit that waits for its forward pass. Its `cost` is counted in patches, or in mel
    frames for a sound."""

    rank: Rank
    key: UnitKey
    modality: str
    cost: int
    num_tokens: int
    place: tuple[float, int] = (0.0, 0)
    """Holds the share of the item's rows that precede this unit, and the item's index. Sorting by it makes the units of
    a video and of its sound track take turns."""
    worker_id: MemberId = MemberId("")
    """Names the worker of the call that has `rank`."""


def place_in_line(unit: QueuedUnit) -> tuple[Rank, tuple[float, int], int, MmHash]:
    """Returns the key by which units are ordered."""
    return unit.rank, unit.place, unit.key.unit, unit.key.mm_hash


class QueuedSound(NamedTuple):
    """A `QueuedSound` is a decoded sound from which the device has yet to make units. Its `cost` is counted in mel
    frames."""

    rank: Rank
    mm_hash: MmHash
    cost: int


LOOK_AHEAD = 64
"""Limits how many units may be passed over while a batch is chosen; the search then ends. This bounds the time of one
choice."""
MIN_GAIN = 0.02
"""Units of different requests are fused only if a separate forward pass has an overhead of at least this share of the
unit's own work. A smaller overhead is noise of the measurement."""


def is_fusing_worthwhile(estimate: CostEstimate, cost: int, *, is_same_request: bool) -> bool:
    """Returns whether a unit of `cost` should join a forward pass with a unit that is ahead of it.

    In a separate pass the unit adds `overhead_s` for itself and for every unit behind it. In the same pass it delays
    the earlier unit's feature by the time that its own patches take. That delay counts fully if both units are of one
    request, because the request gains from receiving one feature before the other. `cost` is then the sum over all
    units of that request that join, because the first unit waits for each of them, and so may a picture that arrives
    meanwhile. Returns True while nothing is measured.
    """
    share = 1.0 if is_same_request else MIN_GAIN
    return estimate.overhead_s >= share * estimate.seconds_per_cost * cost


def choose_batch(
    units: Iterable[QueuedUnit], max_cost: int, estimate: Callable[[str], CostEstimate]
) -> list[QueuedUnit]:
    """Returns the batch of the next forward pass: the first of `units`, which are in order, and the later ones that fit
    with it into `max_cost`. `estimate` returns the cost estimate of a modality.

    All units of a batch have one modality, because a pass is packed from the inputs of one encoder. A unit that is too
    large for the rest of the batch is passed over. It does not starve, because the first unit is taken even if it costs
    more than `max_cost`. Where units of one video share a pass, that pass takes less than twice as long as a pass over
    one of them.
    """
    line = iter(units)
    first = next(line, None)
    if first is None:
        return []
    batch, passed_over = [first], list[QueuedUnit]()
    line_of_forward = estimate(first.modality)
    requests = {first.rank.age}
    # `along_cost` sums the units that follow another unit of their own request in this batch.
    cost, along_cost = first.cost, 0
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
    """Returns a batch of a different size: half of a batch of several units, or a single unit with the next unit that
    fits with it. Returns the batch unchanged if neither is possible."""
    if len(batch) > 1:
        return batch[: len(batch) // 2]
    (first,) = batch
    for unit in passed_over:
        if unit.modality == first.modality and first.cost + unit.cost <= max_cost:
            return [first, unit]
    return batch


def choose_sounds(sounds: Iterable[QueuedSound], max_cost: int) -> list[QueuedSound]:
    """Returns the sounds whose units are made together: the first in order, and the later ones that fit with it into
    `max_cost`. Adding sounds is always worthwhile, because no unit of a sound can be encoded before its spectrogram
    exists, and a batch of sounds takes hardly longer than one sound."""
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
    """Splits an item's patches over its units in proportion to their rows. Returns whole numbers that sum to `cost`."""
    num_tokens = sum(unit_tokens)
    ends, done = [], 0
    for tokens in unit_tokens:
        done += tokens
        ends.append(cost * done // num_tokens)
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
