"""Keeps the virtual time of a simulation: a heap of events, which is also the event loop in which the encoder's
production pipeline runs.

Events at one time run in the order in which they were scheduled, so a simulation depends on its random seed alone. The
loop implements the part of `asyncio.AbstractEventLoop` that tasks and futures need. It has no sockets, no threads and
no other clock, and it knows nothing of what the events mean.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
from asyncio import events as asyncio_events
from collections import deque
from collections.abc import Callable, Coroutine
from heapq import heappop, heappush
from typing import Any, TypeVar

Result = TypeVar("Result")
GC_THRESHOLDS = (200_000, 20, 50)
"""Sets how rarely the garbage collector runs during a simulation. Almost nothing in it forms cycles, and with the
default thresholds the collector takes a tenth of the time of a large cluster."""


class SimEvent:
    """A `SimEvent` is a call at a virtual time. It is what the loop needs of an `asyncio.TimerHandle`, at a third of
    its cost: it has no context and does not catch the error of the call, which ends the run."""

    __slots__ = ("_arguments", "_call", "_is_cancelled")

    def __init__(self, call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._call, self._arguments, self._is_cancelled = call, arguments, False

    def cancel(self) -> None:
        self._is_cancelled = True

    def cancelled(self) -> bool:
        return self._is_cancelled

    def _run(self) -> None:
        self._call(*self._arguments)


class VirtualLoop(asyncio.AbstractEventLoop):
    """A `VirtualLoop` runs events in the order of their virtual times. It is a `Clock` as well."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._num_scheduled = 0
        self._heap: list[tuple[float, int, SimEvent]] = []
        self._ready: deque[asyncio.Handle | SimEvent] = deque()
        self.num_events = 0
        """Counts the events that have run."""
        self.errors: list[BaseException] = []
        """Holds errors of tasks that no caller awaited; a simulation must have none."""

    # ------------------------------------------------------------ time

    def now(self) -> float:
        return self._now_s

    def time(self) -> float:
        return self._now_s

    def at(self, when_s: float, run: Callable[..., object], *arguments: Any) -> SimEvent:
        """Schedules an event at a virtual time in seconds; an event in the past runs now. Returns the event, which the
        caller may cancel."""
        event = SimEvent(run, arguments)
        self._num_scheduled = number = self._num_scheduled + 1
        heappush(self._heap, (when_s if when_s > self._now_s else self._now_s, number, event))
        return event

    def after(self, delay_s: float, run: Callable[..., object], *arguments: Any) -> SimEvent:
        return self.at(self._now_s + delay_s, run, *arguments)

    def soon(self, run: Callable[..., object], *arguments: Any) -> None:
        """Schedules an event at the present time, after those that are ready."""
        self._ready.append(SimEvent(run, arguments))

    def run_while(self, is_going_on: Callable[[], bool]) -> None:
        """Runs events until the condition is false or no event is left. Raises the first error of an event or task."""
        asyncio_events._set_running_loop(self)
        thresholds = gc.get_threshold()
        gc.set_threshold(*GC_THRESHOLDS)
        try:
            ready, heap = self._ready, self._heap
            while is_going_on():
                event: asyncio.Handle | SimEvent
                if ready:
                    event = ready.popleft()
                    if event.cancelled():
                        continue
                elif heap:
                    when_s, _, event = heappop(heap)
                    if event._is_cancelled:
                        continue
                    self._now_s = when_s
                else:
                    return
                self.num_events += 1
                event._run()
                if self.errors:
                    raise self.errors[0]
        finally:
            gc.set_threshold(*thresholds)
            asyncio_events._set_running_loop(None)

    # ------------------------------------------------------------ what tasks and futures need

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]  # the simulator passes no name and no context
        self, coro: Coroutine[Any, Any, Result], **options: Any
    ) -> asyncio.Task[Result]:
        return asyncio.Task(coro, loop=self, **options)

    def call_soon(  # type: ignore[override]  # the signatures of asyncio bind the arguments' types
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context or _CONTEXT)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]  # there is one thread
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]  # as above
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> SimEvent:
        return self.after(delay, callback, *args)

    def call_at(  # type: ignore[override]  # as above
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> SimEvent:
        return self.at(when, callback, *args)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: a cancelled event is skipped when its time comes."""

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Takes an error that no event handled; the run ends with it."""
        self.errors.append(context.get("exception") or RuntimeError(str(context.get("message"))))


_CONTEXT = contextvars.Context()
"""All events share one context, because nothing in a simulation reads context variables."""
