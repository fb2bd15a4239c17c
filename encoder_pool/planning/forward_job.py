"""Defines what goes to the device and what comes back. This is the interface between the planning and the thread that
owns the model.

The module knows nothing of torch; tests drive the pipeline through this interface, one forward pass at a time.
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
    """Counts the planned rows of the feature."""
    buffer: npt.NDArray[np.uint8]
    """Views the bytes of the unit's slot in the arena, with shape `(nbytes,)`."""
    num_levels: int = 0
    """Has the meaning of `MediaItem.num_levels`."""


class ForwardResult(NamedTuple):
    errors: list[WeftError | None]
    """Holds one entry per unit, in order. None means that the unit's bytes are complete in its slot."""
    seconds: float


class SoundJob(NamedTuple):
    waveform: Waveform
    item: MediaItem


class SoundResult(NamedTuple):
    outcomes: list[list[EncoderInput] | WeftError]
    """Holds the planned units of each sound, in order, or the error that prevented them."""
    seconds: float


class Forward(Protocol):
    def submit(self, units: Sequence[ForwardUnit], done: Callable[[ForwardResult], None]) -> None:
        """Encodes a batch of one modality into the units' buffers. Calls `done` once, in any thread."""
        ...

    def submit_sounds(self, sounds: Sequence[SoundJob], done: Callable[[SoundResult], None]) -> None:
        """Resamples sounds and makes units of their spectrograms, all in one batch. Calls `done` once, in any thread.
        It is only used where sounds arrive as waveforms."""
        ...
