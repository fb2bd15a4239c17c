"""Computes log-mel spectrograms from samples, in numpy. They equal those of transformers' WhisperFeatureExtractor to
1e-4.

The number of frames follows from the number of samples alone (`num_mel_frames`), so a sound is planned before it is
decoded. This module knows nothing of files or models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FLOOR = 1e-10
DYNAMIC_RANGE = 8.0
"""Limits the range below the loudest value of the whole spectrogram, in powers of ten; quieter values are raised to the
lower end."""
_MAX_HZ = 8000.0
_BLOCK_FRAMES = 4096
"""Limits the frames that are transformed at once, which bounds the memory that a long sound takes."""


@dataclass(frozen=True, slots=True)
class MelOptions:
    """Holds the options of a checkpoint's preprocessor_config.json."""

    num_bins: int
    rate: int
    """Counts the samples per second."""
    hop: int
    """Counts the samples from one frame to the next."""
    window: int
    """Counts the samples that a frame sees."""
    chunk_samples: int
    """Counts the samples to which shorter sounds are padded, where the family pads."""


def num_mel_frames(num_samples: int, options: MelOptions, padded_to: int = 0) -> int:
    """Returns the number of frames that count as sound if silence pads the sound to `padded_to` samples: those that the
    reference's attention mask keeps. Returns 0 for a sound that is too short to be transformed."""
    total = max(num_samples, padded_to)
    if num_samples < 1 or total <= options.window // 2:
        return 0
    return min(math.ceil(num_samples / options.hop), total // options.hop)


class Extent(NamedTuple):
    """Says what the frames of a sound see, and how many frames there are. Half a window is reflected at both ends of
    the signal, and frame i sees `[i * hop : i * hop + window]` of the result."""

    num_made: int
    """Counts the frames that are computed; the loudest value is the maximum over these."""
    num_kept: int
    silence: int
    """Counts the samples of silence behind the sound."""


def extent_of(num_samples: int, options: MelOptions, padded_to: int = 0, num_extra_frames: int = 0) -> Extent:
    """Returns the extent of a sound; the arguments are those of `log_mel`. There are no frames if the sound is too
    short."""
    num_frames = num_mel_frames(num_samples, options, padded_to)
    if num_frames == 0:
        return Extent(0, 0, 0)
    total = max(num_samples, padded_to)
    # Up to two frames behind the sound still see its end, and may hold the loudest value.
    num_made = min(num_frames + max(2, num_extra_frames), total // options.hop)
    silence = min(total - num_samples, (2 + num_extra_frames) * options.hop + options.window)
    return Extent(num_made, min(num_frames + num_extra_frames, num_made), silence)


def log_mel(
    samples: npt.NDArray[np.float32], options: MelOptions, padded_to: int = 0, num_extra_frames: int = 0
) -> npt.NDArray[np.float32]:
    """Returns the spectrogram `(num_mel_frames, num_bins)` of the samples `(num_samples,)` at the options' rate, as if
    silence padded them to `padded_to` samples. Up to `num_extra_frames` frames of that silence are appended, as far as
    it reaches. A sound that is too short has no frames."""
    extent = extent_of(len(samples), options, padded_to, num_extra_frames)
    if extent.num_made == 0:
        return np.empty((0, options.num_bins), dtype=np.float32)
    signal = np.pad(samples.astype(np.float32, copy=False), (0, extent.silence))
    signal = np.pad(signal, options.window // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(signal, options.window)[:: options.hop]
    filters, window = mel_filters(options), np.hanning(options.window + 1)[:-1].astype(np.float32)
    energies = np.empty((extent.num_made, options.num_bins))
    for start in range(0, extent.num_made, _BLOCK_FRAMES):
        block = slice(start, min(start + _BLOCK_FRAMES, extent.num_made))
        spectrum = np.fft.rfft(frames[block] * window)
        energies[block] = (spectrum.real**2 + spectrum.imag**2) @ filters
    values: npt.NDArray[np.float64] = np.log10(np.maximum(energies, FLOOR))
    values = (np.maximum(values, values.max() - DYNAMIC_RANGE) + 4.0) / 4.0
    return values[: extent.num_kept].astype(np.float32)


@lru_cache(maxsize=8)
def mel_filters(options: MelOptions) -> npt.NDArray[np.float64]:
    """Returns triangular filters of equal area on Slaney's mel scale (librosa's `filters.mel`). The array has shape
    `(1 + window // 2, num_bins)`."""
    edges = _mel_to_hz(np.linspace(0.0, _hz_to_mel(_MAX_HZ), options.num_bins + 2))
    bins = np.linspace(0, options.rate // 2, 1 + options.window // 2)
    slopes = edges[None, :] - bins[:, None]
    widths = np.diff(edges)
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    filters = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))
    filters.flags.writeable = False
    return filters


# Slaney's scale is linear below 1000 Hz (15 mel) and logarithmic above.
_LINEAR_HZ, _LINEAR_MEL = 1000.0, 15.0
_HZ_PER_MEL = 200.0 / 3.0
_MEL_PER_E = 27.0 / math.log(6.4)


def _hz_to_mel(hz: float) -> float:
    return hz / _HZ_PER_MEL if hz < _LINEAR_HZ else _LINEAR_MEL + math.log(hz / _LINEAR_HZ) * _MEL_PER_E


def _mel_to_hz(mel: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    above = _LINEAR_HZ * np.exp((np.maximum(mel, _LINEAR_MEL) - _LINEAR_MEL) / _MEL_PER_E)
    return np.where(mel < _LINEAR_MEL, mel * _HZ_PER_MEL, above)
