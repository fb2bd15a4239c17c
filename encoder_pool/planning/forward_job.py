"""What goes to the device and what comes back: the seam between the planning and the thread that owns the model.

Knows nothing of torch; tests drive the pipeline through this seam, one forward at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fabric.errors import WeftError
from fabric.messages import MediaItem
from modalities.family import EncoderInput
from modalities.waveform import Waveform


class ForwardUnit(NamedTuple):
    input: EncoderInput
    num_tokens: int
    """Rows that were planned."""
    buffer: npt.NDArray[np.uint8]
    """The slot in the arena, `(nbytes,)`."""
    num_levels: int = 0
    """As in `MediaItem`."""


class ForwardResult(NamedTuple):
    errors: list[WeftError | None]
    """One per unit, in order; None: the unit's bytes are complete in its slot."""
    seconds: float


class SoundJob(NamedTuple):
    waveform: Waveform
    item: MediaItem


class SoundResult(NamedTuple):
    outcomes: list[list[EncoderInput] | WeftError]
    """The planned units of each sound, in order, or why there are none."""
    seconds: float


class Forward(Protocol):
    def submit(self, units: Sequence[ForwardUnit], done: Callable[[ForwardResult], None]) -> None:
        """Encodes a batch of one modality into the units' buffers. `done` is called once, in whatever thread."""
        ...

    def submit_sounds(self, sounds: Sequence[SoundJob], done: Callable[[SoundResult], None]) -> None:
        """Resamples sounds and makes units of their spectrograms, all in one batch; `done` as above. Only where
        sounds come as waveforms."""
        ...
