"""Turns the sounds of a family into units on a device: it resamples and transforms them in batches and cuts them.

`DeviceSounds` is the family's `Spectrograms`, and runs the two steps for many sounds at once. `DeviceResampler` brings
them from their files' rates to one rate; each result equals that of libswresample to 1e-6. `DeviceMel` computes their
log-mel spectrograms; each equals the result of `modalities.media.spectrograms` to 1e-4. No sound is padded to the
length of another.

This module knows nothing of files and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from modalities.device_copies import to_device, to_host
from modalities.families.audio_towers.sound_plans import SoundHalf
from modalities.family import EncoderInput, Waveform
from modalities.media import (
    BETA,
    DYNAMIC_RANGE,
    FLOOR,
    NUM_CROSSINGS,
    Extent,
    MelOptions,
    Resampling,
    extent_of,
    mel_filters,
)


class DeviceSounds:
    """Implements `modalities.family.Spectrograms`. It is not thread-safe."""

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
    (joined,) = to_host([torch.cat(list(spectrograms))])
    values: npt.NDArray[np.float32] = joined.numpy()
    return np.split(values, np.cumsum([len(one) for one in spectrograms])[:-1])


# ------------------------------------------------------------ resampling

_BLOCK_S = 64
"""Limits the seconds that are resampled at once, which bounds the memory (64 s of 48 kHz are 25 MB of float64)."""

Resample = Callable[[torch.Tensor], torch.Tensor]
"""A `Resample` maps float64 `(n, num_samples)` to `(n, num_resampled)`, with zeros around the samples; `num_samples`
consists of whole steps."""


class DeviceResampler:
    """Resamples sounds to `rate` on `device`. It is not thread-safe.

    A sound is cut into seconds, each with the samples around it that the filter sees, and all seconds of one rate are
    one batch. The computation is in float64: in float32 the rounding of loud low tones covers everything that is 80 dB
    quieter, and a convolution in TF32 covers even more."""

    def __init__(self, rate: int, device: str) -> None:
        self._rate, self._device = rate, torch.device(device)
        self._found_to_resample: dict[int, Resample] = {}

    @torch.no_grad()
    def resampled(self, waveforms: Sequence[Waveform]) -> list[torch.Tensor]:
        """Returns the samples of each sound, float32 `(num_samples,)`, on the device. Each has its planned length."""
        found: list[torch.Tensor] = [torch.empty(0)] * len(waveforms)
        for rate in sorted({waveform.rate for waveform in waveforms}):
            at = [index for index, waveform in enumerate(waveforms) if waveform.rate == rate]
            sounds = [to_device(waveforms[index].samples, self._device) for index in at]
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


def _margin(filters: Resampling) -> int:
    """Returns how many samples on each side of a second its filters see, rounded up to whole steps."""
    return -(-filters.num_taps // (2 * filters.step)) * filters.step


def _fitted(samples: torch.Tensor, num_samples: int) -> torch.Tensor:
    return functional.pad(samples[:num_samples], (0, max(0, num_samples - len(samples))))


def load_resample(filters: Resampling, device: torch.device, with_torchaudio: bool = True) -> Resample:
    """Returns torchaudio's resampler where torchaudio can be imported (the `gpu` extra), and otherwise one that
    computes the same convolution with torch alone."""
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


# ------------------------------------------------------------ spectrograms

_BLOCK_FRAMES = 16384
"""Limits the frames that are transformed at once, which bounds the memory for all sounds: with 400 samples per frame,
the spectra take about 100 MB."""


class DeviceMel:
    """Computes spectrograms with the options of one checkpoint. Sounds of all lengths lie one behind the other, so no
    sound is padded to the length of another. The class is not thread-safe: it shares the device with the encoder's
    forward pass."""

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
        `modalities.media.spectrograms.log_mel`."""
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
