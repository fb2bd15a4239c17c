"""A family's half for sounds: how many rows one becomes, known from its header, and its spectrogram, cut into units.

Pure but for decoding. Knows neither tokenizers nor weights.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fabric.errors import InvalidMedia
from fabric.messages import MediaItem
from modalities.audio import decode_samples, decode_waveform, num_samples_at, probe_sound
from modalities.audio_towers.cutting import Cutting, cut
from modalities.family import AudioHeader, EncoderInput, ItemPlan
from modalities.mel import MelOptions, log_mel, num_mel_frames
from modalities.waveform import Waveform

_AUDIO = "audio"


class Unit(NamedTuple):
    """Mel frames of one segment of the sound."""

    segment: slice
    """Samples with a spectrogram of their own."""
    start: int
    num_frames: int
    num_read: int
    """With those behind them that the convolutions read."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SoundHalf:
    """One checkpoint's. Immutable and thread-safe."""

    mel: MelOptions
    cutting: Cutting
    padded_to: int = 0
    """Samples that a spectrogram is made of, silence behind the sound; 0 for the sound alone."""
    segment_samples: int = 0
    """A longer sound becomes several, each with a spectrogram of its own; 0 for one, however long."""
    num_extra_frames: int = 0
    """Mel frames behind its own that a unit's convolutions read, as far as there are any."""

    def plan(self, header: AudioHeader) -> ItemPlan:
        """Raises InvalidMedia for a sound too short to become a row."""
        num_samples = num_samples_at(header, self.mel.rate)
        units = self.cut(num_samples)
        if not units:
            raise InvalidMedia(f"a sound of {1000 * header.seconds:.0f} ms is too short")
        return ItemPlan(
            modality=_AUDIO,
            grid=(sum(unit.num_frames for unit in units), 1, 1),
            unit_tokens=tuple(unit.num_tokens for unit in units),
            cost=sum(unit.num_read for unit in units),
            geometry=(self.mel.rate, num_samples),
            num_levels=1,
        )

    def options(self) -> str:
        """Canonical JSON of everything that a sound's features depend on: part of the content's identity."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    def preprocess(self, data: bytes, item: MediaItem) -> list[EncoderInput]:
        """A file of sound, or a video's track, -> its units. Raises InvalidMedia for a broken file or one that is not
        what was planned."""
        rate, num_samples = self._planned(data, item)
        return self.inputs(decode_samples(data, rate, num_samples, item.part))

    def decode_waveform(self, data: bytes, item: MediaItem) -> Waveform:
        """As far as `preprocess` comes without a spectrogram; perhaps at the file's own rate. Raises as that does."""
        rate, num_samples = self._planned(data, item)
        return decode_waveform(data, rate, num_samples, item.part)

    def inputs(self, samples: npt.NDArray[np.float32]) -> list[EncoderInput]:
        """`(num_samples,)` at the family's rate -> units, pixels `(num_read, num_bins)`, grid `(num_frames, 1, 1)`."""
        spectrograms = [
            log_mel(samples[segment], self.mel, self.padded_to, self.num_extra_frames)
            for segment in self.segments(len(samples))
        ]
        return self.units(len(samples), spectrograms)

    def segments(self, num_samples: int) -> list[slice]:
        """The samples of each spectrogram of a sound, in order."""
        found = dict.fromkeys((unit.segment.start, unit.segment.stop) for unit in self.cut(num_samples))
        return [slice(*bounds) for bounds in found]

    def units(self, num_samples: int, spectrograms: Sequence[npt.NDArray[np.float32]]) -> list[EncoderInput]:
        """Cuts the spectrograms of the sound's segments, in their order, into units as `inputs` does."""
        starts = [segment.start for segment in self.segments(num_samples)]
        start_to_values = dict(zip(starts, spectrograms, strict=True))
        found: list[EncoderInput] = []
        for unit in self.cut(num_samples):
            values = start_to_values[unit.segment.start]
            pixels = np.ascontiguousarray(values[unit.start : unit.start + unit.num_read])
            grid = (unit.num_frames, 1, 1)
            found.append(EncoderInput(_AUDIO, pixels, grid, geometry=(self.mel.rate, num_samples)))
        return found

    def cut(self, num_samples: int) -> list[Unit]:
        """The units of a sound of so many samples at the family's rate; none if it is too short. A last segment too
        short to become a row is left out."""
        length = self.segment_samples or max(1, num_samples)
        found: list[Unit] = []
        for start in range(0, num_samples, length):
            segment = slice(start, min(start + length, num_samples))
            size = segment.stop - start
            num_made = max(size, self.padded_to) // self.mel.hop
            at = 0
            for window in cut(num_mel_frames(size, self.mel, self.padded_to), self.cutting):
                num_read = min(at + window.num_frames + self.num_extra_frames, num_made) - at
                found.append(Unit(segment, at, window.num_frames, num_read, window.num_tokens))
                at += window.num_frames
        return found

    def _planned(self, data: bytes, item: MediaItem) -> tuple[int, int]:
        """The family's rate, and samples at it. Raises InvalidMedia if the file is not what was planned."""
        found = self.plan(probe_sound(data, item.part))
        if (found.grid, found.unit_tokens) != (item.grid, item.unit_tokens):
            raise InvalidMedia(
                f"{item.part}: the sound gives mel frames {found.grid}, planned were {item.grid}", param=item.part
            )
        rate, num_samples = found.geometry
        return rate, num_samples
