"""Loads and runs InternVL's vision tower and projector. Only this module knows the names of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, InternVLConfig
from transformers.models.internvl.modeling_internvl import (
    InternVLModel,
    InternVLMultiModalProjector,
    InternVLPreTrainedModel,
)

from modalities.family import EncoderInput
from modalities.tiled.encoder import TileEncoder, frame_rows, load_tile_encoder

NAMES = {r"^model\.(vision_tower|multi_modal_projector)\.": r"\1."}


class InternVLVisionHalf(InternVLPreTrainedModel):  # type: ignore[misc]  # mypy does not follow transformers
    """An `InternVLVisionHalf` is the vision tower and the projector: the model without its language model."""

    def __init__(self, config: InternVLConfig) -> None:
        super().__init__(config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = InternVLMultiModalProjector(config)
        self.post_init()

    get_image_features = InternVLModel.get_image_features
    pixel_shuffle = InternVLModel.pixel_shuffle


def rows_of(part: Any, tiles: torch.Tensor, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
    rows = part.get_image_features(tiles, return_dict=True).pooler_output
    units = rows.split([len(unit.pixels) for unit in inputs])
    return [
        frame_rows(tiles_rows, unit) if unit.modality == "video" else tiles_rows.flatten(0, 1)
        for tiles_rows, unit in zip(units, inputs, strict=True)
    ]


def load_encoder(model_dir: Path, device: str, dtype: str) -> TileEncoder:
    """Loads the vision tower and the projector. Raises ConfigError if a weight is missing."""
    return load_tile_encoder(InternVLVisionHalf, NAMES, rows_of, model_dir, (device, dtype))
