"""Keeps the virtual time of a simulation: a heap of events, which is also the event loop in which the encoder's
production pipeline runs.

Events at one time run in the order in which they were scheduled, so a simulation depends on its random seed alone. The
loop implements the part of `asyncio.AbstractEventLoop` that tasks and futures need. It has no sockets, no threads and
no other clock, and it knows nothing of what the events mean.
"""

from __future__ import annotations

import asyncio
import contextvars
from asyncio import events as asyncio_events
from collections import deque
from collections.abc import Callable, Coroutine
from heapq import heappop, heappush
from typing import Any, TypeVar

Result = TypeVar("Result")


class VirtualLoop(asyncio.AbstractEventLoop):
    """A `VirtualLoop` runs events in the order of their virtual times. It is a `Clock` as well."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._num_scheduled = 0
        self._heap: list[tuple[float, int, asyncio.Handle]] = []
        self._ready: deque[asyncio.Handle] = deque()
        self.num_events = 0
        """Counts the events that have run."""
        self.errors: list[BaseException] = []
        """Holds errors of tasks that no caller awaited; a simulation must have none."""

    # ------------------------------------------------------------ time

    def now(self) -> float:
        return self._now_s

    def time(self) -> float:
        return self._now_s

    def at(self, when_s: float, run: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        """Schedules an event at a virtual time in seconds; an event in the past runs now. Returns the handle that
        cancels the event."""
        handle = asyncio.TimerHandle(when_s, run, arguments, self, _CONTEXT)
        self._num_scheduled += 1
        heappush(self._heap, (max(when_s, self._now_s), self._num_scheduled, handle))
        return handle

    def after(self, delay_s: float, run: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        return self.at(self._now_s + delay_s, run, *arguments)

    def soon(self, run: Callable[..., object], *arguments: Any) -> None:
        """Schedules an event at the present time, after those that are ready."""
        self._ready.append(asyncio.Handle(run, arguments, self, _CONTEXT))

    def run_while(self, is_going_on: Callable[[], bool]) -> None:
        """Runs events until the condition is false or no event is left. Raises the first error of an event or task."""
        asyncio_events._set_running_loop(self)
        try:
            ready, heap = self._ready, self._heap
            while is_going_on():
                if ready:
                    handle = ready.popleft()
                elif heap:
                    when_s, _, handle = heappop(heap)
                    if handle.cancelled():
                        continue
                    self._now_s = when_s
                else:
                    return
                if not handle.cancelled():
                    self.num_events += 1
                    handle._run()
                if self.errors:
                    raise self.errors[0]
        finally:
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
    ) -> asyncio.TimerHandle:
        return self.after(delay, callback, *args)

    def call_at(  # type: ignore[override]  # as above
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
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
