"""Describes one engine step as plain numbers: what the scheduler decides and the runner executes.

    plan_step() -> StepPlan;  runner.execute(plan) -> StepResult;  commit(plan, result) -> events

This module knows nothing of how a step is chosen or computed.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fabric.ids import SequenceId, UnitKey
from fabric.messages import SamplingParams, TokenLogprobs
from fabric.weighted_tokens import weighted_tokens
from llm_workers.scheduling.guidance import Guide
from llm_workers.scheduling.token_counts import TokenCounts
from llm_workers.step_costs import StepWork

NOT_FINITE_TOKEN = -1
"""This id is drawn where the logits are not finite."""
BROKEN_GRAMMAR_TOKEN = -2
"""This id is drawn where a grammar can't be followed any further."""
NO_BLOCK = -1
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Splice:
    """Says that rows `[row, row + length)` of a unit's feature go to `[at, at + length)` of the chunk."""

    at: int
    length: int
    unit: UnitKey
    row: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A `Chunk` describes the tokens `[start, start + num_tokens)` of one sequence, which this step computes."""

    sequence_id: SequenceId
    start: int
    num_tokens: int
    token_ids: npt.NDArray[np.int64]
    """Has shape `(num_tokens,)`; placeholder positions hold the placeholder's id."""
    positions: npt.NDArray[np.int64]
    """Has shape `(num_axes, num_tokens)`."""
    block_ids: npt.NDArray[np.int64]
    """Holds the block table up to and including the block of token `start + num_tokens - 1`."""
    splices: tuple[Splice, ...]
    sampling: SamplingParams | None
    """Is set when the chunk reaches the sequence's last token, so that its logits are sampled; otherwise it is None."""
    draw_index: int = 0
    """Holds the index of the token that is drawn (0 is the first generated one)."""
    counts: TokenCounts | None = None
    """Counts all tokens up to the drawn one, if `sampling` has penalties. It is the sequence's own object, for reading
    only."""
    barred: tuple[int, ...] = ()
    """Holds the ids that would end the sequence before its `min_tokens`; the first `num_barred` draws never give
    them."""
    num_barred: int = 0
    guide: Guide | None = None
    """Holds the grammar's state after the last token, if `sampling` has a grammar. It is the sequence's own object, for
    reading only."""
    side_names: frozenset[str] = frozenset()
    """Names the side tensors whose rows of this chunk are to be stored in its blocks."""
    num_drafts: int = 0
    """This many of the last tokens were not drawn but guessed. Logits are sampled at the token before them and at each
    of them; the results after the first wrong guess have no meaning."""
    copied_from: int = NO_BLOCK
    """Names a block whose content is copied, before the step, into the block that `start` lies in; `NO_BLOCK` means
    none."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def drafts(self) -> npt.NDArray[np.int64]:
        """Has shape `(num_drafts,)`."""
        return self.token_ids[self.num_tokens - self.num_drafts :]

    def accepted(self, sampled: SequenceOf[int]) -> SequenceOf[int]:
        """Returns those of the `num_drafts + 1` tokens drawn one after the other that would have been drawn without
        drafts: all up to and including the first that differs from its guess."""
        for index, draft in enumerate(self.drafts.tolist()):
            if sampled[index] != draft:
                return sampled[: index + 1]
        return sampled


@dataclass(frozen=True, eq=False)
class Decodes:
    """`Decodes` is the part of a step that decodes plainly: one known token of each sequence and nothing else. A row
    says what a chunk of that sequence would say, without an object for each.

    Row i of every field belongs to one sequence. All sequences are sampled, and only `sampling` shapes the
    distribution: there are no penalties, no bias, no grammar, no barred ids, no log-probabilities and no side
    tensors."""

    sequence_ids: tuple[SequenceId, ...]
    sampling: tuple[SamplingParams, ...]
    token_ids: Ints
    """Holds the last known tokens, with shape `(n,)`."""
    starts: Ints
    """Holds the indexes of these tokens in their sequences, with shape `(n,)`."""
    positions: Ints
    """Has shape `(num_axes, n)`."""
    tables: Ints
    """Holds the block tables, padded with their own first block, with shape `(n, width)`."""
    num_blocks: Ints
    """Holds the number of blocks of each table, with shape `(n,)`."""
    draw_indexes: Ints
    """Holds the indexes of the tokens that are drawn, with shape `(n,)`."""

    def __len__(self) -> int:
        return len(self.sequence_ids)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Returns the same part of the step as one chunk for each sequence."""
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
    """Holds the chunks of all sequences that are not among `decodes`."""
    decodes: Decodes | None = None

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Returns all of the step as chunks, those of `decodes` first. They are made at the first call, because a step
        that succeeds needs none."""
        return self.others if self.decodes is None else (*self.decodes.chunks, *self.others)

    @property
    def num_sequences(self) -> int:
        return len(self.others) + self.num_decodes

    @property
    def num_decodes(self) -> int:
        """Counts the sequences among `decodes`."""
        return 0 if self.decodes is None else len(self.decodes)

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(chunk.num_tokens for chunk in self.others)

    def work(self, context_scale_tokens: float) -> StepWork:
        """Returns the work of the step; a chunk of one known token counts as a decode, and its drafts count as other
        tokens."""
        num_decodes, num_weighted = self.num_decodes, 0.0
        for chunk in self.others:
            is_decode = chunk.num_tokens - chunk.num_drafts == 1 and chunk.start > 0
            num_decodes += is_decode
            num_weighted += weighted_tokens(chunk.num_tokens - is_decode, chunk.start + is_decode, context_scale_tokens)
        return StepWork(num_decodes, num_weighted)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Holds the drawn tokens per sequence that was sampled (one, and one more for each draft that was right), and their
    log-probabilities where they are wanted."""

    token_ids: dict[SequenceId, tuple[int, ...]]
    logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    not_finite: set[SequenceId] = field(default_factory=set)
    """Holds the sequences whose chunk, sampled or not, gave numbers that are not finite. Such a step must not be
    committed, because other sequences would find its blocks."""
