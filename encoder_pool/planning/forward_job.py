"""What goes into one forward and what comes back: the seam between the planning and the thread that owns the model.

Knows nothing of torch; tests drive the pipeline through this seam, one forward at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fabric.errors import WeftError
from modalities.family import EncoderInput


class ForwardUnit(NamedTuple):
    input: EncoderInput
    num_tokens: int
    """Rows that were planned."""
    buffer: npt.NDArray[np.uint8]
    """The slot in the arena, `(nbytes,)`."""


class ForwardResult(NamedTuple):
    errors: list[WeftError | None]
    """One per unit, in order; None: the unit's bytes are complete in its slot."""
    seconds: float


class Forward(Protocol):
    def submit(self, units: Sequence[ForwardUnit], done: Callable[[ForwardResult], None]) -> None:
        """Encodes a batch of one modality into the units' buffers. `done` is called once, in whatever thread."""
        ...
