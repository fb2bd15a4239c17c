"""Reads from each family's config files how it treats sounds (its `SoundHalf`), and refuses what Weft can't run.

This module is pure and knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fabric.errors import ConfigError
from modalities.audio_towers.cutting import ConvolvedChunks, PooledChunks, halved
from modalities.audio_towers.sound import SoundHalf
from modalities.mel import MelOptions
from modalities.mel_options import read_mel_options

_ROWS_OF_A_CHUNK = 13
"""Qwen3-Omni's reference counts this many rows for each full chunk, as a constant that ignores the chunk's size."""
_UNIT_CHUNKS = 4
"""A unit of Qwen2.5-Omni has this many chunks, so that it lasts 8 s like the units of Qwen3-Omni. Each unit is
announced and transferred separately, and a single chunk (50 rows) is too small for that cost."""
_READ_AHEAD = 2
"""Counts the mel frames that the two convolutions of Qwen2-Audio read after those of the last row that counts."""


def qwen3_omni_sound(model_dir: Path, audio: Mapping[str, Any], hidden_size: int) -> SoundHalf:
    """Returns how Qwen3-Omni treats sounds. `audio` is the model's `audio_config`; `hidden_size` is the text model's.

    Convolutions see chunks of `2 * n_window` mel frames; attention sees `n_window_infer` mel frames, rounded down to
    whole chunks, and these are a unit. Sounds may have any length (the reference's processor uses
    `padding=True, truncation=False`). Raises ConfigError for a config that Weft can't run."""
    mel = _mel(model_dir, audio)
    _check_width(audio, hidden_size)
    chunk_frames, seen = 2 * _number(audio, "n_window", 50), _number(audio, "n_window_infer", 800)
    if halved(chunk_frames, 3) != _ROWS_OF_A_CHUNK or seen < chunk_frames:
        raise ConfigError(f"audio_config: n_window {chunk_frames // 2} with n_window_infer {seen} is not supported")
    return SoundHalf(mel, ConvolvedChunks(chunk_frames, seen // chunk_frames * chunk_frames))


def qwen2_5_omni_sound(model_dir: Path, audio: Mapping[str, Any], hidden_size: int) -> SoundHalf:
    """Returns how Qwen2.5-Omni treats sounds. `audio` and `hidden_size` are as in `qwen3_omni_sound`.

    Convolutions and attention see chunks of `2 * n_window` mel frames, and pairs of their rows are pooled. The
    spectrogram is computed as if silence padded the sound to the extractor's length. The reference's processor
    truncates longer sounds; Weft encodes them whole. Raises ConfigError for a config that Weft can't run."""
    mel = _mel(model_dir, audio)
    _check_width(audio, hidden_size)
    chunk_frames = 2 * _number(audio, "n_window", 100)
    return SoundHalf(mel, PooledChunks(_UNIT_CHUNKS * chunk_frames), padded_to=mel.chunk_samples)


def qwen2_audio_sound(model_dir: Path, audio: Mapping[str, Any]) -> SoundHalf:
    """Returns how Qwen2-Audio treats sounds. `audio` is the model's `audio_config`.

    Attention sees the extractor's 30 s, so these are a unit. The reference's processor truncates a longer sound; Weft
    encodes it as several consecutive sounds. Raises ConfigError for a config that Weft can't run."""
    mel = _mel(model_dir, audio)
    num_frames = mel.chunk_samples // mel.hop
    if num_frames != 2 * _number(audio, "max_source_positions", 1500) or mel.chunk_samples % mel.hop:
        raise ConfigError(
            f"audio_config.max_source_positions is not half of the preprocessor's {num_frames} mel frames"
        )
    return SoundHalf(
        mel,
        PooledChunks(num_frames),
        padded_to=mel.chunk_samples,
        segment_samples=mel.chunk_samples,
        num_extra_frames=_READ_AHEAD,
    )


def _mel(model_dir: Path, audio: Mapping[str, Any]) -> MelOptions:
    mel = read_mel_options(model_dir)
    if mel.num_bins != _number(audio, "num_mel_bins", 128):
        raise ConfigError(f"audio_config.num_mel_bins is not the preprocessor's feature_size of {mel.num_bins}")
    return mel


def _check_width(audio: Mapping[str, Any], hidden_size: int) -> None:
    if _number(audio, "output_dim", 3584) != hidden_size:
        raise ConfigError("audio_config.output_dim is not the text model's hidden_size")


def _number(audio: Mapping[str, Any], name: str, default: int) -> int:
    value = audio.get(name, default)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"audio_config.{name} must be a positive number, not {value!r}")
    return value
