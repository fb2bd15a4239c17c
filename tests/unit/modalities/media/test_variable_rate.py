"""Tests videos of variable rate: frames are spread evenly over time, and the model receives the times at which they are
really shown.

Every frame of a file has one level of grey, which is its number and is coded without loss; so a decoded frame shows its
number.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_corpus import Clip, encode_video
from modalities_files import VIDEO_PREPROCESSOR, thinker_config, write_config

from fabric.contracts import InvalidMedia
from modalities.families.qwen_vl.layout import MeasuredTime, SharedTime
from modalities.families.qwen_vl.patches import ImageOptions, VideoOptions, cut_video, step_times_s
from modalities.families.tiled.tiled_family import FrameTiling
from modalities.family import AudioHeader, MediaOptions, ModelShape, VideoHeader
from modalities.media import (
    Normalisation,
    Timeline,
    VideoPlugin,
    decode_frames,
    plan_media,
    sample_frames,
    settled_frames,
)
from modalities.pixel_options import PixelOptions
from modalities.registry import REGISTRY

PARAM = "messages.0.content.1"
BURST = (*(round(1000 * at / 60) for at in range(60)), *range(1000, 20_000, 1000))
"""Holds sixty frames in the first second, then one a second up to 20 s, in 1/1000 s."""
STILL = (0, 40, 80, 120, 160, 5000, 5040, 9000)
LOSSLESS = Clip("matroska", "libx264rgb", pixel_format="rgb24", options=(("qp", "0"), ("bf", "0")))
B_FRAMES = LOSSLESS._replace(options=(("qp", "0"), ("bf", "3"), ("b_strategy", "0")))
CLIPS = {
    "mkv": LOSSLESS,
    "mp4": LOSSLESS._replace(container="mp4"),
    "mp4-b-frames": B_FRAMES._replace(container="mp4"),
    "mkv-b-frames": B_FRAMES,
    "mp4-fragmented": B_FRAMES._replace(container="mp4", muxer_options=(("movflags", "frag_keyframe+empty_moov"),)),
}


@cache
def numbered(times: Sequence[int], clip: Clip) -> bytes:
    """Returns a file whose frames appear at `times`, in 1/1000 s; frame i has the grey level i."""
    frames = [np.full((32, 48, 3), at, np.uint8) for at in range(len(times))]
    return encode_video(frames, clip._replace(times=tuple(times)))


def looked_at(data: bytes, frames: Sequence[int], header: VideoHeader) -> list[int]:
    """Returns the numbers that the decoded frames show."""
    decoded = list(decode_frames(data, frames, header, PARAM))
    assert all(frame.min() == frame.max() for frame in decoded)
    return [int(frame[0, 0, 0]) for frame in decoded]


def rules(is_budget_shared: bool) -> VideoOptions:
    """Returns the options of Qwen3-VL if `is_budget_shared`, and those of its predecessors otherwise."""
    image = ImageOptions(14, 2, 2, 28 * 28, 28 * 28 * 8, 3, 1 / 255, (0.5,) * 3, (0.5,) * 3)
    return VideoOptions(image, 4, 768, is_budget_shared, False, 768)


def shown_at(times_s: npt.NDArray[np.float64], moment_s: float, slack_s: float) -> set[int]:
    """Returns the frames that are on the screen around `moment_s`."""
    first = np.searchsorted(times_s, moment_s - slack_s, side="right") - 1
    last = np.searchsorted(times_s, moment_s + slack_s, side="right") - 1
    return set(range(max(int(first), 0), int(last) + 1))


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("sampling", ["fps", "uniform"])
@pytest.mark.parametrize("is_qwen3", [False, True])
def test_frames_are_spread_evenly_over_time(name: str, sampling: str, is_qwen3: bool) -> None:
    data = numbered(BURST, CLIPS[name])
    header = VideoPlugin().probe(data, PARAM)
    assert header.num_frames == len(BURST)
    assert header.times_s is not None
    assert header.times_s.tolist() == pytest.approx([at / 1000 for at in BURST])
    cut = cut_video(header, MediaOptions(sampling), rules(is_qwen3))
    assert len(cut.frames) == 32
    found = looked_at(data, cut.frames, header)
    assert found == list(cut.frames)
    assert 1 <= sum(number < 60 for number in found) <= 3  # Sampling by index would give 24 of 32.
    steps = np.diff(cut.times_s)
    assert steps.min() > 0.9 * steps.max()
    for number, moment_s in zip(found, cut.times_s, strict=True):
        assert number in shown_at(header.times_s, moment_s, 1 / 120)


@pytest.mark.parametrize("times", [BURST, STILL])
@pytest.mark.parametrize(
    "options",
    [
        MediaOptions(),
        MediaOptions("uniform"),
        MediaOptions("uniform", max_frames=7),
        MediaOptions(fps=1.0, reduction=1),
        MediaOptions(fps=9.0, max_frames=200),
    ],
)
@pytest.mark.parametrize("is_qwen3", [False, True])
def test_they_are_those_of_the_same_film_at_a_constant_rate(
    times: tuple[int, ...], options: MediaOptions, is_qwen3: bool
) -> None:
    data = numbered(times, LOSSLESS)
    header = VideoPlugin().probe(data, PARAM)
    shortest = min(np.diff(times))
    num_slots = round(header.seconds * 1000 / shortest)
    converted = VideoHeader("MP4", 48, 32, num_slots, header.seconds)
    ends = (np.arange(num_slots) + 0.5) * header.seconds / num_slots * 1000
    shown = np.searchsorted(np.array(times), ends, side="right") - 1
    expected = cut_video(converted, options, rules(is_qwen3))
    found = cut_video(header, options, rules(is_qwen3))
    assert found.frames == tuple(shown[list(expected.frames)])
    assert found.times_s == expected.times_s
    assert (found.grid, found.num_moments) == (expected.grid, expected.num_moments)


def test_a_constant_rate_is_sampled_as_ever() -> None:
    """The container's clock may round the times, and a frame may be dropped now and then."""
    rate = Fraction(30000, 1001)
    for dropped in ((), (150,)):
        times = tuple(round(1000 * at / rate) for at in range(300) if at not in dropped)
        frames = [np.full((32, 48, 3), at % 200, np.uint8) for at in range(len(times))]
        header = VideoPlugin().probe(encode_video(frames, LOSSLESS._replace(times=times, fps=30)), PARAM)
        assert header.times_s is None
        cut = cut_video(header, MediaOptions(), rules(is_budget_shared=False))
        assert cut.frames == sample_frames(len(times), header.seconds, MediaOptions(), multiple=2, min_frames=4)
        assert cut.times_s == tuple(at / header.fps for at in cut.frames)


