"""Where requests wait until a worker, or an encoder of the right kind, is there: `planning.capacity` in the event loop.

Nothing polls. A waiter wakes when the members change, when an exclusion ends, or at its own deadline. Waiters are
released one per turn of the loop, so that the plan of each counts the load of those before it. Knows nothing of plans,
attempts or streams.
"""

from __future__ import annotations

import asyncio

from fabric.clock import Clock
from router.metrics import RouterMetrics
from router.planning.capacity import CapacityQueue, Need, Supply, Waiter


class Wait:
    """One request's wait: await `ended`, and call `leave` in any case, at the latest when the first token is there."""

    def __init__(self, gate: CapacityGate, waiter: Waiter) -> None:
        self.waiter = waiter
        self.waited_s = 0.0
        self._gate = gate
        self._began_s = gate.clock.now()
        self._future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        """Whether the request was released, or its time has passed."""
        return self._future.done()

    async def ended(self) -> bool:
        """Whether what the request needs is there; False once its deadline has passed."""
        outcome = "left"
        try:
            is_served = await self._future
            outcome = "served" if is_served else "expired"
            return is_served
        finally:
            self.waited_s = self._gate.clock.now() - self._began_s
            self._gate.metrics.capacity_wait.labels(outcome).observe(self.waited_s)

    def end(self, is_served: bool) -> None:
        """The wait is over now, whether or not a member came."""
        if not self._future.done():
            self._future.set_result(is_served)

    def leave(self, has_arrived: bool = False) -> None:
        """Gives the place up, among those that wait or those on the way. `has_arrived`: the first token is there.
        Idempotent."""
        self._gate.leave(self, has_arrived)


class CapacityGate:
    """Belongs to the router's event loop."""

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
        """Whether others that waited are to be released before a request of this age."""
        return self._queue.num_waiting > 0 and self._queue.must_wait(age, self.clock.now())

    def join(self, age: tuple[float, str], need: Need, limit_s: float) -> Wait:
        """A place in the queue, for `limit_s` at most."""
        wait = Wait(self, Waiter(age, need, self.clock.now() + limit_s))
        self._waits[wait.waiter] = wait
        self._queue.join(wait.waiter)
        self.changed()
        return wait

    def changed(self) -> None:
        """Members came or went, or somebody on the way has arrived: those who can be served are released, in the next
        turns of the loop."""
        if self._queue.num_waiting and not self._is_releasing:
            self._is_releasing = True
            asyncio.get_running_loop().call_soon(self._release)

    def leave(self, wait: Wait, has_arrived: bool) -> None:
        """Called by waits."""
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
        """Ends one wait, and comes back in the next turn; without any that can end, at the next moment that matters."""
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
