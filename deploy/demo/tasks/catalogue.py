"""Lists all tasks of the demo model and the stages of training that teach them. It knows no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from deploy.demo.drawing.facts import Sample
from deploy.demo.drawing.figures import Rng
from deploy.demo.tasks import heard, lessons, pictures, watched, words


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    modality: str
    """Names the modality: `text`, `image`, `audio` or `video`. For the last two, a cluster must accept that
    modality."""
    draw: Callable[[Rng, int], Sample]
    """Draws a sample from a random stream and a scale of picture sizes (see `scenes.SCALES`)."""
    weight: float
    """Sets the share of the task in training, relative to the other tasks."""
    needs_speech: bool = False
    """Says whether drawing a sample needs espeak-ng."""


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
LEARNED = MODALITIES
"""The shipped checkpoint has learned these modalities."""

LESSONS = (
    Task("lesson about one picture", "image", lessons.one_picture, 4),
    Task("lesson about two figures", "image", lessons.two_figures, 4),
    Task("lesson about several pictures", "image", lessons.several_pictures, 5),
    Task("lesson about a clip", "video", lessons.clip, 3),
)


@dataclass(frozen=True, slots=True)
class TowerStage:
    """Describes one cycle of training a tower (the vision or audio encoder) alone."""

    name: str
    num_steps: int
    peak_rate: float
    batch_size: int
    num_cycle_steps: int = 0
    """Means the same as in `TrainingStage`."""

    @property
    def part_to_rate(self) -> Mapping[str, float]:
        """Means the same as in `TrainingStage`; it is empty because there is only one part."""
        return {}


VISION_TOWER_STAGE = TowerStage("vision tower", 2800, 3e-3, 48)
AUDIO_TOWER_STAGE = TowerStage("audio tower", 500, 3e-3, 48)


SCALE_SHARES = (0.7, 0.2, 0.1)
"""Gives the share of each scale of picture sizes in training. Large pictures are rare because they cost most and look
like small ones."""


TAUGHT_TOWER_RATE = 0.3
"""Sets the learning rate of towers that were trained before the language model, as a share of the stage's rate."""


@dataclass(frozen=True, slots=True)
class TrainingStage:
    """Describes one cycle of training on conversations."""

    name: str
    tasks: tuple[Task, ...]
    num_steps: int
    peak_rate: float
    scale_shares: tuple[float, float, float]
    """Gives the share of each scale of picture sizes."""
    lessons: tuple[Task, ...]
    """Lists tasks for training only; they ask more questions about each medium."""
    lesson_share: tuple[float, float]
    """Gives the share of `lessons` in a batch, at the first step and at the last."""
    num_cycle_steps: int = 0
    """Sets the number of steps in the cycle of the learning rate, for a stage that ends before its cycle does; 0 means
    that the cycle ends with the stage, after `num_steps`."""
    batch_size: int = 32
    vision_rate: float = TAUGHT_TOWER_RATE
    """Sets the learning rate of the vision tower, as a share of `peak_rate`."""
    num_looks: int = 0
    """Counts additional pictures and clips in a batch; for these the vision tower alone learns to name what each cell
    shows."""

    @property
    def part_to_rate(self) -> Mapping[str, float]:
        """Maps a part of a parameter's name to the learning rate of such parameters, as a share of the rate of the
        others."""
        return {".visual.": self.vision_rate, ".audio_tower.": TAUGHT_TOWER_RATE}

    def shares(self, step: int) -> npt.NDArray[np.float64]:
        """Returns the share of each of `tasks` and `lessons` in the batch of a step; the shares add up to one."""
        first, last = self.lesson_share
        share = first + (last - first) * step / self.num_steps
        return np.concatenate([(1 - share) * _normed(self.tasks), share * _normed(self.lessons)])


def _normed(tasks: tuple[Task, ...]) -> npt.NDArray[np.float64]:
    weights = np.array([task.weight for task in tasks])
    shares: npt.NDArray[np.float64] = weights / weights.sum()
    return shares


HARD = {
    "earlier turn": 10.0,
    "repeat": 10.0,
    "next number": 6.0,
    "count": 14.0,
    "sentence": 9.0,
    "yes or no": 5.0,
    "place": 5.0,
    "beeps": 9.0,
    "spoken digit": 6.0,
    "picture and sound": 8.0,
    "direction": 6.0,
    "order of colours": 8.0,
    "number of objects": 12.0,
    "clip with sound": 6.0,
}
"""Maps the tasks that the model learned last to their weight in the stage "practice"; the other tasks have
`EASY_WEIGHT`."""
EASY_WEIGHT = 3.0
LAST = {
    "count": 60.0,
    "sentence": 18.0,
    "number of objects": 10.0,
    "beeps": 8.0,
    "order of colours": 8.0,
    "clip with sound": 5.0,
}
"""Maps the tasks that were wrong most often after the stage "practice" to their weight in the stage "counting"."""
COUNTS = {"count": 60.0, "beeps": 45.0, "sentence": 35.0, "order of colours": 6.0}
"""Maps the tasks that were wrong most often after "counting" to their weight in the stage "counting again"."""
CROWDS = {
    "count": 45.0,
    "beeps": 40.0,
    "order of colours": 32.0,
    "sentence": 22.0,
    "yes or no": 12.0,
    "number of objects": 8.0,
    "clip with sound": 6.0,
    "direction": 5.0,
}
"""Maps the tasks that were wrong most often after "counting again" to their weight in the stage "a closer look", which
also trains the vision tower on crowded pictures."""


def _practice(
    name: str,
    weights: Mapping[str, float],
    num_steps: int,
    peak_rate: float,
    lesson_share: tuple[float, float],
    vision_rate: float = TAUGHT_TOWER_RATE,
    num_looks: int = 0,
) -> TrainingStage:
    """Returns a stage with all tasks, in which those in `weights` occur more often than the others."""
    tasks = tuple(replace(task, weight=weights.get(task.name, EASY_WEIGHT)) for task in TASKS)
    return TrainingStage(
        name,
        tasks,
        num_steps,
        peak_rate,
        SCALE_SHARES,
        LESSONS,
        lesson_share=lesson_share,
        vision_rate=vision_rate,
        num_looks=num_looks,
    )


STAGES: tuple[TrainingStage, ...] = (
    TrainingStage(
        "conversations",
        TASKS,
        2000,
        2e-3,
        SCALE_SHARES,
        lessons=LESSONS,
        lesson_share=(0.75, 0.75 - 0.45 * 2000 / 5200),
        num_cycle_steps=5200,
    ),
    _practice("practice", HARD, 1300, 1e-3, (0.3, 0.1)),
    _practice("counting", LAST, 800, 1e-3, (0.1, 0.0), vision_rate=1.0),
    _practice("counting again", COUNTS, 600, 7e-4, (0.05, 0.0)),
    _practice("a closer look", CROWDS, 950, 1e-3, (0.05, 0.0), vision_rate=1.0, num_looks=48),
)
