"""All tasks of the demo model, and in which order it learns them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deploy.demo.drawing import Rng
from deploy.demo.media import Sample
from deploy.demo.tasks import heard, pictures, watched, words


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


LOOKING = Task("looking", "image", pictures.looking, 1)
"""Taught first and not asked for: without it nothing was seen in 600 steps of all tasks together."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A one-cycle run of training."""

    name: str
    tasks: tuple[Task, ...]
    num_steps: int
    peak_rate: float
    scale_shares: tuple[float, float, float]
    """How often each scale of picture sizes is drawn."""
    batch_size: int = 64


def _of(*modalities: str) -> tuple[Task, ...]:
    return tuple(task for task in TASKS if task.modality in modalities)


STAGES: tuple[Stage, ...] = (
    Stage("looking", (LOOKING,), 1000, 3e-3, (1.0, 0.0, 0.0)),
    Stage("pictures and words", _of("text", "image"), 1500, 2e-3, (0.9, 0.07, 0.03)),
    Stage("everything", _of("text", "image", "audio", "video"), 2000, 2e-3, (0.9, 0.07, 0.03)),
)
