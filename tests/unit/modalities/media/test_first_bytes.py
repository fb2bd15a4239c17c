"""Tests what is read of the first bytes of a file: no good file is refused, wherever it is cut, and what it declares is
what is found in it later."""

from __future__ import annotations

import struct

import pytest
from media_corpus import CLIPS, RECORDINGS, sound_file, video_file
from media_mutations import spoiled_file, whole_files
from modalities_files import encode, picture
from sound_files import encoded, tone

from modalities.family import AudioHeader, ImageHeader, VideoHeader
from modalities.media import JUDGED_BYTES, JudgesFirstBytes, MediaLimits, max_file_bytes
from modalities.media.first_bytes import Declared, declared_picture, declared_sound, declared_video
from modalities.registry import REGISTRY

FILES = [
    pytest.param(modality, data, id=f"{modality}-{name}")
    for modality, files in whole_files().items()
    for name, data in files
]
LEAST = 64
"""No format is recognised by fewer bytes than this; `JUDGED_BYTES` is more."""


def judge_of(modality: str) -> JudgesFirstBytes:
    plugin = REGISTRY.modality(modality)
    assert isinstance(plugin, JudgesFirstBytes)
    return plugin


def flaw(modality: str, head: bytes, **limits: float) -> str:
    return judge_of(modality).judge(head, MediaLimits(**limits)).flaw


@pytest.mark.parametrize(("modality", "data"), FILES)
def test_a_good_file_has_no_flaw_wherever_it_is_cut(modality: str, data: bytes) -> None:
    cuts = [*range(LEAST, min(len(data), 2000)), *range(2000, len(data), 997), len(data)]
    flaws = {cut: flaw(modality, data[:cut]) for cut in cuts}
    assert {cut: found for cut, found in flaws.items() if found} == {}


@pytest.mark.parametrize(("modality", "data"), FILES)
def test_what_a_file_declares_is_what_is_in_it(modality: str, data: bytes) -> None:
    header = REGISTRY.modality(modality).probe(data, "part")
    if isinstance(header, ImageHeader):
        width, height, _, is_final = declared_picture(data)
        assert is_final
        assert width is None or {width, height} == {header.width, header.height}
    elif isinstance(header, VideoHeader):
        width, height, seconds, _ = declared_video(data)
        assert width is None or {width, height} == {header.width, header.height}
        assert seconds is None or seconds == pytest.approx(header.seconds, rel=0.3, abs=0.3)
    else:
        assert isinstance(header, AudioHeader)
        seconds = declared_sound(data).seconds
        assert seconds is None or seconds == pytest.approx(header.seconds, rel=0.05, abs=0.1)


