"""One engine step as plain numbers: what the scheduler decides and the runner executes.

plan_step() -> StepPlan;  runner.execute(plan) -> StepResult;  commit(plan, result) -> events
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cached_property

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
Ints = npt.NDArray[np.int64]


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


@dataclass(frozen=True, eq=False)
class Decodes:
    """The part of a step that decodes plainly: one known token of each sequence, and nothing beside it. A row says what
    a chunk of that sequence would say, without an object for each.

    Row i of every field is one sequence. All are sampled, with no more than `sampling` says of the shape of the
    distribution: no penalties, no bias, no grammar, no barred ids, no log-probabilities, no side tensors."""

    sequence_ids: tuple[SequenceId, ...]
    sampling: tuple[SamplingParams, ...]
    token_ids: Ints
    """`(n,)`, of the last known tokens."""
    starts: Ints
    """`(n,)`, of their places."""
    positions: Ints
    """`(num_axes, n)`."""
    tables: Ints
    """`(n, width)`: block tables, padded with their own first block."""
    num_blocks: Ints
    """`(n,)`, of each table."""
    draw_indexes: Ints
    """`(n,)`, of the tokens that are drawn."""

    def __len__(self) -> int:
        return len(self.sequence_ids)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The same, a chunk for each."""
        return tuple(
            Chunk(
                sequence_id=sequence_id,
                start=int(self.starts[row]),
                num_tokens=1,
                token_ids=self.token_ids[row : row + 1],
                positions=self.positions[:, row : row + 1],
                block_ids=self.tables[row, : self.num_blocks[row]],
                splices=(),
                sampling=self.sampling[row],
                draw_index=int(self.draw_indexes[row]),
            )
            for row, sequence_id in enumerate(self.sequence_ids)
        )


@dataclass(frozen=True, eq=False)
class StepPlan:
    step: int
    others: tuple[Chunk, ...]
    """Chunks of all sequences that are not among `decodes`."""
    decodes: Decodes | None = None

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """All of the step as chunks, those of `decodes` first. Made at the first call: a step that goes well needs
        none."""
        return self.others if self.decodes is None else (*self.decodes.chunks, *self.others)

    @property
    def num_sequences(self) -> int:
        return len(self.others) + self.num_decodes

    @property
    def num_decodes(self) -> int:
        """Sequences among `decodes`."""
        return 0 if self.decodes is None else len(self.decodes)

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(chunk.num_tokens for chunk in self.others)

    def work(self, context_scale_tokens: float) -> StepWork:
        """What the step has to do; a chunk of one known token counts as a decode, its drafts as other tokens."""
        num_decodes, num_flat = self.num_decodes, 0.0
        for chunk in self.others:
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
    not_finite: set[SequenceId] = field(default_factory=set)
    """Sequences whose chunk, drawn from or not, gave numbers that are not finite. Such a step must not be committed:
    its blocks would be found by others."""
