"""Tests videos: for every container, decoding gives what the header promises, and broken files are refused."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence

import av
import numpy as np
import pytest
from lossless_files import mkv
from media_corpus import CLIPS, STORED, Clip, encode_video, frame_pixels, motion_jpeg, sound_file, video_file
from modalities_files import data_url, encode, picture

from fabric.contracts import InvalidMedia, InvalidRequest
from modalities.family import MediaOptions, VideoHeader
from modalities.media import MediaLimits, VideoPlugin, decode_frames, settled_frames

PLUGIN = VideoPlugin()
PARAM = "messages.0.content.1"
EVERY_FILE = (*CLIPS, *STORED)


def decoded(data: bytes, indices: Sequence[int], header: VideoHeader) -> list[np.ndarray]:
    return list(decode_frames(data, indices, header, PARAM))


def every_frame(data: bytes) -> list[np.ndarray]:
    """Returns every frame as PyAV alone decodes it."""
    with av.open(io.BytesIO(data)) as container:
        return [np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90) for frame in container.decode(video=0)]


@pytest.mark.parametrize("name", EVERY_FILE)
def test_the_header_is_what_decoding_gives(name: str) -> None:
    data = video_file(name)
    header = PLUGIN.probe(data, PARAM)
    frames = every_frame(data)
    assert header.num_frames == len(frames)
    assert {frame.shape for frame in frames} == {(header.height, header.width, 3)}
    found = decoded(data, range(header.num_frames), header)
    assert all(np.array_equal(one, other) for one, other in zip(found, frames, strict=True))
    picks = [0, 0, header.num_frames // 2, header.num_frames - 1, header.num_frames - 1]
    for at, frame in zip(picks, decoded(data, picks, header), strict=True):
        assert np.array_equal(frame, frames[at])
        assert frame.dtype == np.uint8
        assert frame.flags.c_contiguous


@pytest.mark.parametrize("name", [name for name in CLIPS if not CLIPS[name].times])
def test_frames_are_upright_in_order_and_in_time(name: str) -> None:
    clip = CLIPS[name]
    header = PLUGIN.probe(video_file(name), PARAM)
    assert header.num_frames == clip.num_frames
    assert header.seconds == clip.num_frames / clip.fps
    for at, found in enumerate(decoded(video_file(name), range(clip.num_frames), header)):
        shown = np.rot90(frame_pixels(at, clip.width, clip.height), clip.rotation // 90)
        assert np.mean(np.abs(found.astype(int) - shown.astype(int))) < 16


@pytest.mark.parametrize(("name", "seconds"), [("mp4-variable-rate", 2.04), ("webm-vp9-variable-rate", 2.1)])
def test_a_variable_rate_is_measured(name: str, seconds: float) -> None:
    header = PLUGIN.probe(video_file(name), PARAM)
    assert header.num_frames == len(CLIPS[name].times)
    assert header.seconds == pytest.approx(seconds + 0.1)  # The last frame counts for as long as it is shown.


@pytest.mark.parametrize("name", [name for name in CLIPS if CLIPS[name].sound_codec])
def test_the_sound_track_is_described(name: str) -> None:
    data = video_file(name)
    sound = PLUGIN.probe(data, PARAM).sound
    assert sound is not None
    with av.open(io.BytesIO(data)) as container:
        num_samples = sum(frame.samples for frame in container.decode(audio=0))
    assert (sound.sample_rate, sound.num_channels) == (48000, 2)
    assert abs(sound.num_samples - num_samples) <= 0.03 * 48000
    assert PLUGIN.probe(video_file("mp4-h264"), PARAM).sound is None


def test_the_last_frame_stands_in_for_one_and_no_more() -> None:
    data = video_file("webm-vp9")
    header = PLUGIN.probe(data, PARAM)
    one_more = dataclasses.replace(header, num_frames=31)
    frames = decoded(data, [28, 29, 30, 30], one_more)
    assert not np.array_equal(frames[0], frames[1])
    assert np.array_equal(frames[1], frames[2])
    assert np.array_equal(frames[1], frames[3])
    two_more = dataclasses.replace(header, num_frames=32)
    with pytest.raises(InvalidMedia, match="30 of 32"):
        decoded(data, [0, 31], two_more)
    assert len(decoded(data, [0, 29], two_more)) == 2  # Decoding goes no further than needed.


@pytest.mark.parametrize("name", [*(n for n in EVERY_FILE if not n.startswith("mpeg"))])
@pytest.mark.parametrize("share", [0.3, 0.8, 0.9])
def test_truncated_files_are_refused(name: str, share: float) -> None:
    data = video_file(name)
    with pytest.raises(InvalidMedia) as caught:
        PLUGIN.probe(data[: int(len(data) * share)], PARAM)
    assert caught.value.param == PARAM


@pytest.mark.parametrize("name", [name for name in CLIPS if name.startswith("mpeg")])
def test_streams_without_a_length_may_be_shorter(name: str) -> None:
    """A broadcast declares no length, so its frames are decoded as far as they go, or the file is refused."""
    data = video_file(name)
    for share in (0.3, 0.8):
        try:
            header = PLUGIN.probe(data[: int(len(data) * share)], PARAM)
            frames = decoded(data[: int(len(data) * share)], range(header.num_frames), header)
        except InvalidMedia:
            continue
        assert len(frames) == header.num_frames


@pytest.mark.parametrize(("codec", "options"), [("libx264", ()), ("mpeg2video", (("bf", "2"),)), ("mpeg2video", ())])
def test_a_broadcast_may_begin_in_the_middle(codec: str, options: tuple[tuple[str, str], ...]) -> None:
    clip = Clip("mpegts", codec, fps=25, options=(("g", "10"), *options))
    data = encode_video([frame_pixels(at, 48, 32) for at in range(40)], clip)
    for num_cut in (20, 30, 40):
        # The file has its tables, and then continues from a later packet.
        cut = data[: 3 * 188] + data[num_cut * 188 :]
        header = PLUGIN.probe(cut, PARAM)
        assert 10 < header.num_frames < 40
        assert len(decoded(cut, range(header.num_frames), header)) == header.num_frames


NOT_VIDEOS = {
    "nothing": b"",
    "text": b"hello, I am a video" * 100,
    "picture": encode(picture(40, 30)),
    "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    "concat": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "sound": sound_file("wav-16"),
    "sound in a video's container": sound_file("m4a-aac"),
    "a signature and no more": b"\x00\x00\x00\x18ftypmp42",
    "zeros behind a signature": b"\x1a\x45\xdf\xa3" + bytes(1000),
}


@pytest.mark.parametrize("name", NOT_VIDEOS)
def test_what_is_no_video_is_refused(name: str) -> None:
    with pytest.raises(InvalidMedia, match=PARAM) as caught:
        PLUGIN.probe(NOT_VIDEOS[name], PARAM)
    assert caught.value.param == PARAM


@pytest.mark.parametrize("container", ["mp4", "avi", "matroska", "webm"])
def test_a_video_of_no_frames_is_refused(container: str) -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream("libvpx" if container == "webm" else "mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        file.start_encoding()
    with pytest.raises(InvalidMedia):
        PLUGIN.probe(buffer.getvalue(), PARAM)


def jpeg(width: int, height: int) -> bytes:
    return encode(picture(width, height), "JPEG", quality=30)


def test_frames_of_another_size_are_refused() -> None:
    usual = jpeg(64, 48)
    whole = motion_jpeg([usual] * 4)
    assert len(decoded(whole, range(4), PLUGIN.probe(whole, PARAM))) == 4
    data = motion_jpeg([usual, usual, jpeg(80, 48), usual])
    header = PLUGIN.probe(data, PARAM)
    assert (header.num_frames, header.width) == (4, 64)
    with pytest.raises(InvalidMedia, match="80x48"):
        decoded(data, range(4), header)


def test_a_frame_that_would_fill_the_memory_is_not_decoded() -> None:
    usual = jpeg(64, 48)
    at = usual.index(b"\xff\xc0") + 5  # The frame's height and width are here in JPEG's SOF segment.
    bomb = usual[:at] + b"\xff\xdc\xff\xdc" + usual[at + 4 :]
    header = PLUGIN.probe(motion_jpeg([usual] * 3), PARAM)
    with pytest.raises(InvalidMedia, match="broken"):
        decoded(motion_jpeg([usual, bomb, usual]), range(3), header)
    with pytest.raises(InvalidMedia):
        PLUGIN.probe(motion_jpeg([bomb, usual]), PARAM)


def test_parts_and_limits() -> None:
    data = video_file("mp4-h264")
    url = data_url(data, "video/jpeg")  # The plugin does not read the declared type.
    assert PLUGIN.parse({"type": "video_url", "video_url": {"url": url}}, PARAM, MediaLimits()) == data
    frames = data_url(jpeg(64, 48), "video/jpeg") + ",AAAA" * 1000  # Some servers accept such a list of pictures.
    with pytest.raises(InvalidMedia, match="base64"):
        PLUGIN.parse({"video_url": frames}, PARAM, MediaLimits())
    with pytest.raises(InvalidRequest, match="only data: URLs"):
        PLUGIN.parse({"video_url": "https://example.org/a.mp4"}, PARAM, MediaLimits())
    with pytest.raises(InvalidMedia, match="limit of 100"):
        PLUGIN.parse({"video_url": url}, PARAM, MediaLimits(max_bytes_per_item=100))
    header = PLUGIN.probe(data, PARAM)
    PLUGIN.validate(header, MediaLimits(), PARAM)
    for limits, message in [
        (MediaLimits(max_video_pixels=48 * 32 - 1), "48x32"),
        (MediaLimits(max_video_seconds=1.0), r"1\.2 s"),
        (MediaLimits(max_video_frames=11), "12 frames"),
    ]:
        with pytest.raises(InvalidMedia, match=message):
            PLUGIN.validate(header, limits, PARAM)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_key_frames_of_a_clip_with_cuts(count: int) -> None:
    scenes = {0: 20, 13: 120, 29: 235, 40: 60}
    level = 0
    frames = []
    for at in range(48):
        level = scenes.get(at, level)
        frames.append(np.full((32, 48, 3), level, np.uint8))
    data = encode_video(frames, Clip("webm", "libvpx"))
    header = PLUGIN.probe(data, PARAM)
    found = settled_frames(data, header, range(count), MediaOptions(sampling="keyframe"), PARAM)
    assert len(found) == count
    if count == 2:
        assert found == (0, 40)  # The level falls from 235 to 60 there.
    elif count == 4:
        assert found == tuple(scenes)
    else:
        assert set(scenes) < set(found)
    assert settled_frames(data, header, [3, 5], MediaOptions(), PARAM) == (3, 5)


def test_key_frames_are_found_among_two_hundred_at_64_by_64() -> None:
    """A scene of three frames in 400 differs from the rest in a pattern of single pixels: with fewer probes the scene
    is missed, and pictures made smaller than 64 x 64 are grey all over."""
    y, x = np.mgrid[:64, :64]
    pattern = np.repeat(((x + y) % 2 * 255).astype(np.uint8)[..., None], 3, axis=2)
    frames = np.stack([pattern] * 400)
    frames[101:104] = 255 - pattern
    data = mkv(frames, 25)
    header = PLUGIN.probe(data, PARAM)
    assert settled_frames(data, header, range(3), MediaOptions(sampling="keyframe"), PARAM) == (0, 102, 104)
