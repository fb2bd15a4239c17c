"""Draws conversations without media: greetings, questions about what the model can do, and questions about earlier
turns. It knows no model."""

from __future__ import annotations

from deploy.demo.drawing.facts import NUMBERS, ChatTurn, Sample, pick
from deploy.demo.drawing.figures import COLOURS, Rng

HELLO = "Hello! Show me a picture and ask me about it."
ABILITY = "I can see pictures, hear sounds and watch videos. I know colours, shapes and numbers."
IDENTITY = "I am the demo model of Weft."
WELCOME = "You are welcome."
FIXED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hello there!", "Good morning!", "Hey!", "Good evening!"), HELLO),
    (("What can you do?", "What do you know?", "How can you help me?", "What are you able to do?"), ABILITY),
    (("Who are you?", "What are you?", "What is your name?", "Which model are you?"), IDENTITY),
    (("Thank you", "Thank you!", "Thanks!", "Thanks"), WELCOME),
    (("Goodbye", "Goodbye!", "Bye!", "Good night!"), "Goodbye!"),
)
NAMES: tuple[str, ...] = (
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Emma",
    "Felix",
    "Greta",
    "Hugo",
    "Ida",
    "Jonas",
    "Kim",
    "Lena",
    "Max",
    "Nora",
)
NAMES += ("Oskar", "Paula", "Robin", "Sara", "Tom", "Vera")
ANIMALS = ("cat", "dog", "horse", "bird", "fish", "cow", "sheep", "lion", "bear", "mouse")


def fixed(rng: Rng, _scale: int) -> Sample:
    """Draws a conversation that is a greeting or a question about the model."""
    questions, answer = FIXED[int(rng.integers(len(FIXED)))]
    return Sample("greeting", (ChatTurn("user", (pick(rng, questions),)),), answer)


def recall(rng: Rng, _scale: int) -> Sample:
    """Draws a conversation that asks what the user said in an earlier turn, sometimes with another exchange in
    between."""
    kind = pick(rng, ("name", "colour", "animal", "number"))
    options = {"name": NAMES, "colour": COLOURS, "animal": ANIMALS, "number": NUMBERS}[kind]
    word = pick(rng, options)
    if kind == "name":
        told, question = (
            pick(rng, (f"My name is {word}.", f"I am {word}.")),
            pick(rng, ("What is my name?", "Who am I?")),
        )
    else:
        told, question = f"My favourite {kind} is {word}.", f"What is my favourite {kind}?"
    turns = [ChatTurn("user", (told,)), ChatTurn("assistant", ("I will remember that.",))]
    if rng.random() < 0.4:
        questions, answer = FIXED[int(rng.integers(len(FIXED) - 1))]
        turns += [ChatTurn("user", (pick(rng, questions),)), ChatTurn("assistant", (answer,))]
    return Sample("earlier turn", (*turns, ChatTurn("user", (question,))), word)


def echo(rng: Rng, _scale: int) -> Sample:
    word = pick(rng, (*COLOURS, *ANIMALS, *NAMES, *NUMBERS))
    return Sample("repeat", (ChatTurn("user", (pick(rng, (f"Say {word}.", f"Repeat the word {word}.")),)),), word)


def counting(rng: Rng, _scale: int) -> Sample:
    number = int(rng.integers(0, 9))
    if rng.random() < 0.5:
        question, answer = f"Which number comes after {NUMBERS[number]}?", NUMBERS[number + 1]
    else:
        question, answer = f"Which number comes before {NUMBERS[number + 1]}?", NUMBERS[number]
    return Sample("next number", (ChatTurn("user", (question,)),), answer)
