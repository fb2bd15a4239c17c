"""Defines what the scheduler reports to the engine: answers to `add`, events of a step, and needed units.

All of them are plain values. A sequence is "at its doorstep" while the feature of its next token has not landed, so
that it can compute nothing. This module knows nothing of how the values come about, and nothing of their readers.
"""

from __future__ import annotations

from typing import NamedTuple

from fabric.contracts import PromptLogprobs, SequenceId, TokenLogprobs, UnitKey

# ---------------------------------------------------------------- requests and steps


class AdmittedSequences(NamedTuple):
    """An `AdmittedSequences` is the scheduler's answer to `add`."""

    sequence_ids: tuple[SequenceId, ...]
    """Holds one id per choice that runs."""
    num_cached_tokens: int
    """Counts the prompt tokens of the first choice that were found in the prefix cache."""
    missing_units: tuple[UnitKey, ...]
    """Holds the units that some choice needs and that have not landed, in the order of their spans."""
    reason: str
    """Names the reason for those missing units that were not dispatched to an encoder for this attempt."""
    finished: tuple[FinishedSequence, ...] = ()
    """Holds the choices that an earlier attempt had already brought to their end; they do not run, and no event follows
    for them."""


class StepEvents(NamedTuple):
    """Holds what one committed step changed."""

    tokens: tuple[SequenceTokens, ...]
    finished: tuple[FinishedSequence, ...]
    prefill: tuple[PrefillProgress, ...]
    at_doorstep: tuple[SequenceId, ...]
    """Holds the sequences that arrived at their doorstep with this step."""
    preempted: tuple[SequenceId, ...]
    began_s: float = 0.0
    """This is the time on the scheduler's clock at which the step was planned."""
    ended_s: float = 0.0
    """This is the time at which the step was committed."""
    prompt_outputs: tuple[SequenceOutputs, ...] = ()
    """Holds what the prompts that this step has completed give besides tokens, where it is wanted: once for each
    attempt, from the choice that computed the prompt."""


class SequenceTokens(NamedTuple):
    """Holds the new tokens of one sequence. `first_index` counts generated tokens over all attempts."""

    sequence_id: SequenceId
    first_index: int
    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Holds one entry per token if the request wants log-probabilities, else none."""


class FinishedSequence(NamedTuple):
    """Describes a choice that has come to its end."""

    sequence_id: SequenceId
    finish_reason: str
    """Is `stop` or `length`."""
    num_tokens: int
    """Counts the tokens generated over all attempts, the end-of-sequence token included."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Counts the prompt tokens that were found in the prefix cache before the sequence's first step."""
    times: SequenceTimes


class SequenceOutputs(NamedTuple):
    """Holds what a prompt gives besides tokens (`PromptOutputs`)."""

    sequence_id: SequenceId
    embedding: bytes
    """Holds float32 values, little-endian, with shape `(hidden_size,)`; it is empty if no embedding is wanted."""
    logprobs: PromptLogprobs | None


class PrefillProgress(NamedTuple):
    """Says that the prompt tokens `[start, end)` were computed."""

    sequence_id: SequenceId
    start: int
    end: int


class SequenceTimes(NamedTuple):
    """Holds durations in seconds. `queue_s` lasts from the sequence's arrival to the first step with a chunk of it,
    without the time at its doorstep.
    `prefill_s` is the time of the steps that computed prompt tokens of it. `held_s` is the time at its doorstep.
    `first_token_s` lasts from its arrival to its first new token (0 if there was none). `total_s` lasts from its
    arrival until now, or until its end."""

    queue_s: float
    prefill_s: float
    held_s: float
    first_token_s: float
    total_s: float = 0.0
    held_spans: tuple[tuple[float, float], ...] = ()
    """Holds when each stay at the doorstep began and ended, on the clock of the scheduler, for the first stays only."""


# ---------------------------------------------------------------- features that are needed

NOT_COVERED = "not_covered"
PREEMPTED = "preempted"


class NeededUnit(NamedTuple):
    """Says that a sequence needs a unit again, and why."""

    sequence_id: SequenceId
    unit: UnitKey
    reason: str


class NextRead(NamedTuple):
    """Says where an attempt needs a unit next. Values are ordered: of two reads of an attempt, the smaller one comes
    first."""

    choice: int
    position: int
    """This is the index of the first token of the run of placeholders."""
