"""Draws scenes, which are pictures with known figures in known places, and the facts that one can ask about them. It
knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deploy.demo.drawing.facts import Fact, Picture, are, number_of, pick
from deploy.demo.drawing.figures import COLOURS, SHAPES, Figure, Rng, choose_look, draw, scattered

PLACES = (
    ("top left", "top", "top right"),
    ("left", "middle", "right"),
    ("bottom left", "bottom", "bottom right"),
)
# The geometric mean of a picture's sides lies between two lengths in pixels; each pair is one scale.
SCALES = ((56, 112), (112, 224), (224, 400))
MAX_SIDE = 448
MIN_SIDE = 56


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    picture: Picture
    figures: tuple[Figure, ...]
    facts: tuple[Fact, ...]

    def fact(self, task: str) -> Fact:
        return next(fact for fact in self.facts if fact.task == task)


def picture_size(rng: Rng, scale: int) -> tuple[int, int]:
    """Returns (height, width). Half of the pictures are square, the others are up to twice as long as wide or the other
    way round."""
    low, high = SCALES[scale]
    side = np.exp(rng.uniform(np.log(low), np.log(high)))
    stretch = 1.0 if rng.random() < 0.5 else 2 ** rng.uniform(-0.5, 0.5)
    height, width = (int(np.clip(round(side * factor), MIN_SIDE, MAX_SIDE)) for factor in (stretch, 1 / stretch))
    return height, width


def one_figure(
    rng: Rng, size: tuple[int, int], shapes: Sequence[str] = SHAPES, colours: Sequence[str] = COLOURS
) -> Scene:
    """Draws a figure of ordinary size anywhere in the picture."""
    height, width = size
    radius = rng.uniform(0.2, 0.42) * min(size)
    (x, y), *_ = scattered(rng, height, width, 1, radius)
    figure = Figure(pick(rng, shapes), pick(rng, colours), x, y, radius)
    return _scene(rng, size, [figure], f"a {figure.colour} {figure.shape}", [colour_fact(figure), shape_fact(figure)])


def placed_figure(rng: Rng, size: tuple[int, int]) -> Scene:
    """Draws a small figure in one of nine places."""
    height, width = size
    row, column = rng.integers(3, size=2).tolist()
    radius = rng.uniform(0.11, 0.16) * min(size)
    x = (column + 0.5 + rng.uniform(-0.15, 0.15)) / 3 * width
    y = (row + 0.5 + rng.uniform(-0.15, 0.15)) / 3 * height
    place = PLACES[row][column]
    figure = Figure(
        pick(rng, SHAPES),
        pick(rng, COLOURS),
        float(np.clip(x, radius, width - radius)),
        float(np.clip(y, radius, height - radius)),
        radius,
    )
    where = "in the middle" if place == "middle" else f"at the {place}"
    questions = ("Where is the shape?", "Where is it?", f"Where is the {figure.shape}?", "In which place is the shape?")
    fact = Fact("place", questions, place, f"The {figure.shape} is {where}.")
    name = f"a {figure.colour} {figure.shape} {where}"
    return _scene(rng, size, [figure], name, [fact, colour_fact(figure)])


def sized_figure(rng: Rng, size: tuple[int, int]) -> Scene:
    """Draws a figure that is clearly small or clearly large."""
    height, width = size
    is_large = rng.random() < 0.5
    radius = (rng.uniform(0.34, 0.45) if is_large else rng.uniform(0.11, 0.18)) * min(size)
    (x, y), *_ = scattered(rng, height, width, 1, radius)
    figure = Figure(pick(rng, SHAPES), pick(rng, COLOURS), x, y, radius)
    word = "large" if is_large else "small"
    questions = ("Is the shape small or large?", "Is it large or small?", f"Is the {figure.shape} small or large?")
    fact = Fact("size", questions, word, f"The {figure.shape} is {word}.")
    return _scene(
        rng,
        size,
        [figure],
        f"a {word} {figure.colour} {figure.shape}",
        [fact, colour_fact(figure), *([shape_fact(figure)] if is_large else [])],
    )


def several_figures(rng: Rng, size: tuple[int, int]) -> Scene:
    """Draws one to five figures that are all alike or (in a third of the pictures) mixed."""
    height, width = size
    count = int(rng.integers(1, 6))
    radius = rng.uniform(0.1, 0.14) * min(size)
    centres = scattered(rng, height, width, count, radius)
    is_mixed = rng.random() < 1 / 3
    kinds = [(pick(rng, SHAPES), pick(rng, COLOURS)) for _ in range(count if is_mixed else 1)] * (
        1 if is_mixed else count
    )
    figures = [Figure(shape, colour, x, y, radius) for (shape, colour), (x, y) in zip(kinds, centres, strict=True)]
    noun = "shape" if is_mixed else figures[0].shape
    name = number_of(count, noun) if is_mixed else number_of(count, f"{figures[0].colour} {noun}")
    plural = number_of(2, noun).split(" ", 1)[1]
    questions = (
        "How many shapes are there?",
        "How many shapes do you see?",
        f"How many {plural} are there?",
        "Count the shapes.",
    )
    fact = Fact("count", questions, number_of(count, noun).split()[0], f"There {are(count)} {number_of(count, noun)}.")
    facts = [fact] if is_mixed else [fact, colour_fact(figures[0], is_plural=count > 1)]
    return _scene(rng, size, figures, name, facts)


def two_figures(rng: Rng, size: tuple[int, int]) -> Scene:
    """Draws two figures that differ in shape and in colour."""
    height, width = size
    radius = rng.uniform(0.17, 0.22) * min(size)
    centres = scattered(rng, height, width, 2, radius)
    shapes = rng.choice(SHAPES, 2, replace=False).tolist()
    colours = rng.choice(COLOURS, 2, replace=False).tolist()
    figures = [Figure(s, c, x, y, radius) for s, c, (x, y) in zip(shapes, colours, centres, strict=True)]
    facts = facts_of_one_of_two(figures[int(rng.integers(2))])
    rng.shuffle(facts)
    return _scene(rng, size, figures, " and ".join(f"a {f.colour} {f.shape}" for f in figures), facts)


def facts_of_one_of_two(figure: Figure) -> list[Fact]:
    """Returns two facts: the colour of the figure with this shape, and the shape of the figure with this colour."""
    sentence = f"The {figure.shape} is {figure.colour}."
    by_shape = (f"What colour is the {figure.shape}?", f"Which colour does the {figure.shape} have?")
    by_colour = (f"Which shape is {figure.colour}?", f"What is the {figure.colour} shape?")
    return [
        Fact("colour of one of two", by_shape, figure.colour, sentence),
        Fact("shape of one of two", by_colour, figure.shape, sentence),
    ]


def colour_fact(figure: Figure, is_plural: bool = False) -> Fact:
    questions: tuple[str, ...] = (
        "What colour is the shape?",
        "Which colour do you see?",
        f"What colour is the {figure.shape}?",
        "What colour is it?",
    )
    sentence = f"The {figure.shape} is {figure.colour}."
    if is_plural:
        plural = number_of(2, figure.shape).split(" ", 1)[1]
        questions = ("What colour are the shapes?", "Which colour do you see?", f"What colour are the {plural}?")
        sentence = f"The {plural} are {figure.colour}."
    return Fact("colour", questions, figure.colour, sentence)


def shape_fact(figure: Figure) -> Fact:
    questions = (
        "What shape is this?",
        "Which shape do you see?",
        f"What is the {figure.colour} shape?",
        "What shape is it?",
    )
    return Fact("shape", questions, figure.shape, f"It is a {figure.shape}.")


def _scene(rng: Rng, size: tuple[int, int], figures: Sequence[Figure], name: str, facts: Sequence[Fact]) -> Scene:
    look = choose_look(rng, *size, [figure.colour for figure in figures])
    pixels = draw(rng, look, figures)
    return Scene(Picture(pixels, f"{name} ({size[1]} x {size[0]})"), tuple(figures), tuple(facts))
