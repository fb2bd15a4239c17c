"""Estimates age: what was learned of a member long ago is believed less and less, and what its kind costs in common
the more.

Without it a member that looked slow once would look so for ever: it gets nothing to do as long as others are idle, so
nothing corrects it. With it, its estimate comes near the others' in some half-lives, it gets a request, and what that
teaches counts. One that really is slow is found so again, and each time believed twice as long.

Differences between members that are within the noise of measuring count as none, else the same one of two equals would
get everything. The time is passed in. Knows nothing of members, queues or the score.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, exp2, log
from typing import NamedTuple

from router.planning.cost import LEARNING_RATE, LinearCost
from router.planning.views import Line

HALF_LIFE_S = 10.0
"""Of the trust in an estimate that nothing confirms. A machine is busy with other things for seconds or minutes."""
MAX_HALF_LIFE_S = 160.0
"""Of one that was found true after each silence."""
CONFIRMED = 1.5
"""What is found again within this factor is taken as the same."""
NOISE = 0.2
"""Logarithm of the factor within which a member counts as no other than its kind; from twice that on as itself."""
_LEAST_TRUST = 1e-9
"""So that of estimates that are all old, the least old count most."""


class Age:
    """Since when nothing is known of a member, and how fast that is forgotten."""

    def __init__(self) -> None:
        self._at_s: float | None = None
        self._half_life_s = HALF_LIFE_S

    def trust(self, now: float) -> float:
        """In [0, 1]; 0 before the first evidence, 1 at the moment of the last."""
        if self._at_s is None:
            return 0.0
        return max(_LEAST_TRUST, exp2(-max(0.0, now - self._at_s) / self._half_life_s))

    def renew(self, now: float, is_confirmed: bool) -> None:
        """There is new evidence. What was doubted and is confirmed is believed longer from now on."""
        if not is_confirmed:
            self._half_life_s = HALF_LIFE_S
        elif self._at_s is not None and self.trust(now) < 0.5:
            self._half_life_s = min(2.0 * self._half_life_s, MAX_HALF_LIFE_S)
        self._at_s = now if self._at_s is None else max(now, self._at_s)


class Estimate(NamedTuple):
    line: Line
    trust: float


class AgeingCost:
    """A member's line, and how old it is."""

    def __init__(self, start: Line) -> None:
        self._cost = LinearCost(start)
        self._age = Age()
        self._reported: Line | None = None

    @property
    def line(self) -> Line:
        """As it was learned, however long ago."""
        return self._cost.line

    @property
    def is_measured(self) -> bool:
        return self._cost.is_measured

    def estimate(self, now: float) -> Estimate:
        return Estimate(self._cost.line, self._age.trust(now))

    def observe(self, x: float, actual_s: float, now: float) -> None:
        """What a response reports. After a silence it counts for more than what was known."""
        if not (actual_s > 0.0 and x >= 0.0):
            return
        predicted_s = self._cost.line.at(x)
        is_confirmed = predicted_s > 0.0 and 1.0 / CONFIRMED <= actual_s / predicted_s <= CONFIRMED
        gain = 1.0 - (1.0 - LEARNING_RATE) * self._age.trust(now)
        self._cost.observe(x, actual_s, gain)
        self._age.renew(now, is_confirmed)

    def anchor(self, measured: Line, now: float) -> None:
        """What the member reports. Numbers that are those of its last report are no news."""
        if measured == self._reported:
            return
        self._reported = measured
        before = self._cost.line
        self._cost.anchor(measured)
        if self._cost.is_measured:
            self._age.renew(now, _are_alike(before, self._cost.line))


def common_line(estimates: Iterable[Estimate]) -> Line | None:
    """What a kind costs: the median of its members, each weighing as much as it is trusted, so that a slow one does not
    make the others look slow; the lower of two that weigh the same. None without any evidence."""
    known = [estimate for estimate in estimates if estimate.trust > 0.0]
    if not known:
        return None
    half = 0.5 * sum(estimate.trust for estimate in known)
    return Line(
        _median(sorted((line.base_s, trust) for line, trust in known), half),
        _median(sorted((line.per_unit_s, trust) for line, trust in known), half),
    )


def believed(estimate: Estimate, common: Line | None) -> Line:
    """Between a member's own line and the common one, by trust; and at the common one within the noise."""
    line, trust = estimate
    if common is None:
        return line
    return Line(_drawn(line.base_s, common.base_s, trust), _drawn(line.per_unit_s, common.per_unit_s, trust))


def _median(values: Sequence[tuple[float, float]], half: float) -> float:
    """Of (value, weight), the smallest first; `half` of all weight."""
    below = 0.0
    for value, weight in values:
        below += weight
        if below >= half:
            return value
    return values[-1][0]


def _drawn(own: float, common: float, trust: float) -> float:
    if own <= 0.0 or common <= 0.0:
        return own
    apart = log(own / common)
    left = trust * abs(apart)
    if left < 2.0 * NOISE:
        left = max(0.0, 2.0 * (left - NOISE))
    return common * exp(left if apart > 0.0 else -left)


def _are_alike(before: Line, after: Line) -> bool:
    """Of what small and of what large amounts cost."""
    return all(1.0 / CONFIRMED <= after.at(x) / before.at(x) <= CONFIRMED for x in (1.0, 1000.0))
