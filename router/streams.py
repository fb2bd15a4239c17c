"""A stream connects a request's attempts, which write as tokens come, with one reader, which takes text when it can.

A slow reader delays nothing else: text that it has not taken is joined, so the buffer is one text per choice, no longer
than the choice itself. Exactly one call of `finish` or `fail` ends a stream. The module knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fabric.errors import Aborted, WeftError
from fabric.ids import RequestId
from router.api.response import Usage
from router.choices import ChoiceOutput
from router.degradation import StepDown


class Delta(NamedTuple):
    """A `Delta` is the new text of one choice. `finish_reason` comes once, with the choice's last text."""

    choice: int
    text: str
    finish_reason: str | None


class _Pending:
    """Holds what the reader has not taken yet of one choice."""

    __slots__ = ("finish_reason", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.finish_reason: str | None = None


class RequestStream:
    """A `RequestStream` is read with `async for deltas in stream`, which ends after the terminal event; `usage` is set
    then. A failure is raised after everything that came before it was read."""

    def __init__(
        self,
        request_id: RequestId,
        choices: Sequence[ChoiceOutput],
        on_close: Callable[[], None],
        prompt_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.degraded: tuple[StepDown, ...] = ()
        """Lists the media that the model did not get as they were sent. It is fixed once the stream is started."""
        self.choices = tuple(choices)
        self.usage: Usage | None = None
        self._error: WeftError | None = None
        self._pending: list[_Pending | None] = [_Pending() for _ in choices]
        """Holds None for a choice once its finish was read."""
        self._on_close = on_close
        self._news = asyncio.Event()
        self._started = asyncio.Event()

    # ------------------------------------------------------------ the writer's side

    def write(self, choice: int, text: str) -> None:
        """Adds text of a choice, possibly empty; takes the finish reason from the choice. A write counts as the first
        event."""
        pending = self._pending[choice]
        if pending is not None:
            if text:
                pending.texts.append(text)
            pending.finish_reason = self.choices[choice].finish_reason
        self._started.set()
        self._news.set()

    def restart(self, prompt_token_ids: tuple[int, ...], degraded: tuple[StepDown, ...]) -> None:
        """Continues the request with another prompt. It is allowed only before the first token."""
        assert not self.is_started, "an answer is about one prompt"
        self.prompt_token_ids, self.degraded = prompt_token_ids, degraded

    def finish(self, usage: Usage) -> None:
        """Ends the stream of a request that was served. Later calls of `finish` or `fail` change nothing."""
        if not self.is_ended:
            self.usage = usage
            self._end()

    def fail(self, error: WeftError) -> None:
        if not self.is_ended:
            self._error = error
            self._end()

    @property
    def is_ended(self) -> bool:
        return self.usage is not None or self._error is not None

    @property
    def is_started(self) -> bool:
        return self._started.is_set()

    @property
    def error(self) -> WeftError | None:
        return self._error

    @property
    def are_choices_finished(self) -> bool:
        return all(choice.is_finished for choice in self.choices)

    def _end(self) -> None:
        self._started.set()
        self._news.set()

    # ------------------------------------------------------------ the reader's side

    async def started(self) -> None:
        """Waits until the first token is there. Raises the failure if that came first."""
        await self._started.wait()
        if self._error is not None and not self._has_news():
            raise self._error

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[Delta]:
        """Returns everything new since the last call, at most one delta per choice."""
        while True:
            await self._news.wait()
            self._news.clear()
            deltas = self._take()
            if self.is_ended:
                self._news.set()
            if deltas:
                return deltas
            if self._error is not None:
                raise self._error
            if self.usage is not None:
                raise StopAsyncIteration

    def close(self) -> None:
        """Closes the reader's side when the reader has left or is done. If the request still runs, it ends, and
        everything that it holds is freed."""
        if not self.is_ended:
            self._on_close()
            self.fail(Aborted("the client left"))

    def _has_news(self) -> bool:
        return any(pending is not None and (pending.texts or pending.finish_reason) for pending in self._pending)

    def _take(self) -> list[Delta]:
        deltas: list[Delta] = []
        for choice, pending in enumerate(self._pending):
            if pending is None or not (pending.texts or pending.finish_reason):
                continue
            deltas.append(Delta(choice, "".join(pending.texts), pending.finish_reason))
            pending.texts.clear()
            if pending.finish_reason is not None:
                self._pending[choice] = None
        return deltas
