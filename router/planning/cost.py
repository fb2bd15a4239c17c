"""What a stage costs, learned online: straight lines `base_s + per_unit_s * x`, one per member and stage.

A line starts from an anchor (a default, or what the member measured itself and reports) and is corrected by what
responses report. Knows nothing of members, queues or the score.
"""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

from router.planning.links import LinkClass
from router.planning.views import Line

MAX_SURPRISE = 4.0
"""One observation counts as at most this many times the prediction, and at least its inverse: a pause of seconds
moves a line like a small surprise does, while a true change gets through in a few observations."""
LEARNING_RATE = 0.25
MIN_SHARE = 0.05
"""Of the blame, for base and slope each: one that was thought negligible can still grow."""
MAX_CORRECTION = 1e4
"""Bound on the learned factor between an anchor and the line."""


class CostDefaults(NamedTuple):
    """Before anything is measured: a small model on a CPU. An order of magnitude is enough, they are corrected."""

    prefill: Line = Line(base_s=5e-3, per_unit_s=1e-4)
    prepare: Line = Line(base_s=2e-3, per_unit_s=2e-6)
    encode: Line = Line(base_s=2e-3, per_unit_s=2e-5)
    same_process: Line = Line(base_s=1e-4, per_unit_s=1 / 5e9)
    same_host: Line = Line(base_s=5e-4, per_unit_s=1 / 2e9)
    network: Line = Line(base_s=1e-3, per_unit_s=1 / 1e9)

    def link(self, link: LinkClass) -> Line:
        return {
            LinkClass.SAME_PROCESS: self.same_process,
            LinkClass.SAME_HOST: self.same_host,
            LinkClass.NETWORK: self.network,
        }[link]


class LinearCost:
    """A line that is corrected by observations.

    An update is one gradient step on the squared error of the logarithm, in the logarithms of base and slope: it is
    blind to scale, keeps both positive, and blames each in proportion to its share of the prediction, so small
    inputs teach the base and large ones the slope.
    """

    def __init__(self, anchor: Line, is_measured: bool = False) -> None:
        self._anchor = anchor
        self._is_measured = is_measured
        self._base_factor = 1.0
        self._slope_factor = 1.0
        self._line = anchor

    @property
    def line(self) -> Line:
        return self._line

    def observe(self, x: float, actual_s: float) -> None:
        """`actual_s` seconds were spent on `x` units. Values that say nothing (not positive) are ignored."""
        predicted_s = self._line.at(x)
        if not (actual_s > 0.0 and predicted_s > 0.0 and x >= 0.0 and actual_s < float("inf")):
            return
        surprise = min(max(actual_s / predicted_s, 1.0 / MAX_SURPRISE), MAX_SURPRISE)
        base_share = min(max(self._line.base_s / predicted_s, MIN_SHARE), 1.0 - MIN_SHARE)
        # Divided by the squared norm of the shares, so that a step takes the same part of the error at any input.
        step = LEARNING_RATE * log(surprise) / (base_share**2 + (1.0 - base_share) ** 2)
        self._base_factor = _bounded(self._base_factor * exp(step * base_share))
        self._slope_factor = _bounded(self._slope_factor * exp(step * (1.0 - base_share)))
        self._refresh()

    def anchor(self, measured: Line) -> None:
        """The member's own measurement. The first one replaces what was learned on a guess; later ones keep the
        correction, which is relative. A slope that is not positive means `not known yet`."""
        if measured.per_unit_s <= 0.0 or measured.base_s < 0.0:
            return
        if not self._is_measured:
            self._base_factor = self._slope_factor = 1.0
        self._is_measured = True
        self._anchor = measured
        self._refresh()

    def _refresh(self) -> None:
        self._line = Line(self._anchor.base_s * self._base_factor, self._anchor.per_unit_s * self._slope_factor)


def _bounded(factor: float) -> float:
    return min(max(factor, 1.0 / MAX_CORRECTION), MAX_CORRECTION)
