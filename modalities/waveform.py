"""Sounds whose spectrograms an encoder's device makes: what the decode process hands over, and the seam to the device.

A family need not offer it; without it spectrograms are made where sounds are decoded. Knows no family. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fabric.messages import MediaItem
from modalities.family import EncoderInput


@dataclass(frozen=True, slots=True)
class Waveform:
    """A decoded sound. `rate` is the family's, or one that `resampling.Resampling` has for devices."""

    samples: npt.NDArray[np.float32]
    """`(num_found,)`, the mean of the channels."""
    rate: int
    num_samples: int
    """That were planned, at the family's rate: what is left over is dropped, silence stands in for what is missing."""


class Spectrograms(Protocol):
    """Of one family, on one device. Used by one thread, which owns the device."""

    def units(self, waveforms: Sequence[Waveform]) -> list[list[EncoderInput]]:
        """All in one batch: the units that `Family.preprocess` gives of each sound, to 1e-4. They lie in host
        memory."""
        ...


@runtime_checkable
class HearsOnDevice(Protocol):
    """What a family may offer beside `Family.preprocess`, for its sounds."""

    def decode_waveform(self, data: bytes, item: MediaItem) -> Waveform:
        """The first half of `preprocess`. Raises InvalidMedia as that does."""
        ...

    def load_spectrograms(self, device: str) -> Spectrograms:
        """The other half. `device` as torch names it."""
        ...
