"""What a stage costs, corrected by what it took: seconds = sum of coefficient * amount.

One correction is a gradient step on the squared error of the logarithm, in the logarithms of the coefficients: it is
blind to scale, keeps all positive, and blames each in proportion to its share of the prediction, so a machine that
became slower is learned from any amounts. `Memory` says how much one observation may move, by the time between them.
Knows nothing of what the amounts are; the time is passed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, exp2, inf, log

MAX_SURPRISE = 4.0
"""One observation counts as at most this many times the prediction, and at least its inverse: a pause of seconds
moves an estimate like a small surprise does, while a true change gets through in a few observations."""
MIN_SHARE = 0.05
"""Of the blame, for each coefficient that has an amount: one that was thought negligible can still grow."""


def corrected(
    coefficients: Sequence[float], amounts: Sequence[float], actual_s: float, gain: float
) -> tuple[float, ...]:
    """`coefficients` moved by the part `gain` (0 to 1) of the error, when `amounts` (not negative) took `actual_s`.
    Values that say nothing (not positive, not finite) change nothing, as do coefficients whose amount is 0."""
    parts = [each * amount for each, amount in zip(coefficients, amounts, strict=True)]
    predicted_s = sum(parts)
    if not (0.0 < actual_s < inf and 0.0 < predicted_s < inf and min(amounts) >= 0.0):
        return tuple(coefficients)
    surprise = min(max(actual_s / predicted_s, 1.0 / MAX_SURPRISE), MAX_SURPRISE)
    most = 1.0 - MIN_SHARE * (sum(amount > 0.0 for amount in amounts) - 1)
    shares = [
        min(max(part / predicted_s, MIN_SHARE), most) if amount > 0.0 else 0.0
        for part, amount in zip(parts, amounts, strict=True)
    ]
    # Divided by the squared norm of the shares, so that a step takes the same part of the error at any amounts.
    step = gain * log(surprise) / sum(share * share for share in shares)
    return tuple(each * exp(step * share) for each, share in zip(coefficients, shares, strict=True))


class Memory:
    """How many observations an estimate rests on: what was seen a half-life ago counts half, and no more than
    `max_weight` count at all. So a thousand observations of one bad second are forgotten in time, and the first one
    after a silence counts for much."""

    def __init__(self, half_life_s: float, max_weight: float) -> None:
        self._half_life_s = half_life_s
        self._max_weight = max_weight
        self._weight = 0.0
        self._at_s = 0.0

    def gain(self, now_s: float) -> float:
        """Something is observed now: its share of all weight, at most a half, for no single one is the truth."""
        kept = self._weight * exp2(-max(0.0, now_s - self._at_s) / self._half_life_s)
        self._weight, self._at_s = min(kept + 1.0, self._max_weight), now_s
        return 1.0 / max(self._weight, 2.0)
