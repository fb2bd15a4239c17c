"""Tells a router which replicas Serve has stopped to route to, at the moment at which Serve says it.

Serve's own routers live in the process of Weft's router, on a loop of their own, and learn of a stopping replica before
anyone else. Their class (`ray_pools.PinnedRequestRouter`) travels by value, so what it shares with the process stands
in this module, which does not.

The module knows nothing of what is served, or of what a router does with the news.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

MAX_GONE = 4096
"""A router remembers this many replicas of a deployment that have gone. A replica that stops is in the directory for
minutes, so the ones that are forgotten have left it, unless thousands stop at once."""


class ReplicaHistory:
    """A `ReplicaHistory` holds the replicas of one deployment to which Serve routes, and those to which it did before.
    Of the latter it forgets those that went first, so it does not grow with the age of the cluster."""

    def __init__(self, max_gone: int = MAX_GONE) -> None:
        self._max_gone = max_gone
        self._running: set[str] = set()
        self._gone: dict[str, None] = {}
        """Holds the replicas that have gone, in the order in which they went."""

    @property
    def gone(self) -> frozenset[str]:
        return frozenset(self._gone)

    def update(self, running: Iterable[str]) -> bool:
        """Takes the ids of the replicas to which Serve routes now. Returns whether this changed which have gone."""
        before, present = self.gone, set(running)
        for name in sorted(self._running - present):
            self._gone[name] = None
        for name in self._gone.keys() & present:
            del self._gone[name]
        for name in list(self._gone)[: max(0, len(self._gone) - self._max_gone)]:
            del self._gone[name]
        self._running = present
        return self.gone != before

    def has_seen(self, name: str) -> bool:
        """Returns whether Serve routes to the replica, or did before and the replica is not forgotten."""
        return name in self._running or name in self._gone


_LOCK = threading.Lock()
_DEPLOYMENT_TO_HISTORY: dict[str, ReplicaHistory] = {}
_LISTENERS: list[Callable[[frozenset[str]], None]] = []


def update(deployment: str, running: Iterable[str]) -> None:
    """Takes the ids of the replicas to which Serve routes now. Any thread may call it."""
    with _LOCK:
        if _DEPLOYMENT_TO_HISTORY.setdefault(deployment, ReplicaHistory()).update(running):
            _tell()


def subscribe(listener: Callable[[frozenset[str]], None]) -> Callable[[], None]:
    """Calls `listener` at once and after each change with the ids of the replicas that were there and to which Serve
    routes no longer. Those that went first are no longer named once `MAX_GONE` others have gone. The listener is called
    in any thread and must not call this module. Returns the call that ends this."""
    with _LOCK:
        _LISTENERS.append(listener)
        _tell()

    def end() -> None:
        with _LOCK:
            _LISTENERS.remove(listener)

    return end


def _tell() -> None:
    """Tells all listeners, while the lock is held, so that the newest news comes last."""
    gone = frozenset().union(*(history.gone for history in _DEPLOYMENT_TO_HISTORY.values()))
    for listener in _LISTENERS:
        listener(gone)
