"""Tests that frames picked out of long videos are the same as those of a whole decode, though most of the file is left
out."""

from __future__ import annotations

import io
from functools import cache

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_corpus import Clip, encode_video, frame_pixels

from modalities.family import VideoHeader
from modalities.media import VideoPlugin, decode_frames
from modalities.media.containers import open_container, stream_packets
from modalities.media.video import GroupPlan, plan_groups

PARAM = "messages.0.content.1"
NUM_FRAMES = 120
CLIPS = {
    "h264": Clip("mp4", options=(("g", "12"), ("sc_threshold", "0"))),
    "h264-b-frames": Clip("mp4", options=(("g", "12"), ("bf", "3"), ("b_strategy", "0"))),
    "mpeg2-open-groups": Clip("mp4", "mpeg2video", fps=25, options=(("g", "12"), ("bf", "2"))),
    "mpeg4-b-frames": Clip("matroska", "mpeg4", options=(("g", "12"), ("bf", "2"))),
    "vp8": Clip("webm", "libvpx", options=(("g", "12"), ("deadline", "realtime"))),
    "vp9": Clip("webm", "libvpx-vp9", options=(("g", "12"), ("deadline", "realtime"), ("cpu-used", "8"))),
}


@cache
def long_video(name: str) -> tuple[bytes, VideoHeader, list[np.ndarray]]:
    """Returns the file, its header and all its frames as PyAV alone decodes them."""
    data = encode_video([frame_pixels(at, 48, 32) for at in range(NUM_FRAMES)], CLIPS[name])
    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return data, VideoPlugin().probe(data, PARAM), frames


def planned(data: bytes, indices: list[int], num_frames: int = NUM_FRAMES) -> GroupPlan | None:
    with open_container(data, PARAM) as container:
        return plan_groups(stream_packets(container, container.streams.video[0]), indices, num_frames)


@pytest.mark.parametrize("name", CLIPS)
@given(indices=st.lists(st.integers(0, NUM_FRAMES - 1), min_size=1, max_size=6).map(sorted))
@settings(deadline=None, max_examples=12)
def test_picked_frames_are_those_of_a_whole_decode(name: str, indices: list[int]) -> None:
    data, header, frames = long_video(name)
    assert header.num_frames == len(frames) == NUM_FRAMES
    found = list(decode_frames(data, indices, header, PARAM))
    assert len(found) == len(indices)
    assert all(np.array_equal(one, frames[at]) for one, at in zip(found, indices, strict=True))


@pytest.mark.parametrize("name", CLIPS)
def test_groups_that_nobody_looks_at_are_left_out(name: str) -> None:
    plan = planned(long_video(name)[0], [50])
    assert plan is not None
    assert 1 <= sum(plan.is_needed) <= 2
    assert len(plan.is_needed) >= NUM_FRAMES // 14
    assert [plan.number_of(int(time)) for time in plan.times] == list(range(NUM_FRAMES))
    assert plan.number_of(int(plan.times[-1]) + 1) is None
    assert plan.number_of(None) is None


def test_pictures_before_their_key_frame_need_the_group_before() -> None:
    data, _, _ = long_video("mpeg2-open-groups")
    counts = set()
    for at in range(12, 36):
        plan = planned(data, [at])
        assert plan is not None
        counts.add(sum(plan.is_needed))
    assert counts == {1, 2}


def test_without_a_saving_or_a_trusty_clock_there_is_no_plan() -> None:
    data, _, _ = long_video("h264")
    assert planned(data, list(range(NUM_FRAMES))) is None
    assert planned(data, [0], NUM_FRAMES + 1) is None
