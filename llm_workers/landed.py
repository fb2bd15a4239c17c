"""Presents landed features as tensors, without a copy on the host. This module knows nothing of slots or
announcements.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fabric.channel import LandedFeature
from fabric.ids import UnitKey
from modalities.torch_dtypes import torch_dtype


class LandedFeatures:
    """`LandedFeatures` is a FeatureReader over the features that the receiver holds."""

    def __init__(self, landed: Mapping[UnitKey, LandedFeature]) -> None:
        self._landed = landed

    def feature(self, unit: UnitKey) -> torch.Tensor:
        """Returns the feature of a landed unit (one separately encoded part of a media item) with shape
        `(num_levels, num_tokens, hidden)`. It has the dtype in which it was sent and is a view of the inbox arena, or
        of the kept copy if the feature is lent."""
        feature = self._landed[unit]
        return torch.from_numpy(feature.buffer).view(torch_dtype(feature.ticket.dtype)).view(feature.ticket.shape)
