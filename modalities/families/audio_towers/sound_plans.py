"""Plans the sounds of a family and turns them into encoder inputs.

`SoundHalf` is what one checkpoint does with sounds before its encoder runs. Its plan (how many rows a sound becomes)
follows from the sound's header alone; its inputs are the sound's spectrogram, cut into units. A `Cutting` says where a
spectrogram may be cut, so that each unit, encoded alone, gives exactly its rows of the whole spectrogram: each tower's
convolutions and attention stay within chunks of mel frames, and a unit is one or more chunks. Three functions build the
`SoundHalf` of each family from its config files, and refuse what Weft can't run.

The module is pure except for decoding. It knows nothing of tokenizers or weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fabric.contracts import ConfigError, InvalidMedia, MediaItem
from modalities.checkpoint_files import read_feature_extractor
from modalities.family import AudioHeader, EncoderInput, ItemPlan, Waveform, canonical_options
from modalities.media import (
    MelOptions,
    decode_samples,
    decode_waveform,
    log_mel,
    num_mel_frames,
    num_samples_at,
    probe_sound,
)

# ------------------------------------------------------------ a family's sounds

_AUDIO = "audio"


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
            raise InvalidMedia(f"the sound lasts {1000 * header.seconds:.0f} ms, which is too short for the model")
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
        return canonical_options(self)

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
                f"{item.part}: the sound gives mel frames {found.grid}, but {item.grid} were planned from its header",
                param=item.part,
            )
        rate, num_samples = found.geometry
        return rate, num_samples


class Unit(NamedTuple):
    """A `Unit` is a run of mel frames from one segment of the sound; it is encoded by itself."""

    segment: slice
    """Holds the range of samples that the unit's spectrogram is computed from."""
    start: int
    num_frames: int
    num_read: int
    """Counts the unit's frames and the frames after them that the convolutions read too."""
    num_tokens: int


# ------------------------------------------------------------ where a spectrogram may be cut


class Window(NamedTuple):
    """A `Window` holds the size of one unit: its mel frames, and the rows (tokens) that they become."""

    num_frames: int
    num_tokens: int


class Cutting(Protocol):
    """A `Cutting` knows how many mel frames a tower takes in one unit, and how many rows they become."""

    @property
    def unit_frames(self) -> int:
        """Returns the number of mel frames of a full unit."""
        ...

    def num_tokens(self, num_frames: int) -> int:
        """Returns the number of rows that the first `num_frames` consecutive mel frames of a unit become."""
        ...


