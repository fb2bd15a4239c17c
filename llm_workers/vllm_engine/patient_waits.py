"""Lets the engine core sleep while ranks on a CPU compute, in place of spinning.

vLLM's engine core asks for the answer of a rank again and again, for up to a second, and only then waits for a message
that wakes it. That takes a whole core, which ranks on GPUs do not need. Ranks on a CPU do: on a machine with few cores,
whatever else runs there, the router for example, then takes its time from the ranks.

This module knows nothing of vLLM but the four names of `SpinCondition`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

SPIN_S = 0.002
"""Limits how long the engine core spins after a message. Steps of tiny models are over by then."""
SLEEP_S = 0.0001
"""Each sleep lasts this long, to which the system adds about half. On average, an answer is noticed 0.1 ms late."""


class SpinCondition(Protocol):
    """This is what is used of the class with this name in `vllm.distributed.device_communicators.shm_broadcast`. A
    queue calls `wait` until there is a message, and notes the moment of each in `last_read`."""

    last_read: float
    """Holds a moment of `time.monotonic`."""
    busy_loop_s: float
    """Holds how long after `last_read` `wait` returns at once."""
    wait: Callable[..., None]


def wait_patiently(
    condition: SpinCondition,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Replaces the `wait` of a condition: from `SPIN_S` after its last message on, it sleeps where it spun."""
    spin_or_poll = condition.wait

    def wait(*args: Any, **kwargs: Any) -> None:
        if SPIN_S < now_s() - condition.last_read <= condition.busy_loop_s:
            sleep(SLEEP_S)
        else:
            spin_or_poll(*args, **kwargs)

    condition.wait = wait
