"""Draws conversations that ask several questions about each of their media; they serve for training only.

A second question about a picture costs a tenth of a second picture, and teaches as much.
"""

from __future__ import annotations

from deploy.demo.drawing import clips, scenes
from deploy.demo.drawing.facts import ORDINALS, Fact, Sample, any_manner, conversation, number_of
from deploy.demo.drawing.figures import COLOURS, SHAPES, Rng
from deploy.demo.tasks.heard import beeping, pitched
from deploy.demo.tasks.pictures import presence, which_fact
from deploy.demo.tasks.watched import STORY_OF_TASK

_SCENES = (scenes.one_figure, scenes.several_figures, scenes.placed_figure, scenes.sized_figure)
_MOST_QUESTIONS = 5


def one_picture(rng: Rng, scale: int) -> Sample:
    draw = _SCENES[int(rng.choice(len(_SCENES), p=(0.45, 0.3, 0.15, 0.1)))]
    scene = draw(rng, scenes.picture_size(rng, scale))
    facts = list(scene.facts)
    if draw is scenes.one_figure:
        facts += [presence(rng, scene.figures[0]), presence(rng, scene.figures[0])]
    rng.shuffle(facts)
    return conversation(rng, "lesson", [scene.picture], facts, any_manner(rng))


def two_figures(rng: Rng, scale: int) -> Sample:
    scene = scenes.two_figures(rng, scenes.picture_size(rng, scale))
    facts = [fact for figure in scene.figures for fact in scenes.facts_of_one_of_two(figure)]
    rng.shuffle(facts)
    return conversation(rng, "lesson", [scene.picture], facts, any_manner(rng))


def several_pictures(rng: Rng, scale: int) -> Sample:
    """Draws a conversation about two or three pictures: which picture shows something, what a picture shows, and how
    many pictures there are."""
    count = int(rng.integers(2, 4))
    shapes, colours = (
        rng.choice(SHAPES, count, replace=False).tolist(),
        rng.choice(COLOURS, count, replace=False).tolist(),
    )
    drawn = [
        scenes.one_figure(rng, scenes.picture_size(rng, scale), [shape], [colour])
        for shape, colour in zip(shapes, colours, strict=True)
    ]
    amount = number_of(count, "picture")
    questions = ("How many pictures are there?", "How many pictures do you see?")
    facts = [Fact("", questions, amount.split()[0], f"There are {amount}.")]
    for ordinal, scene in zip(ORDINALS, drawn, strict=False):
        figure = scene.figures[0]
        where = f"in the {ordinal} picture"
        colour = f"What colour is the shape {where}?"
        facts += [
            which_fact(figure.shape, "", ordinal),
            which_fact(figure.colour, " shape", ordinal),
            Fact("", (colour,), figure.colour, f"The shape {where} is {figure.colour}."),
            Fact("", (f"What shape is {where}?",), figure.shape, f"The shape {where} is a {figure.shape}."),
        ]
    rng.shuffle(facts)
    media = [scene.picture for scene in drawn]
    return conversation(rng, "lesson", media, facts[:_MOST_QUESTIONS], any_manner(rng))


def clip(rng: Rng, _scale: int) -> Sample:
    """Draws a conversation about a clip, often with a sound track, and about everything that one can see and hear in
    it."""
    story = list(STORY_OF_TASK.values())[int(rng.choice(len(STORY_OF_TASK), p=(0.4, 0.3, 0.1, 0.2)))](rng)
    facts, sound = list(story.facts), None
    if rng.random() < 0.5:
        sound, heard = beeping(rng) if rng.random() < 0.6 else pitched(rng)
        facts.append(heard)
    rng.shuffle(facts)
    shown = clips.film(rng, story, float(rng.choice(clips.SECONDS)), sound=sound)
    return conversation(rng, "lesson", [shown], facts, any_manner(rng))
