"""Resamples sounds from their files' rates to one rate, in batches on a device. Each result equals that of
libswresample to 1e-6.

A sound is cut into seconds, each with the samples around it that the filter sees, and all seconds of one rate are one
batch. The computation is in float64: in float32 the rounding of loud low tones covers everything that is 80 dB quieter,
and a convolution in TF32 covers even more. torchaudio computes it where it can be imported (the `gpu` extra), and
otherwise torch alone computes the same convolution. This module knows nothing of files or spectrograms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from modalities.resampling import BETA, NUM_CROSSINGS, Resampling
from modalities.waveform import Waveform

_BLOCK_S = 64
"""Limits the seconds that are resampled at once, which bounds the memory (64 s of 48 kHz are 25 MB of float64)."""

Resample = Callable[[torch.Tensor], torch.Tensor]
"""A `Resample` maps float64 `(n, num_samples)` to `(n, num_resampled)`, with zeros around the samples; `num_samples`
consists of whole steps."""


class DeviceResampler:
    """Resamples sounds to `rate` on `device`. It is not thread-safe."""

    def __init__(self, rate: int, device: str) -> None:
        self._rate, self._device = rate, torch.device(device)
        self._found_to_resample: dict[int, Resample] = {}

    @torch.no_grad()
    def resampled(self, waveforms: Sequence[Waveform]) -> list[torch.Tensor]:
        """Returns the samples of each sound, float32 `(num_samples,)`, on the device. Each has its planned length."""
        found: list[torch.Tensor] = [torch.empty(0)] * len(waveforms)
        for rate in sorted({waveform.rate for waveform in waveforms}):
            at = [index for index, waveform in enumerate(waveforms) if waveform.rate == rate]
            sounds = [torch.from_numpy(waveforms[index].samples).to(self._device) for index in at]
            made = sounds if rate == self._rate else self._of_one_rate(sounds, rate)
            for index, samples in zip(at, made, strict=True):
                found[index] = _fitted(samples, waveforms[index].num_samples)
        return found

    def _of_one_rate(self, sounds: Sequence[torch.Tensor], found: int) -> list[torch.Tensor]:
        filters = Resampling.between(found, self._rate)
        if found not in self._found_to_resample:
            self._found_to_resample[found] = load_resample(filters, self._device)
        resample = self._found_to_resample[found]
        pieces = [_seconds(samples, filters) for samples in sounds]
        start = _margin(filters) // filters.step * filters.num_phases
        made = torch.cat([resample(part)[:, start : start + self._rate] for part in torch.cat(pieces).split(_BLOCK_S)])
        of_sounds = made.float().split([len(piece) for piece in pieces])
        return [
            seconds.reshape(-1)[: filters.num_made(len(samples))]
            for seconds, samples in zip(of_sounds, sounds, strict=True)
        ]


def load_resample(filters: Resampling, device: torch.device, with_torchaudio: bool = True) -> Resample:
    """Returns torchaudio's resampler, or one that uses torch alone if torchaudio can't be imported."""
    if with_torchaudio:
        try:
            from torchaudio.transforms import Resample as TorchaudioResample
        except (ImportError, OSError):  # With a CPU build of torch, torchaudio is missing or is linked against CUDA.
            pass
        else:
            made: Resample = TorchaudioResample(
                filters.step,
                filters.num_phases,
                "sinc_interp_kaiser",
                NUM_CROSSINGS,
                filters.rolloff,
                BETA,
                dtype=torch.float64,
            ).to(device)
            return made
    bank = filter_bank(filters).to(device)

    def resample(batch: torch.Tensor) -> torch.Tensor:
        reach = filters.num_taps // 2
        batch = functional.pad(batch, (reach, reach))
        return functional.conv1d(batch[:, None], bank[:, None], stride=filters.step).transpose(1, 2).flatten(1)

    return resample


def filter_bank(filters: Resampling) -> torch.Tensor:
    """Returns the filters, float64 `(num_phases, num_taps + step)`. Row i holds the weights of the file's samples for
    the i-th sample made in a step. The first weight belongs to the sample that is half of the taps before the step."""
    reach = filters.num_taps // 2
    places = torch.arange(-reach, filters.step + reach, dtype=torch.float64)
    phases = torch.arange(filters.num_phases, dtype=torch.float64)[:, None] * filters.step / filters.num_phases
    distances = (places - phases) * filters.factor  # The unit is zero crossings.
    inside = (1 - (distances / NUM_CROSSINGS).square()).clamp(min=0)
    window = torch.i0(BETA * inside.sqrt()) / torch.i0(torch.tensor(BETA, dtype=torch.float64))
    return torch.sinc(distances) * window * (inside > 0) * filters.factor


def _margin(filters: Resampling) -> int:
    """Returns how many samples on each side of a second its filters see, rounded up to whole steps."""
    return -(-filters.num_taps // (2 * filters.step)) * filters.step


def _seconds(samples: torch.Tensor, filters: Resampling) -> torch.Tensor:
    """Returns the seconds of a sound with their margins, float64 `(num_seconds, found + 2 * margin)`. The ends are
    reflected as libswresample does: the first sample is not repeated, and the last one is."""
    margin, num_taps = _margin(filters), filters.num_taps
    num_missing = -len(samples) % filters.found
    around = [
        samples[1 : margin + 1].flip(0),
        samples,
        samples[-num_taps:].flip(0),
        samples.new_zeros(max(0, num_missing + margin - num_taps)),
    ]
    return torch.cat(around).double().unfold(0, filters.found + 2 * margin, filters.found)


def _fitted(samples: torch.Tensor, num_samples: int) -> torch.Tensor:
    return functional.pad(samples[:num_samples], (0, max(0, num_samples - len(samples))))