def cut(num_frames: int, cutting: Cutting) -> tuple[Window, ...]:
    """Returns the units of a spectrogram. A remainder that gives no row of its own joins the unit before it. The result
    is empty if the whole spectrogram gives no row."""
    counts = [cutting.unit_frames] * (num_frames // cutting.unit_frames)
    if rest := num_frames % cutting.unit_frames:
        counts.append(rest)
    if len(counts) > 1 and cutting.num_tokens(counts[-1]) == 0:
        counts[-2:] = [counts[-2] + counts[-1]]
    return tuple(Window(count, cutting.num_tokens(count)) for count in counts if cutting.num_tokens(count))


class PooledChunks(NamedTuple):
    """Counts the rows of Qwen2.5-Omni and Qwen2-Audio (`_get_feat_extract_output_lengths`): a convolution halves the
    frames within each chunk, then pooling of pairs over the whole unit halves them a second time. `unit_frames` must
    be a whole number of chunks and a multiple of four."""

    unit_frames: int

    def num_tokens(self, num_frames: int) -> int:
        return (num_frames + 1) // 2 // 2


class ConvolvedChunks(NamedTuple):
    """Counts the rows of Qwen3-Omni (`_get_feat_extract_output_lengths`): three convolutions halve the frames within
    each chunk. The reference counts 13 rows for a full chunk."""

    chunk_frames: int
    unit_frames: int

    def num_tokens(self, num_frames: int) -> int:
        full, rest = divmod(num_frames, self.chunk_frames)
        return full * halved(self.chunk_frames, 3) + halved(rest, 3)


def halved(num_frames: int, num_times: int) -> int:
    """Returns the number of frames that remain after `num_times` convolutions of stride two and padding one."""
    for _ in range(num_times):
        num_frames = (num_frames + 1) // 2
    return num_frames


# ------------------------------------------------------------ the families

_ROWS_OF_A_CHUNK = 13
"""Qwen3-Omni's reference counts this many rows for each full chunk, as a constant that ignores the chunk's size."""
_UNIT_CHUNKS = 4
"""A unit of Qwen2.5-Omni has this many chunks, so that it lasts 8 s like the units of Qwen3-Omni. Each unit is
announced and transferred separately, and a single chunk (50 rows) is too small for that cost."""
_READ_AHEAD = 2
"""Counts the mel frames that the two convolutions of Qwen2-Audio read after those of the last row that counts."""


def qwen3_omni_sound(model_dir: Path, audio: Mapping[str, Any], hidden_size: int) -> SoundHalf:
    """Returns how Qwen3-Omni treats sounds. `audio` is the model's `audio_config`; `hidden_size` is the text model's.

    Convolutions see chunks of `2 * n_window` mel frames; attention sees `n_window_infer` mel frames, rounded down to
    whole chunks, and these are a unit. Sounds may have any length (the reference's processor uses
    `padding=True, truncation=False`). Raises ConfigError for a config that Weft can't run."""
    mel = _mel(model_dir, audio)
    _check_width(audio, hidden_size)
    chunk_frames, seen = 2 * _number(audio, "n_window", 50), _number(audio, "n_window_infer", 800)
    if halved(chunk_frames, 3) != _ROWS_OF_A_CHUNK or seen < chunk_frames:
        raise ConfigError(
            f"audio_config has n_window {chunk_frames // 2} and n_window_infer {seen}; 2 * n_window mel frames must "
            f"give {_ROWS_OF_A_CHUNK} rows, and n_window_infer must be at least 2 * n_window"
        )
    return SoundHalf(mel, ConvolvedChunks(chunk_frames, seen // chunk_frames * chunk_frames))


def qwen2_5_omni_sound(model_dir: Path, audio: Mapping[str, Any], hidden_size: int) -> SoundHalf:
    """Returns how Qwen2.5-Omni treats sounds. `audio` and `hidden_size` are as in `qwen3_omni_sound`.

    Convolutions and attention see chunks of `2 * n_window` mel frames, and pairs of their rows are pooled. The
    spectrogram is computed as if silence padded the sound to the extractor's length. The reference's processor
    truncates longer sounds; Weft encodes them whole. Raises ConfigError for a config that Weft can't run."""
    mel = _mel(model_dir, audio)
    _check_width(audio, hidden_size)
    chunk_frames = 2 * _number(audio, "n_window", 100)
    return SoundHalf(mel, PooledChunks(_UNIT_CHUNKS * chunk_frames), padded_to=mel.chunk_samples)


def qwen2_audio_sound(model_dir: Path, audio: Mapping[str, Any]) -> SoundHalf:
    """Returns how Qwen2-Audio treats sounds. `audio` is the model's `audio_config`.

    Attention sees the extractor's 30 s, so these are a unit. The reference's processor truncates a longer sound; Weft
    encodes it as several consecutive sounds. Raises ConfigError for a config that Weft can't run."""
    mel = _mel(model_dir, audio)
    num_frames, num_positions = mel.chunk_samples // mel.hop, _number(audio, "max_source_positions", 1500)
    if num_frames != 2 * num_positions or mel.chunk_samples % mel.hop:
        raise ConfigError(
            f"audio_config.max_source_positions is {num_positions}, but it must be half of the "
            f"{mel.chunk_samples / mel.hop:g} mel frames of the preprocessor"
        )
    return SoundHalf(
        mel,
        PooledChunks(num_frames),
        padded_to=mel.chunk_samples,
        segment_samples=mel.chunk_samples,
        num_extra_frames=_READ_AHEAD,
    )


def _mel(model_dir: Path, audio: Mapping[str, Any]) -> MelOptions:
    mel = read_mel_options(model_dir)
    if mel.num_bins != (num_bins := _number(audio, "num_mel_bins", 128)):
        raise ConfigError(
            f"audio_config.num_mel_bins is {num_bins}, but the feature_size of the preprocessor is {mel.num_bins}"
        )
    return mel


def _check_width(audio: Mapping[str, Any], hidden_size: int) -> None:
    if (width := _number(audio, "output_dim", 3584)) != hidden_size:
        raise ConfigError(f"audio_config.output_dim is {width}, but the hidden_size of the text model is {hidden_size}")


def _number(audio: Mapping[str, Any], name: str, default: int) -> int:
    value = audio.get(name, default)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"audio_config.{name} must be a positive whole number, not {value!r}")
    return value


_KIND = "WhisperFeatureExtractor"


def read_mel_options(model_dir: Path) -> MelOptions:
    """Returns the options of a checkpoint's feature extractor for sounds (transformers' WhisperFeatureExtractor), from
    processor_config.json (nested) or preprocessor_config.json. Missing keys take the values that transformers 5.23
    gives them. Raises ConfigError if the files are missing or broken, if the extractor is of another kind, and if it
    adds noise or does not pad with silence."""
    options = read_feature_extractor(model_dir)
    kind = options.get("feature_extractor_type", _KIND)
    if kind != _KIND:
        raise ConfigError(f"{model_dir}: the feature extractor {kind!r} is not supported; Weft supports {_KIND}")
    if options.get("dither") or options.get("padding_value"):
        raise ConfigError(
            f"{model_dir}: the feature extractor must pad with silence and must not add noise, but its padding_value "
            f"is {options.get('padding_value', 0)} and its dither is {options.get('dither', 0)}"
        )
    try:
        rate = int(options.get("sampling_rate", 16000))
        found = MelOptions(
            num_bins=int(options.get("feature_size", 80)),
            rate=rate,
            hop=int(options.get("hop_length", 160)),
            window=int(options.get("n_fft", 400)),
            chunk_samples=int(options.get("chunk_length", 30)) * rate,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{model_dir}: the config of the feature extractor is broken: {error}") from error
    if min(found.num_bins, found.rate, found.hop, found.chunk_samples) < 1 or found.window < 2:
        raise ConfigError(
            f"{model_dir}: the config of the feature extractor is broken: its numbers must be positive, and n_fft must "
            f"be at least 2, but they are {found}"
        )
    return found
