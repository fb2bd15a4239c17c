"""Samples -> log-mel spectrograms on a device, many sounds at once: what `modalities.mel` makes of each, to 1e-4.

For encoders on CUDA. Knows no files and no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fabric.errors import ConfigError
from modalities.mel import DYNAMIC_RANGE, FLOOR, MelOptions, mel_filters, signal_of

_FILTER_WIDTH = 64
_ROLLOFF = 0.97
"""As wide and as steep as `modalities.audio` resamples."""


class DeviceMel:
    """Spectrograms by one checkpoint's options. Not thread-safe: it shares the device with the encoder's forward."""

    def __init__(self, options: MelOptions, device: str) -> None:
        self._options = options
        self._window = torch.hann_window(options.window, device=device)
        self._filters = torch.from_numpy(mel_filters(options).astype(np.float32)).to(device)

    @torch.no_grad()
    def log_mels(
        self, sounds: Sequence[npt.NDArray[np.float32]], padded_to: int = 0, num_extra_frames: int = 0
    ) -> list[torch.Tensor]:
        """Samples `(num_samples,)` each, at the options' rate -> float32 `(num_mel_frames, num_bins)` each, on the
        device; arguments and lengths as in `modalities.mel.log_mel`. Memory grows with the longest sound times their
        number."""
        if not sounds:
            return []
        options = self._options
        signals = [signal_of(samples, options, padded_to, num_extra_frames) for samples in sounds]
        batch = np.zeros((len(signals), max(len(signal.values) for signal in signals)), dtype=np.float32)
        for row, signal in zip(batch, signals, strict=True):
            row[: len(signal.values)] = signal.values
        spectra = torch.stft(
            torch.from_numpy(batch).to(self._window.device),
            options.window,
            options.hop,
            window=self._window,
            center=False,
            return_complex=True,
        )
        energies = torch.view_as_real(spectra).square().sum(-1).transpose(1, 2) @ self._filters
        values = energies.clamp(min=FLOOR).log10()  # (sounds, frames, bins)
        made = torch.tensor([signal.num_made for signal in signals], device=values.device)
        is_made = torch.arange(values.shape[1], device=values.device) < made[:, None]
        loudest = values.amax(-1).masked_fill(~is_made, -torch.inf).amax(-1)
        values = (torch.maximum(values, (loudest - DYNAMIC_RANGE)[:, None, None]) + 4.0) / 4.0
        return [rows[: signal.num_kept] for rows, signal in zip(values, signals, strict=True)]


def resampled(samples: torch.Tensor, found: int, rate: int) -> torch.Tensor:
    """`(num_sounds, num_samples)` from one rate to another, on its device: `ceil(num_samples * rate / found)` samples
    (torchaudio's sinc filters). Raises ConfigError where torchaudio, of the `gpu` extra, can't be imported."""
    if found == rate:
        return samples
    made: torch.Tensor = _torchaudio_functional().resample(
        samples, found, rate, _FILTER_WIDTH, _ROLLOFF, "sinc_interp_kaiser"
    )
    return made


def _torchaudio_functional() -> Any:
    try:
        from torchaudio import functional
    except (ImportError, OSError) as error:
        raise ConfigError(f"resampling on a device needs torchaudio (`pip install weft[gpu]`): {error}") from error
    return functional
