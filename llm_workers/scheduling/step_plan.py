"""Describes one engine step as plain values: what the scheduler decides, what the runner computes, and what that costs.

    plan_step() -> StepPlan;  runner.execute(plan) -> StepResult;  commit(plan, result) -> events

A `StepPlan` consists of `Decodes`, with one row for each sequence that decodes plainly, and of one `Chunk` for each
other sequence. What a chunk refers to stands here as well: the token counts and the grammar state (`Guide`) that shape
a draw. They belong to the sequence, and the runner only reads them. A plan can say what its `StepWork` is, and
`StepCosts` estimates from that how long a step takes.

This module knows nothing of how a step is chosen or computed, of how penalties change logits, and of how a grammar is
written (`llm_workers.sampling.grammar`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fabric.contracts import (
    CHANGE_RUN,
    COMMON_CHANGE,
    CONFIRMED,
    Memory,
    SamplingParams,
    SequenceId,
    SurpriseRun,
    TokenLogprobs,
    UnitKey,
    corrected,
    weighted_tokens,
)
from llm_workers.scheduling.prompt_reader import PromptReading, PromptRows

# ---------------------------------------------------------------- plan and result

NOT_FINITE_TOKEN = -1
"""This id is drawn where the logits are not finite."""
BROKEN_GRAMMAR_TOKEN = -2
"""This id is drawn where a grammar can't be followed any further."""
NO_BLOCK = -1
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """A `StepPlan` is all that the runner needs to know of one step."""

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
    reading: PromptReading | None = None
    """Says what the step hands back of the prompt's tokens in this chunk; None means nothing."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def drafts(self) -> npt.NDArray[np.int64]:
        """Has shape `(num_drafts,)`."""
        return self.token_ids[self.num_tokens - self.num_drafts :]

    def accepted(self, sampled: Sequence[int]) -> Sequence[int]:
        """Returns those of the `num_drafts + 1` tokens drawn one after the other that would have been drawn without
        drafts: all up to and including the first that differs from its guess."""
        for index, draft in enumerate(self.drafts.tolist()):
            if sampled[index] != draft:
                return sampled[: index + 1]
        return sampled


@dataclass(frozen=True, slots=True)
class Splice:
    """Says that rows `[row, row + length)` of a unit's feature go to `[at, at + length)` of the chunk."""

    at: int
    length: int
    unit: UnitKey
    row: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """Holds the drawn tokens per sequence that was sampled (one, and one more for each draft that was right), and their
    log-probabilities where they are wanted."""

    token_ids: dict[SequenceId, tuple[int, ...]]
    logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    not_finite: set[SequenceId] = field(default_factory=set)
    """Holds the sequences whose chunk, sampled or not, gave numbers that are not finite. Such a step must not be
    committed, because other sequences would find its blocks."""
    readings: dict[SequenceId, PromptRows] = field(default_factory=dict)
    """Holds, for each chunk with a `reading`, what that asks for."""


# ---------------------------------------------------------------- what a chunk refers to


class Guide(Protocol):
    """A `Guide` holds the state of one sequence in its grammar: it follows the tokens of the sequence and says which
    tokens may come next. The state follows from the ids alone, so that any worker can rebuild it."""

    def fork(self) -> Guide:
        """Returns an independent guide with the same state."""
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """Moves the state past these generated tokens."""
        ...

    def write_mask(self, words: npt.NDArray[np.int32]) -> bool:
        """Sets bit i (the lowest first) for each token i that may come next, and clears the others; `words` has shape
        `(ceil(vocab / 32),)`. Returns False when the grammar can't be followed any further, and then no bit is
        valid."""
        ...


class SeenTokens(NamedTuple):
    """Holds the arrays of `TokenCounts` at one moment."""

    ids: npt.NDArray[np.int64]
    num_generated: npt.NDArray[np.int64]


