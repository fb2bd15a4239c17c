"""Loads and runs LLaVA-1.5's vision tower and projector. Only this module knows the names of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, LlavaConfig
from transformers.models.llava.modeling_llava import LlavaModel, LlavaMultiModalProjector, LlavaPreTrainedModel

from modalities.family import EncoderInput
from modalities.tiled.encoder import TileEncoder, load_tile_encoder

NAMES = {r"^model\.(vision_tower|multi_modal_projector)\.": r"\1."}


class LlavaVisionHalf(LlavaPreTrainedModel):  # type: ignore[misc]  # mypy does not follow transformers
    """A `LlavaVisionHalf` is the vision tower and the projector: the model without its language model."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__(config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = LlavaMultiModalProjector(config)
        self.post_init()

    get_image_features = LlavaModel.get_image_features


def rows_of(part: Any, tiles: torch.Tensor, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
    return list(part.get_image_features(tiles, return_dict=True).pooler_output)


def load_encoder(model_dir: Path, device: str, dtype: str) -> TileEncoder:
    """Loads the vision tower and the projector. Raises ConfigError if a weight is missing."""
    return load_tile_encoder(LlavaVisionHalf, NAMES, rows_of, model_dir, (device, dtype))
