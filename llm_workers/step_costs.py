"""Estimates what a step costs: seconds = overhead + a cost per decoding sequence + a cost per weighted token of the
rest. The estimate is fitted to a few steps at boot, and every step corrects it. Old observations lose weight over time,
so later steps soon outweigh what was learned while the machine was busy with other work.

This module knows nothing of what the tokens are. The caller passes the time in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fabric.learned_cost import Memory, corrected

HALF_LIFE_S = 5.0
"""Sets the time in which the weight of an observed step halves."""
MAX_WEIGHT = 40.0
"""Limits the number of steps that are remembered. One step then moves an estimate by a fortieth of its error."""
_LEAST_SHARE = 1e-3
"""Sets the smallest cost that the fit gives to a kind of work, as a share of the time of the fastest step. A cost for
which nothing was measured can grow from there."""


class StepWork(NamedTuple):
    """Describes the work of a step."""

    num_decodes: int
    """Counts the sequences whose single known token is computed."""
    weighted_tokens: float
    """Counts all other tokens, weighted by their contexts (see `fabric.weighted_tokens`)."""

    @property
    def amounts(self) -> tuple[float, float, float]:
        return (1.0, float(self.num_decodes), self.weighted_tokens)


class StepCosts:
    """Holds the estimated costs. All are 0 until a step was observed."""

    def __init__(self) -> None:
        self._memory = Memory(HALF_LIFE_S, MAX_WEIGHT)
        self._costs: tuple[float, ...] = (0.0, 0.0, 0.0)

    def fit(self, steps: Sequence[tuple[StepWork, float]]) -> None:
        """Fits the costs to steps of different kinds and the seconds that each step took. Steps that took no time are
        ignored. A cost that would be negative is left out of the fit."""
        steps = [(work, taken_s) for work, taken_s in steps if taken_s > 0.0]
        if not steps:
            return
        amounts = np.array([work.amounts for work, _ in steps])
        seconds = np.array([taken_s for _, taken_s in steps])
        costs = np.zeros(3)
        kinds = list(range(3))
        while kinds:
            # The fit minimises relative errors, so a small step counts as much as a large step.
            found = np.linalg.lstsq(amounts[:, kinds] / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
            if found.min() >= 0.0:
                costs[kinds] = found
                break
            kinds.pop(int(found.argmin()))
        least = _LEAST_SHARE * seconds.min() / np.maximum(amounts.max(axis=0), 1.0)
        self._costs = tuple(np.maximum(costs, least).tolist())

    def observe(self, work: StepWork, seconds: float, now_s: float) -> None:
        """Takes the observation that a step took `seconds` and ended at `now_s`."""
        if not any(self._costs):
            self.fit([(work, seconds)])
        self._costs = corrected(self._costs, work.amounts, seconds, self._memory.gain(now_s))

    @property
    def overhead_s(self) -> float:
        return self._costs[0]

    @property
    def s_per_decode(self) -> float:
        return self._costs[1]

    @property
    def s_per_token(self) -> float:
        """Returns the seconds per weighted token."""
        return self._costs[2]
