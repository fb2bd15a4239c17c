"""Turns the sounds of a family into units on a device: it resamples and transforms them in batches and cuts them.

This module knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from modalities.audio_towers.sound import SoundHalf
from modalities.family import EncoderInput
from modalities.mel_device import DeviceMel
from modalities.resample_device import DeviceResampler
from modalities.waveform import Waveform


class DeviceSounds:
    """Implements `modalities.waveform.Spectrograms`. It is not thread-safe."""

    def __init__(self, half: SoundHalf, device: str) -> None:
        self._half = half
        self._resampler = DeviceResampler(half.mel.rate, device)
        self._mel = DeviceMel(half.mel, device)

    def units(self, waveforms: Sequence[Waveform]) -> list[list[EncoderInput]]:
        """Returns for each sound the units that `SoundHalf.preprocess` returns, equal to within 1e-4."""
        half = self._half
        sounds = self._resampler.resampled(waveforms)
        segments = [half.segments(waveform.num_samples) for waveform in waveforms]
        pieces = [samples[bounds] for samples, found in zip(sounds, segments, strict=True) for bounds in found]
        spectrograms = iter(_on_host(self._mel.log_mels(pieces, half.padded_to, half.num_extra_frames)))
        return [
            half.units(waveform.num_samples, [next(spectrograms) for _ in found])
            for waveform, found in zip(waveforms, segments, strict=True)
        ]


def _on_host(spectrograms: Sequence[torch.Tensor]) -> list[npt.NDArray[np.float32]]:
    """Copies all spectrograms to the host in one copy. Units wait for their forward pass in host memory, because the
    encoder limits how much of that memory they take."""
    if not spectrograms:
        return []
    values: npt.NDArray[np.float32] = torch.cat(list(spectrograms)).cpu().numpy()
    return np.split(values, np.cumsum([len(one) for one in spectrograms])[:-1])
