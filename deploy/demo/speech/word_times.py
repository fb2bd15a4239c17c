"""Guesses which word each frame of a recording says, from the lengths of the words' own recordings.

The talker learns to name the next word at each frame (`talker_training`), for which a guess is enough. The module
knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from deploy.demo.speech.speech_data import Ints

PAUSE_FRAMES = 2.5
"""Counts the frames of silence at the end of a recorded word, and after a mark of punctuation in a sentence."""
LEAST_FRAMES, LEAST_UNKNOWN_FRAMES, FRAMES_PER_LETTER = 2.0, 1.2, 0.6


def word_at_frames(text: str, num_frames: int, word_to_frames: Mapping[str, int]) -> Ints:
    """Returns the index of the word that each frame says. `word_to_frames` gives the lengths of recorded words in lower
    case; the other words count by their letters."""
    lengths = [_length(word, word_to_frames) for word in text.split()]
    ends = np.cumsum(lengths)
    places = (np.arange(num_frames) + 0.5) / num_frames * ends[-1]
    return np.asarray(np.minimum(np.searchsorted(ends, places), len(ends) - 1), np.int64)


def _length(word: str, word_to_frames: Mapping[str, int]) -> float:
    bare = re.sub(r"[^a-z]", "", word.lower())
    known = word_to_frames.get(bare) or word_to_frames.get(bare.removesuffix("s"))
    length = max(LEAST_UNKNOWN_FRAMES, len(bare) * FRAMES_PER_LETTER)
    if known is not None:
        length = max(LEAST_FRAMES, known - PAUSE_FRAMES)
    return length + (0.0 if word[-1].isalpha() else PAUSE_FRAMES)