@pytest.mark.parametrize("container", ["matroska", "mp4", "mpegts"])
@pytest.mark.parametrize("begin", [0, 5000])
def test_time_is_counted_from_the_first_frame(container: str, begin: int) -> None:
    clip = Clip(container) if container == "mpegts" else LOSSLESS._replace(container=container)
    header = VideoPlugin().probe(numbered(tuple(at + begin for at in BURST), clip), PARAM)
    assert header.times_s is not None
    assert header.times_s.tolist() == pytest.approx([at / 1000 for at in BURST], abs=1e-3)


@pytest.mark.parametrize("clip", [CLIPS["mp4"], CLIPS["mp4-b-frames"]])
def test_what_an_edit_list_cuts_away_counts_for_nothing(clip: Clip) -> None:
    data = numbered(tuple(at - 505 for at in BURST), clip)
    left = [number for number, at in enumerate(BURST) if at >= 505]
    header = VideoPlugin().probe(data, PARAM)
    assert header.num_frames == len(left)
    assert looked_at(data, range(header.num_frames), header) == left
    found = looked_at(data, cut_video(header, MediaOptions(), rules(False)).frames, header)
    assert sum(number < 60 for number in found) <= 2
    with pytest.raises(InvalidMedia, match="truncated"):
        VideoPlugin().probe(data[: len(data) // 2], PARAM)


def test_frames_that_avi_left_out_are_no_damage() -> None:
    """AVI has no presentation times, and it has empty packets where a frame stays."""
    buffer = io.BytesIO()
    slots = (0, 1, 2, 3, 4, 5, 6, 7, 30, 60, 90)
    with av.open(buffer, "w", format="avi") as container:
        stream = container.add_stream("png", rate=10)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "rgb24"
        for number, slot in enumerate(slots):
            picture = av.VideoFrame.from_ndarray(np.full((32, 48, 3), number, np.uint8), format="rgb24")
            picture.pts, picture.time_base = slot, Fraction(1, 10)
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    header = VideoPlugin().probe(buffer.getvalue(), PARAM)
    assert header.seconds == pytest.approx(9.1)
    assert header.times_s is not None
    assert header.times_s.tolist() == pytest.approx([slot / 10 for slot in slots])
    cut = cut_video(header, MediaOptions("uniform", max_frames=4), rules(False))
    assert looked_at(buffer.getvalue(), cut.frames, header) == [0, 7, 8, 9]
    with pytest.raises(InvalidMedia, match="truncated"):
        VideoPlugin().probe(buffer.getvalue()[:-2000], PARAM)


def test_key_frames_are_looked_for_all_over_the_video() -> None:
    """The search finds a cut in the sparse half, though nearly all frames are in the other half."""
    times = (*range(0, 4000, 5), *range(4000, 40_000, 2000))
    scenes = [0 if at < 800 else 60 for at in range(len(times))]
    for cut_at in (806, 811):
        scenes[cut_at:] = [scenes[cut_at] + 60] * (len(times) - cut_at)
    frames = [np.full((32, 48, 3), level, np.uint8) for level in scenes]
    data = encode_video(frames, LOSSLESS._replace(times=times))
    header = VideoPlugin().probe(data, PARAM)
    options = MediaOptions("keyframe", max_frames=8)
    planned = cut_video(header, options, rules(False)).frames
    found = settled_frames(data, header, planned, options, PARAM)
    assert len(found) == len(planned) == 8
    assert len(set(found)) == 8
    assert {0, 800, 806, 811} <= set(found)
    seconds = [times[at] / 1000 for at in found]
    # The other frames fill the longest gaps in time, not in frames.
    assert max(np.diff([*seconds, header.seconds])) < 10


gaps = st.lists(st.integers(1, 4000), min_size=2, max_size=80)


@given(
    gaps_ms=gaps,
    options=st.builds(
        MediaOptions,
        sampling=st.sampled_from(["fps", "uniform"]),
        fps=st.sampled_from([0.5, 2.0, 7.3]),
        max_frames=st.integers(2, 64),
        reduction=st.integers(0, 2),
    ),
    is_qwen3=st.booleans(),
)
@settings(deadline=None, max_examples=150)
def test_what_is_looked_at_is_on_the_screen(gaps_ms: list[int], options: MediaOptions, is_qwen3: bool) -> None:
    times_s = np.concatenate([[0], np.cumsum(gaps_ms)])[:-1] / 1000
    seconds = sum(gaps_ms) / 1000
    header = VideoHeader("MP4", 48, 32, len(times_s), seconds, None, times_s)
    cut = cut_video(header, options, rules(is_qwen3))
    assert len(cut.frames) == len(cut.times_s) == 2 * cut.grid[0]
    assert list(cut.frames) == sorted(cut.frames)
    assert 0 <= cut.frames[0] <= cut.frames[-1] < len(times_s)
    assert cut.num_moments <= max(options.max_frames, 2)
    slot_s = seconds / Timeline.of(header).num_frames
    for frame, moment_s in zip(cut.frames, cut.times_s, strict=True):
        assert frame in shown_at(times_s, moment_s, slot_s * 0.51)
    moments = sorted(set(cut.times_s))
    if len(moments) > 2:
        steps = np.diff(moments)
        assert steps.max() - steps.min() <= 1.01 * slot_s  # The steps are as even as the slots permit.
    assert all(0 <= at < seconds for at in step_times_s(cut, 2))


def test_positions_are_those_of_the_moments() -> None:
    header = VideoPlugin().probe(numbered(BURST, LOSSLESS), PARAM)
    options = MediaOptions()
    cut = cut_video(header, options, rules(False))
    assert not cut.is_as_asked
    for time, per_second in ((MeasuredTime(4), 4), (SharedTime(25, True, 0), 25), (SharedTime(25, False, 50), 25)):
        found = time.positions(cut.grid[0], time.row_seconds(cut, header, options, 2))
        # Positions are cut off, and times differ by up to a slot.
        assert np.abs(found - np.array(cut.times_s[::2]) * per_second).max() < 1.5


def test_sound_is_woven_to_the_pictures_it_is_heard_with(tmp_path: Path) -> None:
    """The sound between two steps of an omni model is the sound that is heard between them, to a step of the clock."""
    write_config(tmp_path, thinker_config() | {"position_id_per_seconds": 13})
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(VIDEO_PREPROCESSOR))
    family: Any = REGISTRY.load_family(tmp_path)
    header = VideoPlugin().probe(numbered(BURST, LOSSLESS), PARAM)
    film, item = plan_media(family, b"", header, 0, PARAM)
    assert item.num_levels == family.shape.num_levels
    assert item.row_seconds == film.row_seconds
    heard = family.plan(AudioHeader("WAV", 16_000, 1, 20 * 16_000))
    expanded = family.expand([105, 102, 106], [film, dataclasses.replace(heard, anchor=0)])
    num_rows = sum(film.unit_tokens) // film.grid[0]
    num_heard, step = 0, 0
    moments = cut_video(header, MediaOptions(), family.config.video).times_s[::2]
    for token in expanded.token_ids:
        if token == 103:
            num_heard += 1
        elif token == 102:
            if step % num_rows == 0:
                assert abs(num_heard / 13 - moments[step // num_rows]) <= 1.5 / 13
            step += 1
    assert step == sum(film.unit_tokens)


@pytest.mark.parametrize("is_centred", [False, True])
def test_frames_as_tiles(is_centred: bool) -> None:
    data = numbered(BURST, LOSSLESS)
    header = VideoPlugin().probe(data, PARAM)
    tiling = FrameTiling(PixelOptions(3, Normalisation(1 / 255, (0.5,) * 3, (0.5,) * 3)), 28, 4, 4, is_centred, False)
    options = MediaOptions("uniform", max_frames=10)
    plan, item = plan_media(_Tiles(tiling), data, header, 0, PARAM, options=options)
    shift = 0.5 if is_centred else 0.0
    moments_s = [(at + shift) * header.seconds / 10 for at in range(10)]
    assert plan.frame_times_s == pytest.approx(moments_s, abs=0.02)
    numbers = [
        round(float((tile * 0.5 + 0.5).mean()) * 255) for unit in tiling.units(data, item) for tile in unit.pixels
    ]
    assert header.times_s is not None
    assert len(numbers) == 10
    for number, moment_s in zip(numbers, moments_s, strict=True):
        assert number in shown_at(header.times_s, moment_s, 1 / 60)


class _Tiles:
    """Provides as much of a family as planning a video needs."""

    model_id = "tiles"
    shape = ModelShape(8, 1, 1, 1, 8, 100, 1000)

    def __init__(self, tiling: FrameTiling) -> None:
        self.plan = tiling.plan

    def options(self, modality: str) -> str:
        return ""