PICTURES = [("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("GIF", {}), ("BMP", {}), ("WEBP", {})]


@pytest.mark.parametrize(("name", "options"), PICTURES)
def test_ordinary_pictures_declare_their_size_near_the_beginning(name: str, options: dict[str, object]) -> None:
    data = encode(picture(301, 203, "P" if name == "GIF" else "RGB"), name, **options)
    assert declared_picture(data[:1024]) == Declared(301, 203, None, is_final=True)
    assert flaw("image", data[:1024], max_image_pixels=301 * 203) == ""
    assert flaw("image", data[:1024], max_image_pixels=301 * 203 - 1) == (
        "the image has 301x203 pixels, which is more than the limit of 61102 pixels"
    )


def test_the_size_of_a_jpeg_behind_long_tables_is_awaited() -> None:
    data = encode(picture(40, 30), "JPEG")
    long = data[:2] + b"\xff\xfe\xff\xff" + bytes(65533) + data[2:]
    assert declared_picture(long[:60_000]) == Declared(is_final=False)
    assert declared_picture(long[:67_000])[:2] == (40, 30)


@pytest.mark.parametrize("name", [name for name in CLIPS if name.startswith(("webm", "avi", "mp4-fragmented"))])
def test_videos_with_their_tables_in_front_declare_the_size_of_their_frames(name: str) -> None:
    head = video_file(name)[:2048]
    assert {declared_video(head).width, declared_video(head).height} == {CLIPS[name].width, CLIPS[name].height}
    most = CLIPS[name].width * CLIPS[name].height
    assert flaw("video", head, max_video_pixels=most) == ""
    assert f"more than the limit of {most - 1} pixels" in flaw("video", head, max_video_pixels=most - 1)


def tables_in_front(data: bytes) -> bytes:
    """Returns an MP4 file with its box `moov` before its packets, as files for the web have it. (The positions of the
    packets in it are wrong then, which nothing here reads.)"""
    begin = int.from_bytes(data[:4], "big")
    at = data.index(b"moov") - 4
    end = at + int.from_bytes(data[at : at + 4], "big")
    return data[:begin] + data[at:end] + data[begin:at] + data[end:]


def lasting(data: bytes, seconds: int, *boxes: bytes) -> bytes:
    """Returns an MP4 file whose boxes of these names declare so many seconds."""
    made = bytearray(data)
    for name in boxes:
        at = made.index(name) + 4
        scale = int.from_bytes(made[at + 12 : at + 16], "big")
        made[at + 16 : at + 20] = (seconds * scale).to_bytes(4, "big")
    return bytes(made)


def test_an_mp4_file_with_its_tables_in_front_declares_its_length() -> None:
    whole = tables_in_front(video_file("mp4-h264-aac"))
    assert declared_video(whole[:4096]) == Declared(48, 32, pytest.approx(1.2, abs=0.15), is_final=True)
    long = lasting(whole, 7200, b"mvhd", b"mdhd")
    assert flaw("video", long[:4096]) == "the video lasts 7200.0 s, which is more than the limit of 3600 s"
    assert flaw("video", long[:4096], max_video_seconds=7000.0) == ""


def test_a_long_sound_track_makes_no_long_video() -> None:
    whole = lasting(tables_in_front(video_file("mp4-h264")), 7200, b"mvhd")
    assert declared_video(whole).seconds == pytest.approx(1.2, abs=0.15)
    assert flaw("video", whole) == ""


def test_a_webm_file_declares_its_length() -> None:
    data = bytearray(video_file("webm-vp9"))
    assert declared_video(bytes(data[:2048])).seconds == pytest.approx(1.0, abs=0.1)
    at = data.index(b"\x44\x89\x88") + 3
    data[at : at + 8] = struct.pack(">d", 4000e3)
    assert flaw("video", bytes(data[:2048])) == "the video lasts 4000.0 s, which is more than the limit of 3600 s"
    assert flaw("video", bytes(data[:2048]), max_video_seconds=4000.0) == ""


@pytest.mark.parametrize(("modality", "data"), FILES)
def test_a_file_exactly_at_the_limits_has_no_flaw(modality: str, data: bytes) -> None:
    header = REGISTRY.modality(modality).probe(data, "part")
    limits: dict[str, float] = {}
    if isinstance(header, ImageHeader):
        limits["max_image_pixels"] = header.width * header.height
    elif isinstance(header, VideoHeader):
        limits = {"max_video_pixels": header.width * header.height, "max_video_seconds": header.seconds}
    elif isinstance(header, AudioHeader):
        limits["max_audio_seconds"] = header.seconds
    files = [data, tables_in_front(data)] if b"moov" in data and modality == "video" else [data]
    assert [flaw(modality, file, **limits) for file in files] == [""] * len(files)


@pytest.mark.parametrize("name", ["wav", "flac"])
def test_a_sound_that_declares_to_be_too_long_is_refused(name: str) -> None:
    data = encoded(tone(20.0, 16000), 16000, name)
    assert declared_sound(data[:JUDGED_BYTES]).seconds == pytest.approx(20.0)
    assert flaw("audio", data[:JUDGED_BYTES], max_audio_seconds=20.0) == ""
    assert flaw("audio", data[:JUDGED_BYTES], max_audio_seconds=10.0) == (
        "the sound lasts 20.0 s, which is more than the limit of 10 s"
    )


def test_the_length_of_a_recording_that_goes_on_is_unknown() -> None:
    data = bytearray(encoded(tone(1.0, 16000), 16000, "wav"))
    at = data.index(b"data") + 4
    data[at : at + 4] = b"\xff\xff\xff\xff"
    assert declared_sound(bytes(data)) == Declared(is_final=True)


HTML = b"<!DOCTYPE html><html><body>404</body></html>" + b" " * 600
OTHERS = {
    "image": [HTML, video_file("mp4-h264"), sound_file("wav-16"), b"%PDF-1.7" + bytes(600), bytes(600)],
    "video": [HTML, encode(picture(31, 17)), sound_file("wav-16"), sound_file("flac"), sound_file("mp3-constant")],
    "audio": [HTML, encode(picture(31, 17)), encode(picture(31, 17), "JPEG")],
}


@pytest.mark.parametrize(
    ("modality", "data"), [(modality, data) for modality, files in OTHERS.items() for data in files]
)
def test_a_file_of_another_kind_is_refused_by_its_first_bytes(modality: str, data: bytes) -> None:
    found = flaw(modality, data[:JUDGED_BYTES])
    assert found.startswith(("the file is not a", "the file contains no video"))
    assert data is not HTML or found.endswith("it seems to be an HTML page")


@pytest.mark.parametrize("modality", ["image", "video", "audio"])
def test_no_bytes_whatsoever_break_a_judge(modality: str) -> None:
    for seed in range(600):
        verdict = judge_of(modality).judge(spoiled_file(seed).data, MediaLimits())
        assert isinstance(verdict.flaw, str)


@pytest.mark.parametrize(
    "head",
    [
        b"\x00\x00\x00\x08free" * 100_000,
        b"RIFF\x00\x00\x00\x00WAVE" + b"junk\x00\x00\x00\x00" * 100_000,
        b"\x1a\x45\xdf\xa3\x80" + b"\xec\x80" * 100_000,
        b"\xff\xd8\xff" + b"\xff" * 500_000,
    ],
)
def test_endless_tables_take_few_steps(head: bytes) -> None:
    for read in (declared_picture, declared_sound, declared_video):
        assert read(head)[:3] == (None, None, None)


def test_the_limits_on_files_hold_for_their_modalities() -> None:
    limits = MediaLimits(max_bytes_per_item=100, max_audio_bytes=30)
    assert {name: max_file_bytes(REGISTRY.modality(name), limits) for name in ("image", "video", "audio")} == {
        "image": 100,
        "video": 100,
        "audio": 30,
    }
    assert max_file_bytes(REGISTRY.modality("audio"), MediaLimits(max_bytes_per_item=20)) == 20


def test_every_recording_is_a_sound() -> None:
    assert [name for name in RECORDINGS if flaw("audio", sound_file(name)[:JUDGED_BYTES])] == []
