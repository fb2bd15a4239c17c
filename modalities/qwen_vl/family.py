"""A Qwen vision family: what it takes, how much of the prompt a medium takes, where it stands.

Pure but for the two loaders, which import torch when they are called.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fabric.errors import InvalidMedia, UnsupportedModality
from fabric.messages import MediaItem, PlaceholderRange
from modalities.family import (
    DEFAULT_OPTIONS,
    EncoderInput,
    EncoderModel,
    ExpandedPrompt,
    ImageHeader,
    ItemPlan,
    LanguageModel,
    MediaHeader,
    MediaOptions,
    ModelShape,
    Positions,
)
from modalities.placeholders import expand_placeholders
from modalities.qwen_vl.config import Layout, read_config
from modalities.qwen_vl.positions import grid_positions, prompt_positions
from modalities.qwen_vl.preprocess import image_grid, image_patches

if TYPE_CHECKING:
    from modalities.qwen_vl.checkpoint import Checkpoint

_IMAGE = "image"


class QwenVLFamily:
    """One checkpoint directory. Immutable and thread-safe."""

    def __init__(self, layout: Layout, model_dir: Path, checkpoint: Callable[[], Checkpoint]) -> None:
        """Reads config files only. `checkpoint` imports the family's transformers classes when it is called. Raises
        ConfigError."""
        self.name = layout.name
        self.config = read_config(model_dir, layout)
        self.model_id = self.config.model_id
        self.shape: ModelShape = self.config.shape
        self.max_items: Mapping[str, int] = {_IMAGE: 64}
        self._layout, self._checkpoint = layout, checkpoint

    def plan(self, header: MediaHeader, options: MediaOptions = DEFAULT_OPTIONS) -> ItemPlan:
        """Raises InvalidMedia for an aspect ratio above 200."""
        if not isinstance(header, ImageHeader):
            raise UnsupportedModality(f"{self.name} takes images alone")
        grid = image_grid(header, self.config.image)
        cost = grid[0] * grid[1] * grid[2]
        num_tokens = cost // self.config.image.merge_size**2
        return ItemPlan(_IMAGE, grid, (num_tokens,), cost, (header.width, header.height))

    def placeholder_text(self, modality: str) -> str:
        """Raises UnsupportedModality."""
        self._check(modality)
        return self._layout.image_placeholder

    def expand(
        self,
        token_ids: Sequence[int],
        plans: Sequence[ItemPlan],
        tokenize: Callable[[str], Sequence[int]] | None = None,
    ) -> ExpandedPrompt:
        """Raises InvalidRequest if placeholders and plans do not match."""
        return expand_placeholders(token_ids, {_IMAGE: self.config.image_token_id}, plans)

    def positions(
        self, token_ids: Sequence[int], placeholders: Sequence[PlaceholderRange], media: Sequence[MediaItem]
    ) -> Positions:
        """M-RoPE, three axes. Raises ProtocolError if the ranges do not fit."""
        return prompt_positions(len(token_ids), placeholders, media, {_IMAGE: self._image_block})

    def options(self, modality: str) -> str:
        """Raises UnsupportedModality."""
        self._check(modality)
        return json.dumps(dataclasses.asdict(self.config.image), sort_keys=True, separators=(",", ":"))

    def preprocess(self, data: bytes, item: MediaItem) -> list[EncoderInput]:
        """One unit. Raises InvalidMedia for a broken file or one that is not what was planned."""
        self._check(item.modality)
        num_patches = item.grid[0] * item.grid[1] * item.grid[2]
        if item.unit_tokens != (num_patches // self.config.image.merge_size**2,):
            raise InvalidMedia(f"{item.part}: grid {item.grid} does not give {item.unit_tokens} rows", param=item.part)
        pixels = image_patches(data, item.grid, self.config.image, item.part)
        return [EncoderInput(_IMAGE, pixels, item.grid)]

    def load_encoder(self, model_dir: Path, device: str, dtype: str, modalities: Sequence[str]) -> EncoderModel:
        """The vision tower. Raises ConfigError if a weight is missing, UnsupportedModality."""
        from modalities.qwen_vl.encoder import load_vision_encoder

        for modality in modalities:
            self._check(modality)
        return load_vision_encoder(self._checkpoint(), model_dir, self.config, device, dtype)

    def load_language_model(self, model_dir: Path, device: str, dtype: str, attention_name: str) -> LanguageModel:
        """The text half. Raises ConfigError if a weight is missing."""
        from modalities.qwen_vl.language_model import load_text_model

        return load_text_model(self._checkpoint(), model_dir, self.config, device, dtype, attention_name)

    def _image_block(self, item: MediaItem) -> npt.NDArray[np.int64]:
        # One temporal patch, so its time step plays no part.
        return grid_positions(item.grid, self.config.image.merge_size, time_step=0)

    def _check(self, modality: str) -> None:
        if modality not in self.max_items:
            raise UnsupportedModality(f"the model takes no {modality}")
