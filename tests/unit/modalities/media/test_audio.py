"""Tests the audio modality: which parts it accepts, how every format becomes samples, and what it refuses."""

from __future__ import annotations

import base64
import contextlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_corpus import CLIPS, video_file
from sound_files import FORMATS, encoded, noise, tone, wav

from fabric.contracts import InvalidMedia, InvalidRequest
from modalities.family import AudioHeader, VideoHeader
from modalities.media import AudioPlugin, MediaLimits, decode_samples, num_samples_at, probe_sound
from modalities.media.plugin import AUDIO_S
from modalities.registry import REGISTRY

RATE = 16000
PLUGIN, LIMITS = AudioPlugin(), MediaLimits()
PART = "messages.0.content.1"
LOSSY = {"mp3", "mp3-vbr", "ogg-opus", "m4a", "webm"}
"""Names the formats in which the level may change: LAME lowers it by a twentieth."""


def samples_of(data: bytes, rate: int = RATE) -> np.ndarray:
    return decode_samples(data, rate, num_samples_at(probe_sound(data, PART), rate), PART)


def error_of(part: dict[str, Any], limits: MediaLimits = LIMITS) -> Exception:
    with pytest.raises((InvalidMedia, InvalidRequest)) as caught:
        PLUGIN.parse(part, PART, limits)
    assert caught.value.param == PART
    assert PART in caught.value.message
    return caught.value


def test_parts_become_bytes() -> None:
    data = wav(noise(800), RATE)
    text = base64.b64encode(data).decode()
    url = f"data:audio/wav;base64,{text}"
    for part in (
        {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": text, "format": "mp3"}},  # The bytes decide the format.
        {"type": "input_audio", "input_audio": {"data": url}},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "audio_url", "audio_url": url},
    ):
        assert PLUGIN.parse(part, PART, LIMITS) == data


@pytest.mark.parametrize("value", [None, "text", 3, [], {}, {"data": None}, {"data": 7, "format": "wav"}])
def test_parts_of_another_form(value: object) -> None:
    assert isinstance(error_of({"type": "input_audio", "input_audio": value}), InvalidRequest)


def test_what_a_part_may_not_hold() -> None:
    def part(data: str) -> dict[str, Any]:
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}

    assert "base64" in str(error_of(part("no base64!")))
    assert "empty" in str(error_of(part("")))
    assert "limit of 2" in str(error_of(part("QUJD"), MediaLimits(max_bytes_per_item=2)))
    assert "data:" in str(error_of({"type": "audio_url", "audio_url": {"url": "https://example.org/a.wav"}}))
    assert isinstance(error_of({"type": "audio_url"}), InvalidRequest)


class CountedText(str):
    """Counts how often the text is read, as decoding does."""

    num_read = 0

    def __getitem__(self, at: Any) -> str:
        CountedText.num_read += isinstance(at, slice) and at.start is not None and at.start >= 0
        return super().__getitem__(at)


@pytest.mark.parametrize("kind", ["input_audio", "audio_url"])
def test_a_large_file_is_refused_before_it_is_decoded(kind: str) -> None:
    """Twenty-five megabytes are the limit, also where other media may be larger."""
    assert LIMITS.max_audio_bytes == 25 * 2**20 < LIMITS.max_bytes_per_item
    limits = MediaLimits(max_audio_bytes=300)

    def part(num_bytes: int) -> dict[str, Any]:
        text = base64.b64encode(b"x" * num_bytes).decode()
        if kind == "input_audio":
            return {"type": kind, kind: {"data": CountedText(text), "format": "wav"}}
        return {"type": kind, kind: {"url": f"data:audio/wav;base64,{text}"}}

    assert PLUGIN.parse(part(300), PART, limits) == b"x" * 300
    CountedText.num_read = 0
    assert "has 301 bytes, which is more than the limit of 300" in str(error_of(part(301), limits))
    assert CountedText.num_read == 0


def test_limits() -> None:
    PLUGIN.validate(AudioHeader("WAV", RATE, 1, 600 * RATE), LIMITS, PART)
    with pytest.raises(InvalidMedia, match=rf"{PART}: the sound lasts 600\.1 s, .* limit of 600 s") as caught:
        PLUGIN.validate(AudioHeader("WAV", RATE, 1, 600 * RATE + 1600), LIMITS, PART)
    assert caught.value.param == PART
    with pytest.raises(InvalidMedia, match="no samples"):
        PLUGIN.validate(AudioHeader("WAV", RATE, 1, 0), LIMITS, PART)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rate", "num_channels"), [(48000, 1), (16000, 2)])
