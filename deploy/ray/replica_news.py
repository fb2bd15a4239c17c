"""Tells a router which replicas Serve has stopped to route to, at the moment at which Serve says it.

Serve's own routers live in the process of Weft's router, on a loop of their own, and learn of a stopping replica before
anyone else. Their class (`ray_pools.PinnedRequestRouter`) travels by value, so what it shares with the process stands
in this module, which does not.

The module knows nothing of what is served, or of what a router does with the news.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

_LOCK = threading.Lock()
_SEEN: dict[str, set[str]] = {}
"""Holds the ids of all replicas that Serve has routed to, by deployment."""
_GONE: dict[str, frozenset[str]] = {}
_LISTENERS: list[Callable[[frozenset[str]], None]] = []


def update(deployment: str, running: Iterable[str]) -> None:
    """Takes the ids of the replicas to which Serve routes now. Any thread may call it."""
    with _LOCK:
        present = set(running)
        seen = _SEEN.setdefault(deployment, set())
        seen |= present
        gone = frozenset(seen - present)
        if gone == _GONE.get(deployment, frozenset()):
            return
        _GONE[deployment] = gone
        _tell()


def subscribe(listener: Callable[[frozenset[str]], None]) -> Callable[[], None]:
    """Calls `listener` at once and after each change with the ids of all replicas that were there and to which Serve
    routes no longer. It is called in any thread and must not call this module. Returns the call that ends this."""
    with _LOCK:
        _LISTENERS.append(listener)
        _tell()

    def end() -> None:
        with _LOCK:
            _LISTENERS.remove(listener)

    return end


def _tell() -> None:
    """Tells all listeners, while the lock is held, so that the newest news comes last."""
    gone = frozenset().union(*_GONE.values())
    for listener in _LISTENERS:
        listener(gone)
