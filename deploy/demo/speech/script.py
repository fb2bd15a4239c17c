"""Lists what the demo's voices learn to say: answers of the demo's tasks, made-up sentences, and words in any order.

Where few sentences are learned many times, a talker knows each of them by heart, and says a sentence that it never
learned as the nearest one that it did. So most of the script is drawn at random from many more possible sentences.

The module knows neither recordings nor models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from deploy.demo.drawing.clips import DIRECTION_TO_STEP
from deploy.demo.drawing.facts import NUMBERS, ORDINALS, Rng, are, number_of, pick
from deploy.demo.drawing.figures import COLOURS, SHAPES
from deploy.demo.drawing.scenes import PLACES
from deploy.demo.tasks.words import ANIMALS, FIXED, NAMES

ALL_PLACES = tuple(place for row in PLACES for place in row)
NOUNS = (*SHAPES, "shape", "picture", "beep", "object")
SIZES = ("small", "large")
WORDS: tuple[str, ...] = tuple(
    dict.fromkeys(
        (
            *COLOURS,
            *SHAPES,
            *NUMBERS,
            *ORDINALS,
            *ALL_PLACES,
            *DIRECTION_TO_STEP,
            *SIZES,
            *ANIMALS,
            *NAMES,
            *("yes", "no", "low", "high", "rising", "falling", "appears", "disappears"),
        )
    )
)
"""Holds every answer in one word (or two: the places)."""
FIXED_ANSWERS = ("I will remember that.", *(answer for _, answer in FIXED))
HELD_OUT_SHARE = 0.1
NUM_MADE_UP = 3500
NUM_LOOSE = 2000
NUM_UNSEEN = 60


@dataclass(frozen=True, slots=True)
class Script:
    words: tuple[str, ...]
    sentences: tuple[str, ...]
    """Holds the sentences of training: answers, made-up ones, and words in any order."""
    held_out: tuple[str, ...]
    """Holds answers that the talker never learns, and made-up sentences of the same kind."""


def script(seed: int) -> Script:
    """Returns the same script for the same seed."""
    rng = np.random.default_rng((seed, 0x5A1D))
    frames = [sentence for sentence in answers() if sentence not in FIXED_ANSWERS]
    is_held_out = rng.random(len(frames)) < HELD_OUT_SHARE
    made_up = dict.fromkeys(made_up_sentence(rng) for _ in range(NUM_MADE_UP + NUM_UNSEEN))
    loose = dict.fromkeys(loose_words(rng) for _ in range(NUM_LOOSE))
    spoken = [text for text, is_out in zip(frames, is_held_out, strict=True) if not is_out]
    unseen = [text for text, is_out in zip(frames, is_held_out, strict=True) if is_out]
    every = list(made_up)
    sentences = (*FIXED_ANSWERS, *spoken, *every[NUM_UNSEEN:], *loose)
    return Script(WORDS, sentences, (*unseen, *every[:NUM_UNSEEN]))


def answers() -> tuple[str, ...]:
    """Returns every sentence with which the demo can answer, each one once."""
    return tuple(dict.fromkeys((*FIXED_ANSWERS, *_about_pictures(), *_about_sounds(), *_about_clips())))


def _about_pictures() -> Iterator[str]:
    for shape, colour in product(SHAPES, COLOURS):
        yield f"The {shape} is {colour}."
        yield f"The {number_of(2, shape).split()[1]} are {colour}."
    for shape in SHAPES:
        yield f"It is a {shape}."
        yield from (f"Yes, there is a {shape}.", f"No, there is no {shape}.")
        yield from (f"The {shape} is {size}." for size in SIZES)
        yield from (f"The {shape} is {'in the middle' if p == 'middle' else f'at the {p}'}." for p in ALL_PLACES)
    for colour in COLOURS:
        yield from (f"Yes, the shape is {colour}.", f"No, the shape is not {colour}.")
    for noun, count in product((*SHAPES, "shape", "picture", "object"), range(1, 6)):
        yield f"There {are(count)} {number_of(count, noun)}."
    for ordinal in ORDINALS:
        yield from (f"The {shape} is in the {ordinal} picture." for shape in SHAPES)
        yield from (f"The {colour} shape is in the {ordinal} picture." for colour in COLOURS)
        yield from (f"The shape in the {ordinal} picture is {colour}." for colour in COLOURS)
        yield from (f"The shape in the {ordinal} picture is a {shape}." for shape in SHAPES)


def _about_sounds() -> Iterator[str]:
    yield from (f"You hear {number_of(count, 'beep')}." for count in range(1, 6))
    yield from (f"The tone is {word}." for word in ("low", "high", "rising", "falling"))
    yield from (f"You hear the number {word}." for word in NUMBERS)
    yield from (f"You hear the colour {word}." for word in COLOURS)


def _about_clips() -> Iterator[str]:
    for shape in SHAPES:
        for direction, (across, _) in DIRECTION_TO_STEP.items():
            yield f"The {shape} moves {f'to the {direction}' if across else direction}."
        yield from (f"The {shape} appears.", f"The {shape} disappears.")
    for colour in COLOURS:
        yield from (f"First it is {colour}.", f"At last it is {colour}.")


def made_up_sentence(rng: Rng) -> str:
    """Returns a sentence that is no answer of the demo but consists of the same words."""

    def figure() -> str:
        size = f"{pick(rng, SIZES)} " if rng.random() < 0.6 else ""
        return f"{size}{pick(rng, COLOURS)} {pick(rng, SHAPES)}"

    def where() -> str:
        place = pick(rng, ALL_PLACES)
        return "in the middle" if place == "middle" else f"at the {place}"

    def some() -> str:
        return number_of(int(rng.integers(2, 10)), f"{pick(rng, COLOURS)} {pick(rng, NOUNS)}")

    kinds = (
        lambda: f"There is a {figure()} {where()}, and a {figure()} {where()}.",
        lambda: f"There is a {figure()} {where()}.",
        lambda: f"The {figure()} is {where()}.",
        lambda: f"There are {some()} and {some()}.",
        lambda: f"You hear {some()}, and the tone is {pick(rng, ('low', 'high', 'rising', 'falling'))}.",
        lambda: f"First it is {pick(rng, COLOURS)}, and at last it is {pick(rng, COLOURS)}.",
        lambda: f"Yes, the {pick(rng, SHAPES)} in the {pick(rng, ORDINALS)} picture is {pick(rng, COLOURS)}.",
        lambda: f"No, the {figure()} is not {where()}.",
        lambda: f"My favourite animal is the {pick(rng, ANIMALS)}, {pick(rng, NAMES)}.",
        lambda: f"{pick(rng, NAMES)}, {pick(rng, NAMES)} and {pick(rng, NAMES)} hear the {pick(rng, ANIMALS)}.",
        lambda: f"The {pick(rng, SHAPES)} moves {pick(rng, ('up', 'down'))} and disappears.",
    )
    return kinds[int(rng.integers(len(kinds)))]()


def loose_words(rng: Rng) -> str:
    """Returns two to eight words of the demo's sentences in any order, written like a sentence."""
    words = [pick(rng, _LOOSE) for _ in range(int(rng.integers(2, 9)))]
    text = words[0] + "".join((", " if rng.random() < 0.1 else " ") + word for word in words[1:])
    return f"{text[0].upper()}{text[1:]}."


_LOOSE = (*WORDS, *(number_of(2, noun).split()[1] for noun in NOUNS), *NOUNS)
_LOOSE += tuple(dict.fromkeys(re.findall(r"[A-Za-z]+", " ".join(answers()))))
