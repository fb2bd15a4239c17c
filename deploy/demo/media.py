"""Defines the values that a conversation of the demo consists of: pictures, sounds, clips and turns. The module draws
none of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SAMPLE_RATE = 16_000


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
