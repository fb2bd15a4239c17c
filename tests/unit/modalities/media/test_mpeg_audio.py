"""Tests MP3 files as they occur in practice: behind junk, joined from several files, and with tags in between. Players
accept them all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_corpus import sound_file

from fabric.contracts import InvalidMedia
from modalities.media import AudioPlugin, decode_samples, num_samples_at
from modalities.media.containers import sniff
from modalities.media.mpeg_audio import MAX_JUNK_BYTES, first_frame, one_stream

PARAM = "messages.0.content.1"
RATE = 16_000
CONSTANT = sound_file("mp3-constant")
VARIABLE = sound_file("mp3-variable")
BARE = sound_file("mp3-variable-no-header")
NUM_SAMPLES = 12345
ID3V1 = b"TAG" + b"\0" * 125
ID3V2 = b"ID3\x04\x00\x00\x00\x00\x00\x0a" + b"\0" * 10


def apev2(values: bytes = b"x" * 8) -> bytes:
    head = b"APETAGEX" + (2000).to_bytes(4, "little") + (len(values) + 32).to_bytes(4, "little")
    flags = [flag.to_bytes(4, "little") + b"\0" * 8 for flag in (0xA0000000, 0x80000000)]
    count = (1).to_bytes(4, "little")
    return head + count + flags[0] + values + head + count + flags[1]


def heard(data: bytes) -> np.ndarray:
    """Returns samples at 16 kHz, as many as the header states."""
    header = AudioPlugin().probe(data, PARAM)
    assert header.format == "MP3"
    samples = decode_samples(data, RATE, num_samples_at(header, RATE), PARAM)
    assert np.abs(samples).max() > 0.2
    return samples


JUNK = {
    "zeros": b"\0" * 300,
    "a few bytes": b"\x01\x02",
    "text": b"HTTP/1.1 200 OK\r\nContent-Type: audio/mpeg\r\n\r\n",
    "false starts": b"\xff\xfb\x90\x00" * 40,
    "much": bytes(range(1, 251)) * 250,
    "tags": ID3V2 + ID3V2 + b"\0" * 50,
    "a tag and text": ID3V2 + b"hello",
}


@pytest.mark.parametrize("name", JUNK)
@pytest.mark.parametrize("sound", [CONSTANT, VARIABLE, BARE])
def test_a_file_behind_junk_is_the_file(name: str, sound: bytes) -> None:
    assert np.array_equal(heard(JUNK[name] + sound), heard(sound))


BETWEEN = {
    "nothing": b"",
    "id3v1": ID3V1,
    "apev2": apev2(),
    "apev2 and id3v1": apev2() + ID3V1,
    "zeros behind a tag": ID3V1 + b"\0" * 700,
    "id3v2 twice": ID3V2 + ID3V2,
}


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("sounds", [(CONSTANT, CONSTANT), (VARIABLE, BARE), (BARE, VARIABLE), (CONSTANT,) * 4])
def test_files_put_together_play_one_after_the_other(name: str, sounds: tuple[bytes, ...]) -> None:
    """Each file has its own tag and count of frames, and the encoders' delays stay in the sound, as players leave
    them."""
    samples = heard(BETWEEN[name].join(sounds) + (ID3V1 if name == "id3v1" else b""))
    single = max(len(heard(sound)) for sound in sounds)
    assert 0.95 * single * len(sounds) < len(samples) < 1.2 * single * len(sounds)
    quarter = len(samples) // len(sounds) // 4
    for at in range(len(sounds)):  # No part is silent.
        middle = (2 * at + 1) * len(samples) // (2 * len(sounds))
        assert np.abs(samples[middle - quarter : middle + quarter]).max() > 0.2


def test_a_file_whose_last_frame_is_cut_off_by_the_next() -> None:
    for first in (CONSTANT, BARE):
        second = CONSTANT if first is CONSTANT else VARIABLE
        assert abs(len(heard(first[:-100] + second)) - len(heard(first + second))) <= 1152


def test_what_is_whole_is_not_touched() -> None:
    for data in (
        CONSTANT,
        VARIABLE,
        BARE,
        CONSTANT + ID3V1,
        CONSTANT + apev2(),
        sound_file("wav-16"),
        b"",
        b"\xff" * 99,
    ):
        assert one_stream(data) is data
    assert len(heard(CONSTANT)) == NUM_SAMPLES


def test_other_rates_in_the_middle_are_refused() -> None:
    with pytest.raises(InvalidMedia, match="sample rate of the sound changes from 44100 to 16000"):
        heard(CONSTANT + VARIABLE)


def test_damage_in_the_middle_is_refused_as_ever() -> None:
    middle = len(CONSTANT) // 2
    for damaged in (
        CONSTANT[:middle] + b"\x55" * 900 + CONSTANT[middle + 900 :],
        CONSTANT[:middle] + b"\x55" * 900 + CONSTANT[middle:],
    ):
        assert one_stream(damaged) is damaged
        with pytest.raises(InvalidMedia):
            heard(damaged)


def test_what_holds_no_sound_is_not_taken_for_it() -> None:
    rng = np.random.default_rng(0)
    for size in (10, 1000, 300_000):
        for _ in range(20):
            data = b"x" + rng.bytes(size)
            assert first_frame(data) == -1
            assert sniff(data) is None
    far = b"\x11" * (MAX_JUNK_BYTES + 1) + CONSTANT[45:]
    assert sniff(far) is None


def test_files_of_nothing_but_tags_hold_no_sound() -> None:
    """The number of tags does not matter, and each part of a file is found, regardless of how many parts it has."""
    for data in (ID3V2[:10].replace(b"\x0a", b"\0") * 50_000, (ID3V2 + b"\0") * 20_000, b"\xff" * 500_000):
        assert one_stream(data) is data
    many = (BARE[45:] + ID3V1) * 60
    assert one_stream(many).count(b"TAG") == 1  # That tag is behind the last part.


@given(st.binary(max_size=400), st.sampled_from([CONSTANT, VARIABLE, BARE]), st.binary(max_size=200))
@settings(deadline=None, max_examples=150)
def test_any_bytes_around_sound_do_no_harm(before: bytes, sound: bytes, behind: bytes) -> None:
    found = one_stream(before + sound + behind)
    assert found.endswith(sound[-400:] + behind)
    assert one_stream(found[:-1]) is not None
