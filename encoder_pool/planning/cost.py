"""What a forward takes: seconds = overhead + slope * patches, fitted to what was measured, newest first.

Least squares with exponential forgetting, two numbers per modality: a patch and a mel frame do not cost the same.
Knows nothing of models or clocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

FORGETTING = 0.97
"""Weight of an observation after one more: about the last 30 batches count."""


class CostEstimate(NamedTuple):
    seconds_per_cost: float
    overhead_s: float


class ForwardCost:
    """Both numbers stay non-negative; with one batch size seen, everything is put on the slope."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, cost: int, seconds: float) -> None:
        """One forward of `cost` patches took `seconds`."""
        self._weight = self._weight * FORGETTING + 1.0
        self._x = self._x * FORGETTING + cost
        self._y = self._y * FORGETTING + seconds
        self._xx = self._xx * FORGETTING + cost * cost
        self._xy = self._xy * FORGETTING + cost * seconds

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

    def observe(self, modality: str, cost: int, seconds: float) -> None:
        """One forward over units of `modality`."""
        self._modality_to_cost.setdefault(modality, ForwardCost()).observe(cost, seconds)
        self._mixed.observe(cost, seconds)

    def estimate(self, modality: str) -> CostEstimate:
        """Zeros until a forward of that modality was observed."""
        cost = self._modality_to_cost.get(modality)
        return cost.estimate() if cost else CostEstimate(0.0, 0.0)

    def mixed(self) -> CostEstimate:
        return self._mixed.estimate()

    def work_s(self, modality: str, cost: int) -> float:
        """What units of that cost add to a forward."""
        return self.estimate(modality).seconds_per_cost * cost
