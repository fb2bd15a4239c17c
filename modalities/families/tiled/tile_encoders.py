"""Encodes the tiles of many pictures and frames into features, in one forward pass, with the towers of LLaVA-1.5,
LLaVA-OneVision and InternVL.

`TileEncoder` runs any of these families. For each family there is a class that is its model without the language model,
a function that computes the rows of its units, and a function that loads both. Only this module knows the names of
their weights.

It knows nothing of requests or queues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, InternVLConfig, LlavaConfig, LlavaOnevisionConfig, PreTrainedModel
from transformers.models.internvl.modeling_internvl import (
    InternVLModel,
    InternVLMultiModalProjector,
    InternVLPreTrainedModel,
)
from transformers.models.llava.modeling_llava import LlavaModel, LlavaMultiModalProjector, LlavaPreTrainedModel
from transformers.models.llava_onevision.modeling_llava_onevision import (
    LlavaOnevisionModel,
    LlavaOnevisionMultiModalProjector,
    LlavaOnevisionPreTrainedModel,
)

from modalities.checkpoint_files import names_of_others
from modalities.device_copies import join_on_device
from modalities.families.causal_lm.language_model import PartNames, load_part, read_pretrained_config
from modalities.family import EncoderInput
from modalities.media import VideoRows
from modalities.video_features import thinned

# ------------------------------------------------------------ what the families share

TileRows = Callable[[Any, torch.Tensor, Sequence[EncoderInput]], Sequence[torch.Tensor]]
"""Such a function computes the rows of each unit, of shape `(num_tokens, hidden)`. Its arguments are the loaded part of
the model, the tiles of shape `(num_tiles, 3, height, width)`, and the units that the tiles come from."""


class TileEncoder:
    """Implements `modalities.family.EncoderModel`. It runs one forward pass at a time and is not thread-safe."""

    def __init__(self, part: Any, rows_of: TileRows) -> None:
        self._part, self._rows_of = part, rows_of

    @torch.no_grad()
    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        """Returns the features of each unit, of shape `(1, num_tokens, hidden)`. Tiles do not attend to each other."""
        if not inputs:
            return []
        tiles = join_on_device([unit.pixels for unit in inputs], self._part.device, self._part.dtype)
        rows = self._rows_of(self._part, tiles, inputs)
        return [unit[None].contiguous() for unit in rows]


def load_tile_encoder(
    kind: type[PreTrainedModel], names: Mapping[str, str], rows_of: TileRows, model_dir: Path, place: tuple[str, str]
) -> TileEncoder:
    """Loads `kind`, the vision tower and the projector of a family. `names` maps patterns of the checkpoint's names to
    its own; `place` is (device, dtype). Raises ConfigError if a weight is missing."""
    config = read_pretrained_config(model_dir)
    part_names = PartNames(names, names_of_others("vision", "projector"))
    return TileEncoder(load_part(kind, model_dir, config, part_names, place, "sdpa"), rows_of)


def frame_rows(frames: torch.Tensor, unit: EncoderInput) -> torch.Tensor:
    """Returns the rows that the sampling options keep of a video's unit. `frames` has shape
    `(num_frames, num_rows, hidden)`, the result `(num_tokens, hidden)`."""
    return thinned(frames[None], VideoRows.of_geometry(unit.geometry[1:]))[0]


def is_closed(unit: EncoderInput) -> bool:
    """Returns whether an extra row after the last frame ends the video's unit."""
    return bool(unit.geometry[0])


# ------------------------------------------------------------ LLaVA-1.5

_LLAVA_NAMES = {r"^model\.(vision_tower|multi_modal_projector)\.": r"\1."}


class LlavaVisionHalf(LlavaPreTrainedModel):  # type: ignore[misc]  # mypy does not follow transformers
    """A `LlavaVisionHalf` is the vision tower and the projector: the model without its language model."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__(config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = LlavaMultiModalProjector(config)
        self.post_init()

    get_image_features = LlavaModel.get_image_features


def _llava_rows(part: Any, tiles: torch.Tensor, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
    return list(part.get_image_features(tiles, return_dict=True).pooler_output)


def load_llava_encoder(model_dir: Path, device: str, dtype: str) -> TileEncoder:
    """Loads the vision tower and the projector. Raises ConfigError if a weight is missing."""
    return load_tile_encoder(LlavaVisionHalf, _LLAVA_NAMES, _llava_rows, model_dir, (device, dtype))


# ------------------------------------------------------------ LLaVA-OneVision

_LLAVA_ONEVISION_NAMES = {
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


def _llava_onevision_rows(part: Any, tiles: torch.Tensor, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
    if inputs[0].modality == "video":
        return _llava_onevision_video_rows(part, tiles, inputs)
    heights_and_widths = [[height, width] for width, height in (unit.geometry for unit in inputs)]
    return list(part.get_image_features(tiles, image_sizes=heights_and_widths, return_dict=True).pooler_output)


def _llava_onevision_video_rows(part: Any, frames: torch.Tensor, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
    # The model gets the frames as videos of one frame each. The newline follows only the last unit of a video.
    made = part.get_video_features(frames[:, None], return_dict=True).pooler_output[:, :-1]
    units = made.split([len(unit.pixels) for unit in inputs])
    rows = [frame_rows(steps, unit) for steps, unit in zip(units, inputs, strict=True)]
    newline = part.image_newline[None]
    return [
        torch.cat([of_unit, newline]) if is_closed(unit) else of_unit
        for of_unit, unit in zip(rows, inputs, strict=True)
    ]


def load_llava_onevision_encoder(model_dir: Path, device: str, dtype: str) -> TileEncoder:
    """Loads the vision tower, the projector and the newline. Raises ConfigError if a weight is missing."""
    return load_tile_encoder(
        LlavaOnevisionVisionHalf, _LLAVA_ONEVISION_NAMES, _llava_onevision_rows, model_dir, (device, dtype)
    )


# ------------------------------------------------------------ InternVL

_INTERNVL_NAMES = {r"^model\.(vision_tower|multi_modal_projector)\.": r"\1."}


class InternVLVisionHalf(InternVLPreTrainedModel):  # type: ignore[misc]  # mypy does not follow transformers
    """An `InternVLVisionHalf` is the vision tower and the projector: the model without its language model."""

    def __init__(self, config: InternVLConfig) -> None:
        super().__init__(config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = InternVLMultiModalProjector(config)
        self.post_init()

    get_image_features = InternVLModel.get_image_features
    pixel_shuffle = InternVLModel.pixel_shuffle


def _internvl_rows(part: Any, tiles: torch.Tensor, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
    rows = part.get_image_features(tiles, return_dict=True).pooler_output
    units = rows.split([len(unit.pixels) for unit in inputs])
    return [
        frame_rows(tiles_rows, unit) if unit.modality == "video" else tiles_rows.flatten(0, 1)
        for tiles_rows, unit in zip(units, inputs, strict=True)
    ]


def load_internvl_encoder(model_dir: Path, device: str, dtype: str) -> TileEncoder:
    """Loads the vision tower and the projector. Raises ConfigError if a weight is missing."""
    return load_tile_encoder(InternVLVisionHalf, _INTERNVL_NAMES, _internvl_rows, model_dir, (device, dtype))
