"""Features into input embeddings: the rows of a step's pictures, sounds and frames, in one copy.

Knows nothing of requests, units' owners or where features come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from fabric.ids import UnitKey
from llm_workers.scheduling.plan import Splice


class FeatureReader(Protocol):
    def feature(self, unit: UnitKey) -> torch.Tensor:
        """Of a landed unit: `(num_levels, num_tokens, hidden)`, valid during the step."""
        ...


class PlacedSplice(NamedTuple):
    """A splice at its row of the packed input."""

    at: int
    splice: Splice


def splice_features(
    embeddings: torch.Tensor, placed: Sequence[PlacedSplice], features: FeatureReader
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Copies level 0 of the features into `embeddings` `(num_tokens, hidden)`, in ascending order of row. Returns the
    rows, int64, and the DeepStack levels there, `(num_levels - 1, num_rows, hidden)`; None if nothing is placed."""
    if not placed:
        return None, None
    taken = []
    for _, splice in placed:
        feature = features.feature(splice.unit)[:, splice.row : splice.row + splice.length]
        taken.append(feature.to(device=embeddings.device, dtype=embeddings.dtype))
    levels = torch.cat(taken, dim=1)
    rows = np.concatenate([np.arange(at, at + splice.length) for at, splice in placed])
    feature_rows = torch.from_numpy(rows).to(embeddings.device)
    embeddings.index_copy_(0, feature_rows, levels[0])
    return feature_rows, levels[1:]
