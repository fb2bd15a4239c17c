"""Keeps what the worker's contract needs of each sequence that vLLM computes: tokens, times, and reported numbers.

The book hears what a step computes (`plan`), that it has been computed (`commit`), and what came out of it (`take`),
and makes the events of the contract of that. Choices of one request share its prompt: the first one computes it, and
the others wait until it has done so, so that vLLM finds the prompt in its prefix cache.

This module is pure: it knows nothing of vLLM's classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fabric.contracts import (
    AttemptId,
    Clock,
    EngineFailed,
    EngineStats,
    GenerateRequest,
    InvalidRequest,
    PromptLogprobs,
    SequenceId,
    TokenLogprobs,
    WeftError,
    weighted_tokens,
)
from llm_workers.engine_interface import FailedAttempt
from llm_workers.scheduling import (
    FinishedSequence,
    PrefillProgress,
    Sequence,
    SequenceOutputs,
    SequenceTokens,
    StepEvents,
    StepWork,
)
from llm_workers.vllm_engine.feature_board import FeatureBoard


class PlannedChunk(NamedTuple):
    """Says that a step computes tokens `[start, start + num_tokens)` of a request, the last `num_drafts` of which are
    guesses."""

    name: str
    start: int
    num_tokens: int
    num_drafts: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class CoreOutput(NamedTuple):
    """Holds what a step gives one request."""

    name: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None
    """Is `stop` or `length` if vLLM has ended the request by its own rules."""
    failure: str = ""
    """Says why vLLM has given the request up, if it has."""


@dataclass(slots=True)
class BookedChoice:
    """Holds what is known of one sequence."""

    sequence: Sequence
    request: GenerateRequest
    name: str
    """Names the request of vLLM."""
    grammar: Any = None
    """Holds the grammar that vLLM follows, if there is one; its `is_broken` says that the sequence must end."""
    is_submitted: bool = False
    """Says that vLLM has the request."""
    is_in_prefill: bool = True
    """Says that tokens before the last known one are not computed."""

    @property
    def sequence_id(self) -> SequenceId:
        return self.sequence.sequence_id


@dataclass(slots=True)
class StepOutcome:
    """Collects what the steps of one turn have done."""

    tokens: list[SequenceTokens] = field(default_factory=list)
    finished: list[FinishedSequence] = field(default_factory=list)
    prefill: list[PrefillProgress] = field(default_factory=list)
    preempted: list[SequenceId] = field(default_factory=list)
    at_doorstep: list[SequenceId] = field(default_factory=list)
    prompt_outputs: list[SequenceOutputs] = field(default_factory=list)
    work: StepWork | None = None
    began_s: float = 0.0
    ended_s: float = 0.0

    def events(self) -> StepEvents | None:
        """Returns the events of the contract, or None if nothing has happened."""
        if self.work is None and not (self.tokens or self.finished or self.preempted or self.at_doorstep):
            return None
        return StepEvents(
            tuple(self.tokens),
            tuple(self.finished),
            tuple(self.prefill),
            tuple(self.at_doorstep),
            tuple(self.preempted),
            self.began_s,
            self.ended_s,
            tuple(self.prompt_outputs),
        )


class TakenOutputs(NamedTuple):
    """Says what follows from the outputs of a step."""

    ended: list[BookedChoice]
    """Holds the choices that have come to their end."""
    failed: list[FailedAttempt]
    ready_attempts: list[AttemptId]
    """Holds the attempts whose first choice has computed the prompt, so that the others can begin."""


class SequenceBook:
    """Belongs to the engine thread."""

    def __init__(self, board: FeatureBoard, clock: Clock, context_scale_tokens: float) -> None:
        self._board, self._clock, self._scale = board, clock, context_scale_tokens
        self._name_to_choice: dict[str, BookedChoice] = {}
        self._attempt_to_choices: dict[AttemptId, dict[int, BookedChoice]] = {}
        self._in_prefill: dict[str, BookedChoice] = {}
        self._at_doorstep: dict[SequenceId, BookedChoice] = {}
        self._planned_at_s: list[float] = []
        """Holds when each step in flight was planned, the oldest first."""
        self._stats = EngineStats()
        self.outcome = StepOutcome()

    # ------------------------------------------------------------ choices

    def add(self, choices: Iterable[BookedChoice]) -> None:
        """Takes the choices of one attempt."""
        for choice in choices:
            choice.sequence.counts = None  # vLLM counts what its penalties need.
            self._attempt_to_choices.setdefault(choice.sequence_id.attempt_id, {})[choice.sequence_id.choice] = choice

    def submitted(self, choice: BookedChoice) -> None:
        """Notes that vLLM has a choice."""
        choice.is_submitted = True
        self._name_to_choice[choice.name] = self._in_prefill[choice.name] = choice

    def leave(self, choice: BookedChoice) -> None:
        """Forgets a choice that has ended. A second call does nothing."""
        name, attempt = choice.sequence_id, choice.sequence_id.attempt_id
        choices = self._attempt_to_choices.get(attempt, {})
        if choices.pop(name.choice, None) is None:
            return
        if not choices:
            del self._attempt_to_choices[attempt]
        if choice.is_submitted:
            self._board.remove(name)
            del self._name_to_choice[choice.name]
            self._in_prefill.pop(choice.name, None)
            self._at_doorstep.pop(name, None)

    def choices_of(self, attempt: AttemptId) -> list[BookedChoice]:
        return list(self._attempt_to_choices.get(attempt, {}).values())

    def waiting_siblings(self, attempt: AttemptId) -> list[BookedChoice]:
        """Returns the choices of an attempt that wait for one that has the prompt, if they need not wait any more."""
        choices = self.choices_of(attempt)
        if any(choice.is_submitted and choice.is_in_prefill for choice in choices):
            return []
        return [choice for choice in choices if not choice.is_submitted]

    def get(self, name: str) -> BookedChoice | None:
        return self._name_to_choice.get(name)

    def __len__(self) -> int:
        return sum(map(len, self._attempt_to_choices.values()))

    # ------------------------------------------------------------ steps

    def plan(self, chunks: SequenceOf[PlannedChunk]) -> StepWork:
        """Notes that a step with these chunks is about to be computed, and which sequences it has found at their
        doorstep. Returns the step's work."""
        now_s = self._clock.now()
        self._note_doorsteps(now_s)
        if chunks:
            self._planned_at_s.append(now_s)
        for chunk in chunks:
            sequence = self._name_to_choice[chunk.name].sequence
            if not sequence.is_started:
                sequence.is_started = True
                sequence.stopwatch.begin(now_s)
                sequence.num_cached = min(chunk.start, sequence.num_prompt)
                self._stats.prefix_query_tokens += sequence.num_prompt
                self._stats.prefix_hit_tokens += sequence.num_cached
            sequence.num_computed = chunk.end - chunk.num_drafts
        return self._work(chunks)

    def commit(self, chunks: SequenceOf[PlannedChunk]) -> None:
        """Notes that a planned step was computed. Steps are committed in the order of their plans."""
        if not chunks:
            return
        outcome, now_s = self.outcome, self._clock.now()
        planned_at_s = self._planned_at_s.pop(0)
        outcome.began_s = outcome.began_s or planned_at_s
        outcome.ended_s, outcome.work = now_s, self._work(chunks)
        self._stats.steps += 1
        for chunk in chunks:
            choice = self._name_to_choice.get(chunk.name)
            if choice is None:  # It was aborted while the step was in flight.
                continue
            sequence = choice.sequence
            if chunk.start < sequence.num_prompt:
                end = min(chunk.end, sequence.num_prompt)
                outcome.prefill.append(PrefillProgress(choice.sequence_id, chunk.start, end))
                sequence.stopwatch.add_prefill(now_s - planned_at_s)
                self._stats.prompt_tokens_computed += end - chunk.start
            if choice.is_in_prefill:
                self._board.advance(choice.sequence_id, chunk.end)
                choice.is_in_prefill = chunk.end < sequence.num_tokens
                if not choice.is_in_prefill:
                    del self._in_prefill[chunk.name]
            self._stats.drafts_proposed += chunk.num_drafts

    def preempt(self, name: str) -> None:
        """Notes that a request has lost its blocks and begins again."""
        choice = self._name_to_choice[name]
        choice.is_in_prefill, choice.sequence.num_computed = True, 0
        self._in_prefill[name] = choice
        self._board.restart(choice.sequence_id)
        self._stats.num_preemptions += 1
        self.outcome.preempted.append(choice.sequence_id)

    def take(self, outputs: Iterable[CoreOutput]) -> TakenOutputs:
        """Takes what committed steps give. Outputs of requests that have left are ignored."""
        now_s, taken = self._clock.now(), TakenOutputs([], [], [])
        for output in outputs:
            choice = self._name_to_choice.get(output.name)
            if choice is None:
                continue
            sequence, name = choice.sequence, choice.sequence_id
            if error := _failure(choice, output):
                taken.failed.append(FailedAttempt(name.attempt_id, error))
                continue
            if output.prompt_logprobs is not None:
                self.outcome.prompt_outputs.append(SequenceOutputs(name, b"", output.prompt_logprobs))
            if output.token_ids:
                taken.ready_attempts.append(name.attempt_id)
            reason = output.finish_reason
            if output.token_ids and sequence.is_generating:
                reason = self._take_tokens(choice, output, now_s) or reason
            elif output.token_ids:
                reason = "length"  # vLLM draws one token even where none is wanted.
            if reason is not None:
                taken.ended.append(choice)
                self.outcome.finished.append(finished_sequence(sequence, reason, now_s))
        self.outcome.ended_s = self.outcome.ended_s or now_s
        return taken

    def _take_tokens(self, choice: BookedChoice, output: CoreOutput, now_s: float) -> str | None:
        sequence = choice.sequence
        first = sequence.num_generated
        count, reason = sequence.take(output.token_ids)
        sequence.stopwatch.first_token(now_s)
        reason = reason or output.finish_reason
        tokens = SequenceTokens(choice.sequence_id, first, output.token_ids[:count], reason, output.logprobs[:count])
        self.outcome.tokens.append(tokens)
        self._stats.tokens_generated += count
        self._stats.drafts_accepted += count - 1
        return reason

    def _note_doorsteps(self, now_s: float) -> None:
        """Starts and stops the stopwatches of those that have come to their doorstep, or have left it."""
        waiting = self._board.waiting
        for name in [name for name in self._at_doorstep if name not in waiting]:
            self._at_doorstep.pop(name).sequence.stopwatch.hold(False, now_s)
        for name in waiting:
            if name not in self._at_doorstep:
                choice = self._attempt_to_choices[name.attempt_id][name.choice]
                choice.sequence.stopwatch.hold(True, now_s)
                self._at_doorstep[name] = choice
                self.outcome.at_doorstep.append(name)

    def _work(self, chunks: Iterable[PlannedChunk]) -> StepWork:
        num_decodes, num_weighted = 0, 0.0
        for chunk in chunks:
            is_decode = chunk.num_tokens - chunk.num_drafts == 1 and chunk.start > 0
            num_decodes += is_decode
            num_weighted += weighted_tokens(chunk.num_tokens - is_decode, chunk.start + is_decode, self._scale)
        return StepWork(num_decodes, num_weighted)

    # ------------------------------------------------------------ numbers

    def stats(self, num_running: int, kv_blocks_used: int, kv_blocks_total: int) -> EngineStats:
        """Returns the numbers of this moment; vLLM knows those that are passed in."""
        stats = copy(self._stats)
        stats.num_running, stats.num_waiting = num_running, len(self) - num_running
        stats.num_at_doorstep = len(self._board.waiting)
        for choice in self._in_prefill.values():
            sequence = choice.sequence
            start = sequence.num_computed or sequence.num_covered
            end = self._board.limit(choice.sequence_id, start, sequence.num_tokens)
            stats.queued_tokens += end - start
            stats.queued_weighted_tokens += weighted_tokens(end - start, start, self._scale)
            stats.behind_tokens += sequence.num_tokens - end
            stats.behind_weighted_tokens += weighted_tokens(sequence.num_tokens - end, end, self._scale)
        stats.num_decoding = len(self._name_to_choice) - len(self._in_prefill)
        stats.kv_blocks_used, stats.kv_blocks_total = kv_blocks_used, kv_blocks_total
        stats.num_features = self._board.num_readable
        return stats


def finished_sequence(sequence: Sequence, reason: str, now_s: float) -> FinishedSequence:
    """Returns how a choice has ended."""
    return FinishedSequence(
        sequence.sequence_id,
        reason,
        sequence.num_generated,
        sequence.num_prompt,
        sequence.num_cached,
        sequence.stopwatch.times(now_s),
    )


def _failure(choice: BookedChoice, output: CoreOutput) -> WeftError | None:
    if choice.grammar is not None and choice.grammar.is_broken:
        return InvalidRequest("the grammar of the structured output became too complex to be followed")
    return EngineFailed(output.failure) if output.failure else None
