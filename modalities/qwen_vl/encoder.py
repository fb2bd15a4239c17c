"""Runs the encoders: they turn patches of many pictures or frames, and spectrograms, into features. The module knows
nothing of requests and queues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from modalities.family import EncoderInput, EncoderModel
from modalities.qwen_vl.checkpoint import Checkpoint
from modalities.qwen_vl.config import AUDIO, IMAGE, VIDEO, QwenVLConfig
from modalities.qwen_vl.fused_tower import fused_tower
from modalities.video_features import thinned
from modalities.video_rows import VideoRows


class VisionEncoder:
    """Implements `modalities.family.EncoderModel`. Only one forward pass may run at a time: the class is not
    thread-safe."""

    def __init__(self, tower: PreTrainedModel, has_deepstack: bool) -> None:
        self._tower, self._has_deepstack = tower, has_deepstack

    @torch.no_grad()
    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        """Returns, per unit, `(1 + num_deepstack_levels, num_tokens, hidden)`: level 0 replaces the embedding, and
        level i is added to the hidden states after layer i - 1 of the text model. Pictures do not attend to each other,
        and neither do the temporal patches of a video."""
        if not inputs:
            return []
        pixels = torch.from_numpy(np.concatenate([unit.pixels for unit in inputs]))
        grids = torch.tensor([unit.grid for unit in inputs], dtype=torch.int64)
        output = self._tower(
            pixels.to(self._tower.device, self._tower.dtype), grid_thw=grids.to(self._tower.device), return_dict=True
        )
        deepstack = output.deepstack_features if self._has_deepstack else ()
        levels = torch.stack([output.pooler_output, *deepstack])
        num_tokens = (grids.prod(-1) // self._tower.spatial_merge_size**2).tolist()
        features = zip(inputs, levels.split(num_tokens, dim=1), strict=True)
        return [_thinned(unit, feature).contiguous() for unit, feature in features]


class OmniEncoder:
    """Holds one tower per modality. Implements `modalities.family.EncoderModel` as the towers do."""

    def __init__(self, modality_to_encoder: Mapping[str, EncoderModel]) -> None:
        self._modality_to_encoder = modality_to_encoder

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        """Encodes the inputs, which all have one modality, with the tower of that modality."""
        return self._modality_to_encoder[inputs[0].modality].encode(inputs) if inputs else []


def load_encoder(
    checkpoint: Checkpoint,
    model_dir: Path,
    config: QwenVLConfig,
    place: tuple[str, str],
    modalities: Sequence[str],
) -> EncoderModel:
    """Loads only the towers of `modalities`; pictures and videos share one. `place` is (device, dtype). Raises
    ConfigError if a weight is missing."""
    found: dict[str, EncoderModel] = {}
    if set(modalities) - {AUDIO}:
        tower = fused_tower(checkpoint.load_vision_tower(model_dir, config, *place))
        vision = VisionEncoder(tower, has_deepstack=config.num_deepstack_levels > 0)
        if AUDIO not in modalities:
            return vision
        found = {IMAGE: vision, VIDEO: vision}
    return OmniEncoder({**found, AUDIO: checkpoint.load_sound_tower(model_dir, config, place)})


def _thinned(unit: EncoderInput, feature: torch.Tensor) -> torch.Tensor:
    """Returns the rows that remain of a video's unit `(num_levels, num_tokens, hidden)` after thinning; other units
    stay unchanged."""
    if unit.modality != VIDEO:
        return feature
    steps = feature.unflatten(1, (unit.grid[0], -1))
    return thinned(steps, VideoRows.of_geometry(unit.geometry))
