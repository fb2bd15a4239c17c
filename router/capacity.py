"""Lets requests wait until a worker, or an encoder of the right kind, is there. It runs `planning.capacity` in the
event loop.

Nothing polls. A waiting request wakes when the members change, when an exclusion ends, or at its own deadline. Each
turn of the loop releases one request, so that the plan of each counts the load of those released before it. The module
knows nothing of plans, attempts or streams.
"""

from __future__ import annotations

import asyncio

from fabric.clock import Clock
from router.metrics import RouterMetrics
from router.planning.capacity import CapacityNeed, CapacityQueue, Supply, Waiter


class Wait:
    """A `Wait` is one request's stay in the queue. Its owner awaits `ended`, and calls `leave` in any case, at the
    latest when the first token is there."""

    def __init__(self, gate: CapacityGate, waiter: Waiter) -> None:
        self.waiter = waiter
        self.waited_s = 0.0
        self._gate = gate
        self._began_s = gate.clock.now()
        self._future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        """Tells whether the request was released, or its time has passed."""
        return self._future.done()

    async def ended(self) -> bool:
        """Waits for the end, and returns whether the members that the request needs are there; False means that its
        deadline passed first. Records the time waited in the metrics."""
        outcome = "left"
        try:
            is_served = await self._future
            outcome = "served" if is_served else "expired"
            return is_served
        finally:
            self.waited_s = self._gate.clock.now() - self._began_s
            self._gate.metrics.capacity_wait.labels(outcome).observe(self.waited_s)

    def end(self, is_served: bool) -> None:
        """Ends the wait now with the outcome `is_served`, whether or not a member came. Has no effect once the wait is
        over."""
        if not self._future.done():
            self._future.set_result(is_served)

    def leave(self, has_arrived: bool = False) -> None:
        """Gives up the place in the queue, or the place among released requests that have no token yet. `has_arrived`
        says that the first token is there. The method is idempotent."""
        self._gate.leave(self, has_arrived)


class CapacityGate:
    """A `CapacityGate` holds the queue of waiting requests. It belongs to the router's event loop."""

    def __init__(self, supply: Supply, clock: Clock, metrics: RouterMetrics) -> None:
        self.clock, self.metrics = clock, metrics
        self._queue = CapacityQueue(supply)
        self._waits: dict[Waiter, Wait] = {}
        self._is_releasing = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    def must_wait(self, age: tuple[float, str]) -> bool:
        """Returns whether requests that already wait must be released ahead of a request of this age."""
        return self._queue.num_waiting > 0 and self._queue.must_wait(age, self.clock.now())

    def join(self, age: tuple[float, str], need: CapacityNeed, limit_s: float) -> Wait:
        """Adds a request to the queue for at most `limit_s` seconds, and returns its wait."""
        wait = Wait(self, Waiter(age, need, self.clock.now() + limit_s))
        self._waits[wait.waiter] = wait
        self._queue.join(wait.waiter)
        self.changed()
        return wait

    def changed(self) -> None:
        """Releases, in the next turns of the loop, the requests that can be served now. It is called when members
        joined or left, and when a released request gave up its place or got its first token."""
        if self._queue.num_waiting and not self._is_releasing:
            self._is_releasing = True
            asyncio.get_running_loop().call_soon(self._release)

    def leave(self, wait: Wait, has_arrived: bool) -> None:
        """Frees the place of a wait; waits call it."""
        if self._waits.pop(wait.waiter, None) is not None:
            self._queue.leave(wait.waiter, has_arrived)
            self.changed()
            if not self._queue.num_waiting:
                self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _release(self) -> None:
        """Ends one wait and runs again in the next turn of the loop. If no wait can end now, sets a timer for the next
        moment at which one may."""
        loop = asyncio.get_running_loop()
        self._stop_timer()
        turn = self._queue.take(self.clock.now())
        if turn is not None:
            self._waits[turn.waiter].end(turn.is_served)
            loop.call_soon(self._release)
            return
        self._is_releasing = False
        now = self.clock.now()
        at_s = self._queue.next_at_s(now)
        if at_s is not None:
            self._timer = loop.call_later(max(0.0, at_s - now), self.changed)
