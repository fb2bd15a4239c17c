"""Defines the waveforms that the decode process hands to an encoder whose device makes spectrograms, and the interface
to this device.

A family need not offer `MelOnDevice`; without it, the process that decodes a sound also makes its spectrogram. This
module knows nothing of particular families. It is pure.
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
    """A `Waveform` is a decoded sound. `rate` is the family's rate, or a rate that `resampling.Resampling` allows for
    devices."""

    samples: npt.NDArray[np.float32]
    """Holds the mean of the channels. Has shape `(num_found,)`."""
    rate: int
    num_samples: int
    """Counts the planned samples at the family's rate. Samples beyond this number are dropped, and silence replaces
    missing ones."""


class Spectrograms(Protocol):
    """Makes the spectrograms of one family on one device. One thread, which owns the device, uses it."""

    def units(self, waveforms: Sequence[Waveform]) -> list[list[EncoderInput]]:
        """Returns for each sound the units that `Family.preprocess` returns, equal to within 1e-4. All are computed in
        one batch, and they are in host memory."""
        ...


@runtime_checkable
class MelOnDevice(Protocol):
    """A family may offer this for its sounds, in addition to `Family.preprocess`."""

    def decode_waveform(self, data: bytes, item: MediaItem) -> Waveform:
        """Decodes the sound, which is the first half of `preprocess`. Raises InvalidMedia in the same cases."""
        ...

    def load_spectrograms(self, device: str) -> Spectrograms:
        """Loads the other half of `preprocess`, which makes spectrograms. `device` is named as in torch."""
        ...
