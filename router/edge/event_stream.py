"""Sends a streamed answer: server-sent events, or the samples of a sound. The module knows nothing of the meaning of
what it sends, which an `AnswerWriter` writes.
"""

from __future__ import annotations

from contextlib import closing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fabric.contracts import Aborted, WeftError
from router.edge.answers import AnswerWriter
from router.edge.connection import ClientWatch, note_answer, note_failure
from router.edge.paced_writer import PacedWriter
from router.edge.tickets import Tickets
from router.run import JoinedStreams

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
"""The header `x-accel-buffering` keeps proxies (nginx) from collecting the stream."""


class EventStream(Response):
    """An `EventStream` sends one answer while it is made. A slow reader delays only its own stream: while the socket is
    full, nothing is taken from the request's buffer.

    It owns the request's stream, its tickets and the client watch, and closes all of them when the response ends,
    however it ends."""

    def __init__(
        self,
        stream: JoinedStreams,
        writer: AnswerWriter,
        headers: dict[str, str],
        watch: ClientWatch,
        tickets: Tickets,
        write_timeout_s: float,
    ) -> None:
        super().__init__(headers=None)
        self._stream = stream
        self._writer = writer
        self._sent_headers = HEADERS | headers
        self._watch = watch
        self._tickets = tickets
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
            self._tickets.release()

    async def _write_all(self, send: Send) -> WeftError | None:
        """Writes the whole answer. Returns the error that ended the stream early, after sending it to the client, or
        None."""
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._sent_headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        with closing(PacedWriter(send, self._write_timeout_s)) as paced:
            return await self._write_body(paced)

    async def _write_body(self, paced: PacedWriter) -> WeftError | None:
        writer = self._writer
        await paced.write(writer.opening())
        try:
            async for deltas in self._stream:
                await paced.write(writer.events(deltas))
        except WeftError as error:
            told = writer.failure(error)
            if told is not None:  # Otherwise the answer stays without its end, and the server cuts the connection.
                await paced.write(told, is_last=True)
            return error
        await paced.write(writer.closing(), is_last=True)
        return None
