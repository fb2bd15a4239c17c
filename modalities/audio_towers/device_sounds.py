"""A family's sounds -> units, on a device: resampled, transformed and cut in batches. Knows no weights."""

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
    """Implements `modalities.waveform.Spectrograms`. Not thread-safe."""

    def __init__(self, half: SoundHalf, device: str) -> None:
        self._half = half
        self._resampler = DeviceResampler(half.mel.rate, device)
        self._mel = DeviceMel(half.mel, device)

    def units(self, waveforms: Sequence[Waveform]) -> list[list[EncoderInput]]:
        """Of each sound what `SoundHalf.preprocess` gives, to 1e-4."""
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
    """In one copy: units wait for their forward in host memory, whose budget is kept."""
    if not spectrograms:
        return []
    values: npt.NDArray[np.float32] = torch.cat(list(spectrograms)).cpu().numpy()
    return np.split(values, np.cumsum([len(one) for one in spectrograms])[:-1])
