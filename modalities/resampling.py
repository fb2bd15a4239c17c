"""Defines by numbers how sounds are resampled: one filter for libswresample on the host and for torchaudio on a device.

The filter is a sinc of 64 zero crossings on each side under a Kaiser window. libswresample rounds its number of taps
up, so the cutoff is chosen such that there is nothing to round. Then torchaudio's filter has the same taps, and host
and device compute the same result. This module knows nothing of files or devices.
"""

from __future__ import annotations

import math
from typing import NamedTuple

NUM_CROSSINGS = 64
"""Counts the zero crossings on each side. At 16 kHz, this filter is flat to 7.4 kHz and 100 dB down from 8.5 kHz on;
libswresample's default (16) loses 3 dB at 7.5 kHz and folds back at -26 dB."""
BETA = 9.0
"""This is the parameter of the Kaiser window; it is libswresample's default."""
_CUTOFF = 0.97
"""Limits the cutoff as a share of the lower rate's band; it is libswresample's default."""
_MOST_COEFFICIENTS = 1 << 19
"""Limits the coefficients of a filter bank on a device. Rates without a large common divisor would take gigabytes
(44101 Hz: 3 GB)."""
_MOST_DOWN = 3
"""Limits the file's samples for each resampled one: files of higher rates are not worth sending to a device. The limit
is 48 kHz for 16 kHz."""


class Resampling(NamedTuple):
    """Describes the resampling from `found` to `rate` samples per second."""

    found: int
    rate: int
    num_taps: int
    """Counts the samples of the file from which each new sample is made. It is even."""

    @staticmethod
    def between(found: int, rate: int) -> Resampling:
        least = 2 * NUM_CROSSINGS * max(1.0, found / (_CUTOFF * rate))
        return Resampling(found, rate, 2 * math.ceil(least / 2))

    @property
    def factor(self) -> float:
        """Returns the cutoff as a share of the file's own band."""
        return 2 * NUM_CROSSINGS / self.num_taps

    @property
    def rolloff(self) -> float:
        """Returns the cutoff as a share of the lower rate's band."""
        return self.factor * self.found / min(self.found, self.rate)

    @property
    def step(self) -> int:
        """Returns the number of the file's samples after which the same phases repeat."""
        return self.found // math.gcd(self.found, self.rate)

    @property
    def num_phases(self) -> int:
        """Returns the number of samples that are made in each step."""
        return self.rate // math.gcd(self.found, self.rate)

    @property
    def options(self) -> str:
        """Returns the options of FFmpeg's filter `aresample`. The cutoff is made slightly larger, because otherwise
        rounding up would add two taps."""
        cutoff = min(1.0, self.factor * self.found / self.rate * (1 + 1e-9))
        return f"{self.rate}:filter_size={2 * NUM_CROSSINGS}:cutoff={cutoff:.12f}:kaiser_beta={BETA:g}"

    @property
    def least_samples(self) -> int:
        """Returns the number of samples that a sound must have to be resampled on a device, where its ends are
        reflected."""
        return self.num_taps + self.step + 1

    @property
    def is_for_devices(self) -> bool:
        """Returns whether a device resamples such files, instead of the process that decodes them."""
        num_coefficients = self.num_phases * (self.num_taps + self.step)
        return num_coefficients <= _MOST_COEFFICIENTS and self.found <= _MOST_DOWN * self.rate

    def num_made(self, num_samples: int) -> int:
        """Returns the number of samples that libswresample makes of `num_samples`, which must be at least
        `least_samples`. It sometimes leaves out the last one.

        libswresample stops where the filter does not fit any more. Then it reflects half a filter's length of the
        samples that it still holds, and stops again in the same way (libswresample/resample.c: `swri_resample`,
        `resample_flush`)."""
        reach = self.num_taps // 2
        first_left_out = self._num_fitting(num_samples - reach)
        held = num_samples - (first_left_out * self.step // self.num_phases - reach + 1)
        return self._num_fitting(num_samples + (min(held, self.num_taps) + 1) // 2 - reach)

    def _num_fitting(self, num_samples: int) -> int:
        """Returns how many resampled samples begin within the first `num_samples` of the file."""
        return -(-num_samples * self.num_phases // self.step)
