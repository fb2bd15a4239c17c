"""Tests the timeline of one spoken answer on the production schedulers and the production adapter."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.simulator.speech_timeline import SAMPLES_PER_FRAME, SpeechStageTimes, spoken_timeline

pytestmark = pytest.mark.torch

DOCUMENT = SpeechStageTimes(thinker_s=2.0, talker_s=3.0, code2wav_s=1.0, num_tokens=100, num_frames=188)


def test_without_chunks_each_stage_waits_for_the_whole_of_the_one_before() -> None:
    timeline = spoken_timeline(DOCUMENT, is_async=False)
    assert timeline.token_s[-1] == pytest.approx(2.0)
    assert timeline.sound_s == pytest.approx((6.0,), abs=0.01)


def test_with_chunks_the_sound_begins_and_ends_as_the_documentation_says() -> None:
    timeline = spoken_timeline(DOCUMENT, is_async=True, first_chunk_frames=20)
    assert timeline.token_s[-1] == pytest.approx(2.0), "speech takes nothing from the text"
    assert timeline.first_sound_s == pytest.approx(0.5, rel=0.1)
    assert timeline.total_s == pytest.approx(3.5, rel=0.1)
    assert spoken_timeline(DOCUMENT, is_async=True).first_sound_s < 0.25


@given(
    num_tokens=st.integers(1, 40),
    num_frames=st.integers(1, 90),
    first_chunk_frames=st.none() | st.integers(1, 40),
    times_s=st.tuples(*[st.floats(0.01, 4.0)] * 3),
)
def test_every_frame_is_heard_once_and_no_stage_is_faster_than_it_is(
    num_tokens: int, num_frames: int, first_chunk_frames: int | None, times_s: tuple[float, float, float]
) -> None:
    times = SpeechStageTimes(*times_s, num_tokens, num_frames)
    sequential = spoken_timeline(times, is_async=False)
    chunked = spoken_timeline(times, is_async=True, first_chunk_frames=first_chunk_frames)
    for timeline in (sequential, chunked):
        assert timeline.num_samples == num_frames * SAMPLES_PER_FRAME
        assert len(timeline.token_s) == num_tokens
        assert all(earlier < later for earlier, later in pairwise(timeline.sound_s))
        assert timeline.total_s >= max(times_s) - 1e-9
    assert sequential.total_s == pytest.approx(sum(times_s), abs=0.001)
    assert chunked.total_s <= sequential.total_s + 0.01
    assert chunked.first_sound_s <= sequential.first_sound_s + 0.01
