"""What a forward takes: seconds = overhead + slope * patches, fitted to what was measured, newest first.

Least squares with exponential forgetting, by batches and by time, two numbers per modality: a patch and a mel frame do
not cost the same. Forwards of one size alone do not tell the two numbers apart, so the last line that was fitted to
different sizes keeps its shape until other sizes come (`docs/adr/0028-worn-estimates.md`). Knows nothing of models; the
time is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp2, inf
from typing import NamedTuple

FORGETTING = 0.97
"""Weight of an observation after one more: about the last 30 batches count."""
HALF_LIFE_S = 10.0
"""In which an observation loses half of its weight by age: thirty batches of a busy moment are no law."""
LEAST_KEPT = 0.05
"""Of the weight, after any silence: so the first batches after it find a line to correct, not only their own size."""
LEAST_SPREAD = 0.1
"""Standard deviation of the sizes, as a share of their mean, below which no line is fitted. One forward of twice the
usual size keeps the spread above it for about 36 forwards."""
MAX_ALIKE = 32
"""After so many forwards of one size the estimate asks for another."""


class CostEstimate(NamedTuple):
    seconds_per_cost: float
    overhead_s: float
    worn_cost: float = 0.0
    """The size that all recent forwards had, when it is time to try another; 0 when it is not."""


class ForwardCost:
    """Both numbers stay non-negative. Until two sizes differ, everything is put on the slope."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._at_s: float | None = None
        self._shape: CostEstimate | None = None
        """The last line that was fitted to sizes that differ."""
        self._num_alike = 0
        """Forwards since the last one whose size was not that of those before it."""

    def observe(self, cost: int, seconds: float, now_s: float | None = None) -> None:
        """One forward of `cost` patches took `seconds` and ended at `now_s` (None: no time has passed)."""
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
        """Whether recent sizes differ enough to tell the overhead from the slope."""
        if self._weight == 0.0:
            return False
        mean = self._x / self._weight
        return self._xx / self._weight - mean * mean > (LEAST_SPREAD * mean) ** 2

    def estimate(self) -> CostEstimate:
        """Zeros until something was observed."""
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
        """The line through what was observed; its sizes must differ."""
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
        """The last shape, both numbers multiplied so that it passes through what is observed now: a device that slows
        down slows down as a whole."""
        expected_s = 0.0
        if self._shape is not None:
            expected_s = self._shape.overhead_s * self._weight + self._shape.seconds_per_cost * self._x
        if self._shape is None or expected_s <= 0.0:
            return CostEstimate(self._xy / self._xx, 0.0)
        factor = self._y / expected_s
        return CostEstimate(self._shape.seconds_per_cost * factor, self._shape.overhead_s * factor)


def is_alike(cost: float, other: float) -> bool:
    """Whether forwards of these two sizes say nothing about overhead and slope apart. No size is like `other` where
    that is 0, which stands for none, or infinite."""
    return 0.0 < other < inf and abs(cost - other) <= LEAST_SPREAD * other


class ForwardCosts:
    """A line for each modality, and one through all of them for who asks without naming one."""

    def __init__(self) -> None:
        self._modality_to_cost: dict[str, ForwardCost] = {}
        self._mixed = ForwardCost()

    @property
    def modalities(self) -> Iterable[str]:
        """Those that were observed."""
        return self._modality_to_cost.keys()

    def observe(self, modality: str, cost: int, seconds: float, now_s: float | None = None) -> None:
        """One forward over units of `modality`, which ended at `now_s`."""
        self._modality_to_cost.setdefault(modality, ForwardCost()).observe(cost, seconds, now_s)
        self._mixed.observe(cost, seconds, now_s)

    def estimate(self, modality: str) -> CostEstimate:
        """Zeros until a forward of that modality was observed."""
        cost = self._modality_to_cost.get(modality)
        return cost.estimate() if cost else CostEstimate(0.0, 0.0)

    def has_spread(self, modality: str) -> bool:
        """Whether forwards of that modality had sizes that differ."""
        return modality in self._modality_to_cost and self._modality_to_cost[modality].has_spread

    def mixed(self) -> CostEstimate:
        return self._mixed.estimate()

    def work_s(self, modality: str, cost: int) -> float:
        """What units of that cost add to a forward."""
        return self.estimate(modality).seconds_per_cost * cost
