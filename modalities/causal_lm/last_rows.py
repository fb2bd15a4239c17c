"""Which rows of a step the last layer finishes. Of most tokens of a prompt nobody needs more than the keys and values
that it makes of them: what comes behind its attention is computed for the others alone."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from modalities.causal_lm.step_sizes import rounded_size


class LastRows:
    """Of one step."""

    def __init__(self, wanted: torch.Tensor | None, num_rows: int, *, is_padded: bool, can_end_early: bool) -> None:
        """`wanted`: int64, ascending; None for all. `num_rows`: of the step, padding included. `is_padded`: whether
        steps come in few sizes. `can_end_early`: whether the last layer takes `finished`."""
        self._wanted = wanted
        self.finished: torch.Tensor | None = None
        """What the last layer is told: rows of the step, those wanted in front; None if it finishes all."""
        if wanted is None or not can_end_early:
            return
        extra = rounded_size(len(wanted)) - len(wanted) if is_padded else 0
        if len(wanted) + extra < num_rows:
            self.finished = pad(wanted, (0, extra)) if extra else wanted

    def of(self, hidden: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """`hidden`: what came behind the last layer -> the wanted rows, or all `num_tokens`."""
        if self._wanted is None:
            return hidden[:num_tokens]
        return hidden.index_select(0, self._wanted) if self.finished is None else hidden[: len(self._wanted)]
