"""Positions of models with one axis: a token's index, whatever stands there. Knows no media."""

from __future__ import annotations

import numpy as np

from modalities.family import Positions


def running_positions(num_tokens: int) -> Positions:
    """int64 `(1, num_tokens)`; a medium's rows count like text."""
    return Positions(np.arange(num_tokens, dtype=np.int64)[None], 0)
