"""Landed features as tensors, without a copy on the host. Knows nothing of slots or announcements."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fabric.channel import LandedFeature
from fabric.ids import UnitKey

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LandedFeatures:
    """A FeatureReader over what the receiver keeps."""

    def __init__(self, landed: Mapping[UnitKey, LandedFeature]) -> None:
        self._landed = landed

    def feature(self, unit: UnitKey) -> torch.Tensor:
        """`(num_levels, num_tokens, hidden)` in the dtype it was sent in, a view of the inbox arena."""
        feature = self._landed[unit]
        return torch.from_numpy(feature.buffer).view(DTYPES[feature.ticket.dtype]).view(feature.ticket.shape)
