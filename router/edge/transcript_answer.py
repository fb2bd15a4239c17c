"""Writes the answer of `/v1/audio/transcriptions` from the deltas of its request.

The module knows nothing of HTTP connections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from fabric.contracts import WeftError
from modalities.answers import TextPiece
from router.api import Transcription, Usage, error_event, scores_list, sse_event
from router.edge.answers import AnswerTools, PieceReader
from router.edge.scored_pieces import ScoredPiece, ScoredPieces
from router.run import Delta, JoinedStreams


class TranscriptAnswer:
    """Writes a transcript. What the model thinks before it is left out."""

    def __init__(self, source: JoinedStreams, asked: Transcription, tools: AnswerTools) -> None:
        self._form, self._language = asked.form, asked.language  # The request itself holds the sound.
        self._source, self._tools = source, tools
        self._reader = PieceReader(source)
        self._scored = ScoredPieces(source.choices[0], self._reader) if asked.wants_logprobs else None
        self._texts: list[str] = []
        self._logprobs: list[Mapping[str, object]] = []

    def opening(self) -> bytes:
        return b""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        kind = {"type": "transcript.text.delta"}
        return b"".join(sse_event(kind | {"delta": text} | scores) for text, scores in self._read(deltas))

    def closing(self) -> bytes:
        return sse_event({"type": "transcript.text.done", **self._plain()})

    def failure(self, error: WeftError) -> bytes:
        return error_event(error)

    def take(self, deltas: Sequence[Delta]) -> None:
        for _ in self._read(deltas):
            pass  # The pieces are kept; a whole answer has no events.

    def whole(self) -> bytes:
        if self._form == "text":
            return f"{self._text}\n".encode()
        if self._form == "verbose_json":
            return msgspec.json.encode(self._verbose())
        return msgspec.json.encode(self._plain())

    def _plain(self) -> dict[str, object]:
        fields: dict[str, object] = {"text": self._text, "usage": _usage(self._reader.usage())}
        return fields if self._scored is None else fields | {"logprobs": self._logprobs}

    def _verbose(self) -> dict[str, object]:
        """Returns OpenAI's verbose format without its segments, which need time stamps. Nobody tells the language if
        the client does not."""
        seconds = round(self._source.media_s, 3)
        return {
            "task": "transcribe",
            "language": self._language or "unknown",
            "duration": seconds,
            "text": self._text,
            "usage": {"type": "duration", "seconds": seconds},
        }

    @property
    def _text(self) -> str:
        return "".join(self._texts).strip()

    def _read(self, deltas: Sequence[Delta]) -> Iterator[tuple[str, dict[str, object]]]:
        """Yields the pieces of the text that deltas complete, each with the field of its log-probabilities if the
        client asked for them."""
        for piece, tokens in (scored for delta in deltas for scored in self._pieces(delta)):
            if not isinstance(piece, TextPiece):
                continue
            self._texts.append(piece.text)
            if self._scored is None:
                yield piece.text, {}
            else:
                entries = scores_list(tokens, self._tools.bytes_of)
                self._logprobs += entries
                yield piece.text, {"logprobs": entries}

    def _pieces(self, delta: Delta) -> Sequence[ScoredPiece]:
        if self._scored is None:
            return [ScoredPiece(piece) for piece in self._reader.pieces(delta)]
        return self._scored.read(delta)


def _usage(usage: Usage) -> dict[str, object]:
    num_audio = usage.modality_to_tokens.get("audio", 0)
    return {
        "type": "tokens",
        "input_tokens": usage.num_prompt_tokens,
        "input_token_details": {"text_tokens": usage.num_prompt_tokens - num_audio, "audio_tokens": num_audio},
        "output_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }
