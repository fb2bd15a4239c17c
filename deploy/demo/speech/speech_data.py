"""Holds what the training of the demo's voices reads, and writes and reads it as one file.

The file is made once (`deploy.demo.speech.prepare`) and then is all that training needs, so that training can run on
another machine, where neither espeak-ng nor the drawing of media is installed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

FILE = "speech.npz"
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Holds arrays of different lengths one after another."""

    values: npt.NDArray[np.int64]
    """Has shape `(total_length, ...)`."""
    ends: Ints
    """Gives where each array ends in `values`."""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Ints:
        return self.values[0 if index == 0 else self.ends[index - 1] : self.ends[index]]


def ragged(arrays: list[Ints]) -> Ragged:
    return Ragged(np.concatenate(arrays), np.cumsum([len(one) for one in arrays]))


@dataclass(frozen=True, slots=True, eq=False)
class SpeechData:
    texts: Ragged
    """Holds the token ids of each text as it stands at the beginning of an answer."""
    later_texts: Ragged
    """Holds the token ids of each text as it stands after another text and a space."""
    num_words: int
    """The first so many texts are single words, the others are sentences."""
    codes: Ragged
    """Holds the codes of each text in each voice: first all texts in the first voice. Each is of shape `(num_frames,
    NUM_CODEBOOKS)`."""
    word_tokens: Ragged
    """Holds, for each frame of `codes`, the first token of the word that is being said, and that of the word after it,
    or -1 at the last word of a text. Each is of shape `(num_frames, 2)`."""
    user_turns: Ragged
    """Holds the user's turns of conversations: token ids, and -1 at positions of media."""
    media_rows: Floats
    """Holds the thinker's hidden states at the positions of media in `user_turns`, in the same order. Has shape
    `(num_rows, thinker_hidden)`."""
    header: Ints
    """Holds the tokens with which the assistant's turn begins."""
    comma: int
    period: int
    tts_tokens: Ints
    """Holds the ids of the text tokens pad, beginning and end."""
    samples: npt.NDArray[np.int16]
    """Holds the recordings of which code2wav learns, one after another: `FRAME_SAMPLES` for each of `sound_codes`."""
    sound_codes: Ints
    """Has shape `(num_frames, NUM_CODEBOOKS)`."""
    sound_starts: Ints
    """Gives the frames of `sound_codes` at which recordings begin."""
    sound_weights: Floats
    """Says how often each frame of `sound_codes` is drawn, relative to the others."""
    centroids: Floats
    """Holds the codec's codebooks. Has shape `(NUM_CODEBOOKS, CODEBOOK_SIZE, num_components)`."""


def save(data: SpeechData, directory: Path) -> None:
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for field in fields(data):
        value = getattr(data, field.name)
        if field.name == "samples":
            # Differences of the differences compress best, high bytes apart from low ones.
            differences = np.diff(value, 2, prepend=np.zeros(2, np.int16)).astype("<i2")
            arrays[field.name] = np.ascontiguousarray(differences.view(np.uint8).reshape(-1, 2).T)
        elif isinstance(value, Ragged):
            arrays |= {field.name: _small(value.values), f"{field.name}.ends": value.ends}
        elif isinstance(value, int):
            arrays[field.name] = np.array(value)
        else:
            arrays[field.name] = _small(value)
    np.savez_compressed(directory / FILE, **arrays)  # type: ignore[arg-type]


def load(directory: Path) -> SpeechData:
    values: dict[str, object] = {}
    with np.load(directory / FILE) as arrays:
        for field in fields(SpeechData):
            value = arrays[field.name]
            if field.name == "samples":
                differences = np.ascontiguousarray(value.T).view("<i2")[:, 0]
                values[field.name] = np.cumsum(np.cumsum(differences, dtype=np.int16), dtype=np.int16)
            elif f"{field.name}.ends" in arrays:
                values[field.name] = Ragged(value.astype(np.int64), arrays[f"{field.name}.ends"])
            elif value.ndim == 0:
                values[field.name] = int(value)
            else:
                values[field.name] = value.astype(np.float32 if value.dtype.kind == "f" else np.int64)
    return SpeechData(**values)  # type: ignore[arg-type]


def _small(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Returns the same values in the smallest type that holds them; floats in half precision."""
    if values.dtype.kind == "f":
        return values.astype(np.float16)
    least, most = int(values.min(initial=0)), int(values.max(initial=0))
    return values.astype(np.uint8 if least >= 0 and most < 256 else np.int16 if most < 2**15 else np.int64)
