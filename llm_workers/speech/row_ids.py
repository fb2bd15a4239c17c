"""Defines what a talker's stage knows of the rows of one request.

`RowBook` holds the ids of a request's rows as far as they are known, and says how many rows are ready. Each family of
models has its own: `talker_prompt` for Qwen3-Omni, and `single_code_prompt` for Qwen2.5-Omni. The module is pure: it
knows ids and counts, and neither tensors nor positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
NONE = -1
"""Stands where a row has no id."""


class RowParts(NamedTuple):
    """Holds what some consecutive rows are made of, except for the codes of frames."""

    text_ids: Ints
    """Holds the thinker's token id of each row, or NONE."""
    codes: Ints
    """Holds the codec's special id of each row, or NONE."""
    hidden_rows: Ints
    """Holds the rows that take a hidden state of the thinker, counted from the first of these rows, ascending."""
    hidden_indexes: Ints
    """Holds for each of them which of the hidden states that have come it takes."""


class RowBook(Protocol):
    """A `RowBook` belongs to one request."""

    @property
    def user_at(self) -> Ints:
        """Returns the positions of the thinker's prompt that are rows here, in ascending order; they come first."""
        ...

    @property
    def num_prompt_rows(self) -> int:
        """Returns the number of rows up to the one that makes the first frame."""
        ...

    @property
    def is_silent(self) -> bool:
        """Returns whether the answer has ended without a token to speak."""
        ...

    def add_hidden(self, positions: Ints) -> None:
        """Notes that the thinker's hidden states at these positions have come. Raises ProtocolError if they are not the
        next ones that this model needs."""
        ...

    def add_text(self, token_ids: Sequence[int], first_index: int, *, is_last: bool) -> None:
        """Notes generated tokens. Raises ProtocolError if they do not continue the answer."""
        ...

    def end_text(self) -> None:
        """Notes that no tokens follow."""
        ...

    def num_ready(self, num_frames: int) -> int:
        """Returns how many rows are ready from the beginning, when `num_frames` frames have been made."""
        ...

    def parts(self, start: int, end: int) -> RowParts:
        """Returns what the rows `[start, end)`, which must be ready, are made of."""
        ...
