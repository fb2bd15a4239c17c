"""Loads and runs LLaVA-OneVision's vision tower and projector, and its newline.

Only this module knows the names of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, LlavaOnevisionConfig
from transformers.models.llava_onevision.modeling_llava_onevision import (
    LlavaOnevisionModel,
    LlavaOnevisionMultiModalProjector,
    LlavaOnevisionPreTrainedModel,
)

from modalities.family import EncoderInput
from modalities.tiled.encoder import TileEncoder, frame_rows, is_closed, load_tile_encoder

NAMES = {
    r"^model\.(vision_tower|multi_modal_projector)\.": r"\1.",
    r"^model\.image_newline$": "image_newline",
}


class LlavaOnevisionVisionHalf(LlavaOnevisionPreTrainedModel):  # type: ignore[misc]  # mypy does not follow transformers
    """A `LlavaOnevisionVisionHalf` is the vision tower, the projector and the newline: the model without its language
    model."""

    def __init__(self, config: LlavaOnevisionConfig) -> None:
        super().__init__(config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = LlavaOnevisionMultiModalProjector(config)
        self.image_newline = nn.Parameter(torch.zeros(config.text_config.hidden_size, dtype=self.dtype))
        self.post_init()

    get_image_features = LlavaOnevisionModel.get_image_features
    pack_image_features = LlavaOnevisionModel.pack_image_features
    get_video_features = LlavaOnevisionModel.get_video_features
    apply_pooling = LlavaOnevisionModel.apply_pooling


def rows_of(part: Any, tiles: torch.Tensor, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
    if inputs[0].modality == "video":
        return _rows_of_videos(part, tiles, inputs)
    heights_and_widths = [[height, width] for width, height in (unit.geometry for unit in inputs)]
    return list(part.get_image_features(tiles, image_sizes=heights_and_widths, return_dict=True).pooler_output)


def _rows_of_videos(part: Any, frames: torch.Tensor, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
    # The model gets the frames as videos of one frame each. The newline follows only the last unit of a video.
    made = part.get_video_features(frames[:, None], return_dict=True).pooler_output[:, :-1]
    units = made.split([len(unit.pixels) for unit in inputs])
    rows = [frame_rows(steps, unit) for steps, unit in zip(units, inputs, strict=True)]
    newline = part.image_newline[None]
    return [
        torch.cat([of_unit, newline]) if is_closed(unit) else of_unit
        for of_unit, unit in zip(rows, inputs, strict=True)
    ]


def load_encoder(model_dir: Path, device: str, dtype: str) -> TileEncoder:
    """Loads the vision tower, the projector and the newline. Raises ConfigError if a weight is missing."""
    return load_tile_encoder(LlavaOnevisionVisionHalf, NAMES, rows_of, model_dir, (device, dtype))
