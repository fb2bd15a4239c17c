"""Draws conversations about pictures: one picture, several, pictures interleaved with text, and pictures of earlier
turns. It knows no model."""

from __future__ import annotations

from collections.abc import Callable

from deploy.demo.drawing import scenes
from deploy.demo.drawing.facts import (
    ORDINALS,
    ChatTurn,
    Fact,
    Part,
    Sample,
    any_manner,
    conversation,
    number_of,
    pick,
    system_turn,
)
from deploy.demo.drawing.figures import COLOURS, SHAPES, Figure, Rng

SCENE_OF_TASK: dict[str, Callable[[Rng, tuple[int, int]], scenes.Scene]] = {
    "colour": scenes.one_figure,
    "shape": scenes.one_figure,
    "count": scenes.several_figures,
    "place": scenes.placed_figure,
    "size": scenes.sized_figure,
    "colour of one of two": scenes.two_figures,
    "shape of one of two": scenes.two_figures,
}

SCENES = (scenes.one_figure, scenes.several_figures, scenes.placed_figure, scenes.sized_figure)


def about_one(task: str) -> Callable[[Rng, int], Sample]:
    """Returns a function that draws a conversation with one picture and one question."""

    def sample(rng: Rng, scale: int) -> Sample:
        scene = SCENE_OF_TASK[task](rng, scenes.picture_size(rng, scale))
        return conversation(
            rng, task, [scene.picture], [scene.fact(task)], str(rng.choice(["free", "word"], p=[0.8, 0.2]))
        )

    return sample


def in_a_sentence(rng: Rng, scale: int) -> Sample:
    """Draws a conversation about one picture whose system prompt asks for a sentence."""
    task = pick(rng, tuple(SCENE_OF_TASK))
    scene = SCENE_OF_TASK[task](rng, scenes.picture_size(rng, scale))
    return conversation(rng, "sentence", [scene.picture], [scene.fact(task)], "sentence")


def present(rng: Rng, scale: int) -> Sample:
    """Draws a conversation about one picture with a question that is answered by yes or no."""
    scene = scenes.one_figure(rng, scenes.picture_size(rng, scale))
    return conversation(rng, "yes or no", [scene.picture], [presence(rng, scene.figures[0])], any_manner(rng))


def presence(rng: Rng, figure: Figure) -> Fact:
    """Returns a fact that says whether the figure has some shape or colour; the answer is yes half of the time."""
    is_present = rng.random() < 0.5
    if rng.random() < 0.5:
        shape = figure.shape if is_present else pick(rng, [s for s in SHAPES if s != figure.shape])
        question, sentence = f"Is there a {shape}?", f"there is {'a' if is_present else 'no'} {shape}."
    else:
        colour = figure.colour if is_present else pick(rng, [c for c in COLOURS if c != figure.colour])
        question, sentence = f"Is the shape {colour}?", f"the shape is {'' if is_present else 'not '}{colour}."
    word = "yes" if is_present else "no"
    return Fact("yes or no", (question,), word, f"{word.capitalize()}, {sentence}")


def earlier(rng: Rng, scale: int) -> Sample:
    """Draws a conversation of several turns about the picture of the first turn."""
    task = pick(rng, ("colour", "shape", "count", "place", "size", "colour of one of two"))
    scene = SCENE_OF_TASK[task](rng, scenes.picture_size(rng, scale))
    facts = list(scene.facts)
    rng.shuffle(facts)
    thanks = Fact("", ("Thank you!", "Thanks!"), "You are welcome.", "You are welcome.")
    if len(facts) < 2 or rng.random() < 0.4:
        facts.insert(1, thanks)
    if facts[-1] is thanks:
        facts.append(facts[0])
    return conversation(rng, "earlier picture", [scene.picture], facts, any_manner(rng))


def which_of_several(rng: Rng, scale: int) -> Sample:
    """Draws a conversation about two or three pictures, exactly one of which has the shape or colour that the question
    names."""
    count = int(rng.integers(2, 4))
    shapes, colours = (
        rng.choice(SHAPES, count, replace=False).tolist(),
        rng.choice(COLOURS, count, replace=False).tolist(),
    )
    pictures = [
        scenes.one_figure(rng, scenes.picture_size(rng, scale), [shape], [colour])
        for shape, colour in zip(shapes, colours, strict=True)
    ]
    asked = int(rng.integers(count))
    name, noun = (shapes[asked], "") if rng.random() < 0.5 else (colours[asked], " shape")
    fact = which_fact(name, noun, ORDINALS[asked])
    return conversation(rng, "which picture", [scene.picture for scene in pictures], [fact], any_manner(rng))


def which_fact(name: str, noun: str, ordinal: str) -> Fact:
    """Returns a fact that says which picture has, for example, the circle or the red shape."""
    questions = (f"Which picture has the {name}{noun}?", f"In which picture is the {name}{noun}?")
    return Fact("which picture", questions, ordinal, f"The {name}{noun} is in the {ordinal} picture.")


def interleaved(rng: Rng, scale: int) -> Sample:
    """Draws a conversation with two or three pictures and text between them, and then a question about one of the
    pictures."""
    count = int(rng.integers(2, 4))
    pictures = [scenes.one_figure(rng, scenes.picture_size(rng, scale)) for _ in range(count)]
    wording = pick(rng, ("This is the {} picture.", "The {} picture:", "and"))
    parts: list[Part] = []
    for index, scene in enumerate(pictures):
        text = wording.format(ORDINALS[index])
        if wording == "and":
            parts += [scene.picture, text] if index < count - 1 else [scene.picture]
        else:
            parts += [scene.picture, text] if wording.startswith("This") else [text, scene.picture]
    asked = int(rng.integers(count))
    figure = pictures[asked].figures[0]
    where = f"in the {ORDINALS[asked]} picture"
    task = pick(rng, ("colour", "shape"))
    if task == "colour":
        question, word, sentence = (
            f"What colour is the shape {where}?",
            figure.colour,
            f"The shape {where} is {figure.colour}.",
        )
    else:
        question, word, sentence = f"What shape is {where}?", figure.shape, f"The shape {where} is a {figure.shape}."
    manner = any_manner(rng)
    turns = (*system_turn(rng, manner), ChatTurn("user", (*parts, question)))
    return Sample("picture, text, picture", turns, sentence if manner == "sentence" else word)


def how_many_pictures(rng: Rng, scale: int) -> Sample:
    count = int(rng.integers(1, 4))
    pictures = [scenes.one_figure(rng, scenes.picture_size(rng, scale)).picture for _ in range(count)]
    questions = ("How many pictures are there?", "How many pictures do you see?")
    amount = number_of(count, "picture")
    fact = Fact("number of pictures", questions, amount.split()[0], f"There {'is' if count == 1 else 'are'} {amount}.")
    return conversation(rng, "number of pictures", pictures, [fact], any_manner(rng))
