"""How sounds are resampled, in numbers: one filter for libswresample on the host and for torchaudio on a device.

A sinc of 64 zero crossings on each side under a Kaiser window. libswresample rounds its number of taps up, so the
cutoff is chosen such that there is nothing to round: then torchaudio's filter has the same taps, and a device makes
of a sound what the host makes of it. Knows no files and no devices.
"""

from __future__ import annotations

import math
from typing import NamedTuple

NUM_CROSSINGS = 64
"""Flat to 7.4 kHz and 100 dB down from 8.5 kHz on at 16 kHz; libswresample's default (16) loses 3 dB at 7.5 kHz and
folds back at -26."""
BETA = 9.0
"""Of the Kaiser window: libswresample's default."""
_CUTOFF = 0.97
"""At most, of the lower rate's band: libswresample's default."""
_MOST_COEFFICIENTS = 1 << 19
"""Of a filter bank on a device: rates without a common divisor to speak of would take gigabytes (44101 Hz: 3 GB)."""
_MOST_DOWN = 3
"""Samples of the file for each of ours that are worth carrying to a device: 48 kHz for 16 kHz."""


class Resampling(NamedTuple):
    """From `found` to `rate` samples per second."""

    found: int
    rate: int
    num_taps: int
    """Even. Samples of the file that each new one is made of."""

    @staticmethod
    def between(found: int, rate: int) -> Resampling:
        least = 2 * NUM_CROSSINGS * max(1.0, found / (_CUTOFF * rate))
        return Resampling(found, rate, 2 * math.ceil(least / 2))

    @property
    def factor(self) -> float:
        """Cutoff as a share of the file's own band."""
        return 2 * NUM_CROSSINGS / self.num_taps

    @property
    def rolloff(self) -> float:
        """Cutoff as a share of the lower rate's band."""
        return self.factor * self.found / min(self.found, self.rate)

    @property
    def step(self) -> int:
        """Samples of the file after which the same phases come again."""
        return self.found // math.gcd(self.found, self.rate)

    @property
    def num_phases(self) -> int:
        """Samples made in each step."""
        return self.rate // math.gcd(self.found, self.rate)

    @property
    def options(self) -> str:
        """Of FFmpeg's filter `aresample`. The cutoff is a hair larger: rounded up, the taps would be two more."""
        cutoff = min(1.0, self.factor * self.found / self.rate * (1 + 1e-9))
        return f"{self.rate}:filter_size={2 * NUM_CROSSINGS}:cutoff={cutoff:.12f}:kaiser_beta={BETA:g}"

    @property
    def least_samples(self) -> int:
        """That a sound must have to be resampled on a device: its ends are reflected."""
        return self.num_taps + self.step + 1

    @property
    def is_for_devices(self) -> bool:
        """Whether a device resamples such files, rather than the process that decodes them."""
        num_coefficients = self.num_phases * (self.num_taps + self.step)
        return num_coefficients <= _MOST_COEFFICIENTS and self.found <= _MOST_DOWN * self.rate

    def num_made(self, num_samples: int) -> int:
        """Samples that libswresample makes of so many, `least_samples` or more; it sometimes leaves the last one out.

        It stops where the filter does not fit any more, and then once more after half a filter's length of what it
        still holds was reflected (libswresample/resample.c: `swri_resample`, `resample_flush`)."""
        reach = self.num_taps // 2
        first_left_out = self._num_fitting(num_samples - reach)
        held = num_samples - (first_left_out * self.step // self.num_phases - reach + 1)
        return self._num_fitting(num_samples + (min(held, self.num_taps) + 1) // 2 - reach)

    def _num_fitting(self, num_samples: int) -> int:
        """How many of ours begin within the first `num_samples` of the file."""
        return -(-num_samples * self.num_phases // self.step)