class TokenCounts:
    """Counts which tokens a sequence has seen and how often it generated each, which is what the penalties need. `ids`
    and `num_generated` belong together, int64 with shape `(num_distinct,)` each. A token of the prompt that was never
    generated counts 0.

    The counts are sparse, so that a long vocabulary costs nothing; adding a token costs the same however long the
    context is. They follow from the ids alone, so a migrated sequence counts as its first attempt did."""

    def __init__(self, prompt: npt.NDArray[np.int64], generated: npt.NDArray[np.int64]) -> None:
        distinct, counts = np.unique(generated, return_counts=True)
        prompt_only = np.setdiff1d(prompt, distinct)
        self._ids = GrowingArray(np.concatenate([prompt_only, distinct]))
        self._counts = GrowingArray(np.concatenate([np.zeros(len(prompt_only), dtype=np.int64), counts]))
        self._id_to_place = {token_id: place for place, token_id in enumerate(self._ids.view().tolist())}

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Returns a view of the distinct ids, in no particular order."""
        return self._ids.view()

    @property
    def num_generated(self) -> npt.NDArray[np.int64]:
        """Returns a view of the counts."""
        return self._counts.view()

    def add(self, token_id: int) -> None:
        """Counts one generated token."""
        place = self._id_to_place.get(token_id)
        if place is None:
            self._id_to_place[token_id] = len(self._ids)
            self._ids.append(token_id)
            self._counts.append(1)
        else:
            self._counts.replace(place, (self._counts[place] + 1,))

    def after(self, token_ids: Sequence[int]) -> SeenTokens:
        """Returns the ids and counts as they would be if these few tokens were generated too."""
        ids, counts = self.ids, self.num_generated.copy()
        fresh: dict[int, int] = {}
        for token_id in token_ids:
            place = self._id_to_place.get(token_id)
            if place is None:
                fresh[token_id] = fresh.get(token_id, 0) + 1
            else:
                counts[place] += 1
        if not fresh:
            return SeenTokens(ids, counts)
        more = np.array(list(fresh.items()), dtype=np.int64).T
        return SeenTokens(np.concatenate([ids, more[0]]), np.concatenate([counts, more[1]]))


class GrowingArray:
    """A `GrowingArray` is an int64 array with one axis that grows at its end. An append copies nothing of what is
    there, except when the buffer is full and doubles; reading a slice costs nothing."""

    def __init__(self, values: Sequence[int] | npt.NDArray[np.int64] = (), spare: int = 64) -> None:
        self._length = len(values)
        self._buffer = np.empty(self._length + spare, dtype=np.int64)
        self._buffer[: self._length] = values

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self._length
        return int(self._buffer[index])

    def append(self, value: int) -> None:
        if self._length == len(self._buffer):
            self._reserve(1)
        self._buffer[self._length] = value
        self._length += 1

    def extend(self, values: Sequence[int]) -> None:
        self._reserve(len(values))
        self._buffer[self._length : self._length + len(values)] = values
        self._length += len(values)

    def replace(self, start: int, values: Sequence[int]) -> None:
        """Overwrites the values at `[start, start + len(values))`."""
        assert start + len(values) <= self._length
        self._buffer[start : start + len(values)] = values

    def truncate(self, length: int) -> None:
        assert length <= self._length
        self._length = length

    def view(self, start: int = 0, end: int | None = None) -> npt.NDArray[np.int64]:
        """Returns the values at `[start, end)`, with shape `(end - start,)`, and not a copy: growth leaves the view
        unchanged, and `replace` shows in it."""
        end = self._length if end is None else end
        assert end <= self._length
        return self._buffer[start:end]

    def _reserve(self, count: int) -> None:
        if self._length + count > len(self._buffer):
            grown = np.empty(max(2 * len(self._buffer), self._length + count), dtype=np.int64)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown


# ---------------------------------------------------------------- what a step costs

HALF_LIFE_S = 5.0
"""Sets the time in which the weight of an observed step halves."""
MAX_WEIGHT = 40.0
"""Limits the number of steps that are remembered. One step then moves an estimate by a fortieth of its error."""
MAX_GAIN = 0.2
"""Limits the part of its error by which one step moves an estimate."""
_LEAST_SHARE = 1e-3
"""Sets the smallest cost that the fit gives to a kind of work, as a share of the time of the fastest step. A cost for
which nothing was measured can grow from there."""


class StepWork(NamedTuple):
    """Describes the work of a step."""

    num_decodes: int
    """Counts the sequences whose single known token is computed."""
    weighted_tokens: float
    """Counts all other tokens, weighted by their contexts (see `fabric.contracts.learned_cost`)."""

    @property
    def amounts(self) -> tuple[float, float, float]:
        return (1.0, float(self.num_decodes), self.weighted_tokens)


class StepCosts:
    """Estimates what a step costs: seconds = overhead + a cost per decoding sequence + a cost per weighted token of the
    rest. All three are 0 until a step was observed.

    The estimate is fitted to a few steps at boot, and every step corrects it. Old observations lose weight over time,
    so later steps soon outweigh what was learned while the machine was busy with other work. Steps with prompt tokens
    have a memory of their own, because there are few of them beside the steps that only decode. A single step counts as
    at most `CONFIRMED` times its prediction, so a pause moves an estimate by a tenth at most. A run of surprises, of
    steps of any kind, shows that the machine has changed: then all three costs change at once, by almost one factor, so
    a worker knows what its next prompt takes although it has only decoded since the change. A run among the steps with
    prompt tokens, while those between them were as predicted, changes what these steps show (ADR 69). The caller passes
    the time in."""

    def __init__(self) -> None:
        self._decodes, self._prompts = Memory(HALF_LIFE_S, MAX_WEIGHT), Memory(HALF_LIFE_S, MAX_WEIGHT)
        self._run, self._prompt_run = SurpriseRun(), SurpriseRun()
        self._costs: tuple[float, ...] = (0.0, 0.0, 0.0)

    def fit(self, steps: Sequence[tuple[StepWork, float]]) -> None:
        """Fits the costs to steps of different kinds and the seconds that each step took. Steps that took no time are
        ignored. A cost that would be negative is left out of the fit."""
        steps = [(work, taken_s) for work, taken_s in steps if taken_s > 0.0]
        if not steps:
            return
        amounts = np.array([work.amounts for work, _ in steps])
        seconds = np.array([taken_s for _, taken_s in steps])
        costs = np.zeros(3)
        kinds = list(range(3))
        while kinds:
            # The fit minimises relative errors, so a small step counts as much as a large step.
            found = np.linalg.lstsq(amounts[:, kinds] / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
            if found.min() >= 0.0:
                costs[kinds] = found
                break
            kinds.pop(int(found.argmin()))
        least = _LEAST_SHARE * seconds.min() / np.maximum(amounts.max(axis=0), 1.0)
        self._costs = tuple(np.maximum(costs, least).tolist())

    def observe(self, work: StepWork, seconds: float, now_s: float) -> None:
        """Takes the observation that a step took `seconds` and ended at `now_s`. A step in no time says nothing."""
        if not 0.0 < seconds < inf:
            return
        if not any(self._costs):
            self.fit([(work, seconds)])
        predicted_s = self.seconds(work)
        memory = self._prompts if work.weighted_tokens > 0.0 else self._decodes
        gain = min(memory.gain(now_s), MAX_GAIN)
        if factor := self._run.change(predicted_s, seconds):
            self._costs = corrected(self._costs, work.amounts, factor * predicted_s, 1.0, COMMON_CHANGE)
            self._decodes.restart(CHANGE_RUN)
            self._prompts.restart(CHANGE_RUN)
        elif work.weighted_tokens > 0.0 and (factor := self._prompt_run.change(predicted_s, seconds)):
            self._costs = corrected(self._costs, work.amounts, factor * predicted_s, 1.0)
            self._prompts.restart(CHANGE_RUN)
        elif abs(seconds - predicted_s) > 1e-12 * seconds:
            # A correction by nothing would only add rounding errors; a simulation has millions of such steps.
            limited_s = min(max(seconds, predicted_s / CONFIRMED), predicted_s * CONFIRMED)
            self._costs = corrected(self._costs, work.amounts, limited_s, gain)

    def seconds(self, work: StepWork) -> float:
        """Returns the time that a step with this work is expected to take."""
        return sum(cost * amount for cost, amount in zip(self._costs, work.amounts, strict=True))

    @property
    def overhead_s(self) -> float:
        return self._costs[0]

    @property
    def s_per_decode(self) -> float:
        return self._costs[1]

    @property
    def s_per_token(self) -> float:
        """Returns the seconds per weighted token."""
        return self._costs[2]
