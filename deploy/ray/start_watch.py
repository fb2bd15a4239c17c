"""Watches a cluster on Ray while it starts: asks the directory what the members have told, and passes it on for people.

The directory is asked from a thread, because Serve blocks until its replicas are there. The module knows nothing of
where it is shown.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from deploy.start_phases import StartState, ToldPhase, start_state, with_silent

POLL_S = 0.5
ANSWER_S = 5.0

ShowState = Callable[[StartState], None]


@contextlib.contextmanager
def watched_start(directory: Any, wanted: Mapping[str, int], show: ShowState) -> Iterator[None]:
    """Passes to `show` what the cluster waits for, again and again until the block ends. `wanted` maps kinds of members
    to their numbers."""
    has_ended = threading.Event()

    was_ready: set[str] = set()

    def watch() -> None:
        while not has_ended.wait(POLL_S):
            try:
                members, told = ray.get([directory.members.remote(), directory.starting.remote()], timeout=ANSWER_S)
            except (RayError, TimeoutError):  # The directory is busy, or it ends with the cluster.
                continue
            ready = [ToldPhase(member.kind, str(member.member_id), "") for member in members]
            was_ready.update(each.name for each in ready)
            if not has_ended.is_set():
                show(start_state(wanted, ready, with_silent(told, was_ready)))

    thread = threading.Thread(target=watch, name="weft-start-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
