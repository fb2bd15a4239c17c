"""What the scheduler and the runner know of a grammar: it follows the tokens of a sequence and says what may come.

The grammar itself is `llm_workers.grammar`'s; nothing here knows how it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Guide(Protocol):
    """Where one sequence stands in its grammar. The state follows from the ids alone, so it is rebuilt anywhere."""

    def fork(self) -> Guide:
        """A guide of its own at the same place."""
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens were generated."""
        ...

    def write_mask(self, words: npt.NDArray[np.int32]) -> bool:
        """Sets bit i (the lowest first) for each token i that may come next, clears the others; `(ceil(vocab / 32),)`.
        False, and no bit is to be relied on, when the grammar can't be followed any further."""
        ...
