"""Decides which rows of a step the last layer finishes.

Of most tokens of a prompt only the keys and values that the last layer computes are needed, so the operations after its
attention run for the other tokens alone. Two numbers of rows differ here: those that the caller *wants*, and those that
the layer *finishes*, which may be more (rows that round a step, or all rows if the layer can't end early). A caller
that needs every row names none, even if it draws from a few: it then selects these itself. `llm_workers.runner` does so
for side layers, because it checks every row before it selects. This module knows nothing of layers and requests.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from modalities.causal_lm.step_sizes import rounded_size


class LastRows:
    """Holds the rows of one step that the last layer finishes, and selects those that the caller wants."""

    def __init__(self, wanted: torch.Tensor | None, num_rows: int, *, is_padded: bool, can_end_early: bool) -> None:
        """Chooses the rows. `wanted` holds int64 row numbers, ascending; None means all. `num_rows` is the step's
        number of rows, padding included. `is_padded` says whether steps come in few sizes. `can_end_early` says whether
        the last layer takes `finished`."""
        self._wanted = wanted
        self.finished: torch.Tensor | None = None
        """Holds the rows of the step that the last layer finishes, the wanted ones first; None means that it finishes
        all."""
        if wanted is None or not can_end_early:
            return
        extra = rounded_size(len(wanted)) - len(wanted) if is_padded else 0
        if len(wanted) + extra < num_rows:
            self.finished = pad(wanted, (0, extra)) if extra else wanted

    def of(self, hidden: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Returns the wanted rows of `hidden`, the last layer's output, or all `num_tokens` rows if none were named."""
        if self._wanted is None:
            return hidden[:num_tokens]
        return hidden.index_select(0, self._wanted) if self.finished is None else hidden[: len(self._wanted)]
