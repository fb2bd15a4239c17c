"""What a conversation of the demo is made of: pictures, sounds, clips, turns. Values only; drawn elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SAMPLE_RATE = 16_000


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    pixels: npt.NDArray[np.uint8]
    """`(height, width, 3)`, RGB."""
    description: str


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    samples: npt.NDArray[np.float32]
    """`(num_samples,)` between -1 and 1, 16 kHz."""
    description: str


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    frames: npt.NDArray[np.uint8]
    """`(num_frames, height, width, 3)`, RGB."""
    fps: float
    description: str
    sound: Sound | None = None
    """The track that runs along with it."""


Part = str | Picture | Sound | Clip


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation that ends with a user's turn, and the one right answer to it."""

    task: str
    turns: tuple[Turn, ...]
    answer: str

    def media(self) -> Iterator[Picture | Sound | Clip]:
        """In the order of the conversation."""
        for turn in self.turns:
            for part in turn.parts:
                if not isinstance(part, str):
                    yield part
