"""Reads from a request whether and how its answer is spoken. The module knows nothing of how speech is made.

What would make text and sound differ is refused: a stop string cuts the text after the talker has read it, and several
choices would need several voices at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from fabric.contracts import InvalidRequest
from router.api import ChatRequest
from router.router_config import RouterConfig

MAX_SEED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SpeechOptions:
    """Holds how the answer of one request is spoken."""

    voice: str
    initial_codec_chunk_frames: int | None = None
    """Sets the number of codec frames in the first chunk; None leaves it to the talker's load."""

    def to_stage(self, seed: int) -> dict[str, str | int | float]:
        """Returns the options as the stages take them (`StageRequest.options`). `seed` is that of the request's
        tokens."""
        options: dict[str, str | int | float] = {"voice": self.voice, "seed": seed & MAX_SEED}
        if self.initial_codec_chunk_frames is not None:
            options["initial_codec_chunk_frames"] = self.initial_codec_chunk_frames
        return options


def speech_of(chat: ChatRequest, config: RouterConfig) -> SpeechOptions | None:
    """Returns how the answer is spoken, or None if the client wants text alone. Raises InvalidRequest, naming the
    field, for what can't be honoured."""
    if not chat.wants_audio:
        return None
    settings = config.speech
    if settings is None:
        message = "this server gives no speech: its model has no voice, or `stages` is not set in its config"
        raise InvalidRequest(message, param="modalities")
    if chat.num_choices > 1:
        raise InvalidRequest("a spoken answer has one choice; leave out `n`", param="n")
    if chat.stop:
        message = "`stop` has no effect on what was spoken already; leave it out, or ask for text alone"
        raise InvalidRequest(message, param="stop")
    audio = chat.audio
    voice = settings.default_voice if audio is None or audio.voice is None else audio.voice
    if voice.lower() not in settings.voices:
        known = ", ".join(settings.voices)
        raise InvalidRequest(f"the voice {voice!r} does not exist; this model has {known}", param="audio.voice")
    if chat.stream and audio is not None and audio.format not in (None, "pcm16"):
        message = f"a stream has sound as `pcm16` only, not `{audio.format}`; leave out `stream`, or ask for `pcm16`"
        raise InvalidRequest(message, param="audio.format")
    return SpeechOptions(voice.lower(), chat.initial_codec_chunk_frames)
