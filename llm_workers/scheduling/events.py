"""What the scheduler tells the engine: answers to `add`, events of a step, counters. Values only."""

from __future__ import annotations

from typing import NamedTuple

from fabric.ids import SequenceId, UnitKey
from fabric.messages import TokenLogprobs

NOT_COVERED = "not_covered"
PREEMPTED = "preempted"


class SequenceTimes(NamedTuple):
    """Seconds. `queue_s`: from its arrival to the first step with a chunk of it; `prefill_s`: steps that computed
    prompt tokens of it; `held_s`: at its doorstep; `first_token_s`: from its arrival to its first new token (0 if none
    came); `total_s`: from its arrival until now, or its end."""

    queue_s: float
    prefill_s: float
    held_s: float
    first_token_s: float
    total_s: float = 0.0


class SequenceTokens(NamedTuple):
    """New tokens of one sequence. `first_index` counts generated tokens over all attempts."""

    sequence_id: SequenceId
    first_index: int
    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, if they are wanted."""


class FinishedSequence(NamedTuple):
    sequence_id: SequenceId
    finish_reason: str
    """`stop` or `length`."""
    num_tokens: int
    """Generated over all attempts, the end-of-sequence token included."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Of the prompt, found in the prefix cache before its first step."""
    times: SequenceTimes


class PrefillProgress(NamedTuple):
    """Prompt tokens `[start, end)` were computed."""

    sequence_id: SequenceId
    start: int
    end: int


class NextRead(NamedTuple):
    """Where a unit is needed next. Ordered: of two reads of an attempt, the smaller one comes first."""

    choice: int
    position: int
    """First token of the run of placeholders."""


class NeededUnit(NamedTuple):
    sequence_id: SequenceId
    unit: UnitKey
    reason: str


class Admission(NamedTuple):
    """Answer to `add`."""

    sequence_ids: tuple[SequenceId, ...]
    """One per choice that runs."""
    num_cached_tokens: int
    """Prompt tokens of the first choice found in the prefix cache."""
    missing_units: tuple[UnitKey, ...]
    """Needed by some choice and not landed, in span order."""
    reason: str
    """Why missing units that nobody dispatched are needed."""
    finished: tuple[FinishedSequence, ...] = ()
    """Choices that a former attempt had already brought to their end; they do not run and no event follows."""


class StepEvents(NamedTuple):
    tokens: tuple[SequenceTokens, ...]
    finished: tuple[FinishedSequence, ...]
    units_done: tuple[UnitKey, ...]
    """No live sequence needs them any more, landed or not: release slots, tickets and transfers."""
    prefill: tuple[PrefillProgress, ...]
    at_doorstep: tuple[SequenceId, ...]
    """Sequences that came to stand at their doorstep with this step."""
    preempted: tuple[SequenceId, ...]


class SchedulerStats(NamedTuple):
    """The fields of WorkerReport that the scheduler knows, by the same names."""

    num_running: int
    """Sequences that have begun; those at their doorstep included."""
    num_waiting: int
    num_at_doorstep: int
    queued_tokens: int
    num_decoding: int
    kv_blocks_used: int
    kv_blocks_total: int
    num_features: int
    steps: int
    tokens_generated: int
    prompt_tokens_computed: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    num_preemptions: int
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    queued_flat_tokens: float = 0.0
