"""Writes answers that are heard: chat completions with sound (`SpokenChatAnswer`), and texts read aloud
(`ReadAloudAnswer`), whole or streamed. The module knows nothing of HTTP connections, or of how speech is made."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator, Mapping, Sequence

from fabric.contracts import WeftError
from router.api import (
    PCM,
    WAV,
    ChatRequest,
    ChoiceText,
    ChunkWriter,
    Head,
    Speech,
    encoded_audio,
    error_event,
    sse_event,
    wav_header,
)
from router.edge.answers import AnswerTools, ChatAnswer
from router.run import Delta, JoinedStreams

KEPT_S = 0
"""Sounds are not kept, so the time at which a sound expires (`expires_at`) is the time of its answer."""


class SpokenChunkWriter(ChunkWriter):
    """A `SpokenChunkWriter` writes the text of an answer as the transcript of its sound."""

    def __init__(self, head: Head, has_usage_chunk: bool, audio_id: str) -> None:
        super().__init__(head, has_usage_chunk)
        self._audio_id = audio_id

    def role(self, choice: int, prompt_token_ids: Sequence[int] | None = None) -> bytes:
        extra = {} if prompt_token_ids is None else {"prompt_token_ids": prompt_token_ids}
        return self._chunk(choice, {"role": "assistant", "content": None, "refusal": None}, None, extra=extra)

    def text(self, choice: int, text: str, details: dict[str, object] | None = None) -> bytes:
        return self._chunk(choice, {"audio": {"id": self._audio_id, "transcript": text}}, None, details)

    def sound(self, choice: int, samples: bytes) -> bytes:
        """Returns the chunk with the next samples."""
        data = base64.b64encode(samples).decode()
        return self._chunk(choice, {"audio": {"id": self._audio_id, "data": data}}, None)

    def sound_end(self, choice: int, expires_at: int) -> bytes:
        """Returns the chunk after the last samples."""
        return self._chunk(choice, {"audio": {"id": self._audio_id, "expires_at": expires_at}}, None)


class SpokenChatAnswer(ChatAnswer):
    """Writes a chat completion that is spoken. The text of a batch goes before its sound, and the finish after both."""

    def __init__(self, source: JoinedStreams, request: ChatRequest, head: Head, tools: AnswerTools) -> None:
        super().__init__(source, request, head, tools)
        self._audio_id = f"audio_{secrets.token_hex(12)}"
        self._spoken = SpokenChunkWriter(head, request.wants_usage_chunk, self._audio_id)
        self._writer = self._spoken
        self._form = WAV if request.audio is None or request.audio.format is None else request.audio.format
        self._pieces: list[bytes] = []

    def take(self, deltas: Sequence[Delta]) -> None:
        super().take(deltas)
        self._pieces += [delta.samples for delta in deltas if delta.samples]

    def _events(self, delta: Delta) -> Iterator[bytes]:
        if delta.text or not (delta.samples or delta.finish_reason):
            yield from super()._events(delta._replace(finish_reason=None))
        if delta.samples:
            yield self._spoken.sound(delta.choice, delta.samples)
        if delta.finish_reason is not None:
            yield self._spoken.sound_end(delta.choice, self._head.created + KEPT_S)
            yield from super()._events(delta._replace(text=""))

    def _choice_text(self, at: int) -> ChoiceText:
        whole = super()._choice_text(at)
        data = encoded_audio(b"".join(self._pieces), self._source.sample_rate, self._form)
        audio: Mapping[str, object] = {
            "id": self._audio_id,
            "data": base64.b64encode(data).decode(),
            "expires_at": self._head.created + KEPT_S,
            "transcript": whole.text,
        }
        return whole._replace(text="", audio=audio)


class ReadAloudAnswer:
    """Writes the sound of a given text: a file, or a stream of samples or of server-sent events."""

    def __init__(self, source: JoinedStreams, asked: Speech) -> None:
        self._source, self._form, self._has_events = source, asked.form, asked.has_events
        self._pieces: list[bytes] = []
        self._is_begun = False

    def opening(self) -> bytes:
        return b"" if self._has_events or self._form == PCM else wav_header(self._source.sample_rate)

    def events(self, deltas: Sequence[Delta]) -> bytes:
        samples = b"".join(delta.samples for delta in deltas)
        if not samples or not self._has_events:
            return samples
        if self._form == WAV and not self._is_begun:
            samples = wav_header(self._source.sample_rate) + samples
        self._is_begun = True
        return sse_event({"type": "speech.audio.delta", "audio": base64.b64encode(samples).decode()})

    def closing(self) -> bytes:
        usage = self._source.usage
        assert usage is not None
        if not self._has_events:
            return b""
        num_input = usage.num_completion_tokens  # The answer is what the client has sent.
        counts = {"input_tokens": num_input, "output_tokens": 0, "total_tokens": num_input}
        return sse_event({"type": "speech.audio.done", "usage": counts})

    def failure(self, error: WeftError) -> bytes | None:
        """Returns the event of a failure. A stream of samples can't tell of one, so its connection is cut."""
        return error_event(error) if self._has_events else None

    def take(self, deltas: Sequence[Delta]) -> None:
        self._pieces += [delta.samples for delta in deltas]

    def whole(self) -> bytes:
        return encoded_audio(b"".join(self._pieces), self._source.sample_rate, self._form)
