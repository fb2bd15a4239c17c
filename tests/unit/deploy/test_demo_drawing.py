"""Tests that the demo draws what its samples say it drew."""

from __future__ import annotations

import numpy as np
import pytest

from deploy.demo.drawing import clips, scenes, sounds
from deploy.demo.drawing.facts import NUMBERS, SAMPLE_RATE, Clip, Picture
from deploy.demo.drawing.figures import COLOUR_TO_RGB, COLOURS, SHAPES
from deploy.demo.drawing.speech import has_speech
from deploy.demo.evaluate import fresh_samples
from deploy.demo.tasks.catalogue import TASKS
from deploy.demo.training.encoding import num_audio_tokens, sampled_frames

DRAWABLE = [task for task in TASKS if has_speech() or not task.needs_speech]


def nearest_colour(rgb: np.ndarray) -> str:
    return min(COLOURS, key=lambda name: float(np.linalg.norm(np.array(COLOUR_TO_RGB[name]) - rgb)))


@pytest.mark.parametrize("seed", range(30))
def test_a_figure_has_its_colour_where_it_stands(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = [shape for shape in SHAPES if shape != "ring"]  # The middle of a ring does not have the ring's colour.
    scene = scenes.one_figure(rng, scenes.picture_size(rng, seed % 3), shapes)
    figure = scene.figures[0]
    x, y = round(figure.x), round(figure.y)
    middle = scene.picture.pixels[y - 1 : y + 2, x - 1 : x + 2].reshape(-1, 3).mean(0)
    assert nearest_colour(middle) == figure.colour == scene.fact("colour").word
    assert scene.fact("shape").word == figure.shape


@pytest.mark.parametrize("seed", range(30))
def test_figures_keep_apart_and_are_as_many_as_the_answer_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scene = scenes.several_figures(rng, scenes.picture_size(rng, 0))
    assert NUMBERS[len(scene.figures)] == scene.fact("count").word
    height, width, _ = scene.picture.pixels.shape
    for index, figure in enumerate(scene.figures):
        assert figure.radius <= figure.x <= width - figure.radius
        assert figure.radius <= figure.y <= height - figure.radius
        for other in scene.figures[:index]:
            assert np.hypot(figure.x - other.x, figure.y - other.y) > 2 * figure.radius


def test_all_nine_places_are_drawn_where_they_are_named() -> None:
    places = set()
    for seed in range(80):
        rng = np.random.default_rng(seed)
        scene = scenes.placed_figure(rng, (90, 120))
        figure, place = scene.figures[0], scene.fact("place").word
        row, column = int(figure.y / 30), int(figure.x / 40)
        assert scenes.PLACES[row][column] == place
        places.add(place)
    assert len(places) == 9


def test_sizes_lie_in_the_promised_range() -> None:
    rng = np.random.default_rng(0)
    sizes = [scenes.picture_size(rng, scale) for scale in (0, 1, 2) for _ in range(200)]
    assert min(map(min, sizes)) >= 56
    assert max(map(max, sizes)) <= 448
    assert max(max(size) for size in sizes) > 380
    assert len({round(height / width, 1) for height, width in sizes}) > 8


@pytest.mark.parametrize("task", DRAWABLE, ids=lambda task: task.name)
def test_same_seed_same_sample(task: object) -> None:
    def content(seed: int) -> list[object]:
        (sample,) = fresh_samples(task, 1, seed)
        media = [
            m.pixels if isinstance(m, Picture) else m.frames if isinstance(m, Clip) else m.samples
            for m in sample.media()
        ]
        return [
            sample.answer,
            [part for turn in sample.turns for part in turn.parts if isinstance(part, str)],
            *(m.tobytes() for m in media),
        ]

    assert content(5) == content(5)
    assert [content(seed) for seed in range(5)] != [content(seed) for seed in range(5, 10)]


def centre_of(frame: np.ndarray, ground: np.ndarray) -> np.ndarray:
    """Returns the mean position (x, y) of the pixels where a frame differs from the ground, weighted by the
    difference."""
    weight = np.abs(frame.astype(float) - ground).sum(2)
    weight = np.where(weight > 90, weight, 0)
    y, x = np.indices(weight.shape)
    return np.array([(x * weight).sum(), (y * weight).sum()]) / weight.sum()


@pytest.mark.parametrize("seed", range(20))
def test_a_moving_figure_moves_as_told(seed: int) -> None:
    rng = np.random.default_rng(seed)
    story = clips.moving(rng)
    clip = clips.film(rng, story, 3.0)
    ground = np.median(clip.frames.astype(float), axis=0)
    step = centre_of(clip.frames[-1], ground) - centre_of(clip.frames[0], ground)
    direction = ("left", "right")[int(step[0] > 0)] if abs(step[0]) > abs(step[1]) else ("up", "down")[int(step[1] > 0)]
    assert story.facts[0].word == direction


@pytest.mark.parametrize("fps", [2.0, 4.0, 8.0, 24.0])
@pytest.mark.parametrize("seconds", clips.SECONDS)
def test_a_clip_at_any_rate_is_looked_at_in_the_same_moments(fps: float, seconds: float) -> None:
    story = clips.moving(np.random.default_rng(3))
    moments: list[float] = []
    watched = clips.Story(
        story.height, story.width, story.colours, lambda moment: moments.append(moment) or story.figures(moment), "", ()
    )
    clip = clips.film(np.random.default_rng(0), watched, seconds, fps)
    seen = sampled_frames(len(clip.frames), fps)
    num_seen = int(seconds * 2)
    assert np.allclose(np.array(moments)[seen], np.arange(num_seen) / (num_seen - 1))


@pytest.mark.parametrize("count", range(1, 6))
def test_beeps_can_be_counted(count: int) -> None:
    wave = sounds.beeps(np.random.default_rng(count), count, 700.0)
    loud = np.abs(wave).reshape(-1)[: len(wave) // 160 * 160].reshape(-1, 160).max(1) > 0.25 * np.abs(wave).max()
    assert int(np.count_nonzero(np.diff(loud.astype(int)) == 1) + loud[0]) == count


def pitch_of(wave: np.ndarray) -> float:
    return float(np.fft.rfftfreq(len(wave), 1 / SAMPLE_RATE)[np.abs(np.fft.rfft(wave)).argmax()])


@pytest.mark.parametrize("is_rising", [True, False])
def test_sweeps_go_the_way_they_are_called(is_rising: bool) -> None:
    for seed in range(10):
        wave = sounds.sweep(np.random.default_rng(seed), is_rising)
        loud = np.nonzero(np.abs(wave) > 0.3 * np.abs(wave).max())[0]
        wave = wave[loud[0] : loud[-1]]
        fifth = len(wave) // 5
        assert (pitch_of(wave[-fifth:]) > pitch_of(wave[:fifth])) == is_rising


def test_sounds_are_long_enough_and_stay_in_range() -> None:
    rng = np.random.default_rng(0)
    for wave in (sounds.beeps(rng, 1, 500.0), sounds.steady(rng, 300.0), sounds.sweep(rng, True)):
        assert len(wave) >= SAMPLE_RATE
        assert wave.dtype == np.float32
        assert np.abs(wave).max() <= 1


def test_rows_of_a_sound_as_the_audio_tower_counts_them() -> None:
    # The expected counts follow transformers' _get_feat_extract_output_lengths with windows of 100 frames.
    assert [num_audio_tokens(frames) for frames in (1, 8, 9, 99, 100, 101, 250)] == [1, 1, 2, 13, 13, 14, 33]
