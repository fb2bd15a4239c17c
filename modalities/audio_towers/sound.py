"""Plans the sounds of a family and turns them into encoder inputs.

The plan (how many rows a sound becomes) follows from the sound's header alone; the inputs are its spectrogram, cut into
units. The module is pure except for decoding. It knows nothing of tokenizers or weights.
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
    """A `Unit` is a run of mel frames from one segment of the sound; it is encoded by itself."""

    segment: slice
    """Holds the range of samples that the unit's spectrogram is computed from."""
    start: int
    num_frames: int
    num_read: int
    """Counts the unit's frames and the frames after them that the convolutions read too."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SoundHalf:
    """Holds what one checkpoint does with sounds before its encoder runs. It is immutable and thread-safe."""

    mel: MelOptions
    cutting: Cutting
    padded_to: int = 0
    """A sound is padded with silence to at least this many samples for its spectrogram; 0 means no padding."""
    segment_samples: int = 0
    """A sound with more samples than this is split into segments, each with its own spectrogram; 0 means that a sound
    of any length has one spectrogram."""
    num_extra_frames: int = 0
    """A unit's convolutions read up to this many mel frames after its own, as far as the spectrogram has them."""

    def plan(self, header: AudioHeader) -> ItemPlan:
        """Plans a sound from its header alone. Raises InvalidMedia for a sound that is too short to become a row."""
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
        """Returns canonical JSON of all options that a sound's features depend on; it is part of the content's
        identity."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    def preprocess(self, data: bytes, item: MediaItem) -> list[EncoderInput]:
        """Returns the units of a sound file, or of the sound track of a video. Raises InvalidMedia for a broken file
        and for one that differs from its plan."""
        rate, num_samples = self._planned(data, item)
        return self.inputs(decode_samples(data, rate, num_samples, item.part))

    def decode_waveform(self, data: bytes, item: MediaItem) -> Waveform:
        """Decodes the sound like `preprocess`, but computes no spectrogram. The result may have the file's own rate.
        Raises InvalidMedia in the same cases as `preprocess`."""
        rate, num_samples = self._planned(data, item)
        return decode_waveform(data, rate, num_samples, item.part)

    def inputs(self, samples: npt.NDArray[np.float32]) -> list[EncoderInput]:
        """Computes the units of a sound from its samples, of shape `(num_samples,)` at the family's rate. A unit's
        pixels have shape `(num_read, num_bins)`, and its grid is `(num_frames, 1, 1)`."""
        spectrograms = [
            log_mel(samples[segment], self.mel, self.padded_to, self.num_extra_frames)
            for segment in self.segments(len(samples))
        ]
        return self.units(len(samples), spectrograms)

    def segments(self, num_samples: int) -> list[slice]:
        """Returns the range of samples of each spectrogram of a sound, in order."""
        found = dict.fromkeys((unit.segment.start, unit.segment.stop) for unit in self.cut(num_samples))
        return [slice(*bounds) for bounds in found]

    def units(self, num_samples: int, spectrograms: Sequence[npt.NDArray[np.float32]]) -> list[EncoderInput]:
        """Cuts `spectrograms`, which hold one spectrogram for each segment of the sound in order, into the same units
        as `inputs`."""
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
        """Returns the units of a sound of `num_samples` samples at the family's rate; there are none if it is too
        short. A last segment that is too short to become a row is left out."""
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
        """Returns the family's rate and the number of samples at that rate. Raises InvalidMedia if the file differs
        from its plan."""
        found = self.plan(probe_sound(data, item.part))
        if (found.grid, found.unit_tokens) != (item.grid, item.unit_tokens):
            raise InvalidMedia(
                f"{item.part}: the sound gives mel frames {found.grid}, planned were {item.grid}", param=item.part
            )
        rate, num_samples = found.geometry
        return rate, num_samples
