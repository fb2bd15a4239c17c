"""Sends a streamed answer as server-sent events: role, content, finish, usage if the client asked for it, `[DONE]`.

A slow reader delays only its own stream: while the socket is full, nothing is taken from the request's buffer. The
module knows nothing of workers or attempts.
"""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fabric.errors import Aborted, WeftError
from router.access_log import note_answer, note_failure
from router.admission import Ticket
from router.api.response import DONE, ChunkWriter, error_event
from router.connection import ClientWatch
from router.streams import RequestStream
from router.token_details import TokenDetails

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
"""The header `x-accel-buffering` keeps proxies (nginx) from collecting the stream."""


class EventStream(Response):
    """Owns the request's stream, its ticket and the client watch. It closes all of them when the response ends, however
    it ends."""

    def __init__(
        self,
        stream: RequestStream,
        writer: ChunkWriter,
        details: TokenDetails,
        headers: dict[str, str],
        watch: ClientWatch,
        ticket: Ticket,
        write_timeout_s: float,
    ) -> None:
        super().__init__(headers=None)
        self._stream = stream
        self._writer = writer
        self._details = details
        self._sent_headers = HEADERS | headers
        self._watch = watch
        self._ticket = ticket
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            failure = await self._watch.race(self._write_all(send))
        except (Aborted, OSError):
            note_failure(scope, Aborted("the client left"))
        else:
            if failure is None:
                note_answer(scope, self._stream)
            else:
                note_failure(scope, failure)
        finally:
            self._stream.close()
            self._watch.close()
            self._ticket.release()

    async def _write_all(self, send: Send) -> WeftError | None:
        """Writes the whole answer. Returns the error that ended the stream early, after sending it to the client, or
        None."""
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._sent_headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        writer, details = self._writer, self._details
        choices = range(len(self._stream.choices))
        await self._write(send, b"".join(writer.role(choice, details.prompt_token_ids) for choice in choices))
        degraded = [step.to_json() for step in self._stream.degraded]
        try:
            async for deltas in self._stream:
                events: list[bytes] = []
                for delta in deltas:
                    if delta.text:
                        events.append(writer.text(delta.choice, delta.text, details.fresh(delta.choice)))
                    if delta.finish_reason is not None:
                        fresh = details.fresh(delta.choice)
                        events.append(writer.finish(delta.choice, delta.finish_reason, fresh, degraded))
                await self._write(send, b"".join(events))
        except WeftError as error:
            await self._write(send, error_event(error), is_last=True)
            return error
        assert self._stream.usage is not None
        usage = writer.usage(self._stream.usage, degraded) if writer.has_usage_chunk else b""
        await self._write(send, usage + DONE, is_last=True)
        return None

    async def _write(self, send: Send, data: bytes, is_last: bool = False) -> None:
        """Sends `data`, and waits while the socket is full. Raises Aborted if the client takes nothing for too long."""
        if not data and not is_last:
            return
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await send({"type": "http.response.body", "body": data, "more_body": not is_last})
        except TimeoutError:
            raise Aborted("the client reads nothing") from None
