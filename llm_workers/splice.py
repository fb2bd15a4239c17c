"""Copies features into input embeddings: the rows of a step's images, sounds and video frames, with one copy per span.

This module knows nothing of requests or of the origin of features. A unit is one separately encoded part of a media
item.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from fabric.ids import UnitKey
from llm_workers.scheduling.feature_references import FeatureReferences
from llm_workers.scheduling.plan import Splice
from modalities.torch_dtypes import torch_dtype


class FeatureReader(Protocol):
    def feature(self, unit: UnitKey) -> torch.Tensor:
        """Returns the feature of a landed unit with shape `(num_levels, num_tokens, hidden)`. It is valid during the
        step."""
        ...


class ReferencedFeatures:
    """Implements `FeatureReader` over the references that the engine holds, without a copy on the host."""

    def __init__(self, references: FeatureReferences) -> None:
        self._references = references

    def feature(self, unit: UnitKey) -> torch.Tensor:
        """Returns a view of the feature of a readable unit, with shape `(num_levels, num_tokens, hidden)` and the dtype
        in which it was sent."""
        feature = self._references.feature(unit)
        return torch.from_numpy(feature.buffer).view(torch_dtype(feature.ticket.dtype)).view(feature.ticket.shape)


class PlacedSplice(NamedTuple):
    """Describes a splice and its row in the packed input."""

    at: int
    splice: Splice


def splice_features(
    embeddings: torch.Tensor, placed: Sequence[PlacedSplice], features: FeatureReader
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Copies level 0 of the features into `embeddings` with shape `(num_tokens, hidden)`, in ascending order of row.
    Returns the rows that have DeepStack levels, as int64, and these levels with shape
    `(num_levels - 1, num_rows, hidden)`. If no feature has such levels, returns all rows that were placed, with no
    levels. If nothing is placed, both are None."""
    if not placed:
        return None, None
    deeper = []
    for at, splice in placed:
        feature = features.feature(splice.unit)[:, splice.row : splice.row + splice.length]
        embeddings[at : at + splice.length].copy_(feature[0])
        deeper.append(feature[1:].to(device=embeddings.device, dtype=embeddings.dtype))
    num_deeper = max(len(levels) for levels in deeper)
    spans = [
        (np.arange(at, at + splice.length), levels)
        for (at, splice), levels in zip(placed, deeper, strict=True)
        if len(levels) == num_deeper
    ]
    rows = np.concatenate([rows for rows, _ in spans])
    return torch.from_numpy(rows).to(embeddings.device), torch.cat([levels for _, levels in spans], dim=1)
