"""Computes how soon a request could have its first token at best, from stage times that were measured alone.

A request is a row of *spans*: text, which takes a time to prefill, or a unit of a medium, which can only be prefilled
once its feature has landed. On an idle system the bound is that of a serial prefill in order of position: with unit `k`
landing at `r_k`, spans of `p_i` seconds and a wait of `Q` in front,

    TTFT >= max(Q + sum of all p_i, max over units k of (r_k + sum of the p_i from unit k on))

`ideal_ttfts_s` computes the same for requests that meet: the encoder encodes units in order of arrival, the worker
prefills the first request that can compute something, and neither is idle while it has work. A request that meets no
other one gets exactly the bound. `possible_saving` says what part of the time without overlap the overlap can save.

The module is pure. It knows nothing of clusters, clocks or traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

TEXT = -1
"""Stands for the unit of a span that is text."""


class IdealSpan(NamedTuple):
    prefill_s: float
    unit: int = TEXT
    """Is the index of the unit in `IdealRequest.units`, or `TEXT`."""


class IdealUnit(NamedTuple):
    """Describes one unit of a medium alone."""

    ready_s: float
    """Holds the time from the request's arrival until the unit's forward pass can begin."""
    encode_s: float
    transfer_s: float = 0.0
    """Holds the time from the end of the forward pass until the worker can read the feature."""


@dataclass(frozen=True, slots=True)
class IdealRequest:
    """An `IdealRequest` is a request with the times that its parts take alone."""

    arrival_s: float
    units: tuple[IdealUnit, ...]
    """Holds the units in the order in which they are encoded and read."""
    spans: tuple[IdealSpan, ...]
    base_s: float = 0.0
    """Holds the time that the request takes besides encoding and prefill: on the way, and in the router."""

    @property
    def encode_s(self) -> float:
        return sum(unit.encode_s for unit in self.units)

    @property
    def prefill_s(self) -> float:
        return sum(span.prefill_s for span in self.spans)

    def landings_s(self) -> list[float]:
        """Returns when each unit lands, in seconds after the arrival, if the encoder is idle."""
        return _landings_s(self, 0.0)[0]

    def bound_s(self) -> float:
        """Returns the lower bound of the time to first token on an idle system."""
        return prefill_bound_s(self.spans, self.landings_s(), self.base_s)


def prefill_bound_s(spans: Sequence[IdealSpan], landings_s: Sequence[float], queue_s: float = 0.0) -> float:
    """Returns the bound of the module's formula."""
    left_s = sum(span.prefill_s for span in spans)
    bound_s = queue_s + left_s
    for span in spans:
        if span.unit != TEXT:
            bound_s = max(bound_s, landings_s[span.unit] + left_s)
        left_s -= span.prefill_s
    return bound_s


def possible_saving(num_units: int, encode_s: float, prefill_s: float, prefix_s: float = 0.0) -> float:
    """Returns the largest part of the time without overlap that the overlap can save. With text in front of one unit,
    the time in which both are at work is saved: `min(prefix, encode)`. With `num_units` equal units and no text in
    front, all but one unit's share of the shorter stage is saved: `(1 - 1/K) * min(f, 1 - f)`, where `f` is the
    encoder's share of the time; it is never above a half. `prefill_s` contains `prefix_s`."""
    total_s = encode_s + prefill_s
    if total_s <= 0.0:
        return 0.0
    units_s = (1.0 - 1.0 / num_units) * min(encode_s, prefill_s - prefix_s)
    return max(min(prefix_s, encode_s), units_s) / total_s


# ------------------------------------------------------------ requests that meet


def ideal_ttfts_s(requests: Sequence[IdealRequest]) -> list[float]:
    """Returns the time to first token of each request on one encoder and one worker that lose no time. The encoder
    serves units in order of arrival. The worker serves the earliest request whose next span can be computed, and
    finishes a span that it has begun."""
    order = sorted(range(len(requests)), key=lambda index: requests[index].arrival_s)
    at_s = free_s = -inf
    lands: dict[int, list[float]] = {}
    for index in order:
        request = requests[index]
        landings_s, free_s = _landings_s(request, free_s - request.arrival_s)
        free_s += request.arrival_s
        lands[index] = [request.arrival_s + landing_s for landing_s in landings_s]
    next_span = dict.fromkeys(order, 0)
    ttfts_s = [0.0] * len(requests)
    while next_span:
        starts = {index: _can_start_s(requests[index], next_span[index], lands[index]) for index in next_span}
        at_s = max(at_s, min(starts.values()))
        index = next(each for each in next_span if starts[each] <= at_s)
        at_s += requests[index].spans[next_span[index]].prefill_s
        next_span[index] += 1
        if next_span[index] == len(requests[index].spans):
            ttfts_s[index] = at_s - requests[index].arrival_s
            del next_span[index]
    return ttfts_s


def _landings_s(request: IdealRequest, free_s: float) -> tuple[list[float], float]:
    """Returns the landings of the request's units, and when the encoder is free after them, if it is free at `free_s`.
    All times count from the arrival."""
    landings_s = []
    for unit in request.units:
        free_s = max(free_s, unit.ready_s) + unit.encode_s
        landings_s.append(free_s + unit.transfer_s)
    return landings_s, free_s


def _can_start_s(request: IdealRequest, span: int, lands_s: Sequence[float]) -> float:
    unit = request.spans[span].unit
    begin_s = request.arrival_s + request.base_s
    return begin_s if unit == TEXT else max(begin_s, lands_s[unit])
