"""Computes the log-mel spectrograms of many sounds at once on a device. Each equals the result of `modalities.mel` to
1e-4.

Sounds of all lengths lie one behind the other, so no sound is padded to the length of another. This module knows
nothing of files or models.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from modalities.mel import DYNAMIC_RANGE, FLOOR, Extent, MelOptions, extent_of, mel_filters

_BLOCK_FRAMES = 16384
"""Limits the frames that are transformed at once, which bounds the memory for all sounds: with 400 samples per frame,
the spectra take about 100 MB."""


class DeviceMel:
    """Computes spectrograms with the options of one checkpoint. It is not thread-safe: it shares the device with the
    encoder's forward pass."""

    def __init__(self, options: MelOptions, device: str) -> None:
        self._options = options
        self._window = torch.hann_window(options.window, device=device)
        self._filters = torch.from_numpy(mel_filters(options).astype(np.float32)).to(device)

    @torch.no_grad()
    def log_mels(
        self, sounds: Sequence[torch.Tensor], padded_to: int = 0, num_extra_frames: int = 0
    ) -> list[torch.Tensor]:
        """Returns a spectrogram, float32 `(num_mel_frames, num_bins)`, for each sound. A sound is float32
        `(num_samples,)`, on the device and at the options' rate. The other arguments and the lengths are as in
        `modalities.mel.log_mel`."""
        options = self._options
        extents = [extent_of(len(samples), options, padded_to, num_extra_frames) for samples in sounds]
        signals = [
            self._signal(samples, extent) for samples, extent in zip(sounds, extents, strict=True) if extent.num_made
        ]
        if not signals:
            return [self._filters.new_empty((0, options.num_bins)) for _ in sounds]
        values = self._log_energies(torch.cat([*signals, self._window.new_zeros(options.window)]))
        found, at = [], 0
        for extent in extents:
            found.append(_normalised(values[at : at + extent.num_made])[: extent.num_kept])
            at += self._num_hops(extent)
        return found

    def _num_hops(self, extent: Extent) -> int:
        """Returns the number of hops that a sound's signal takes. The frames at its last hops, behind the frames that
        are made, would also see the next sound, and are not used."""
        hop, window = self._options.hop, self._options.window
        return -(-((extent.num_made - 1) * hop + window) // hop) if extent.num_made else 0

    def _signal(self, samples: torch.Tensor, extent: Extent) -> torch.Tensor:
        """Returns all samples that the sound's frames see, padded to whole hops."""
        num_seen = self._num_hops(extent) * self._options.hop
        signal = functional.pad(samples, (0, extent.silence))
        reflected = (self._options.window // 2,) * 2
        signal = functional.pad(signal[None], reflected, mode="reflect")[0, :num_seen]
        return functional.pad(signal, (0, num_seen - len(signal)))

    def _log_energies(self, signal: torch.Tensor) -> torch.Tensor:
        """Returns the logarithms of the mel energies of a frame at each hop. Has shape `(num_frames, num_bins)`."""
        hop, window = self._options.hop, self._options.window
        num_frames = (len(signal) - window) // hop + 1
        values = signal.new_empty((num_frames, self._options.num_bins))
        for start in range(0, num_frames, _BLOCK_FRAMES):
            stop = min(start + _BLOCK_FRAMES, num_frames)
            spectra = torch.stft(
                signal[start * hop : (stop - 1) * hop + window],
                window,
                hop,
                window=self._window,
                center=False,
                return_complex=True,
            )
            energies = torch.view_as_real(spectra).square().sum(-1).T @ self._filters
            values[start:stop] = energies.clamp(min=FLOOR).log10()
        return values


def _normalised(values: torch.Tensor) -> torch.Tensor:
    """Returns normalised values. Values far below the loudest one of the sound are raised to one level."""
    if len(values) == 0:
        return values
    return (torch.maximum(values, values.amax() - DYNAMIC_RANGE) + 4.0) / 4.0
