"""Tests which frames the model looks at: their counts are contracts, and their indices lie within the video."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.contracts import InvalidMedia
from modalities.family import MediaOptions, VideoHeader
from modalities.media import sample_frames
from modalities.media.frame_sampling import choose_keyframes, probed_frames

OPTIONS = st.builds(
    MediaOptions,
    sampling=st.sampled_from(["fps", "uniform", "keyframe"]),
    fps=st.sampled_from([0.5, 1.0, 2.0, 7.3]),
    max_frames=st.integers(1, 64),
    reduction=st.integers(0, 3),
)


def video(num_frames: int, times_s: list[float] | None = None, last_s: float = 0.1) -> VideoHeader:
    """Returns a header with ten frames a second, or with one frame at each of `times_s`, of which the last is shown for
    `last_s`."""
    seconds = num_frames / 10 if times_s is None else times_s[-1] + last_s
    return VideoHeader("MP4", 96, 64, num_frames, seconds, None, None if times_s is None else np.array(times_s))


@given(
    num_frames=st.integers(1, 3000),
    rate=st.sampled_from([1.0, 10.0, 29.97]),
    options=OPTIONS,
    multiple=st.sampled_from([1, 2, 4]),
    max_frames=st.one_of(st.none(), st.integers(1, 40)),
    spacing=st.sampled_from(["stride", "ends"]),
)
@settings(deadline=None, max_examples=200)
def test_any_sample_is_ascending_within_the_video_and_within_the_budget(
    num_frames: int, rate: float, options: MediaOptions, multiple: int, max_frames: int | None, spacing: str
) -> None:
    found = sample_frames(
        num_frames,
        num_frames / rate,
        options,
        multiple=multiple,
        max_frames=max_frames,
        spacing=spacing,
    )
    most = min(options.max_frames, max_frames or options.max_frames)
    assert len(found) % multiple == 0
    assert multiple <= len(found) <= max(most // multiple * multiple, multiple)
    assert list(found) == sorted(found)
    assert found[0] == 0
    assert found[-1] < num_frames
    repeated = len(found) - len(set(found))
    assert repeated < multiple  # A frame repeats only where the last patch must be filled.


@given(num_frames=st.integers(32, 2000), options=OPTIONS, multiple=st.sampled_from([1, 2]))
@settings(deadline=None, max_examples=100)
def test_a_reduction_takes_half(num_frames: int, options: MediaOptions, multiple: int) -> None:
    whole, half = (
        sample_frames(
            num_frames,
            num_frames / 10,
            MediaOptions(options.sampling, options.fps, options.max_frames, reduction=reduction),
            multiple=multiple,
        )
        for reduction in (0, 1)
    )
    assert len(half) == max(len(whole) // 2 // multiple * multiple, multiple)
    if len(whole) == 2 * len(half) and multiple == 1:
        assert [abs(one - other) <= 1 for one, other in zip(half, whole[::2], strict=True)] == [True] * len(half)


def test_uniform_is_the_seeds() -> None:
    options = MediaOptions("uniform", max_frames=32)
    assert sample_frames(20, 2.0, options) == tuple(range(20))
    assert sample_frames(100, 10.0, options) == tuple(int(at * (100 / 32)) for at in range(32))


def test_two_frames_a_second() -> None:
    assert sample_frames(30, 3.0, MediaOptions(), multiple=2, min_frames=4) == (0, 5, 10, 15, 20, 25)
    assert sample_frames(10, 1.0, MediaOptions(), multiple=2, min_frames=4) == (0, 2, 5, 7)
    assert sample_frames(1, 0.1, MediaOptions(), multiple=2, min_frames=4) == (0, 0)
    assert sample_frames(3, 0.3, MediaOptions(), multiple=2, min_frames=4) == (0, 1)
    assert sample_frames(3, 0.3, MediaOptions(), multiple=2, min_frames=4, spacing="ends") == (0, 1, 2, 2)


def test_what_can_not_be_sampled_is_refused() -> None:
    with pytest.raises(InvalidMedia, match="no frames"):
        sample_frames(0, 0.0, MediaOptions())
    with pytest.raises(InvalidMedia, match="guess"):
        sample_frames(10, 1.0, MediaOptions(sampling="guess"))


@pytest.mark.parametrize(
    ("num_frames", "num_probes"),
    [(1, 1), (7, 7), (199, 199), (200, 200), (399, 399), (400, 200), (401, 201), (90_000, 200)],
)
def test_about_two_hundred_frames_are_probed(num_frames: int, num_probes: int) -> None:
    """The probes are evenly spread: they are every frame of a short video, and one in every n frames of a long one."""
    probes = probed_frames(video(num_frames))
    assert len(probes) == num_probes
    assert probes[0] == 0
    assert set(np.diff(probes).tolist()) <= {max(1, num_frames // 200)}
    assert num_frames - max(1, num_frames // 200) <= probes[-1] < num_frames


@given(
    num_frames=st.integers(1, 500),
    count=st.integers(1, 64),
    seed=st.integers(0, 2**32 - 1),
    quiet=st.sampled_from([0.0, 0.5, 0.97]),
)
@settings(deadline=None, max_examples=150)
def test_keyframes_are_exactly_as_many_as_planned(num_frames: int, count: int, seed: int, quiet: float) -> None:
    rng = np.random.default_rng(seed)
    changes = (rng.uniform(0, 255, 400) * (rng.uniform(0, 1, 400) > quiet)).tolist()
    probes = probed_frames(video(num_frames))
    differences = changes[: len(probes)]
    found = choose_keyframes(video(num_frames), probes, differences, count)
    assert len(found) == count
    assert list(found) == sorted(found)
    assert found[0] == 0
    assert found[-1] < num_frames
    assert len(set(found)) == min(count, num_frames)
    cuts = [at for at, change in zip(probes[1:], differences[1:], strict=True) if change > 30.0]
    if len(cuts) < count:
        assert set(cuts) <= set(found)
    elif count <= num_frames:
        assert set(found) <= {0, *cuts}
        left_out = [changes[at] for at in range(1, len(probes)) if probes[at] in set(cuts) - set(found)]
        taken = [changes[at] for at in range(1, len(probes)) if probes[at] in set(found)]
        assert max(left_out, default=0.0) <= min(taken, default=255.0)


def test_gaps_are_filled_evenly() -> None:
    assert choose_keyframes(video(16), range(16), [0.0] * 16, 4) == (0, 4, 8, 12)
    assert choose_keyframes(video(16), range(16), [0.0] * 10 + [99.0] + [0.0] * 5, 4) == (0, 5, 10, 13)
    assert choose_keyframes(video(2), range(2), [0.0, 0.0], 4) == (0, 1, 1, 1)
