"""Runs Qwen2.5-Omni's audio tower: convolutions and attention stay within chunks of `2 * n_window` mel frames, then
pairs of rows are pooled. This module knows nothing of requests or queues."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder

from modalities.device_copies import to_device
from modalities.families.audio_towers.sound_encoder import (
    SoundEncoder,
    batched,
    load_tower,
    pooled_pairs,
    taken,
)
from modalities.families.audio_towers.sound_plans import halved
from modalities.family import EncoderInput
from modalities.packed_attention import Segments


def load_encoder(model_dir: Path, config: PreTrainedConfig, place: tuple[str, str]) -> SoundEncoder:
    """Loads the audio tower. `config` is the model's `audio_config`; `place` is (device, dtype). Raises ConfigError if
    a weight is missing."""
    return SoundEncoder(load_tower(Qwen2_5OmniAudioEncoder, model_dir, config, place), _rows)


def _rows(tower: Any, inputs: Sequence[EncoderInput]) -> Sequence[torch.Tensor]:
    chunk_frames = 2 * tower.n_window
    units = [
        [unit.pixels[at : at + chunk_frames] for at in range(0, len(unit.pixels), chunk_frames)] for unit in inputs
    ]
    chunks = [chunk for pieces in units for chunk in pieces]
    lengths = torch.tensor([len(chunk) for chunk in chunks])
    values = batched(chunks, int(lengths.max()), tower.conv1.weight)
    is_sound = to_device((torch.arange(values.shape[2]) < lengths[:, None])[:, None], values.device)
    values = functional.gelu(tower.conv1(values)) * is_sound
    values = functional.gelu(tower.conv2(values)).transpose(1, 2)
    values = values + tower.positional_embedding.positional_embedding[: values.shape[1]].to(values.dtype)
    num_rows = [halved(len(chunk), 1) for chunk in chunks]
    rows = taken(values, num_rows)
    segments = Segments(num_rows, rows.device)
    for layer in tower.layers:
        (rows,) = layer(rows, segments.bounds, max_seqlen=segments.max_length, segments=(segments,))
    pooled = pooled_pairs(rows, [sum(halved(len(chunk), 1) for chunk in pieces) for pieces in units])
    made: torch.Tensor = tower.proj(tower.ln_post(torch.cat(pooled)))
    per_unit: Sequence[torch.Tensor] = made.split([len(unit) for unit in pooled])
    return per_unit
