"""Predicted against actual, per stage: a planner that can't predict is not trusted, and its error is a metric.

Sums only, so that a scraper can take rates of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageError:
    """Sums since the start. `actual / predicted` is the bias, `abs_error / actual` the relative error. Seconds;
    for the stages `prefix_tokens` tokens, for `cached_items` items."""

    num_observations: int = 0
    predicted: float = 0.0
    actual: float = 0.0
    abs_error: float = 0.0


class Accuracy:
    """Stages: `queue`, `prefill`, `held`, `ttft` of a worker; `encoder_wait`, `prepare`, `encode` of an encoder;
    `transfer`; `lower_bound` (bound against actual TTFT: the overlap's efficiency); `prefix_tokens` and
    `cached_items`, hits as the indexes promised them against what was found."""

    def __init__(self) -> None:
        self._stage_to_error: dict[str, StageError] = {}

    def note(self, stage: str, predicted: float, actual: float) -> None:
        error = self._stage_to_error.get(stage, StageError())
        self._stage_to_error[stage] = StageError(
            error.num_observations + 1,
            error.predicted + predicted,
            error.actual + actual,
            error.abs_error + abs(actual - predicted),
        )

    def stages(self) -> Mapping[str, StageError]:
        return dict(self._stage_to_error)
