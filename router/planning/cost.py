"""Learns online what a stage costs. A cost is a straight line `base_s + per_unit_s * x`; there is one per member and
stage.

A line starts from an anchor (a default, or what the member measured itself and reports), and responses correct it. This
module knows nothing of members, queues or the score.
"""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

from fabric.learned_cost import corrected
from router.planning.links import LinkClass
from router.planning.views import Line

LEARNING_RATE = 0.25
MAX_CORRECTION = 1e4
"""Limits the learned factor between an anchor and the line."""


class CostDefaults(NamedTuple):
    """Holds the costs before anything is measured: those of a small model on a CPU. An order of magnitude is enough,
    because the costs are corrected."""

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
    """A `LinearCost` is a line that observations correct (`fabric.learned_cost`), within bounds of its anchor."""

    def __init__(self, anchor: Line) -> None:
        self._anchor = anchor
        self._is_measured = False
        self._factors = Line(1.0, 1.0)
        """Holds the factors between the anchor and the line, which were learned from responses."""
        self._line = anchor

    @property
    def line(self) -> Line:
        return self._line

    @property
    def is_measured(self) -> bool:
        """Tells whether the member reports its own measurements."""
        return self._is_measured

    def observe(self, x: float, actual_s: float, gain: float = LEARNING_RATE) -> None:
        """Corrects the line by an observation: `x` units took `actual_s` seconds. An observation with a negative `x`,
        or with an `actual_s` that is not positive, carries no information and is ignored."""
        if x < 0.0:
            return
        old = self._line
        base_s, per_unit_s = corrected(old, (1.0, x), actual_s, gain)
        self._factors = Line(
            _bounded(self._factors.base_s * (base_s / old.base_s if old.base_s else 1.0)),
            _bounded(self._factors.per_unit_s * (per_unit_s / old.per_unit_s if old.per_unit_s else 1.0)),
        )
        self._refresh()

    def anchor(self, measured: Line) -> None:
        """Takes the member's own measurement as the anchor. The first one replaces what was learned on top of a guess.
        Later ones keep the learned correction, which is relative, except for the part of it that the new measurement
        itself contains, so that a change that responses had already taught is not counted twice. A slope that is not
        positive means "not known yet" and is ignored."""
        if measured.per_unit_s <= 0.0 or measured.base_s < 0.0:
            return
        if not self._is_measured:
            self._factors = Line(1.0, 1.0)
        else:
            self._factors = Line(*map(_caught_up, self._factors, self._anchor, measured))
        self._is_measured = True
        self._anchor = measured
        self._refresh()

    def _refresh(self) -> None:
        anchor, factors = self._anchor, self._factors
        self._line = Line(anchor.base_s * factors.base_s, anchor.per_unit_s * factors.per_unit_s)


def _caught_up(factor: float, old: float, new: float) -> float:
    """Returns a correction without the part of it that the anchor's change from `old` to `new` already contains."""
    if old <= 0.0 or new <= 0.0 or factor == 1.0:
        return factor
    moved, correction = log(new / old), log(factor)
    if moved * correction <= 0.0:
        return factor
    left = max(0.0, abs(correction) - abs(moved))
    return exp(left if correction > 0.0 else -left)


def _bounded(factor: float) -> float:
    return min(max(factor, 1.0 / MAX_CORRECTION), MAX_CORRECTION)
