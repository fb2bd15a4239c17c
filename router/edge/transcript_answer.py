"""Writes the answer of `/v1/audio/transcriptions` from the deltas of its request.

The module knows nothing of HTTP connections.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fabric.contracts import WeftError
from modalities.answers import TextPiece
from router.api import Transcription, Usage, error_event, sse_event
from router.edge.answers import PieceReader
from router.run import Delta, JoinedStreams


class TranscriptAnswer:
    """Writes a transcript. What the model thinks before it is left out."""

    def __init__(self, source: JoinedStreams, asked: Transcription) -> None:
        self._form, self._language = asked.form, asked.language  # The request itself holds the sound.
        self._source = source
        self._reader = PieceReader(source)
        self._texts: list[str] = []

    def opening(self) -> bytes:
        return b""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        texts = self._read(deltas)
        return b"".join(sse_event({"type": "transcript.text.delta", "delta": text}) for text in texts)

    def closing(self) -> bytes:
        done = {"type": "transcript.text.done", "text": self._text}
        return sse_event(done | {"usage": _usage(self._reader.usage())})

    def failure(self, error: WeftError) -> bytes:
        return error_event(error)

    def take(self, deltas: Sequence[Delta]) -> None:
        self._read(deltas)

    def whole(self) -> bytes:
        if self._form == "text":
            return f"{self._text}\n".encode()
        if self._form == "verbose_json":
            return msgspec.json.encode(self._verbose())
        return msgspec.json.encode({"text": self._text, "usage": _usage(self._reader.usage())})

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

    def _read(self, deltas: Sequence[Delta]) -> list[str]:
        pieces = [piece for delta in deltas for piece in self._reader.pieces(delta)]
        texts = [piece.text for piece in pieces if isinstance(piece, TextPiece)]
        self._texts += texts
        return texts


def _usage(usage: Usage) -> dict[str, object]:
    num_audio = usage.modality_to_tokens.get("audio", 0)
    return {
        "type": "tokens",
        "input_tokens": usage.num_prompt_tokens,
        "input_token_details": {"text_tokens": usage.num_prompt_tokens - num_audio, "audio_tokens": num_audio},
        "output_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }
