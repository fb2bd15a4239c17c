"""Computes the positions of models with one axis: a token's position is its index, also for rows of media. It knows
nothing of media.
"""

from __future__ import annotations

import numpy as np

from modalities.family import Positions


def running_positions(num_tokens: int) -> Positions:
    """Returns int64 positions `(1, num_tokens)`; a medium's rows count like text."""
    return Positions(np.arange(num_tokens, dtype=np.int64)[None], 0)
