"""Holds the arithmetic of costs that workers and routers share: the weighted token, in which both count work, and the
correction of a predicted time by the time that the work took.

A weighted token is what a token costs after a context, in tokens without a context. Workers measure their steps in it,
and routers predict them in it. A stage's time is predicted as the sum of coefficient * amount.

One correction is a gradient step on the squared error of the logarithm, in the logarithms of the coefficients. The step
does not depend on scale, keeps all coefficients positive, and corrects each in proportion to its share of the
prediction, so the estimate follows a machine that became slower, for any amounts. `Memory` says how far one observation
may move an estimate, by the time between observations.

`SurpriseRun` recognises that a machine has become slower or faster as a whole.

This module knows nothing of a model except its hidden size, or of what the amounts are; the caller passes the time in.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, exp2, inf, log

# ------------------------------------------------------------ weighted tokens

_LINEAR_TO_ATTENTION = 6
"""Per layer, a token's linear parts cost about 24 * hidden^2 FLOP, and its attention costs 4 * hidden FLOP per token of
context, so the two are equal at a context of 6 * hidden."""


def context_scale_tokens(hidden_size: int) -> float:
    """Returns the context at which a token's attention costs as much as its linear layers."""
    return float(_LINEAR_TO_ATTENTION * hidden_size)


def weighted_tokens(num_tokens: int, context: int, scale_tokens: float) -> float:
    """Returns how many tokens at context 0 take as long as `num_tokens` after `context` computed ones: attention makes
    a token dearer by `context / scale_tokens`. The result is additive over a split."""
    return num_tokens * (1.0 + (context + 0.5 * num_tokens) / scale_tokens)


# ------------------------------------------------------------ correction by observed times

MAX_SURPRISE = 4.0
"""One observation counts as at most this many times the prediction, and as at least the inverse. So a pause of seconds
moves an estimate like a small surprise does, while a true change gets through in a few observations."""
MIN_SHARE = 0.05
"""Each coefficient with an amount takes at least this share of the error, so that a coefficient that seemed negligible
can still grow."""


def corrected(
    coefficients: Sequence[float], amounts: Sequence[float], actual_s: float, gain: float, common: float = 0.0
) -> tuple[float, ...]:
    """Returns `coefficients` moved by the part `gain` (0 to 1) of the error, given that `amounts` (not negative) took
    `actual_s`. Values that carry no information (not positive, not finite) change nothing. `common` says how much more
    a change of all coefficients by one factor varies than that of a single one, as a ratio of variances. With 0, a
    coefficient whose amount is 0 does not change; the larger it is, the more alike do all coefficients move."""
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
    # The step is divided by the squared norm of the shares, so that it takes the same part of the error at any amounts.
    step = gain * log(surprise) / (common + sum(share * share for share in shares))
    return tuple(each * exp(step * (common + share)) for each, share in zip(coefficients, shares, strict=True))


class Memory:
    """A `Memory` says on how many observations an estimate rests. An observation of a half-life ago counts half, and
    all together count at most `max_weight`. So a thousand observations of one bad second are forgotten in time, and the
    first observation after a silence counts for much."""

    def __init__(self, half_life_s: float, max_weight: float) -> None:
        self._half_life_s = half_life_s
        self._max_weight = max_weight
        self._weight = 0.0
        self._at_s = 0.0

    def restart(self, weight: float) -> None:
        """Lets all earlier observations together count as at most `weight`, because they are of a time before a
        change."""
        self._weight = min(self._weight, weight)

    def gain(self, now_s: float) -> float:
        """Records an observation now and returns its share of all weight. The share is at most a half, because no
        single observation is reliable."""
        kept = self._weight * exp2(-max(0.0, now_s - self._at_s) / self._half_life_s)
        self._weight, self._at_s = min(kept + 1.0, self._max_weight), now_s
        return 1.0 / max(self._weight, 2.0)


# ------------------------------------------------------------ sudden changes

CONFIRMED = 1.5
"""An observation is a surprise if it took longer or less time than predicted by more than this factor."""
CHANGE_RUN = 4
"""This is the number of surprises in a row, all in the same direction, that show that the machine has changed."""
COMMON_CHANGE = 9.0
"""This is the variance of a change of all costs by one factor, over that of a change of a single cost: a machine that
changes usually becomes faster or slower at everything. Costs of which the observations say nothing then change by nine
tenths of what they show."""


class SurpriseRun:
    """A `SurpriseRun` tells a sudden change of a machine's speed from a pause. A member does much of one kind of work,
    such as steps that decode, and little of another, such as prompts, and a machine that is slower at the one is slower
    at the other. So one run holds the observations of all kinds of work on a machine."""

    def __init__(self) -> None:
        self._ratios: list[float] = []
        """Holds the actual times of the last surprises over the predicted ones."""

    def change(self, predicted_s: float, actual_s: float) -> float | None:
        """Takes an observation. Returns by which factor the times of the machine have changed, or None if nothing shows
        a change. The factor is the least surprise of the run, so that a pause within the run does not count. The next
        run begins after it."""
        ratio = actual_s / predicted_s
        if 1.0 / CONFIRMED <= ratio <= CONFIRMED:
            self._ratios.clear()
            return None
        if self._ratios and (self._ratios[-1] > 1.0) != (ratio > 1.0):
            self._ratios.clear()
        self._ratios.append(ratio)
        if len(self._ratios) < CHANGE_RUN:
            return None
        least = min(self._ratios) if ratio > 1.0 else max(self._ratios)
        self._ratios.clear()
        return least
