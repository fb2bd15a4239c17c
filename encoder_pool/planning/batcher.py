"""Chooses which units go into the next forward pass, and predicts from measured passes how long one takes.

`choose_batch` takes the first unit in the queue and the units that are worth adding to it; `choose_sounds` does the
same for sounds whose units the device makes. Whether adding a unit is worthwhile depends on the fixed overhead of a
pass, which `ForwardCosts` fits to the passes measured so far. `InputSizes` estimates how much memory decoded inputs
take, by the same unit of cost (a patch, or a mel frame).

A unit is the part of an item that one forward pass encodes as a whole. An idle encoder starts at once, and the units
that arrive during a pass share the next one. The OmniConnector article (docs/references.md) reports 3.8 times the
images per second at 8 images per pass from this alone. Units of different requests are fused into one pass if all that
wait gain more from one overhead less than the units that are ahead lose by a longer pass. Where the measured overhead
is zero (one picture keeps a CPU fully busy), the first unit does not wait for the others. Units of one request are
fused only if that saves more time than it adds to the first unit, because the language model can process an early
feature while the encoder computes the next one.

The module has no clock, so callers pass the time in. It knows nothing of models, files, budgets or the arena.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from math import exp2, inf
from typing import NamedTuple

from fabric.contracts import (
    CHANGE_RUN,
    COMMON_CHANGE,
    MemberId,
    Memory,
    MmHash,
    Rank,
    SurpriseRun,
    UnitKey,
    corrected,
)

# ------------------------------------------------------------ the choice of a batch

LOOK_AHEAD = 64
"""Limits how many units may be passed over while a batch is chosen; the search then ends. This bounds the time of one
choice."""
NUM_SPARED = 2.0
"""For each waiting unit, this many units are taken to gain from a saved overhead: itself, and one that comes before the
queue is empty. With more, pictures wait longer behind others at low load; with fewer, they wait longer at high load
(`docs/adr/0053-an-encoders-order-is-a-contract.md`)."""


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


def choose_batch(
    units: Iterable[QueuedUnit], max_cost: int, estimate: Callable[[str], CostEstimate]
) -> list[QueuedUnit]:
    """Returns the batch of the next forward pass: the first of `units`, which are in order, and the later ones that fit
    with it into `max_cost`. `estimate` returns the cost estimate of a modality.

    All units of a batch have one modality, because a pass is packed from the inputs of one encoder. A unit that is too
    large for the rest of the batch is passed over. It does not starve, because the first unit is taken even if it costs
    more than `max_cost`. Where units of one video share a pass, that pass takes less than twice as long as a pass over
    one of them. When all recent passes had one size, they say nothing about the overhead of a pass, so the next batch
    that can have another size gets one.
    """
    line = iter(units)
    first = next(line, None)
    if first is None:
        return []
    waiting = deque(islice(line, LOOK_AHEAD))
    batch, passed_over = [first], list[QueuedUnit]()
    line_of_forward = estimate(first.modality)
    requests = {first.rank.age}
    # `along_cost` sums the units that follow another unit of their own request in this batch.
    cost, along_cost = first.cost, 0
    while cost < max_cost and len(passed_over) < LOOK_AHEAD and waiting:
        num_waiting, unit = len(waiting), waiting.popleft()
        waiting.extend(islice(line, 1))
        is_same_request = unit.rank.age in requests
        weighed = along_cost + unit.cost if is_same_request else unit.cost
        if (
            unit.modality != first.modality
            or cost + unit.cost > max_cost
            or not (
                is_own_worthwhile(line_of_forward, weighed)
                if is_same_request
                else is_fusing_worthwhile(line_of_forward, unit.cost, len(batch), num_waiting)
            )
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


def is_own_worthwhile(estimate: CostEstimate, cost: int) -> bool:
    """Returns whether a unit should join a forward pass with an earlier unit of its own request.

    In a separate pass it adds `overhead_s` for itself and for every unit behind it. In the same pass it delays the
    earlier unit's feature by the time that its own patches take, and that delay counts fully, because the request gains
    from receiving one feature before the other. `cost` is the sum over all units of that request that join, because the
    first unit waits for each of them, and so may a picture that arrives meanwhile. Returns True while nothing is
    measured.
    """
    return estimate.overhead_s >= estimate.seconds_per_cost * cost


def is_fusing_worthwhile(estimate: CostEstimate, cost: int, num_ahead: int, num_waiting: int) -> bool:
    """Returns whether a unit of `cost` should join a forward pass with `num_ahead` units of other requests, while
    `num_waiting` units wait that are not in the pass, itself included.

    In the same pass it delays all units in the pass by the time of its own patches. In a separate pass it delays itself
    and every unit behind it by one overhead more, and so it does to units that come while the queue lasts
    (`NUM_SPARED`). A unit whose own patches take no longer than the overhead always joins. Returns True while nothing
    is measured.
    """
    unit_s = estimate.seconds_per_cost * cost
    gained_s = NUM_SPARED * estimate.overhead_s * num_waiting
    return estimate.overhead_s >= unit_s or gained_s >= unit_s * num_ahead


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
    if len(unit_tokens) == 1:
        return [cost]
    num_tokens = sum(unit_tokens)
    ends, done = [], 0
    for tokens in unit_tokens:
        done += tokens
        ends.append(cost * done // num_tokens)
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


# ------------------------------------------------------------ the cost of a forward pass

FORGETTING = 0.97
"""Multiplies the weight of an observation with each later one, so about the last 30 passes count."""
HALF_LIFE_S = 10.0
"""An observation loses half of its weight in this time, because thirty passes of one busy moment do not predict later
ones."""
LEAST_KEPT = 0.05
"""At least this share of the weight stays after any silence. So the first passes after a silence correct an existing
line and do not define a new one from their own size alone."""
LEAST_SPREAD = 0.1
"""No line is fitted while the standard deviation of the sizes is below this share of their mean. One pass of twice the
usual size keeps the spread above the limit for about 36 passes."""
MAX_ALIKE = 32
"""After this many passes of one size the estimate asks for another size."""


class CostEstimate(NamedTuple):
    """A `CostEstimate` is the predicted line for the duration of a forward pass."""

    seconds_per_cost: float
    overhead_s: float
    worn_cost: float = 0.0
    """Holds the size that all recent passes had if a pass of another size should be tried, and 0 otherwise."""


class ForwardCosts:
    """Predicts how long a forward pass takes. It keeps one line for each modality, because a patch and a mel frame do
    not cost the same, and one line over all modalities for callers that do not name one. A run of surprises, in passes
    of any modality, shows that the device has changed: then the lines of all modalities change at once (ADR 69)."""

    def __init__(self) -> None:
        self._modality_to_cost: dict[str, ForwardCost] = {}
        self._mixed = ForwardCost()
        self._run = SurpriseRun()

    @property
    def modalities(self) -> Iterable[str]:
        """Returns the modalities that were observed."""
        return self._modality_to_cost.keys()

    def observe(self, modality: str, cost: int, seconds: float, now_s: float | None = None) -> None:
        """Records one forward pass over units of `modality`, which ended at `now_s`."""
        own = self._modality_to_cost.setdefault(modality, ForwardCost())
        predicted_s = own.known_pass_s(cost)
        if predicted_s > 0.0 and (factor := self._run.change(predicted_s, seconds)):
            own.rescale(factor)
            self._mixed.rescale(factor)
            for other in self._modality_to_cost.values():
                if other is not own:
                    other.rescale(factor ** (COMMON_CHANGE / (1.0 + COMMON_CHANGE)))
        own.observe(cost, seconds, now_s)
        self._mixed.observe(cost, seconds, now_s)

    def estimate(self, modality: str) -> CostEstimate:
        """Returns the line of a modality; both numbers are zero until a pass of that modality was observed."""
        cost = self._modality_to_cost.get(modality)
        return cost.estimate() if cost else CostEstimate(0.0, 0.0)

    def has_spread(self, modality: str) -> bool:
        """Returns whether recent passes of that modality had different sizes."""
        return modality in self._modality_to_cost and self._modality_to_cost[modality].has_spread

    def mixed(self) -> CostEstimate:
        return self._mixed.estimate()

    def work_s(self, modality: str, cost: int) -> float:
        """Returns the seconds that units of that cost add to a forward pass."""
        return self.estimate(modality).seconds_per_cost * cost

    def pass_s(self, modality: str, cost: int) -> float:
        """Returns the seconds of one forward pass over units of that cost."""
        estimate = self.estimate(modality)
        return estimate.overhead_s + estimate.seconds_per_cost * cost

    def passes_s(self, modality: str, cost: int, num_units: int, max_batch_cost: int) -> float:
        """Returns the seconds of the forward passes over `num_units` units of one request that cost `cost` together,
        as `choose_batch` fuses them. A single unit that always joins others counts with a part of a pass."""
        estimate = self.estimate(modality)
        unit_cost = cost / max(num_units, 1)
        if num_units > 1:
            unit_s = estimate.seconds_per_cost * unit_cost
            num_fused = 1.0 + (estimate.overhead_s // unit_s if unit_s else 0.0)
            num_passes = num_units / num_fused
        elif estimate.overhead_s >= estimate.seconds_per_cost * cost:
            num_passes = 0.0
        else:
            num_passes = 1.0
        num_passes = min(max(num_passes, cost / max_batch_cost), num_units)
        return estimate.seconds_per_cost * cost + estimate.overhead_s * num_passes


class ForwardCost:
    """Fits the line of one kind of forward pass: seconds = overhead + slope * patches, with the newest passes weighted
    most. The fit is least squares with exponential forgetting, by the number of passes and by time. Both numbers stay
    non-negative.

    Passes of one size do not separate overhead from slope. Until two sizes differ, the whole time counts as slope, and
    later the last line that was fitted to different sizes keeps its shape until other sizes come
    (`docs/adr/0028-worn-estimates.md`).
    """

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._at_s: float | None = None
        self._shape: CostEstimate | None = None
        """Holds the last line that was fitted to sizes that differ."""
        self._num_alike = 0
        """Counts the passes since the last one whose size differed from the mean of those before it."""

    def observe(self, cost: int, seconds: float, now_s: float | None = None) -> None:
        """Records that one forward pass of `cost` patches took `seconds` and ended at `now_s` (None means that no time
        has passed)."""
        mean_cost = self._x / self._weight if self._weight else 0.0
        self._num_alike = self._num_alike + 1 if is_alike(cost, mean_cost) else 0
        kept = FORGETTING * self._share_kept(now_s)
        self._weight = self._weight * kept + 1.0
        self._x = self._x * kept + cost
        self._y = self._y * kept + seconds
        self._xx = self._xx * kept + cost * cost
        self._xy = self._xy * kept + cost * seconds
        if self.has_spread:
            self._shape = self._fitted()

    @property
    def has_spread(self) -> bool:
        """Returns whether recent sizes differ enough to separate the overhead from the slope."""
        if self._weight == 0.0:
            return False
        mean = self._x / self._weight
        return self._xx / self._weight - mean * mean > (LEAST_SPREAD * mean) ** 2

    def rescale(self, factor: float) -> None:
        """Lets the passes so far count as if they had taken `factor` times as long, and together as much as a run of
        surprises does."""
        kept = min(1.0, CHANGE_RUN / self._weight) if self._weight else 1.0
        self._weight, self._x, self._xx = kept * self._weight, kept * self._x, kept * self._xx
        self._y, self._xy = kept * factor * self._y, kept * factor * self._xy

    def known_pass_s(self, cost: int) -> float:
        """Returns the predicted seconds of a pass, or 0 if passes of about this size are unknown."""
        is_known = self._weight > 0.0 and (self.has_spread or is_alike(cost, self._x / self._weight))
        line = self.estimate()
        return line.overhead_s + line.seconds_per_cost * cost if is_known else 0.0

    def estimate(self) -> CostEstimate:
        """Returns the current line; both numbers are zero until a pass was observed."""
        if self._weight == 0.0 or self._xx == 0.0:
            return CostEstimate(0.0, 0.0)
        if self.has_spread:
            return self._fitted()
        mean_cost = self._x / self._weight
        is_worn = self._shape is None or self._num_alike >= MAX_ALIKE
        return self._scaled()._replace(worn_cost=mean_cost if is_worn else 0.0)

    def _share_kept(self, now_s: float | None) -> float:
        if now_s is None:
            return 1.0
        age_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._at_s = now_s
        return max(LEAST_KEPT, exp2(-age_s / HALF_LIFE_S))

    def _fitted(self) -> CostEstimate:
        """Returns the line through the observations; their sizes must differ."""
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        slope = (self._xy / self._weight - mean_x * mean_y) / variance
        overhead_s = mean_y - slope * mean_x
        if slope < 0.0:
            return CostEstimate(0.0, mean_y)
        if overhead_s < 0.0:
            return CostEstimate(self._xy / self._xx, 0.0)
        return CostEstimate(slope, overhead_s)

    def _scaled(self) -> CostEstimate:
        """Returns the last shape with both numbers multiplied by one factor, so that it passes through the present
        observations. A device that slows down slows down overhead and slope alike."""
        expected_s = 0.0
        if self._shape is not None:
            expected_s = self._shape.overhead_s * self._weight + self._shape.seconds_per_cost * self._x
        if self._shape is None or expected_s <= 0.0:
            return CostEstimate(self._xy / self._xx, 0.0)
        factor = self._y / expected_s
        return CostEstimate(self._shape.seconds_per_cost * factor, self._shape.overhead_s * factor)


def is_alike(cost: float, other: float) -> bool:
    """Returns whether passes of these two sizes are too similar to separate overhead from slope. Returns False if
    `other` is 0, which stands for no size, or infinite."""
    return 0.0 < other < inf and abs(cost - other) <= LEAST_SPREAD * other


# ------------------------------------------------------------ the cost of preparing an item

HALF_LIFE_OF_STAGE_S = 60.0
"""An observation of a stage loses half of its weight in this time."""
MAX_WEIGHT_OF_STAGE = 30.0
"""Limits how many observations an estimate of a stage rests on."""


class StageCosts:
    """Predicts how long a stage takes for an item of each modality, apart from its forward pass: its decoding, or its
    preparation on the device. Items of one modality take very different times, because files differ in more than their
    cost, so one observation moves a line only a little however large it is (`fabric.contracts.learned_cost`)."""

    def __init__(self) -> None:
        self._modality_to_line: dict[str, CostEstimate] = {}
        self._modality_to_memory: dict[str, Memory] = {}

    def calibrate(self, modality: str, small: tuple[int, float], large: tuple[int, float]) -> None:
        """Sets the line of a modality from two measurements, each of a cost and of the seconds that it took."""
        slope = max(0.0, (large[1] - small[1]) / (large[0] - small[0])) if large[0] > small[0] else 0.0
        overhead_s = max(0.0, large[1] - slope * large[0])
        if slope > 0.0 or overhead_s > 0.0:
            self._modality_to_line[modality] = CostEstimate(slope, overhead_s)

    def observe(self, modality: str, cost: int, seconds: float, now_s: float) -> None:
        """Corrects the line of a modality by one observation. Observations that can't be true are ignored."""
        if not (cost > 0 and 0.0 < seconds < inf):
            return
        memory = self._modality_to_memory.setdefault(modality, Memory(HALF_LIFE_OF_STAGE_S, MAX_WEIGHT_OF_STAGE))
        line = self._modality_to_line.get(modality)
        gain = memory.gain(now_s)
        if line is None:
            self._modality_to_line[modality] = CostEstimate(0.5 * seconds / cost, 0.5 * seconds)
            return
        slope, overhead_s = corrected((line.seconds_per_cost, line.overhead_s), (float(cost), 1.0), seconds, gain)
        self._modality_to_line[modality] = CostEstimate(slope, overhead_s)

    def estimate(self, modality: str) -> CostEstimate:
        """Returns the line of a modality; both numbers are zero until something was measured."""
        return self._modality_to_line.get(modality, CostEstimate(0.0, 0.0))

    def seconds(self, modality: str, cost: int, num_items: int = 1) -> float:
        """Returns the seconds of the stage for items of that cost together."""
        line = self.estimate(modality)
        return line.seconds_per_cost * cost + line.overhead_s * num_items


# ------------------------------------------------------------ the memory of decoded inputs


class InputSizes:
    """Estimates how much memory decoded inputs take: a patch takes some KiB of float32, and a frame of a mel
    spectrogram takes half a KiB. It keeps the bytes per unit of cost for each modality, as measured on the newest input
    of that modality."""

    def __init__(self) -> None:
        self._modality_to_bytes: dict[str, float] = {}

    def observe(self, modality: str, cost: int, nbytes: int) -> None:
        """Records that an input of `cost` takes `nbytes`."""
        self._modality_to_bytes[modality] = nbytes / max(cost, 1)

    def in_patches(self, modality: str, cost: int) -> float:
        """Converts the memory of inputs of that cost into units of cost of the modality with the largest bytes per unit
        of cost. Returns `cost` unchanged until an input of the modality was observed."""
        if modality not in self._modality_to_bytes:
            return cost
        return cost * self._modality_to_bytes[modality] / max(self._modality_to_bytes.values())
