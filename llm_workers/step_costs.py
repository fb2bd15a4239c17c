"""What a step costs: seconds = overhead + so much for each sequence that decodes + so much for each flat token of the
rest. Fitted to a few steps at boot, then corrected by every step, in time: what was learned while the machine was busy
with other things is soon outweighed by what comes after.

Knows nothing of what the tokens are. The time is passed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fabric.learned_cost import Memory, corrected

HALF_LIFE_S = 5.0
"""Of what a step has taught."""
MAX_WEIGHT = 40.0
"""At most so many steps are remembered: one step moves an estimate by a fortieth of its error."""
_LEAST_SHARE = 1e-3
"""Of the time of the smallest step, for what nothing was measured of: it can grow from there."""


class StepWork(NamedTuple):
    """What a step has to do."""

    num_decodes: int
    """Sequences whose one known token is computed."""
    flat_tokens: float
    """All other tokens, weighed by their contexts (`fabric.flat_tokens`)."""

    @property
    def amounts(self) -> tuple[float, float, float]:
        return (1.0, float(self.num_decodes), self.flat_tokens)


class StepCosts:
    """All numbers are 0 until something was seen."""

    def __init__(self) -> None:
        self._memory = Memory(HALF_LIFE_S, MAX_WEIGHT)
        self._costs: tuple[float, ...] = (0.0, 0.0, 0.0)

    def fit(self, steps: Sequence[tuple[StepWork, float]]) -> None:
        """Starts from steps of different kinds and the seconds each took; those that took none say nothing. What comes
        out negative is left out."""
        steps = [(work, taken_s) for work, taken_s in steps if taken_s > 0.0]
        if not steps:
            return
        amounts = np.array([work.amounts for work, _ in steps])
        seconds = np.array([taken_s for _, taken_s in steps])
        costs = np.zeros(3)
        kinds = list(range(3))
        while kinds:
            # Relative errors count: a small step is as good a witness as a large one.
            found = np.linalg.lstsq(amounts[:, kinds] / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
            if found.min() >= 0.0:
                costs[kinds] = found
                break
            kinds.pop(int(found.argmin()))
        least = _LEAST_SHARE * seconds.min() / np.maximum(amounts.max(axis=0), 1.0)
        self._costs = tuple(np.maximum(costs, least).tolist())

    def observe(self, work: StepWork, seconds: float, now_s: float) -> None:
        """A step took `seconds` and ended at `now_s`."""
        if not any(self._costs):
            self.fit([(work, seconds)])
        self._costs = corrected(self._costs, work.amounts, seconds, self._memory.gain(now_s))

    def predict_s(self, work: StepWork) -> float:
        return sum(cost * amount for cost, amount in zip(self._costs, work.amounts, strict=True))

    @property
    def overhead_s(self) -> float:
        return self._costs[0]

    @property
    def s_per_decode(self) -> float:
        return self._costs[1]

    @property
    def s_per_token(self) -> float:
        """Of flat tokens."""
        return self._costs[2]
