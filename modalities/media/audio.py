"""Implements the audio modality: it parses `input_audio` and `audio_url` parts, reads headers, and decodes and
resamples sounds with FFmpeg (PyAV).

`decode_samples` returns the samples at the rate that a family expects, which is an argument. `decode_waveform` keeps
the file's own rate if a device may resample the sound. `Resampling` defines by numbers how both do it: libswresample on
the host and torchaudio on a device use one filter, and compute the same result.

This module knows nothing of models or devices, and `modalities.media.spectrograms` computes spectrograms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

import av
import numpy as np
import numpy.typing as npt
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.error import BlockingIOError as NothingYet
from av.error import EOFError as NothingMore
from av.filter import Graph

from fabric.contracts import InvalidMedia, InvalidRequest
from modalities.family import AudioHeader, MediaHeader, Waveform
from modalities.media.containers import not_a_container, open_container, sniff, sound_header, sound_stream
from modalities.media.first_bytes import declared_sound, is_picture
from modalities.media.plugin import (
    AUDIO_S,
    FirstVerdict,
    MediaLimits,
    declares_more,
    decode_base64,
    decode_data_url,
    decoding,
    part_url,
)

Samples = npt.NDArray[np.float32]

_BLOCK_SAMPLES = 1 << 16
_LOUDEST = 1e6
"""Limits the magnitude of a sample, where full scale is 1; a file of floating-point samples that are louder is
broken."""


class AudioPlugin:
    """Parses and probes audio files in `input_audio` and `audio_url` parts."""

    modality = "audio"
    part_types = ("input_audio", "audio_url")
    needs_process = True

    def parse(self, part: Mapping[str, object], param: str, limits: MediaLimits) -> bytes:
        """Returns the bytes of the file that `part` contains. A part has the form
        `{"input_audio": {"data": base64, "format": "wav"}}` or `{"audio_url": {"url": "data:..."}}`. The declared
        format is ignored because the format follows from the bytes. Raises InvalidRequest if the part has another form,
        and InvalidMedia if the payload is broken or too large."""
        most = self.max_file_bytes(limits)
        if part.get("type") == "audio_url" or "input_audio" not in part:
            return decode_data_url(part_url(part, "audio_url", param), param, most)
        value = part["input_audio"]
        text = value.get("data") if isinstance(value, Mapping) else None
        if not isinstance(text, str):
            raise InvalidRequest(
                f"{param}: `input_audio` must be an object with base64 text in `data`, and a `format`", param=param
            )
        if text[:5].lower() == "data:":
            return decode_data_url(text, param, most)
        return decode_base64(text, param, most)

    def max_file_bytes(self, limits: MediaLimits) -> int:
        return min(limits.max_bytes_per_item, limits.max_audio_bytes)

    def judge(self, head: bytes, limits: MediaLimits) -> FirstVerdict:
        """Finds a flaw in what is neither a sound nor a video, and in a sound that declares to be too long."""
        if sniff(head) is None:  # MPEG audio is also found behind other bytes, so only what is plainly no sound tells.
            is_other = is_picture(head) or head.lstrip().startswith(b"<")
            return FirstVerdict(not_a_container(head) if is_other else "", False)
        _, _, seconds, is_final = declared_sound(head)
        is_long = declares_more(seconds, limits.max_audio_seconds)
        return FirstVerdict(_too_long(seconds or 0.0, limits) if is_long else "", is_final)

    def probe(self, data: bytes, param: str) -> AudioHeader:
        """Returns the header of the audio file. Reads the container to its end and decodes nothing. Raises InvalidMedia
        if the file is broken or has no sound."""
        return probe_sound(data, param)

    def validate(self, header: MediaHeader, limits: MediaLimits, param: str) -> None:
        """Raises InvalidMedia if the sound has no samples or is longer than the limit."""
        assert isinstance(header, AudioHeader)
        if header.num_samples < 1:
            raise InvalidMedia(f"{param}: the sound has no samples", param=param)
        if header.seconds > limits.max_audio_seconds:
            raise InvalidMedia(f"{param}: {_too_long(header.seconds, limits)}", param=param)


def _too_long(seconds: float, limits: MediaLimits) -> str:
    return f"the sound lasts {seconds:.1f} s, which is more than the limit of {limits.max_audio_seconds:g} s"


def probe_sound(data: bytes, param: str) -> AudioHeader:
    """Returns the header of an audio file or of a video's sound track. Raises InvalidMedia if the file is broken or has
    no sound."""
    with open_container(data, param) as container:
        return sound_header(data, container, param)


def num_samples_at(header: AudioHeader, rate: int) -> int:
    """Returns the number of samples that the sound has at another rate, rounded up (as librosa's `resample` does)."""
    return -(-header.num_samples * rate // header.sample_rate)


# ------------------------------------------------------------ the samples


@decoding
def decode_samples(data: bytes, rate: int, num_samples: int, param: str) -> Samples:
    """Returns the samples of the first audio stream of a file, which may also be a video: float32 `(num_samples,)`, the
    mean of the channels, at `rate` samples per second. The samples are padded or trimmed if their number differs from
    `num_samples` by at most `AUDIO_S` seconds.

    Decoding stops as soon as the file proves to be longer than that. Raises InvalidMedia if the file is broken, or if
    its length differs from the planned one by more."""
    _, samples = _found_samples(data, rate, num_samples, param, lambda _: False)
    samples = np.concatenate([samples[:num_samples], np.zeros(max(0, num_samples - len(samples)), dtype=np.float32)])
    return _checked(samples, param)


@decoding
def decode_waveform(data: bytes, rate: int, num_samples: int, param: str) -> Waveform:
    """Decodes a file like `decode_samples`, but keeps the file's own rate if a device may resample it, and neither pads
    nor trims the samples."""
    found, samples = _found_samples(
        data, rate, num_samples, param, lambda found: Resampling.between(found, rate).is_for_devices
    )
    if found != rate and len(samples) < Resampling.between(found, rate).least_samples:
        blocks = [block for _, block in _resampled([(found, samples)], rate, lambda _: False)]
        found, samples = rate, np.concatenate([*blocks, np.zeros(0, dtype=np.float32)])
    return Waveform(_checked(samples, param), found, num_samples)


def _found_samples(
    data: bytes, rate: int, num_samples: int, param: str, is_kept: Callable[[int], bool]
) -> tuple[int, Samples]:
    """Returns the rate and the samples of a file of which `num_samples` samples at `rate` are planned. `is_kept` is
    described at `_resampled`. Raises InvalidMedia as `decode_samples` does."""
    slack = round(AUDIO_S * rate)
    blocks: list[Samples] = []
    found, num_found = rate, 0
    with open_container(data, param) as container:
        stream = sound_stream(container)
        if stream is None:
            raise InvalidMedia(f"{param}: the file contains no sound that can be decoded", param=param)
        for found, block in _resampled(_mono_blocks(container, stream, param), rate, is_kept):
            blocks.append(block)
            num_found += len(block)
            if -(-num_found * rate // found) > num_samples + slack:
                raise InvalidMedia(f"{param}: the sound is longer than its header says", param=param)
    if -(-num_found * rate // found) < num_samples - slack:
        raise InvalidMedia(f"{param}: the sound is shorter than its header says", param=param)
    return found, np.concatenate([*blocks, np.zeros(0, dtype=np.float32)])


def _checked(samples: Samples, param: str) -> Samples:
    if not np.all(np.abs(samples) < _LOUDEST):  # This comparison is also false for NaN.
        raise InvalidMedia(
            f"{param}: the sound has samples that are not numbers, or that exceed {_LOUDEST:,.0f} times full scale",
            param=param,
        )
    return samples


def _mono_blocks(container: InputContainer, stream: AudioStream, param: str) -> Iterator[tuple[int, Samples]]:
    """Yields pairs of the file's rate and mono samples, in blocks that are large enough to be worth a call."""
    rate = 0
    waiting: list[Samples] = []
    num_waiting = 0
    for frame in container.decode(stream):
        if rate not in (0, frame.sample_rate):
            raise InvalidMedia(
                f"{param}: the sample rate of the sound changes from {rate} to {frame.sample_rate}", param=param
            )
        rate = frame.sample_rate
        waiting.append(_mono(frame))
        num_waiting += frame.samples
        if num_waiting >= _BLOCK_SAMPLES:
            yield rate, np.concatenate(waiting)
            waiting, num_waiting = [], 0
    if waiting:
        yield rate, np.concatenate(waiting)


def _mono(frame: AudioFrame) -> Samples:
    """Returns the mean of the channels, scaled so that full scale is 1."""
    values = frame.to_ndarray()
    if not frame.format.is_planar:
        values = values.reshape(-1, frame.layout.nb_channels).T
    mono: npt.NDArray[np.floating] = values.mean(axis=0, dtype=np.float64 if values.dtype.itemsize > 2 else np.float32)
    if values.dtype.kind in "iu":
        full = 2.0 ** (8 * values.dtype.itemsize - 1)
        mono = mono / full - (values.dtype.kind == "u")
    return mono.astype(np.float32)


def _resampled(
    blocks: Iterable[tuple[int, Samples]], rate: int, is_kept: Callable[[int], bool]
) -> Iterator[tuple[int, Samples]]:
    """Yields pairs of a rate and samples. libswresample resamples the blocks to `rate` and is flushed at the end.
    Blocks pass unchanged if they have that rate already, or if `is_kept` returns true for their rate."""
    graph: Graph | None = None
    at = 0
    for found, block in blocks:
        if found == rate or is_kept(found):
            yield found, block
            continue
        graph = graph or _resampling_graph(found, rate)
        frame = AudioFrame.from_ndarray(block[None], format="flt", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = found, at, Fraction(1, found)
        at += len(block)
        graph.push(frame)
        yield from ((rate, made) for made in _pulled(graph))
    if graph is not None:
        graph.push(None)
        yield from ((rate, made) for made in _pulled(graph))


def _resampling_graph(found: int, rate: int) -> Graph:
    graph = Graph()
    source = graph.add_abuffer(sample_rate=found, format="flt", layout="mono", time_base=Fraction(1, found))
    resampler, sink = graph.add("aresample", Resampling.between(found, rate).options), graph.add("abuffersink")
    source.link_to(resampler)
    resampler.link_to(sink)
    graph.configure()
    return graph


def _pulled(graph: Graph) -> Iterator[Samples]:
    while True:
        try:
            frame = graph.pull()
        except (NothingYet, NothingMore):
            return
        assert isinstance(frame, av.AudioFrame)
        yield frame.to_ndarray()[0]


# ------------------------------------------------------------ the filter

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
    """Describes the resampling from `found` to `rate` samples per second.

    The filter is a sinc of 64 zero crossings on each side under a Kaiser window. libswresample rounds its number of
    taps up, so the cutoff is chosen such that there is nothing to round. Then torchaudio's filter has the same taps,
    and host and device compute the same result."""

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
