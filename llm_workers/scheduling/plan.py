"""One engine step as plain numbers: what the scheduler decides and the runner executes.

plan_step() -> StepPlan;  runner.execute(plan) -> StepResult;  commit(plan, result) -> events
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fabric.flat_tokens import flat_tokens
from fabric.ids import SequenceId, UnitKey
from fabric.messages import SamplingParams, TokenLogprobs
from llm_workers.scheduling.guidance import Guide
from llm_workers.scheduling.token_counts import TokenCounts
from llm_workers.step_costs import StepWork

NOT_FINITE_TOKEN = -1
"""Drawn where the logits are not finite."""
BROKEN_GRAMMAR_TOKEN = -2
"""Drawn where a grammar can't be followed any further."""
NO_BLOCK = -1


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
    """Ids that would end the sequence before its `min_tokens`; the first `num_barred` draws never give them."""
    num_barred: int = 0
    guide: Guide | None = None
    """Stands behind the last token, if `sampling` has a grammar. The sequence's own: for reading."""
    side_names: frozenset[str] = frozenset()
    """Side tensors whose rows of this chunk are to be stored in its blocks."""
    num_drafts: int = 0
    """So many of the last tokens were not drawn but guessed. Logits are sampled at the token in front of them and at
    each of them; what comes behind the first wrong guess means nothing."""
    copied_from: int = NO_BLOCK
    """A block whose content is to be copied, before the step, into the block that `start` lies in."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def drafts(self) -> npt.NDArray[np.int64]:
        """`(num_drafts,)`."""
        return self.token_ids[self.num_tokens - self.num_drafts :]

    def accepted(self, drawn: SequenceOf[int]) -> SequenceOf[int]:
        """Of the `num_drafts + 1` tokens drawn one after the other, those that would have been drawn without drafts:
        up to and including the first that is not as it was guessed."""
        for index, draft in enumerate(self.drafts.tolist()):
            if drawn[index] != draft:
                return drawn[: index + 1]
        return drawn


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    def work(self, context_scale_tokens: float) -> StepWork:
        """What the step has to do; a chunk of one known token counts as a decode, its drafts as other tokens."""
        num_decodes, num_flat = 0, 0.0
        for chunk in self.chunks:
            is_decode = chunk.num_tokens - chunk.num_drafts == 1 and chunk.start > 0
            num_decodes += is_decode
            num_flat += flat_tokens(chunk.num_tokens - is_decode, chunk.start + is_decode, context_scale_tokens)
        return StepWork(num_decodes, num_flat)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Drawn tokens per sequence that was sampled (one, and one more for each draft that was right), and their
    log-probabilities where they are wanted."""

    token_ids: dict[SequenceId, tuple[int, ...]]
    logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
