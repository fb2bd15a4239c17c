"""Tests containers: which are opened, how samples and frames are counted, and which files end too early."""

from __future__ import annotations

import io
import struct

import av
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_corpus import CLIPS, RECORDINGS, STORED, sound_file, video_file
from modalities_files import encode, picture

from fabric.contracts import InvalidMedia
from modalities.media.containers import (
    format_name,
    is_hidden_vp8,
    is_hidden_vp9,
    num_lost_bytes,
    open_container,
    sniff,
    sound_header,
)
from modalities.media.plugin import AUDIO_S

PARAM = "messages.0.content.1"
NO_LENGTH = ("adts-aac", "mp3-variable-no-header")
"""Names streams that do not state their length."""


@pytest.mark.parametrize("name", RECORDINGS)
def test_samples_are_counted_as_decoding_gives_them(name: str) -> None:
    data = sound_file(name)
    with open_container(data, PARAM) as container:
        header = sound_header(data, container, PARAM)
    with av.open(io.BytesIO(data)) as container:
        num_samples = sum(frame.samples for frame in container.decode(audio=0))
    made = RECORDINGS[name]
    assert (header.sample_rate, header.num_channels) == (made.sample_rate, 2)
    lossless = made.codec.startswith("pcm") or made.codec in ("flac", "alac")
    slack = 0 if lossless or name == "mp3-constant" else round(AUDIO_S / 4 * made.sample_rate)
    assert abs(header.num_samples - num_samples) <= slack
    if lossless:
        assert header.num_samples == made.num_samples


@pytest.mark.parametrize("name", [name for name in RECORDINGS if name not in NO_LENGTH])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_truncated_sounds_are_refused(name: str, share: float) -> None:
    data = sound_file(name)
    with pytest.raises(InvalidMedia) as caught, open_container(data[: int(len(data) * share)], PARAM) as container:
        sound_header(data, container, PARAM)
    assert caught.value.param == PARAM


@pytest.mark.parametrize("name", NO_LENGTH)
def test_streams_without_a_length_are_as_long_as_they_are(name: str) -> None:
    data = sound_file(name)
    with open_container(data[: len(data) // 2], PARAM) as container:
        assert 0.3 < sound_header(data, container, PARAM).num_samples / RECORDINGS[name].num_samples < 0.7


@pytest.mark.parametrize("no_size", [0x7FFF_F000, 0x7FFF_FFFF, 0xFFFF_FFFF])
def test_a_sound_that_was_written_to_a_pipe_is_as_long_as_it_is(no_size: int) -> None:
    """SoX and espeak-ng, older programs, and FFmpeg write these sizes where they can't go back to the header."""
    data = bytearray(sound_file("wav-16"))
    at = data.index(b"data")
    struct.pack_into("<I", data, 4, min(no_size + at, 2**32 - 1))
    struct.pack_into("<I", data, at + 4, no_size)
    with open_container(bytes(data), PARAM) as container:
        assert sound_header(bytes(data), container, PARAM).num_samples == RECORDINGS["wav-16"].num_samples


@pytest.mark.parametrize(
    "name", [*(n for n in (*CLIPS, *RECORDINGS, *STORED) if not n.startswith(("mpeg", "adts", "mp3-variable-no")))]
)
def test_whole_files_have_lost_nothing(name: str) -> None:
    data = sound_file(name) if name in RECORDINGS else video_file(name)
    found = sniff(data)
    assert found is not None
    assert num_lost_bytes(found.name, data) == 0
    assert num_lost_bytes(found.name, data + b"a trailer of another program") == 0 or found.name == "OGG"
    with open_container(data, PARAM) as container:
        assert format_name(container) == found.name


@given(
    name=st.sampled_from(["WAV", "AVI", "MP4", "MATROSKA", "MP3", "OGG", "FLAC"]),
    start=st.binary(max_size=64),
    rest=st.binary(max_size=64),
)
@settings(deadline=None, max_examples=300)
def test_any_bytes_can_be_held_against_their_length(name: str, start: bytes, rest: bytes) -> None:
    signatures = [b"", b"RIFF", b"\x1a\x45\xdf\xa3", b"OggS", b"Xing", b"\0\0\0\1mdat", b"\0\0\0\x08moov", b"ID3"]
    for signature in signatures:
        data = start[:8] + signature + start + signature + rest
        sniff(data)
        sniff(signature + rest)
        assert num_lost_bytes(name, data) >= 0
        assert num_lost_bytes(name, signature + rest) >= 0


def test_what_is_sniffed() -> None:
    mp3 = sound_file("mp3-constant")
    tag = b"ID3\x04\x00\x00\x00\x00\x01\x00" + bytes(128)
    for data, name in [
        (sound_file("flac"), "FLAC"),
        (tag + sound_file("flac"), "FLAC"),
        (tag + mp3[mp3.index(b"\xff\xf3") :], "MP3"),
        (sound_file("adts-aac"), "AAC"),
        (tag + sound_file("adts-aac"), "AAC"),
        (video_file("mpeg-mpeg1"), "MPEG"),
        (video_file("mpegts-mpeg2"), "MPEGTS"),
    ]:
        found = sniff(data)
        assert found is not None
        assert found.name == name
    for data in (b"", b"#EXTM3U", b"\xff", b"G" + bytes(300), encode(picture(9, 9)), b"\0\0\0\x1cftypavif" + bytes(99)):
        assert sniff(data) is None


def test_a_file_does_not_open_others() -> None:
    """The file has a QuickTime track whose samples are in another file (`url ` data reference, not self-contained)."""
    data = bytearray(video_file("mov-mjpeg"))
    at = data.index(b"url \0\0\0\x01")
    data[at + 7] = 0
    with open_container(bytes(data), PARAM) as container:
        # The packets come out of this file, as if the track were self-contained.
        assert sum(packet.size > 0 for packet in container.demux(video=0)) == 12
        assert container.open_files == {}
    with pytest.raises(PermissionError):
        container.io_open("/etc/passwd", 0, {})


def test_errors_of_the_block_are_not_hidden() -> None:
    with pytest.raises(KeyboardInterrupt), open_container(sound_file("flac"), PARAM):
        raise KeyboardInterrupt
    with pytest.raises(InvalidMedia, match="more memory"), open_container(sound_file("flac"), PARAM):
        raise MemoryError


def vp9_frame(profile: int, show_existing: int, show_frame: int) -> memoryview:
    """Returns the first bits of an uncompressed header: marker 2, profile (low bit first), a reserved bit in profile 3,
    show_existing_frame, frame_type, show_frame."""
    bits = f"10{profile & 1}{profile >> 1}" + ("0" if profile == 3 else "") + f"{show_existing}1{show_frame}"
    return memoryview(int(bits.ljust(16, "0"), 2).to_bytes(2, "big") + b"\0")


def test_hidden_frames_are_told_by_their_first_bits() -> None:
    for profile in range(4):
        assert is_hidden_vp9(vp9_frame(profile, 0, 0))
        assert not is_hidden_vp9(vp9_frame(profile, 0, 1))
        assert not is_hidden_vp9(vp9_frame(profile, 1, 0))
    assert not is_hidden_vp9(memoryview(bytes(vp9_frame(0, 0, 0)) + b"\xc1"))  # This is a superframe.
    for tag, is_hidden in [(0x10, False), (0x11, False), (0x00, True), (0x01, True)]:
        assert is_hidden_vp8(memoryview(struct.pack("<B", tag))) == is_hidden
