"""Draws conversations about clips, silent ones and ones with a sound track. It knows no model."""

from __future__ import annotations

from collections.abc import Callable

from deploy.demo.drawing import clips
from deploy.demo.drawing.facts import Fact, Sample, any_manner, conversation
from deploy.demo.drawing.figures import Rng
from deploy.demo.tasks.heard import beeping, pitched

STORY_OF_TASK: dict[str, Callable[[Rng], clips.Story]] = {
    "direction": clips.moving,
    "order of colours": clips.changing,
    "appearing": clips.appearing,
    "number of objects": clips.several,
}


def about(task: str) -> Callable[[Rng, int], Sample]:
    """Returns a function that draws a conversation with one silent clip and one question."""

    def sample(rng: Rng, _scale: int) -> Sample:
        story = STORY_OF_TASK[task](rng)
        clip = clips.film(rng, story, float(rng.choice(clips.SECONDS)))
        return conversation(rng, task, [clip], [story.facts[0]], any_manner(rng))

    return sample


def with_sound(rng: Rng, _scale: int) -> Sample:
    """Draws a conversation about a clip with a sound track; its question is about the pictures or the sound."""
    story = clips.moving(rng) if rng.random() < 0.6 else clips.changing(rng)
    sound, heard = beeping(rng) if rng.random() < 0.6 else pitched(rng)
    clip = clips.film(rng, story, float(rng.choice(clips.SECONDS)), sound=sound)
    fact: Fact = heard if rng.random() < 0.5 else _any_fact(rng, story)
    return conversation(rng, "clip with sound", [clip], [fact], any_manner(rng))


def _any_fact(rng: Rng, story: clips.Story) -> Fact:
    return story.facts[int(rng.integers(len(story.facts)))]
