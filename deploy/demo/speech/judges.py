"""Judges what the demo's voices say, by comparison with recordings: the nearest one tells what was said.

Sounds and recordings are compared as log-mel spectrograms with dynamic time warping. A word alone is compared with all
words of the script. In a sentence each word is judged in its place: it is recognised if the recording of the sentence
is nearer than those with any other word of the same kind in that place, and than the one without the word. A long
answer is first cut into its parts, along the path to the recordings of these parts.

The module knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from deploy.demo.drawing.clips import DIRECTION_TO_STEP
from deploy.demo.drawing.facts import NUMBERS, ORDINALS, number_of
from deploy.demo.drawing.figures import COLOURS, SHAPES
from deploy.demo.speech.mel_codec import FLOOR, log_mel
from deploy.demo.speech.recordings import JUDGES_SPEED, Samples, recording
from deploy.demo.speech.script import NOUNS, SIZES, WORDS
from deploy.demo.tasks.words import ANIMALS, NAMES

Mels = npt.NDArray[np.float32]
MELS_PER_STEP = 2
"""Says how many steps of a log-mel spectrogram, of 10 ms each, are one step of the comparison."""
_LOUD = 0.3
"""A step is no silence if its mean over the bands is so far above the floor, in natural logarithms."""
KINDS: tuple[tuple[str, ...], ...] = (
    COLOURS,
    SHAPES,
    tuple(number_of(2, noun).split()[1] for noun in NOUNS),
    ("shape", "picture", "beep", "object", *SHAPES),
    NUMBERS,
    ORDINALS,
    ANIMALS,
    NAMES,
    SIZES,
    ("top", "bottom", "left", "right", "middle", *DIRECTION_TO_STEP),
    ("low", "high", "rising", "falling"),
    ("appears", "disappears"),
    ("yes", "no"),
    ("is", "are", "was"),
    ("the", "a", "no"),
)


def features(samples: Samples) -> Mels:
    """Returns the spectrogram of a sound without the silence at its ends. Has shape `(num_steps, num_bands)`, at least
    one step."""
    return features_of_mels(log_mel(torch.from_numpy(samples)).numpy())


def features_of_mels(mels: Mels) -> Mels:
    """Returns the same for a log-mel spectrogram."""
    mels = mels - np.float32(np.log(FLOOR))
    loud = np.nonzero(mels.mean(1) > _LOUD)[0]
    if len(loud):
        mels = mels[loud[0] : loud[-1] + 1]
    padded = np.pad(mels, ((0, -len(mels) % MELS_PER_STEP), (0, 0)), mode="edge")
    return np.asarray(padded.reshape(-1, MELS_PER_STEP, mels.shape[1]).mean(1))


def distances(said: Mels, templates: Sequence[Mels]) -> npt.NDArray[np.float32]:
    """Returns the mean distance along the best path to each template."""
    costs, lengths = _costs(said, templates)
    sums = _sums(costs)
    ends = sums[np.arange(len(templates)), len(said) - 1, lengths - 1]
    return np.asarray(ends / (len(said) + lengths))


def _costs(said: Mels, templates: Sequence[Mels]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Returns the distances between all steps, of shape `(num_templates, num_steps, longest)`, and the templates'
    lengths."""
    lengths = np.array([len(template) for template in templates])
    stacked = np.zeros((len(templates), int(lengths.max()), said.shape[1]), np.float32)
    for row, template in zip(stacked, templates, strict=True):
        row[: len(template)] = template
    squares = (said**2).sum(1)[:, None] + (stacked**2).sum(2)[:, None]
    squares -= 2 * np.matmul(said, stacked.transpose(0, 2, 1))
    return np.sqrt(np.maximum(squares, 0)), lengths


