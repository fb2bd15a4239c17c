"""Writes the answer of `/v1/responses` from the deltas of its request: `ResponsesAnswer` reads the pieces of the answer
and has a `ResponseWriter` put them into OpenAI's format.

The module knows nothing of HTTP connections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fabric.contracts import WeftError
from modalities.answers import AnswerPiece, ReasoningPiece, TextPiece, ToolCallArguments, ToolCallStart
from router.api import Head, ResponsesChat, ResponseWriter, ScoredToken, logprobs_object
from router.edge.answers import AnswerTools, PieceReader
from router.edge.scored_pieces import ScoredPieces
from router.run import Delta, JoinedStreams

Logprobs = Sequence[Mapping[str, object]]


class ResponsesAnswer:
    """Writes a response. A response has one choice."""

    def __init__(self, source: JoinedStreams, asked: ResponsesChat, head: Head, tools: AnswerTools) -> None:
        self._source, self._tools = source, tools
        self._wants_explanation = asked.request.wants_explanation  # The request itself may hold megabytes of media.
        self._writer = ResponseWriter(head, asked.request)
        self._reader = PieceReader(source)
        wants_logprobs = asked.chat.num_top_logprobs is not None
        self._scored = ScoredPieces(source.choices[0], self._reader) if wants_logprobs else None

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
        if self._scored is None:
            for piece in self._reader.pieces(delta):
                yield self._event(piece, ())
        else:
            for piece, tokens in self._scored.read(delta):
                yield self._event(piece, self._logprobs(tokens))
        if delta.finish_reason is not None:
            yield self._writer.finish(delta.finish_reason, self._reader.is_call_open(delta.choice))

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

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> Logprobs:
        content: Any = logprobs_object(tokens, self._tools.bytes_of)["content"]
        return list(content)

    @property
    def _explanation(self) -> dict[str, object] | None:
        return self._source.record() if self._wants_explanation else None
