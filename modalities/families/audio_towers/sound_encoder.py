"""Encodes the spectrograms of many sounds into features, in one packed forward pass.

`SoundEncoder` runs a tower, and a function of the tower's module computes the rows. The layers of a tower are
transformers' own. They receive all rows in one sequence, and attend within the segments of
`modalities.packed_attention`. The functions at the end pack and unpack batches for the towers.

This module knows nothing of requests or queues, and of no particular tower.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from modalities.checkpoint_files import names_of_others
from modalities.device_copies import to_device
from modalities.families.causal_lm.language_model import PartNames, load_part
from modalities.family import EncoderInput
from modalities.packed_attention import use_packed_attention


class SoundRows(Protocol):
    def __call__(self, tower: Any, inputs: Sequence[EncoderInput], /) -> Sequence[torch.Tensor]:
        """Returns the rows of each unit. Each tensor has shape `(num_tokens, hidden)`."""
        ...


class SoundEncoder:
    """Implements `modalities.family.EncoderModel`. It runs one forward pass at a time and is not thread-safe."""

    def __init__(self, tower: PreTrainedModel, rows_of: SoundRows) -> None:
        self._tower, self._rows_of = tower, rows_of

    @torch.no_grad()
    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        """Returns the features of each unit, with shape `(1, num_tokens, hidden)`: sounds have no DeepStack levels.
        Units do not attend to each other."""
        return [rows[None].contiguous() for rows in self._rows_of(self._tower, inputs)] if inputs else []


_TOWER_NAMES = PartNames({r"^(thinker\.)?(model\.)?audio_tower\.": ""}, names_of_others("sound"))


def load_tower(
    kind: type[PreTrainedModel], model_dir: Path, config: PreTrainedConfig, place: tuple[str, str]
) -> PreTrainedModel:
    """Loads an Omni model's audio tower, with packed attention. `config` is the model's `audio_config`; `place` is
    (device, dtype). Raises ConfigError if a weight is missing."""
    tower: PreTrainedModel = load_part(kind, model_dir, config, _TOWER_NAMES, place, "sdpa")
    use_packed_attention(tower)
    return tower


# ------------------------------------------------------------ batches


def batched(pieces: Sequence[np.ndarray], num_frames: int, like: torch.Tensor) -> torch.Tensor:
    """Stacks spectrograms of shape `(n, num_bins)`, with `n` at most `num_frames`, and pads them with zeros. The result
    has shape `(len(pieces), num_bins, num_frames)` and the device and dtype of `like`."""
    batch = np.zeros((len(pieces), pieces[0].shape[1], num_frames), dtype=np.float32)
    for index, piece in enumerate(pieces):
        batch[index, :, : len(piece)] = piece.T
    return to_device(batch, like.device, like.dtype)


def taken(batch: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Returns the first `counts[i]` rows of each `batch[i]`, packed. `batch` has shape `(n, num_rows, width)`, the
    result `(sum(counts), width)`."""
    return torch.cat([rows[:count] for rows, count in zip(batch, counts, strict=True)])


def pooled_pairs(rows: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Returns the means of pairs of rows within each packed unit; unit `i` has `counts[i]` rows. An odd last row is
    dropped."""
    units = rows.split(list(counts))
    return [(unit[0 : 2 * (len(unit) // 2) : 2] + unit[1::2]) / 2 for unit in units]
