"""The vision tower: patches of many pictures -> features, in one packed forward. Knows no requests and no queues."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from modalities.family import EncoderInput
from modalities.qwen_vl.checkpoint import Checkpoint
from modalities.qwen_vl.config import QwenVLConfig


class VisionEncoder:
    """Implements `modalities.family.EncoderModel`. One forward at a time: not thread-safe."""

    def __init__(self, tower: PreTrainedModel, has_deepstack: bool) -> None:
        self._tower, self._has_deepstack = tower, has_deepstack

    @torch.no_grad()
    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        """Per unit `(1 + num_deepstack_levels, num_tokens, hidden)`: level 0 stands in for the embedding, level i is
        added to the hidden states behind layer i - 1 of the text model. Pictures do not attend to each other."""
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
        return [unit.contiguous() for unit in levels.split(num_tokens, dim=1)]


def load_vision_encoder(
    checkpoint: Checkpoint, model_dir: Path, config: QwenVLConfig, device: str, dtype: str
) -> VisionEncoder:
    """Raises ConfigError if a weight is missing."""
    tower = checkpoint.load_vision_tower(model_dir, config, device, dtype)
    return VisionEncoder(tower, has_deepstack=config.num_deepstack_levels > 0)
