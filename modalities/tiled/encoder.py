"""Encodes the tiles of many pictures into features, in one forward pass. It knows nothing of requests or queues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from modalities.causal_lm.checkpoint import PartNames, load_part, read_pretrained_config
from modalities.family import EncoderInput
from modalities.part_names import names_of_others
from modalities.video_features import thinned
from modalities.video_rows import VideoRows

RowsOf = Callable[[Any, torch.Tensor, Sequence[EncoderInput]], Sequence[torch.Tensor]]
"""A `RowsOf` computes the rows of each unit, of shape `(num_tokens, hidden)`. Its arguments are the loaded part of the
model, the tiles of shape `(num_tiles, 3, height, width)`, and the units that the tiles come from."""


class TileEncoder:
    """Implements `modalities.family.EncoderModel`. It runs one forward pass at a time and is not thread-safe."""

    def __init__(self, part: Any, rows_of: RowsOf) -> None:
        self._part, self._rows_of = part, rows_of

    @torch.no_grad()
    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        """Returns the features of each unit, of shape `(1, num_tokens, hidden)`. Tiles do not attend to each other."""
        if not inputs:
            return []
        tiles = torch.from_numpy(np.concatenate([unit.pixels for unit in inputs]))
        rows = self._rows_of(self._part, tiles.to(self._part.device, self._part.dtype), inputs)
        return [unit[None].contiguous() for unit in rows]


def load_tile_encoder(
    kind: type[PreTrainedModel], names: Mapping[str, str], rows_of: RowsOf, model_dir: Path, place: tuple[str, str]
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