def test_every_format(name: str, rate: int, num_channels: int) -> None:
    """The samples have the planned length and contain the tone of the file."""
    data = encoded(tone(1.23, rate, num_channels=num_channels), rate, name)
    header = PLUGIN.probe(data, PART)
    assert header.num_channels == num_channels
    assert abs(header.seconds - 1.23) < 0.01
    found = samples_of(data)
    assert (found.shape, found.dtype) == ((num_samples_at(header, RATE),), np.float32)
    middle = found[RATE // 4 : RATE]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert abs(np.argmax(spectrum) * RATE / len(middle) - 440) <= RATE / len(middle)
    assert middle.std() * np.sqrt(2) == pytest.approx(0.5, rel=0.06 if name in LOSSY or name == "wav-u8" else 1e-4)


@settings(deadline=None, max_examples=25)
@given(num_samples=st.integers(1, 30000), rate=st.sampled_from([8000, 11025, 16000, 22050, 44100, 48000]))
def test_any_length(num_samples: int, rate: int) -> None:
    data = wav(noise(num_samples), rate)
    assert len(samples_of(data)) == -(-num_samples * RATE // rate)


def test_a_file_at_the_models_rate_is_taken_as_it_is() -> None:
    samples = noise(5000)
    np.testing.assert_array_equal(samples_of(encoded(samples[None], RATE, "wav-float")), samples)


def test_channels_are_averaged() -> None:
    left, right = noise(5000, seed=1), noise(5000, seed=2)
    for rate in (RATE, 44100):
        both = samples_of(encoded(np.stack([left, right]), rate, "wav-float"))
        alone = [samples_of(encoded(one[None], rate, "wav-float")) for one in (left, right)]
        np.testing.assert_allclose(both, (alone[0] + alone[1]) / 2, atol=1e-6)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000, 96000])
def test_resampling_keeps_frequency_level_and_time(rate: int) -> None:
    found = samples_of(encoded(tone(1.0, rate, 1000.0), rate, "wav-float"))
    expected = tone(1.0, RATE, 1000.0)[0]
    np.testing.assert_allclose(found[200:-200], expected[200:-200], atol=1e-4)


@pytest.mark.parametrize("hz", [8600.0, 10000.0, 15000.0])
def test_what_the_models_rate_can_not_hold_is_gone(hz: float) -> None:
    found = samples_of(encoded(tone(0.5, 48000, hz), 48000, "wav-float"))
    assert np.abs(found[400:-400]).max() < 0.5 * 10 ** (-80 / 20)


@pytest.mark.parametrize("name", [name for name, clip in CLIPS.items() if clip.sound_codec])
def test_sound_tracks_of_videos(name: str) -> None:
    """The video's header describes its track as it is when it is planned and decoded on its own."""
    data = video_file(name)
    header = REGISTRY.modality("video").probe(data, PART)
    assert isinstance(header, VideoHeader)
    assert header.sound == probe_sound(data, PART)
    assert samples_of(data).std() > 0.1


def test_a_video_without_sound() -> None:
    with pytest.raises(InvalidMedia, match="no sound"):
        probe_sound(video_file("mp4-h264"), PART)


def test_other_lengths_than_planned() -> None:
    data = wav(noise(RATE), RATE)
    slack = round(AUDIO_S * RATE)
    whole = samples_of(data)
    longer = decode_samples(data, RATE, RATE + slack, PART)
    assert len(longer) == RATE + slack
    np.testing.assert_array_equal(longer, np.pad(whole, (0, slack)))
    np.testing.assert_array_equal(decode_samples(data, RATE, RATE - slack, PART), whole[: RATE - slack])
    for planned, word in ((RATE + slack + 1, "shorter"), (RATE - slack - 1, "longer")):
        with pytest.raises(InvalidMedia, match=f"{PART}: the sound is {word}") as caught:
            decode_samples(data, RATE, planned, PART)
        assert caught.value.param == PART


def test_a_bomb_is_not_decoded_to_its_end() -> None:
    """The file holds two minutes of silence in a few kilobytes; decoding ends where the plan does."""
    data = encoded(np.zeros((1, 48000 * 120), dtype=np.float32), 48000, "flac")
    assert len(data) < 200_000
    with pytest.raises(InvalidMedia, match="longer"):
        decode_samples(data, RATE, RATE, PART)
    with pytest.raises(InvalidMedia, match="limit of 10 s"):
        PLUGIN.validate(PLUGIN.probe(data, PART), MediaLimits(max_audio_seconds=10), PART)


def test_nothing_to_hear() -> None:
    for data in (wav(noise(0), RATE), b"", b"RIFF", b"hello" * 99, wav(noise(100), RATE)[:30]):
        with pytest.raises(InvalidMedia, match=PART) as caught:
            PLUGIN.probe(data, PART)
        assert caught.value.param == PART


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated_files(name: str, share: float) -> None:
    data = encoded(noise(48000)[None], 48000, name)
    with pytest.raises(InvalidMedia, match=PART) as caught:
        samples_of(data[: int(len(data) * share)])
    assert caught.value.param == PART


@settings(deadline=None, max_examples=60)
@given(name=st.sampled_from(sorted(FORMATS)), seed=st.integers(0, 10**6))
def test_mutated_files_are_decoded_or_refused(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = bytearray(encoded(noise(4000)[None], 48000, name))
    for at in rng.integers(0, len(data), rng.integers(1, 9)):
        data[at] = rng.integers(256)
    header, found = None, None
    with contextlib.suppress(InvalidMedia):
        header = probe_sound(bytes(data), PART)
        PLUGIN.validate(header, MediaLimits(max_audio_seconds=60), PART)
        found = samples_of(bytes(data))
    if header is not None and found is not None:
        assert len(found) == num_samples_at(header, RATE)
        assert np.isfinite(found).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30])
def test_samples_that_are_no_numbers(value: float) -> None:
    data = bytearray(encoded(noise(4000)[None], RATE, "wav-float"))
    data[-8:-4] = struct.pack("<f", value)
    with pytest.raises(InvalidMedia, match="samples that are not numbers"):
        samples_of(bytes(data))
