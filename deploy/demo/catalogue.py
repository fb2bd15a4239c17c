"""All tasks of the demo model, and in which order it learns them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deploy.demo.drawing import Rng
from deploy.demo.media import Sample
from deploy.demo.tasks import heard, lessons, pictures, watched, words


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    modality: str
    """`text`, `image`, `audio` or `video`; the last two say what a cluster must take besides pictures."""
    draw: Callable[[Rng, int], Sample]
    """From a random stream and a scale of picture sizes (see `scenes.SCALES`)."""
    weight: float
    """Share in training, relative to the others."""
    needs_speech: bool = False
    """Of espeak-ng, to draw a sample."""


TASKS: tuple[Task, ...] = (
    Task("greeting", "text", words.fixed, 1),
    Task("earlier turn", "text", words.recall, 2),
    Task("repeat", "text", words.echo, 1.5),
    Task("next number", "text", words.counting, 1),
    Task("colour", "image", pictures.about_one("colour"), 2),
    Task("shape", "image", pictures.about_one("shape"), 4),
    Task("count", "image", pictures.about_one("count"), 4),
    Task("place", "image", pictures.about_one("place"), 3),
    Task("size", "image", pictures.about_one("size"), 2),
    Task("colour of one of two", "image", pictures.about_one("colour of one of two"), 5),
    Task("shape of one of two", "image", pictures.about_one("shape of one of two"), 5),
    Task("yes or no", "image", pictures.present, 3),
    Task("sentence", "image", pictures.in_a_sentence, 4),
    Task("earlier picture", "image", pictures.earlier, 5),
    Task("which picture", "image", pictures.which_of_several, 5),
    Task("picture, text, picture", "image", pictures.interleaved, 5),
    Task("number of pictures", "image", pictures.how_many_pictures, 2),
    Task("beeps", "audio", heard.about_beeps, 5),
    Task("pitch", "audio", heard.about_pitch, 2),
    Task("glide", "audio", heard.about_glide, 2),
    Task("spoken digit", "audio", heard.about_digit, 6, needs_speech=True),
    Task("spoken colour", "audio", heard.about_spoken_colour, 6, needs_speech=True),
    Task("picture and sound", "audio", heard.picture_and_sound, 4),
    Task("direction", "video", watched.about("direction"), 5),
    Task("order of colours", "video", watched.about("order of colours"), 5),
    Task("appearing", "video", watched.about("appearing"), 3),
    Task("number of objects", "video", watched.about("number of objects"), 4),
    Task("clip with sound", "video", watched.with_sound, 6),
)


MODALITIES = ("text", "image", "audio", "video")
LEARNED = ("text", "image")
"""Modalities that the shipped checkpoint knows; the stage of the others has not been run for it."""
SURE = ("greeting", "earlier turn", "repeat", "next number", "colour", "size", "number of pictures")
"""Tasks that the shipped checkpoint does at least 97 % right (REPORT.md); the others it is still to learn."""
NUM_SHIPPED_STAGES = 3

LOOKING = Task("looking", "image", pictures.looking, 1)
"""Taught first and not asked for: without it nothing was seen in 600 steps of all tasks together."""


LESSONS = (
    Task("lesson about one picture", "image", lessons.one_picture, 4),
    Task("lesson about two figures", "image", lessons.two_figures, 4),
    Task("lesson about several pictures", "image", lessons.several_pictures, 4),
)


@dataclass(frozen=True, slots=True)
class Stage:
    """A one-cycle run of training."""

    name: str
    tasks: tuple[Task, ...]
    num_steps: int
    peak_rate: float
    scale_shares: tuple[float, float, float]
    """How often each scale of picture sizes is drawn."""
    known: tuple[Task, ...] = ()
    """Tasks of earlier stages, repeated so that they stay known."""
    known_share: tuple[float, float] = (0.0, 0.0)
    """Of `known` in a batch, at the first step and at the last."""
    num_cycle_steps: int = 0
    """Length of the cycle of the learning rate, if it is cut off at `num_steps`."""
    batch_size: int = 64

    def shares(self, step: int) -> npt.NDArray[np.float64]:
        """Of each of `tasks` and `known` in the batch of a step; they add up to one."""
        first, last = self.known_share
        known = first + (last - first) * step / self.num_steps
        return np.concatenate([(1 - known) * _normed(self.tasks), known * _normed(self.known)])


def _normed(tasks: tuple[Task, ...]) -> npt.NDArray[np.float64]:
    weights = np.array([task.weight for task in tasks])
    return weights / weights.sum()


def _of(*modalities: str) -> tuple[Task, ...]:
    return tuple(task for task in TASKS if task.modality in modalities)


STAGES: tuple[Stage, ...] = (
    Stage("looking", (LOOKING,), 1000, 3e-3, (1.0, 0.0, 0.0)),
    Stage("pictures and words", _of("text", "image"), 1000, 2e-3, (0.84, 0.1, 0.06), num_cycle_steps=1400),
    Stage(
        "lessons about pictures",
        LESSONS,
        650,
        1.5e-3,
        (0.82, 0.12, 0.06),
        known=_of("text", "image"),
        known_share=(0.35, 0.35),
    ),
    Stage(
        "sounds and clips",
        _of("audio", "video"),
        2400,
        2e-3,
        (0.84, 0.1, 0.06),
        known=_of("text", "image"),
        known_share=(0.2, 0.6),
    ),
)
