"""Runs Qwen3-Omni's audio tower: three two-dimensional convolutions per chunk, then attention over `n_window_infer`.

A chunk that is not full is padded with zeros, and the convolutions carry them into the chunk's last row. The reference
pads each chunk to the longest chunk of its batch. In Weft a sound's features must not depend on the other sounds of
the batch. So the last chunk of a sound is padded to a full chunk, and a sound shorter than one chunk is not padded:
this gives what the reference computes for each sound alone. This module knows nothing of requests or queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from modalities.families.audio_towers.sound_encoder import SoundEncoder, batched, load_tower
from modalities.families.audio_towers.sound_plans import SoundHalf, halved
from modalities.family import EncoderInput
from modalities.packed_attention import Segments

_NUM_CONVOLUTIONS = 3
_CHUNKS_IN_CACHE = 8
"""A CPU convolves this many chunks at once. With 64 at once each chunk takes 1.6 times as long, because the values
between the convolutions no longer fit into the cache."""


def load_encoder(model_dir: Path, config: PreTrainedConfig, sound: SoundHalf, place: tuple[str, str]) -> SoundEncoder:
    """Loads the audio tower. `config` is the model's `audio_config`; `place` is (device, dtype). Raises ConfigError if
    a weight is missing."""
    hop = sound.mel.hop

    def rows_of(tower: Any, inputs: Sequence[EncoderInput]) -> Sequence[torch.Tensor]:
        return _rows(tower, inputs, hop)

    tower = load_tower(Qwen3OmniMoeAudioEncoder, model_dir, config, place)
    return SoundEncoder(tower, rows_of)


def _rows(tower: Any, inputs: Sequence[EncoderInput], hop: int) -> Sequence[torch.Tensor]:
    chunk_frames = 2 * tower.n_window
    chunks: list[np.ndarray] = []
    widths: list[int] = []
    num_rows: list[int] = []
    for unit in inputs:
        is_lone = len(unit.pixels) < chunk_frames and _num_frames(unit, hop) < chunk_frames
        pieces = [unit.pixels[at : at + chunk_frames] for at in range(0, len(unit.pixels), chunk_frames)]
        chunks += pieces
        widths += [len(unit.pixels) if is_lone else chunk_frames] * len(pieces)
        num_rows.append(sum(halved(len(piece), _NUM_CONVOLUTIONS) for piece in pieces))
    rows = _convolved(tower, chunks, widths)
    segments = Segments(num_rows, rows.device)
    for layer in tower.layers:
        (rows,) = layer(rows, segments.bounds, max_seqlen=segments.max_length, segments=(segments,))
    made: torch.Tensor = tower.proj2(tower.act(tower.proj1(tower.ln_post(rows))))
    per_unit: Sequence[torch.Tensor] = made.split(num_rows)
    return per_unit


def _num_frames(unit: EncoderInput, hop: int) -> int:
    """Returns the number of mel frames of the whole sound that the unit belongs to."""
    return unit.geometry[1] // hop if unit.geometry else len(unit.pixels)


def _convolved(tower: Any, chunks: Sequence[np.ndarray], widths: Sequence[int]) -> torch.Tensor:
    """Pads each chunk of mel frames to its width and convolves it. Returns the rows of all chunks, with positional
    embeddings added, packed in the order of the chunks."""
    found: list[torch.Tensor] = [torch.empty(0)] * len(chunks)
    for width in sorted(set(widths)):
        at = [index for index, one in enumerate(widths) if one == width]
        values = batched([chunks[index] for index in at], width, tower.conv2d1.weight)[:, None]
        parts = []
        # A device uses the reference's own chunk count, which limits the memory.
        for part in values.split(tower.conv_chunksize if values.is_cuda else _CHUNKS_IN_CACHE):
            for convolution in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
                part = functional.gelu(convolution(part))
            parts.append(part)
        made = torch.cat(parts).permute(0, 3, 1, 2).flatten(2)  # The shape is (chunks, rows, channels * bins).
        made = tower.conv_out(made)
        made = made + tower.positional_embedding.positional_embedding[: made.shape[1]].to(made.dtype)
        for index, rows in zip(at, made, strict=True):
            found[index] = rows
    return torch.cat([rows[: halved(len(chunk), _NUM_CONVOLUTIONS)] for rows, chunk in zip(found, chunks, strict=True)])
