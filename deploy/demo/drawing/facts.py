"""Defines the values that a conversation of the demo consists of, and builds conversations of them.

A `Sample` is a conversation with its one right answer; its turns contain text and media (`Picture`, `Sound`, `Clip`). A
`Fact` is what one can ask about a medium: questions in several wordings, and the answer as a word and as a sentence.
`conversation` puts media and facts together into a sample.

The module draws no media and knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Rng = np.random.Generator
SAMPLE_RATE = 16_000


# ------------------------------------------------------------ conversations


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    pixels: npt.NDArray[np.uint8]
    """Holds RGB pixels. Has shape `(height, width, 3)`."""
    description: str


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    samples: npt.NDArray[np.float32]
    """Holds samples between -1 and 1 at 16 kHz. Has shape `(num_samples,)`."""
    description: str


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    frames: npt.NDArray[np.uint8]
    """Holds RGB pixels. Has shape `(num_frames, height, width, 3)`."""
    fps: float
    description: str
    sound: Sound | None = None
    """Holds the sound track; None means a silent clip."""


Part = str | Picture | Sound | Clip


@dataclass(frozen=True, slots=True)
class ChatTurn:
    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds a conversation that ends with a user's turn, and the one right answer to it."""

    task: str
    turns: tuple[ChatTurn, ...]
    answer: str

    def media(self) -> Iterator[Picture | Sound | Clip]:
        """Yields the media in the order of the conversation."""
        for turn in self.turns:
            for part in turn.parts:
                if not isinstance(part, str):
                    yield part


def conversation(rng: Rng, task: str, media: Sequence[Part], facts: Sequence[Fact], manner: str = "free") -> Sample:
    """Returns a conversation with a question for each fact, the last one not yet answered. The media stand in the first
    user turn, before or after its question."""
    turns: list[ChatTurn] = list(system_turn(rng, manner))
    for index, fact in enumerate(facts):
        question = pick(rng, fact.questions)
        if index == 0:
            is_media_first = rng.random() < 0.7
            turns.append(ChatTurn("user", (*media, question) if is_media_first else (question, *media)))
        else:
            turns.append(ChatTurn("user", (question,)))
        turns.append(ChatTurn("assistant", (fact.sentence if manner == "sentence" else fact.word,)))
    answer = turns.pop().parts[0]
    assert isinstance(answer, str)
    return Sample(task, tuple(turns), answer)


def system_turn(rng: Rng, manner: str) -> tuple[ChatTurn, ...]:
    """Returns the system turn for a manner of answering. `manner` is `word`, `sentence`, or `free` (no system prompt,
    which means a word)."""
    if manner == "free":
        return ()
    return (ChatTurn("system", (pick(rng, WORD_PROMPTS if manner == "word" else SENTENCE_PROMPTS),)),)


def any_manner(rng: Rng) -> str:
    return str(rng.choice(["free", "word", "sentence"], p=[0.6, 0.15, 0.25]))


# ------------------------------------------------------------ facts

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ORDINALS = ("first", "second", "third")
WORD_PROMPTS = ("Answer with one word.", "Answer in one word.", "Be short.")
SENTENCE_PROMPTS = ("Answer in a sentence.", "Answer in a full sentence.", "Use a whole sentence.")


@dataclass(frozen=True, slots=True)
class Fact:
    task: str
    questions: tuple[str, ...]
    word: str
    sentence: str


def number_of(count: int, noun: str) -> str:
    """Returns the number and the noun in words: `three circles`, `one cross`."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{NUMBERS[count]} {noun if count == 1 else plural}"


def are(count: int) -> str:
    return "is" if count == 1 else "are"


def pick(rng: Rng, options: Sequence[str]) -> str:
    """Returns one of the options, drawn at random."""
    return options[int(rng.integers(len(options)))]
