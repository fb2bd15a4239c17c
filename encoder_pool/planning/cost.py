"""What a forward takes: seconds = overhead + slope * patches, fitted to what was measured, newest first.

Least squares with exponential forgetting, by batches and by time, two numbers per modality: a patch and a mel frame do
not cost the same. Knows nothing of models; the time is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp2
from typing import NamedTuple

FORGETTING = 0.97
"""Weight of an observation after one more: about the last 30 batches count."""
HALF_LIFE_S = 10.0
"""In which an observation loses half of its weight by age: thirty batches of a busy moment are no law."""
LEAST_KEPT = 0.05
"""Of the weight, after any silence: so the first batches after it find a line to correct, not only their own size."""


class CostEstimate(NamedTuple):
    seconds_per_cost: float
    overhead_s: float


class ForwardCost:
    """Both numbers stay non-negative; with one batch size seen, everything is put on the slope."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._at_s: float | None = None

    def observe(self, cost: int, seconds: float, now_s: float | None = None) -> None:
        """One forward of `cost` patches took `seconds` and ended at `now_s` (None: no time has passed)."""
        kept = FORGETTING * self._share_kept(now_s)
        self._weight = self._weight * kept + 1.0
        self._x = self._x * kept + cost
        self._y = self._y * kept + seconds
        self._xx = self._xx * kept + cost * cost
        self._xy = self._xy * kept + cost * seconds

    def _share_kept(self, now_s: float | None) -> float:
        if now_s is None:
            return 1.0
        age_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._at_s = now_s
        return max(LEAST_KEPT, exp2(-age_s / HALF_LIFE_S))

    def estimate(self) -> CostEstimate:
        """Zeros until something was observed."""
        if self._weight == 0.0 or self._xx == 0.0:
            return CostEstimate(0.0, 0.0)
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        through_origin = self._xy / self._xx
        if variance <= 1e-6 * mean_x * mean_x:
            return CostEstimate(through_origin, 0.0)
        slope = (self._xy / self._weight - mean_x * mean_y) / variance
        overhead_s = mean_y - slope * mean_x
        if slope < 0.0:
            return CostEstimate(0.0, mean_y)
        if overhead_s < 0.0:
            return CostEstimate(through_origin, 0.0)
        return CostEstimate(slope, overhead_s)


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

    def mixed(self) -> CostEstimate:
        return self._mixed.estimate()

    def work_s(self, modality: str, cost: int) -> float:
        """What units of that cost add to a forward."""
        return self.estimate(modality).seconds_per_cost * cost