def _sums(costs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Returns the least sum of distances up to each pair of steps; a step in both counts twice."""
    num, height, width = costs.shape
    sums = np.full((num, height + 1, width + 1), np.inf, np.float32)
    sums[:, 0, 0] = 0
    for diagonal in range(height + width - 1):
        rows = np.arange(max(0, diagonal - width + 1), min(height, diagonal + 1))
        columns = diagonal - rows
        cost = costs[:, rows, columns]
        straight = np.minimum(sums[:, rows, columns + 1], sums[:, rows + 1, columns]) + cost
        sums[:, rows + 1, columns + 1] = np.minimum(straight, sums[:, rows, columns] + 2 * cost)
    return sums[:, 1:, 1:]


def pieces(said: Mels, templates: Sequence[Mels]) -> list[Mels]:
    """Cuts a long sound into one piece for each template, along the best path to all of them in a row."""
    together = np.concatenate(templates)
    costs, _ = _costs(said, [together])
    sums = np.pad(_sums(costs)[0], ((1, 0), (1, 0)), constant_values=np.inf)
    at, other = len(said), len(together)
    first_step = np.zeros(len(together), np.int64)
    while at > 1 or other > 1:
        first_step[other - 1] = at - 1
        before = ((at - 1, other - 1), (at - 1, other), (at, other - 1))
        at, other = min(before, key=lambda place: sums[place])
    starts = np.cumsum([0, *(len(template) for template in templates[:-1])])
    cuts = [*first_step[starts].tolist(), len(said)]
    return [said[low : max(high, low + 1)] for low, high in pairwise(cuts)]


def recorded(voice: str) -> Callable[[str], Mels]:
    """Returns a function that returns the features of a text as espeak-ng says it, at a speed that no training has
    seen; it remembers what it has recorded."""
    return lru_cache(50_000)(lambda text: features(recording(text, voice, JUDGES_SPEED)))


class Judge:
    """A `Judge` compares with recordings of one voice."""

    def __init__(self, template: Callable[[str], Mels], words: Sequence[str] = WORDS) -> None:
        """Takes a function that returns the features of a recorded text."""
        self._template = template
        self._words = tuple(words)

    def word(self, said: Mels) -> str:
        """Returns the nearest word."""
        found = distances(said, [self._template(word) for word in self._words])
        return self._words[int(found.argmin())]

    def words_of_parts(self, said: Mels, parts: Sequence[str]) -> list[bool]:
        """Returns for each word of an answer, which consists of these words and sentences, whether it is recognised in
        its place."""
        if len(parts) == 1:
            return self._words_of(said, parts[0])
        cut = pieces(said, [self._template(part) for part in parts])
        return [is_right for piece, part in zip(cut, parts, strict=True) for is_right in self._words_of(piece, part)]

    def _words_of(self, said: Mels, sentence: str) -> list[bool]:
        if sentence in self._words:
            return [self.word(said) == sentence] * len(sentence.split())
        others = list(variants(sentence))
        found = distances(said, [self._template(text) for text in (sentence, *(text for _, text in others))])
        nearer = {place for (place, _), distance in zip(others, found[1:], strict=True) if distance < found[0]}
        return [place not in nearer for place in range(len(sentence.split()))]


def sentences_of(text: str) -> list[str]:
    """Returns the sentences of an answer; a word is one."""
    return [part.strip() for part in re.findall(r"[^.!?]+[.!?]*", text)]


def variants(sentence: str) -> Iterator[tuple[int, str]]:
    """Yields the sentence with another word of the same kind in one place, and without the word there, each with the
    index of the place."""
    words = sentence.split()
    for place, word in enumerate(words):
        found = re.fullmatch(r"([A-Za-z]+)(\W*)", word)
        bare, mark = found.groups() if found else (word, "")
        kind = dict.fromkeys(other for kind in KINDS if bare in kind or bare.lower() in kind for other in kind)
        for other in kind:
            if other.lower() != bare.lower():
                shown = other.capitalize() if bare[0].isupper() else other
                yield place, " ".join([*words[:place], shown + mark, *words[place + 1 :]])
        if len(words) > 1:
            yield place, " ".join([*words[:place], *words[place + 1 :]])
