"""One engine step as plain numbers: what the scheduler decides and the runner executes.

plan_step() -> StepPlan;  runner.execute(plan) -> StepResult;  commit(plan, result) -> events
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fabric.ids import SequenceId, UnitKey
from fabric.messages import SamplingParams, TokenLogprobs
from llm_workers.scheduling.guidance import Guide
from llm_workers.scheduling.token_counts import TokenCounts

NOT_FINITE_TOKEN = -1
"""Drawn where the logits are not finite."""
BROKEN_GRAMMAR_TOKEN = -2
"""Drawn where a grammar can't be followed any further."""


@dataclass(frozen=True, slots=True)
class Splice:
    """Rows `[row, row + length)` of a unit's feature go to `[at, at + length)` of the chunk."""

    at: int
    length: int
    unit: UnitKey
    row: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[start, start + num_tokens)` of one sequence, to be computed in this step."""

    sequence_id: SequenceId
    start: int
    num_tokens: int
    token_ids: npt.NDArray[np.int64]
    """`(num_tokens,)`; placeholder positions hold the placeholder's id."""
    positions: npt.NDArray[np.int64]
    """`(num_axes, num_tokens)`."""
    block_ids: npt.NDArray[np.int64]
    """The block table up to and including token `start + num_tokens - 1`."""
    splices: tuple[Splice, ...]
    sampling: SamplingParams | None
    """Given when the chunk reaches the sequence's last token, so its logits are sampled."""
    draw_index: int = 0
    """Index of the token that is drawn (0 is the first generated one)."""
    counts: TokenCounts | None = None
    """Of all tokens up to the drawn one, if `sampling` has penalties. The sequence's own: for reading."""
    barred: tuple[int, ...] = ()
    """Ids that would end the sequence before its `min_tokens`; never drawn."""
    guide: Guide | None = None
    """Stands behind the last token, if `sampling` has a grammar. The sequence's own: for reading."""
    side_names: frozenset[str] = frozenset()
    """Side tensors whose rows of this chunk are to be stored in its blocks."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Drawn token per sequence that was sampled, and its log-probabilities where they are wanted."""

    token_ids: dict[SequenceId, int]
    logprobs: dict[SequenceId, TokenLogprobs] = field(default_factory=dict)
