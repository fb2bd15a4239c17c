"""Writes the answer of `/v1/responses` from the deltas of its request: `ResponsesAnswer` reads the pieces of the answer
and has a `ResponseWriter` put them into OpenAI's format.

The module knows nothing of HTTP connections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fabric.contracts import WeftError
from modalities.answers import AnswerPiece, ReasoningPiece, TextPiece, ToolCallArguments, ToolCallStart
from router.api import Head, ResponsesChat, ResponseWriter, logprobs_object
from router.edge.answers import AnswerTools, FreshTokens, PieceReader
from router.run import Delta, JoinedStreams

Logprobs = Sequence[Mapping[str, object]]


class ResponsesAnswer:
    """Writes a response. A response has one choice."""

    def __init__(self, source: JoinedStreams, asked: ResponsesChat, head: Head, tools: AnswerTools) -> None:
        self._source, self._tools = source, tools
        self._wants_explanation = asked.request.wants_explanation  # The request itself may hold megabytes of media.
        self._writer = ResponseWriter(head, asked.request)
        self._fresh = FreshTokens(source, asked.chat)
        self._reader = PieceReader(source)

    def opening(self) -> bytes:
        return self._writer.opening()

    def events(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(event for delta in deltas for event in self._events(delta))

    def closing(self) -> bytes:
        return self._writer.completed(self._reader.usage(), self._source.degraded, self._explanation)

    def failure(self, error: WeftError) -> bytes:
        return self._writer.failed(error)

    def take(self, deltas: Sequence[Delta]) -> None:
        self.events(deltas)

    def whole(self) -> bytes:
        return self._writer.whole(self._reader.usage(), self._source.degraded, self._explanation)

    def _events(self, delta: Delta) -> Iterator[bytes]:
        pieces = self._reader.pieces(delta)
        # Of a delta with several kinds of pieces it is not known which token belongs to which.
        logprobs = self._logprobs() if all(isinstance(piece, TextPiece) for piece in pieces) else self._skipped()
        for piece in pieces:
            yield self._event(piece, logprobs)
            logprobs = ()
        if delta.finish_reason is not None:
            yield self._writer.finish(delta.finish_reason)

    def _event(self, piece: AnswerPiece, logprobs: Logprobs) -> bytes:
        match piece:
            case TextPiece(text):
                return self._writer.text(text, logprobs)
            case ReasoningPiece(text):
                return self._writer.reasoning(text)
            case ToolCallStart(_, name):
                return self._writer.call_start(self._reader.new_call_id(), name)
            case ToolCallArguments(_, text):
                return self._writer.call_arguments(text)

    def _skipped(self) -> Logprobs:
        """Marks the fresh tokens as given out, and returns nothing."""
        if self._fresh.has_logprobs:
            self._fresh.take(0)
        return ()

    def _logprobs(self) -> Logprobs:
        if not self._fresh.has_logprobs:
            return ()
        _, scored = self._fresh.take(0)
        content: Any = logprobs_object(scored, self._tools.bytes_of)["content"]
        return list(content)

    @property
    def _explanation(self) -> dict[str, object] | None:
        return self._source.record() if self._wants_explanation else None
