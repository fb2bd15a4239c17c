"""Draws short clips: what happens in them and what one can ask about them. It knows no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from deploy.demo.drawing.facts import Clip, Fact, Sound, are, number_of, pick
from deploy.demo.drawing.figures import COLOURS, SHAPES, Figure, Rng, choose_look, draw, scattered

DIRECTION_TO_STEP = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
SECONDS = (2.0, 3.0, 4.0)
# These are the least and the largest mean side length in pixels.
SIDES = (64, 112)
TRAINING_FPS = 2.0


@dataclass(frozen=True, slots=True)
class Story:
    """Describes what a clip shows at each moment, with `0 <= moment <= 1` over the clip's length."""

    height: int
    width: int
    colours: tuple[str, ...]
    figures: Callable[[float], list[Figure]]
    description: str
    facts: tuple[Fact, ...]


def moving(rng: Rng) -> Story:
    """Returns a story in which one figure crosses the picture."""
    height, width = _size(rng)
    direction = pick(rng, tuple(DIRECTION_TO_STEP))
    step_x, step_y = DIRECTION_TO_STEP[direction]
    radius = rng.uniform(0.16, 0.24) * min(height, width)
    shape, colour = pick(rng, SHAPES), pick(rng, COLOURS)
    reach = rng.uniform(0.75, 1.0)
    free_x, free_y = width / 2 - radius, height / 2 - radius
    # Perpendicular to its motion, the figure stands anywhere.
    off_x, off_y = (rng.uniform(-1, 1) * free_x * (step_x == 0), rng.uniform(-1, 1) * free_y * (step_y == 0))

    def figures(moment: float) -> list[Figure]:
        along = (2 * moment - 1) * reach
        x, y = width / 2 + off_x + step_x * along * free_x, height / 2 + off_y + step_y * along * free_y
        return [Figure(shape, colour, float(x), float(y), float(radius))]

    where = f"to the {direction}" if step_x else direction
    questions = ("Which way does the shape move?", "Where does the shape move?", f"Which way does the {shape} move?")
    fact = Fact("direction", questions, direction, f"The {shape} moves {where}.")
    seen = Fact(
        "colour in a clip",
        ("What colour is the shape?", f"What colour is the {shape}?"),
        colour,
        f"The {shape} is {colour}.",
    )
    return Story(height, width, (colour,), figures, f"a {colour} {shape} that moves {where}", (fact, seen))


def changing(rng: Rng) -> Story:
    """Returns a story of one figure that first has one colour, then another."""
    height, width = _size(rng)
    first, last = rng.choice(COLOURS, 2, replace=False).tolist()
    figure = _still(rng, height, width, pick(rng, SHAPES), first)
    switch = rng.choice([0.25, 0.5, 0.75]) - 0.01

    def figures(moment: float) -> list[Figure]:
        return [replace(figure, colour=first if moment < switch else last)]

    facts = (
        Fact(
            "order of colours", ("Which colour comes first?", "Which colour is first?"), first, f"First it is {first}."
        ),
        Fact("order of colours", ("Which colour comes last?", "Which colour is last?"), last, f"At last it is {last}."),
    )
    order = int(rng.integers(2))
    name = f"a {figure.shape} that is {first}, then {last}"
    return Story(height, width, (first, last), figures, name, (facts[order], facts[1 - order]))


def appearing(rng: Rng) -> Story:
    """Returns a story of one figure that appears or disappears."""
    height, width = _size(rng)
    figure = _still(rng, height, width, pick(rng, SHAPES), pick(rng, COLOURS))
    does_appear = bool(rng.random() < 0.5)
    switch = rng.choice([0.25, 0.5, 0.75]) - 0.01

    def figures(moment: float) -> list[Figure]:
        return [figure] if (moment >= switch) == does_appear else []

    word = "appears" if does_appear else "disappears"
    questions = ("Does the shape appear or disappear?", f"Does the {figure.shape} appear or disappear?")
    fact = Fact("appearing", questions, word, f"The {figure.shape} {word}.")
    return Story(height, width, (figure.colour,), figures, f"a {figure.colour} {figure.shape} that {word}", (fact,))


def several(rng: Rng) -> Story:
    """Returns a story of one to four figures that tremble."""
    height, width = _size(rng)
    count = int(rng.integers(1, 5))
    radius = rng.uniform(0.13, 0.16) * min(height, width)
    shape, colour = pick(rng, SHAPES), pick(rng, COLOURS)
    centres = scattered(rng, height, width, count, radius)
    phases = rng.uniform(0, 2 * np.pi, (count, 2))

    def figures(moment: float) -> list[Figure]:
        sway = np.sin(phases + moment * 4 * np.pi) * radius * 0.12
        return [
            Figure(shape, colour, x + u, y + v, radius) for (x, y), (u, v) in zip(centres, sway.tolist(), strict=True)
        ]

    amount = number_of(count, shape)
    questions = ("How many shapes are in the video?", "How many shapes do you see?", "Count the shapes.")
    fact = Fact("number of objects", questions, amount.split()[0], f"There {are(count)} {amount}.")
    return Story(height, width, (colour,), figures, number_of(count, f"{colour} {shape}"), (fact,))


def film(rng: Rng, story: Story, seconds: float, fps: float = TRAINING_FPS, sound: Sound | None = None) -> Clip:
    """Draws the frames of a story. With the frame rate of training they are exactly the frames that the model sees."""
    look = choose_look(rng, story.height, story.width, story.colours)
    frames = np.stack([draw(rng, look, story.figures(moment)) for moment in moments(seconds, int(seconds * fps))])
    heard = f", with {sound.description}" if sound else ""
    name = f"{story.description}{heard} ({seconds:g} s, {story.width} x {story.height})"
    return Clip(frames, fps, name, sound)


def moments(seconds: float, num_frames: int) -> list[float]:
    """Returns for each frame how much of the story is over. The model sees two frames per second, and the last of them
    shows the end of the story."""
    last = (seconds - 0.5) / seconds
    return [min(index / num_frames / last, 1.0) for index in range(num_frames)]


def _size(rng: Rng) -> tuple[int, int]:
    side = np.exp(rng.uniform(np.log(SIDES[0]), np.log(SIDES[1])))
    stretch = 1.0 if rng.random() < 0.6 else 2 ** rng.uniform(-0.4, 0.4)
    return round(side * stretch), round(side / stretch)


def _still(rng: Rng, height: int, width: int, shape: str, colour: str) -> Figure:
    radius = rng.uniform(0.2, 0.4) * min(height, width)
    (x, y), *_ = scattered(rng, height, width, 1, radius)
    return Figure(shape, colour, x, y, float(radius))
