"""Defines the request of `/v1/audio/speech`, and turns it into a chat request whose answer is given: the model reads it
aloud. The module checks shapes only."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from fabric.contracts import InvalidRequest
from router.api.audio_formats import PCM
from router.api.chat_message import ChatMessage
from router.api.chat_request import MAX_FIRST_CHUNK_FRAMES, MAX_VOICE_CHARS, AudioOutput, ChatRequest
from router.api.request_body import parse_body

MAX_INPUT_CHARS = 4096
"""Is OpenAI's limit."""
SpeechFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]


class SpeechRequest(BaseModel):
    """A `SpeechRequest` asks for a text read aloud."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    model: str
    input: str = Field(min_length=1, max_length=MAX_INPUT_CHARS)
    voice: str | None = Field(None, min_length=1, max_length=MAX_VOICE_CHARS)
    """Names one of the model's voices; without it, the model's first one speaks."""
    response_format: SpeechFormat = "mp3"
    """Is the form of the sound; `pcm` is int16, little-endian, one channel."""
    stream_format: Literal["audio", "sse"] = "audio"
    """Says how a streamed answer comes: as the sound itself, or as server-sent events."""
    stream: bool | None = None
    """Asks for the sound while it is made (vLLM's extension); `stream_format: sse` implies it."""
    speed: float | None = Field(None, ge=0.25, le=4.0)
    instructions: str | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    initial_codec_chunk_frames: int | None = Field(None, ge=1, le=MAX_FIRST_CHUNK_FRAMES)
    user: str | None = None


class ReadAloud(ChatRequest):
    """A `ReadAloud` is a chat request whose answer is given, so that only its speech is made."""

    given_answer: str

    @property
    def answer_text(self) -> str | None:
        return self.given_answer


class Speech(NamedTuple):
    """A `Speech` is what the body of a request asks for."""

    chat: ReadAloud
    form: str
    """Names the format (`router.api.audio_formats`)."""
    is_streamed: bool
    has_events: bool
    """Says whether a streamed answer consists of server-sent events."""

    def place(self, text: str) -> str:
        """Returns the name of a field of the chat as the body has it."""
        if text.startswith("messages"):
            return "input"
        return {"audio.voice": "voice", "modalities": "model"}.get(text, text)


def parse_speech(body: bytes) -> Speech:
    """Parses and checks the body of a request. Raises InvalidRequest, whose `param` names the offending field."""
    asked = parse_body(SpeechRequest, body)
    if asked.speed not in (None, 1.0):
        raise InvalidRequest("`speed` is not supported: the model speaks at one speed", param="speed")
    if asked.instructions:
        raise InvalidRequest("`instructions` are not supported by this model's voices", param="instructions")
    form = PCM if asked.response_format == "pcm" else asked.response_format
    is_streamed = bool(asked.stream) or asked.stream_format == "sse"
    if is_streamed and form not in (PCM, "wav"):
        message = f"a stream has sound as `pcm` or `wav` only, not `{asked.response_format}`"
        raise InvalidRequest(message, param="response_format")
    chat = ReadAloud(
        model=asked.model,
        messages=[ChatMessage(role="user", content="")],
        modalities=["text", "audio"],
        audio=AudioOutput(voice=asked.voice),
        initial_codec_chunk_frames=asked.initial_codec_chunk_frames,
        seed=asked.seed,
        user=asked.user,
        given_answer=asked.input,
    )
    return Speech(chat, form, is_streamed, asked.stream_format == "sse")
