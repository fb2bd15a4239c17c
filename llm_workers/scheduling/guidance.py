"""Defines what the scheduler and the runner know of a grammar: a `Guide` follows the tokens of a sequence and says
which tokens may come next.

The grammar itself belongs to `llm_workers.grammar`; this module knows nothing of how it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Guide(Protocol):
    """A `Guide` holds the state of one sequence in its grammar. The state follows from the ids alone, so that any
    worker can rebuild it."""

    def fork(self) -> Guide:
        """Returns an independent guide with the same state."""
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """Moves the state past these generated tokens."""
        ...

    def write_mask(self, words: npt.NDArray[np.int32]) -> bool:
        """Sets bit i (the lowest first) for each token i that may come next, and clears the others; `words` has shape
        `(ceil(vocab / 32),)`. Returns False when the grammar can't be followed any further, and then no bit is
        valid."""
        ...
