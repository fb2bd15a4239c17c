"""Reads what a client chose for its speech: the voice, and how codes are drawn.

The defaults are those of the checkpoint's generation config, and behind it those of transformers' `generate`. The
module knows nothing of tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fabric.contracts import ConfigError, InvalidRequest, SamplingParams, StageRequest

_RESIDUAL_TOP_K, _RESIDUAL_TOP_P = 50, 0.8
"""These numbers truncate the draws of all codes of a frame but the first, as in transformers, which has no option for
them."""
_LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TalkerOptions:
    """Holds the options of one request."""

    speaker: int
    """Is the codec's id of the voice."""
    first: SamplingParams
    """Says how the first code of a frame is drawn. The repetition penalty counts the first codes so far."""
    residual: SamplingParams
    """Says how the other codes are drawn."""
    max_frames: int


@dataclass(frozen=True, slots=True)
class TalkerDefaults:
    """Holds the voices of a checkpoint, and the values that a request does not choose."""

    voice_to_speaker: Mapping[str, int]
    """Maps the names of voices in lower case to the codec's ids."""
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    max_codec_frames: int = 4095
    usual_voice: str = "ethan"
    """Names the voice that speaks if the request names none and the checkpoint has it."""

    @classmethod
    def of(cls, speaker_id: Mapping[str, int] | None, generation: Mapping[str, Any], **family: Any) -> TalkerDefaults:
        """Reads them from the talker's config and from generation_config.json, whose keys begin with `talker_`.
        `family` holds the values of the family that differ from Qwen3-Omni's. Raises ConfigError if the checkpoint has
        no voice."""
        if not speaker_id:
            raise ConfigError("the talker's config has no voices (speaker_id)")
        found = {name: generation.get(f"talker_{name}") for name in ("temperature", "top_k", "top_p")}
        found["repetition_penalty"] = generation.get("talker_repetition_penalty")
        if generation.get("talker_do_sample") is False:
            found["temperature"] = 0.0
        if (most := generation.get("talker_max_new_tokens")) is not None:
            found["max_codec_frames"] = max(1, int(most) - 1)  # transformers makes no frame of its last code.
        chosen = {name: value for name, value in found.items() if value is not None}
        return cls({name.lower(): int(speaker) for name, speaker in speaker_id.items()}, **(family | chosen))

    @property
    def voices(self) -> tuple[str, ...]:
        return tuple(self.voice_to_speaker)

    @property
    def voice(self) -> str:
        """Returns the name of the voice that speaks if the request names none."""
        return self.usual_voice if self.usual_voice in self.voice_to_speaker else self.voices[0]

    def options(self, request: StageRequest) -> TalkerOptions:
        """Returns the options of a request. Raises InvalidRequest for an unknown voice or a value out of range."""
        chosen = request.options
        voice = str(chosen.get("voice", self.voice))
        if voice.lower() not in self.voice_to_speaker:
            known = ", ".join(self.voices)
            raise InvalidRequest(f"there is no voice {voice!r}; this model has {known}", param="audio.voice")
        temperature = _number(chosen, "temperature", self.temperature, 0.0, 100.0)
        # Without a seed, every attempt of a request draws the same codes.
        seed = int(_number(chosen, "seed", zlib.crc32(request.request_id.encode()), -_LARGEST_SEED, _LARGEST_SEED))
        first = SamplingParams(
            temperature=temperature,
            top_p=_number(chosen, "top_p", self.top_p, 1e-6, 1.0),
            top_k=int(_number(chosen, "top_k", self.top_k, 0, 2**31)),
            seed=seed,
            repetition_penalty=_number(chosen, "repetition_penalty", self.repetition_penalty, 1e-3, 1e3),
        )
        residual = SamplingParams(
            temperature=1.0 if temperature > 0 else 0.0, top_p=_RESIDUAL_TOP_P, top_k=_RESIDUAL_TOP_K, seed=seed
        )
        _number(chosen, "initial_codec_chunk_frames", 1, 1, 2**31)
        most = int(_number(chosen, "max_codec_frames", self.max_codec_frames, 1, 2**31))
        return TalkerOptions(self.voice_to_speaker[voice.lower()], first, residual, most)


def _number(chosen: Mapping[str, Any], name: str, default: float, least: float, most: float) -> Any:
    value = chosen.get(name, default)
    if isinstance(value, str | bool) or not least <= value <= most:
        raise InvalidRequest(f"{name} must be a number from {least:g} to {most:g}, not {value!r}", param=name)
    return value
