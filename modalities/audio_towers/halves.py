"""The half for sounds of each family, from its config files. What Weft can't run is refused here. Pure."""

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
"""That Qwen3-Omni's count of rows has as a constant, whatever the chunk."""
_UNIT_CHUNKS = 4
"""Of Qwen2.5-Omni: units of 8 s, as long as Qwen3-Omni's. A unit has its own announcement and transfer, and a chunk
alone (50 rows) would be too little for them."""
_READ_AHEAD = 2
"""Mel frames that the two convolutions of Qwen2-Audio see behind the last row that counts."""


def qwen3_omni_sound(model_dir: Path, audio: Mapping[str, Any], hidden_size: int) -> SoundHalf:
    """`audio`: the model's `audio_config`; `hidden_size`: the text model's. Convolutions see chunks of `2 * n_window`
    mel frames, attention `n_window_infer`, which is a unit. Sounds of any length (the reference's processor:
    `padding=True, truncation=False`). Raises ConfigError."""
    mel = _mel(model_dir, audio)
    _check_width(audio, hidden_size)
    chunk_frames, seen = 2 * _number(audio, "n_window", 50), _number(audio, "n_window_infer", 800)
    if halved(chunk_frames, 3) != _ROWS_OF_A_CHUNK or seen < chunk_frames:
        raise ConfigError(f"audio_config: n_window {chunk_frames // 2} with n_window_infer {seen} is not supported")
    return SoundHalf(mel, ConvolvedChunks(chunk_frames, seen // chunk_frames * chunk_frames))


def qwen2_5_omni_sound(model_dir: Path, audio: Mapping[str, Any], hidden_size: int) -> SoundHalf:
    """As above. Convolutions and attention see chunks of `2 * n_window` mel frames; of these, pairs are pooled. The
    spectrogram is that of a sound with silence up to the extractor's length; longer sounds, which the reference's
    processor cuts off, are taken whole. Raises ConfigError."""
    mel = _mel(model_dir, audio)
    _check_width(audio, hidden_size)
    chunk_frames = 2 * _number(audio, "n_window", 100)
    return SoundHalf(mel, PooledChunks(_UNIT_CHUNKS * chunk_frames), padded_to=mel.chunk_samples)


def qwen2_audio_sound(model_dir: Path, audio: Mapping[str, Any]) -> SoundHalf:
    """Attention sees the extractor's 30 s, so these are a unit. A longer sound, which the reference's processor cuts
    off, is heard as several, one behind the other. Raises ConfigError."""
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
