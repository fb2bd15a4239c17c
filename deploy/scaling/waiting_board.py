"""Keeps what each router last told of the work that waits there, for the decisions about the sizes of the pools.

The module knows nothing of how routers tell it, or of what a decision makes of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from fabric.contracts import MemberId, WaitingWork, sum_waiting

FORGET_S = 5.0
"""The board forgets a router after this time without news, because one that has ended tells nothing more."""


class WaitingBoard:
    """A `WaitingBoard` holds what each router told last. The caller passes the time in."""

    def __init__(self) -> None:
        self._router_to_told: dict[MemberId, tuple[float, Sequence[WaitingWork]]] = {}

    def tell(self, router_id: MemberId, works: Sequence[WaitingWork], now_s: float) -> None:
        """Takes what waits at a router now."""
        self._router_to_told[router_id] = now_s, works

    def total(self, now_s: float) -> tuple[WaitingWork, ...]:
        """Returns the sums over the routers, and forgets those that have told nothing for `FORGET_S`."""
        told = self._router_to_told
        self._router_to_told = {name: each for name, each in told.items() if now_s - each[0] <= FORGET_S}
        return sum_waiting(work for _, works in self._router_to_told.values() for work in works)
