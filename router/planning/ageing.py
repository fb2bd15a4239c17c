"""Estimates age: the longer ago the router learned the cost of a member, the less it trusts that cost, and the more it
uses the common cost of the member's kind instead.

Without ageing, a member that looked slow once would look slow for ever: it gets no requests as long as other members
are idle, so nothing corrects its estimate. With ageing, its estimate approaches that of the others within some
half-lives, it gets a request, and the result of that request counts. A member that really is slow is found slow again,
and each time the estimate is trusted twice as long.

Differences between members that lie within the noise of measuring count as zero; otherwise one of two equal members
would always get every request. The caller passes the time in. This module knows nothing of members, queues or the
score.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, exp2, log
from typing import NamedTuple

from router.planning.cost import LEARNING_RATE, LinearCost
from router.planning.views import Line

HALF_LIFE_S = 10.0
"""This is the half-life of the trust in an estimate that nothing confirms. A machine is busy with other things for
seconds or minutes."""
MAX_HALF_LIFE_S = 160.0
"""Limits the half-life; an estimate reaches this limit when it has been confirmed after each of four silences."""
CONFIRMED = 1.5
"""A new value confirms the old one if it is within this factor of it."""
NOISE = 0.2
"""This is the logarithm of a factor. A member whose cost differs from the common one by less than this factor counts as
equal to its kind; from twice this logarithm on, its own cost counts in full."""
_LEAST_TRUST = 1e-9
"""The trust never falls below this value once there is evidence. So when all estimates are old, the least old ones
still count most."""


class Age:
    """Keeps the time of the last evidence about a member, and the half-life with which the trust in it falls."""

    def __init__(self) -> None:
        self._at_s: float | None = None
        self._half_life_s = HALF_LIFE_S

    def trust(self, now: float) -> float:
        """Returns the trust, in [0, 1]. It is 0 before the first evidence and 1 at the moment of the last."""
        if self._at_s is None:
            return 0.0
        return max(_LEAST_TRUST, exp2(-max(0.0, now - self._at_s) / self._half_life_s))

    def renew(self, now: float, is_confirmed: bool) -> None:
        """Records new evidence. If the trust had fallen below one half and the evidence confirms the estimate, the
        half-life doubles; if the evidence contradicts the estimate, the half-life falls back to `HALF_LIFE_S`."""
        if not is_confirmed:
            self._half_life_s = HALF_LIFE_S
        elif self._at_s is not None and self.trust(now) < 0.5:
            self._half_life_s = min(2.0 * self._half_life_s, MAX_HALF_LIFE_S)
        self._at_s = now if self._at_s is None else max(now, self._at_s)


class Estimate(NamedTuple):
    line: Line
    trust: float


class AgeingCost:
    """Keeps a member's cost line and its age."""

    def __init__(self, start: Line) -> None:
        self._cost = LinearCost(start)
        self._age = Age()
        self._reported: Line | None = None

    @property
    def line(self) -> Line:
        """Returns the line as it was learned, however long ago that was."""
        return self._cost.line

    @property
    def is_measured(self) -> bool:
        return self._cost.is_measured

    def estimate(self, now: float) -> Estimate:
        return Estimate(self._cost.line, self._age.trust(now))

    def observe(self, x: float, actual_s: float, now: float) -> None:
        """Corrects the line by what a response reports. After a silence the response counts for more than the earlier
        estimate."""
        if not (actual_s > 0.0 and x >= 0.0):
            return
        predicted_s = self._cost.line.at(x)
        is_confirmed = predicted_s > 0.0 and 1.0 / CONFIRMED <= actual_s / predicted_s <= CONFIRMED
        gain = 1.0 - (1.0 - LEARNING_RATE) * self._age.trust(now)
        self._cost.observe(x, actual_s, gain)
        self._age.renew(now, is_confirmed)

    def anchor(self, measured: Line, now: float) -> None:
        """Takes the line that the member itself reports. A line that equals the one of its last report is no news and
        is ignored."""
        if measured == self._reported:
            return
        self._reported = measured
        before = self._cost.line
        self._cost.anchor(measured)
        if self._cost.is_measured:
            self._age.renew(now, _are_alike(before, self._cost.line))


def common_line(estimates: Iterable[Estimate]) -> Line | None:
    """Returns what a kind of member costs, or None without any evidence. It is the median of the members' lines, each
    weighted by its trust, so that one slow member does not make the others look slow. If two values split the weight
    equally, the lower one is taken."""
    known = [estimate for estimate in estimates if estimate.trust > 0.0]
    if not known:
        return None
    half = 0.5 * sum(estimate.trust for estimate in known)
    return Line(
        _median(sorted((line.base_s, trust) for line, trust in known), half),
        _median(sorted((line.per_unit_s, trust) for line, trust in known), half),
    )


def believed(estimate: Estimate, common: Line | None) -> Line:
    """Returns a line between the member's own and the common one, in proportion to the trust. Where the difference is
    within the noise, it returns the common line."""
    line, trust = estimate
    if common is None:
        return line
    return Line(_drawn(line.base_s, common.base_s, trust), _drawn(line.per_unit_s, common.per_unit_s, trust))


def _median(values: Sequence[tuple[float, float]], half: float) -> float:
    """Returns the weighted median of (value, weight) pairs that are sorted by value; `half` is half of the sum of all
    weights."""
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
    """Returns whether both lines predict about the same cost for a small and for a large amount."""
    return all(1.0 / CONFIRMED <= after.at(x) / before.at(x) <= CONFIRMED for x in (1.0, 1000.0))
