"""Predicts how long a forward pass takes: seconds = overhead + slope * patches, fitted to measured passes, with the
newest weighted most.

The fit is least squares with exponential forgetting, by the number of passes and by time. Each modality has its own two
numbers, because a patch and a mel frame do not cost the same. Passes of one size do not separate overhead from slope,
so the last line that was fitted to different sizes keeps its shape until other sizes come
(`docs/adr/0028-worn-estimates.md`). This module knows nothing of models, and callers pass the time in.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp2, inf
from typing import NamedTuple

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


class ForwardCost:
    """Fits the line of one kind of forward pass. Both numbers stay non-negative. Until two sizes differ, the whole time
    counts as slope."""

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


class ForwardCosts:
    """Keeps one line for each modality, and one line over all modalities for callers that do not name one."""

    def __init__(self) -> None:
        self._modality_to_cost: dict[str, ForwardCost] = {}
        self._mixed = ForwardCost()

    @property
    def modalities(self) -> Iterable[str]:
        """Returns the modalities that were observed."""
        return self._modality_to_cost.keys()

    def observe(self, modality: str, cost: int, seconds: float, now_s: float | None = None) -> None:
        """Records one forward pass over units of `modality`, which ended at `now_s`."""
        self._modality_to_cost.setdefault(modality, ForwardCost()).observe(cost, seconds, now_s)
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
