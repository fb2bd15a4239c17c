"""Tiles of many pictures -> features, in one forward. Knows no requests and no queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from modalities.family import EncoderInput
from modalities.video_features import thinned
from modalities.video_rows import StepRows

RowsOf = Callable[[Any, torch.Tensor, Sequence[EncoderInput]], Sequence[torch.Tensor]]
"""(part, tiles `(num_tiles, 3, height, width)`, the units they are of) -> rows of each unit `(num_tokens, hidden)`."""


class TileEncoder:
    """Implements `modalities.family.EncoderModel`. One forward at a time: not thread-safe."""

    def __init__(self, part: Any, rows_of: RowsOf) -> None:
        self._part, self._rows_of = part, rows_of

    @torch.no_grad()
    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        """Per unit `(1, num_tokens, hidden)`. Tiles do not attend to each other."""
        if not inputs:
            return []
        tiles = torch.from_numpy(np.concatenate([unit.pixels for unit in inputs]))
        rows = self._rows_of(self._part, tiles.to(self._part.device, self._part.dtype), inputs)
        return [unit[None].contiguous() for unit in rows]


def frame_rows(frames: torch.Tensor, unit: EncoderInput) -> torch.Tensor:
    """Of a video's unit: `(num_frames, num_rows, hidden)` -> those rows that stay, `(num_tokens, hidden)`."""
    return thinned(frames[None], StepRows.of_geometry(unit.geometry[1:]))[0]


def is_closed(unit: EncoderInput) -> bool:
    """Whether a row behind the last frame ends the video's unit."""
    return bool(unit.geometry[0])
