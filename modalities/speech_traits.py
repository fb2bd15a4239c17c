"""Reads from a checkpoint's config what a cluster must know of its speech before any weight is loaded: the voices, the
sample rate, and the layer of the thinker whose rows the talker takes for media.

The module reads JSON and imports no torch. It knows nothing of how speech is made.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric.contracts import ConfigError

MODEL_TYPE = "qwen3_omni_moe"
SAMPLE_RATE = 24_000
"""Is the sample rate of the code2wav of Qwen3-Omni, whose config does not state it."""
DEFAULT_RATES = {"upsample_rates": (8, 5, 4, 3), "upsampling_ratios": (2, 2)}
"""Holds transformers' defaults of `code2wav_config`; their product is the samples of one codec frame."""
DEFAULT_ACCEPTED_LAYER = 18
"""Is transformers' default of `talker_config.accept_hidden_layer`."""


@dataclass(frozen=True, slots=True)
class SpeechTraits:
    """Holds what a checkpoint says about its speech."""

    voices: tuple[str, ...]
    """Lists the voices in lower case, the first of which speaks by default."""
    sample_rate: int
    frame_s: float
    """Is how long a codec frame plays, in seconds."""
    media_layer: int
    """Is the index of the thinker's layer whose output the talker takes at the positions of media."""


def read_speech_traits(model_dir: Path) -> SpeechTraits:
    """Returns the traits of a checkpoint that speaks. Raises ConfigError, saying why, if it does not."""
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    kind = config.get("model_type")
    if kind != MODEL_TYPE or "talker_config" not in config:
        raise ConfigError(
            f"stages is set, but {model_dir.name} is a {kind} without a talker; Weft makes speech with a whole "
            f"{MODEL_TYPE} only"
        )
    if config.get("enable_audio_output") is False:
        raise ConfigError(f"stages is set, but {model_dir.name} says enable_audio_output: false")
    talker: dict[str, Any] = config["talker_config"]
    voices = tuple(str(name).lower() for name in talker.get("speaker_id") or {})
    if not voices:
        raise ConfigError(f"stages is set, but {model_dir.name} names no voice (talker_config.speaker_id)")
    accepted = int(talker.get("accept_hidden_layer", DEFAULT_ACCEPTED_LAYER))
    if accepted < 1:
        raise ConfigError(f"talker_config.accept_hidden_layer is {accepted}, but Weft stores rows of layers from 1 on")
    code2wav: dict[str, Any] = config.get("code2wav_config") or {}
    num_samples = math.prod(math.prod(code2wav.get(name, default)) for name, default in DEFAULT_RATES.items())
    # transformers counts hidden states from the embeddings on, so number 1 is the output of layer 0.
    return SpeechTraits(voices, SAMPLE_RATE, num_samples / SAMPLE_RATE, accepted - 1)
