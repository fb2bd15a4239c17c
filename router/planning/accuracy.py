"""Compares predicted with actual values, per stage: a planner that cannot predict is not trusted, so its error is a
metric.

It keeps sums only, so that a scraper can take rates of them. It knows nothing of how a prediction is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageError:
    """A `StageError` holds one stage's sums since the start. `actual / predicted` is the bias, and `abs_error / actual`
    is the relative error. The unit is seconds, except for the stages `prefix_tokens` (tokens) and `cached_items`
    (items)."""

    num_observations: int = 0
    predicted: float = 0.0
    actual: float = 0.0
    abs_error: float = 0.0


class Accuracy:
    """Keeps a `StageError` for each stage. A worker has the stages `queue`, `prefill`, `held` and `ttft`; an encoder
    has `encoder_wait`, `prepare` and `encode`. `transfer` is the time on a link. `lower_bound` compares the lower bound
    with the actual TTFT, which shows how efficiently work overlaps. `prefix_tokens` and `cached_items` compare the hits
    that the indexes promised with the hits that the members found."""

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
