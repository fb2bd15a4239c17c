"""Keeps the open `generate` calls of a worker and applies the updates of the engine and the events of the receiver to
them.

`OpenCalls` maps each open attempt to its call. It sends the messages that concern one request to the router of that
request: token frames, and requests for features. Each `OpenCall` has an `OpenAttempt`, which keeps the state of one
attempt: its trace, the outcome of each choice, and the result built from them.

The calls live in the event loop. This module knows nothing of the engine's commands and of the feature channel: the
service reports each event to it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fabric.contracts import (
    AttemptId,
    ChoiceResult,
    Clock,
    ErrorInfo,
    FeatureNeeded,
    GenerateRequest,
    GenerateResult,
    MemberId,
    TokenFrame,
    TokenFrames,
    TraceEvent,
    UnitKey,
    WeftError,
)
from fabric.transport import Plane
from llm_workers.engine_interface import Update
from llm_workers.features import MissingUnit
from llm_workers.scheduling import (
    AdmittedSequences,
    FinishedSequence,
    SequenceOutputs,
    SequenceTimes,
    SequenceTokens,
    StepEvents,
)

MEMORY = 4096
"""Limits how many aborted attempts are remembered."""


class OpenCalls:
    """Maps each open attempt to its call. Events for an attempt that is not open are dropped."""

    def __init__(self, member_id: MemberId, plane: Plane, clock: Clock) -> None:
        self._member_id, self._plane, self._clock = member_id, plane, clock
        self._calls: dict[AttemptId, OpenCall] = {}
        self._refused: OrderedDict[AttemptId, None] = OrderedDict()

    def __contains__(self, attempt_id: object) -> bool:
        return attempt_id in self._calls

    def attempts(self) -> list[AttemptId]:
        return list(self._calls)

    def of_router(self, router_id: MemberId) -> list[AttemptId]:
        return [key for key, call in self._calls.items() if call.attempt.request.router_id == router_id]

    def router_of(self, attempt_id: AttemptId) -> MemberId | None:
        """Returns the router of an open attempt, or None if the attempt is not open."""
        call = self._calls.get(attempt_id)
        return None if call is None else call.attempt.request.router_id

    # ------------------------------------------------------------ begin and end

    def open(self, request: GenerateRequest) -> OpenCall:
        """Opens a call for the request. The caller must have checked that the attempt is not open."""
        call = OpenCall(OpenAttempt(self._member_id, request, self._clock.now()))
        self._calls[call.attempt.attempt_id] = call
        return call

    def close(self, attempt_id: AttemptId) -> None:
        del self._calls[attempt_id]

    def refuse(self, attempt_id: AttemptId) -> None:
        """Remembers that the attempt was aborted while it was not open: it has ended, or its call has not arrived
        yet."""
        self._refused[attempt_id] = None
        if len(self._refused) > MEMORY:
            self._refused.popitem(last=False)

    def is_refused(self, attempt_id: AttemptId) -> bool:
        return attempt_id in self._refused

    def is_ended(self, attempt_id: AttemptId) -> bool:
        """Returns whether the open call already has its result."""
        return self._calls[attempt_id].future.done()

    def fail(self, attempt_id: AttemptId, error: WeftError) -> None:
        if call := self._calls.get(attempt_id):
            call.end(error)

    # ------------------------------------------------------------ news of the receiver

    def unit_event(self, attempt_id: AttemptId, name: str, unit: UnitKey) -> None:
        """Records in the trace of the attempt that a unit reached the state `name`: `unit_announced`, `unit_landed` or
        `unit_reused`. A unit is one separately encoded part of a media item."""
        if call := self._calls.get(attempt_id):
            call.attempt.note_units(name, self._clock.now(), [unit])

    def needed(self, needs: Sequence[MissingUnit]) -> None:
        """Asks the routers for units, with one message per attempt and reason."""
        grouped: dict[tuple[AttemptId, str], list[UnitKey]] = defaultdict(list)
        for need in needs:
            grouped[need.attempt, need.reason].append(need.unit)
        for (attempt_id, reason), units in grouped.items():
            if call := self._calls.get(attempt_id):
                message = FeatureNeeded(self._member_id, *attempt_id, tuple(units), reason)
                self._plane.send(call.attempt.request.router_address, message)
                call.attempt.note_units("feature_needed", self._clock.now(), units, reason=reason)

    # ------------------------------------------------------------ news of the engine

    def apply(self, update: Update) -> None:
        """Applies one turn of the engine: extends traces, sends token frames and ends calls."""
        for attempt_id, admission in update.admitted:
            if call := self._calls.get(attempt_id):
                call.attempt.admitted(admission, update.at_s)
        if update.events is not None:
            self._apply_step(update.events, update.at_s)
        for sequence_id, times in update.aborted:
            if call := self._calls.get(sequence_id.attempt_id):
                call.attempt.aborted(sequence_id.choice, times, update.at_s)
        for failed in update.failed:
            self.fail(failed.attempt, failed.error)
        self._end_complete(update)

    def _end_complete(self, update: Update) -> None:
        """Ends the calls whose choices have all ended. Only calls that were admitted, or had a choice that ended,
        in this update are checked, because no other call can have become complete."""
        touched = [attempt_id for attempt_id, _ in update.admitted]
        touched += [sequence_id.attempt_id for sequence_id, _ in update.aborted]
        if update.events is not None:
            touched += [finished.sequence_id.attempt_id for finished in update.events.finished]
        for attempt_id in touched:
            call = self._calls.get(attempt_id)
            if call is not None and not call.attempt.open_choices:
                call.end()

    def _apply_step(self, events: StepEvents, at_s: float) -> None:
        ended_s, step_s = events.ended_s or at_s, events.ended_s - events.began_s
        for sequence_id, start, end in events.prefill:
            if call := self._calls.get(sequence_id.attempt_id):
                call.attempt.prefilled(sequence_id.choice, start, end, ended_s, step_s)
        for outputs in events.prompt_outputs:
            if call := self._calls.get(outputs.sequence_id.attempt_id):
                call.attempt.read(outputs, at_s)
        self._send_tokens(events, at_s)
        for sequence_id in events.preempted:
            if call := self._calls.get(sequence_id.attempt_id):
                call.attempt.note("preempted", at_s, choice=sequence_id.choice)
        for finished in events.finished:
            if call := self._calls.get(finished.sequence_id.attempt_id):
                call.attempt.finished(finished, at_s)

    def _send_tokens(self, events: StepEvents, at_s: float) -> None:
        """Sends the new tokens of a step, in one message per router."""
        frames: dict[str, list[TokenFrame]] = defaultdict(list)
        for tokens in events.tokens:
            if call := self._calls.get(tokens.sequence_id.attempt_id):
                call.attempt.generated(tokens, at_s)
                frame = TokenFrame(
                    *tokens.sequence_id, tokens.first_index, tokens.token_ids, tokens.finish_reason, tokens.logprobs
                )
                frames[call.attempt.request.router_address].append(frame)
        for address, sent in frames.items():
            self._plane.send(address, TokenFrames(self._member_id, tuple(sent)))


class OpenCall:
    """An `OpenCall` is an attempt and the future that its `generate` call waits for."""

    def __init__(self, attempt: OpenAttempt) -> None:
        self.attempt = attempt
        self.future: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()

    def end(self, error: WeftError | None = None) -> None:
        """Resolves the future with the result, or with `error` in it. Only the first call has an effect."""
        if not self.future.done():
            self.future.set_result(self.attempt.result(error))


# ---------------------------------------------------------------- one attempt

MAX_PREFILL_EVENTS = 128
"""Limits the prefill events of one trace. Beyond this number, the trace merges chunks that follow each other into one
event, so that it stays small."""


class OpenAttempt:
    """An `OpenAttempt` is one attempt of a request that this worker processes. It ends when every choice has a result,
    or with an error. It is pure: it sends nothing and waits for nothing."""

    def __init__(self, member_id: MemberId, request: GenerateRequest, received_at_s: float) -> None:
        self.request = request
        self.attempt_id = AttemptId(request.request_id, request.attempt)
        self._member_id = member_id
        self._received_at_s = received_at_s
        self._trace: list[TraceEvent] = []
        self._num_prefill_events = 0
        self._choices: dict[int, ChoiceResult] = {}
        emitted = [len(tokens) for tokens in request.emitted] or [0] * request.num_choices
        self._num_tokens = dict(enumerate(emitted))
        self._num_cached_tokens = 0
        self._times = _Times()
        self._outputs: SequenceOutputs | None = None
        self.note("received", received_at_s)

    # ------------------------------------------------------------ what happened

    def note(self, name: str, at_s: float, **detail: Any) -> None:
        """Adds an event to the trace."""
        self._trace.append(TraceEvent(at_s, self._member_id, name, detail))

    def note_units(self, name: str, at_s: float, units: Iterable[UnitKey], **detail: Any) -> None:
        self.note(name, at_s, units=[f"{unit.mm_hash}:{unit.unit}" for unit in units], **detail)

    def admitted(self, admission: AdmittedSequences, at_s: float) -> None:
        self._num_cached_tokens = admission.num_cached_tokens
        self.note_units("admitted", at_s, admission.missing_units, cached_tokens=admission.num_cached_tokens)
        for finished in admission.finished:
            self.finished(finished, at_s)

    def prefilled(self, choice: int, start: int, end: int, at_s: float, step_s: float = 0.0) -> None:
        """Records that a step of `step_s` seconds has computed the prompt tokens `[start, end)` of a choice. An event
        that covers several steps has the sum of their times."""
        self._num_prefill_events += 1
        if self._num_prefill_events > MAX_PREFILL_EVENTS:
            for index in range(len(self._trace) - 1, -1, -1):
                last = self._trace[index]
                if last.name == "prefill" and last.detail["choice"] == choice and last.detail["end"] == start:
                    merged = {"end": end, "steps_s": last.detail["steps_s"] + step_s}
                    self._trace[index] = TraceEvent(at_s, last.member_id, last.name, last.detail | merged)
                    return
        self.note("prefill", at_s, choice=choice, start=start, end=end, from_s=at_s - step_s, steps_s=step_s)

    def generated(self, tokens: SequenceTokens, at_s: float) -> None:
        """Records new tokens of a choice."""
        if not self._times.first_token_s and tokens.token_ids:
            self._times = replace(self._times, first_token_s=at_s - self._received_at_s)
            self.note("first_token", at_s, choice=tokens.sequence_id.choice)
        choice = tokens.sequence_id.choice
        self._num_tokens[choice] = max(self._num_tokens[choice], tokens.first_index + len(tokens.token_ids))

    def read(self, outputs: SequenceOutputs, at_s: float) -> None:
        """Records what the prompt gives besides tokens. If the request generates nothing, this stands for its first
        token."""
        self._outputs = outputs
        if not self.request.stop.max_tokens:
            self._times = replace(self._times, first_token_s=at_s - self._received_at_s)

    def finished(self, finished: FinishedSequence, at_s: float) -> None:
        """Records that a choice has ended. The first choice computes the prompt for all choices, so the number of
        cached tokens of the attempt is the number that the first choice found."""
        choice = finished.sequence_id.choice
        if choice == 0:
            self._num_cached_tokens = finished.num_cached_tokens
        self._take_times(choice, finished.times)
        self._choices[choice] = ChoiceResult(choice, finished.finish_reason, finished.num_tokens)
        self.note("finished", at_s, choice=choice, reason=finished.finish_reason)

    def aborted(self, choice: int, times: SequenceTimes, at_s: float) -> None:
        """Records that a choice was aborted."""
        self._take_times(choice, times)
        self._choices[choice] = ChoiceResult(choice, "abort", self._num_tokens[choice])
        self.note("aborted", at_s, choice=choice)

    def _take_times(self, choice: int, times: SequenceTimes) -> None:
        """Merges the times of a choice into the times of the attempt. The choice that starts first determines the queue
        time; the slowest choice determines the prefill time and the held time. Each stay at the doorstep becomes an
        event of the trace."""
        for from_s, until_s in times.held_spans:
            self.note("held", until_s, choice=choice, from_s=from_s)
        former = self._times
        self._times = replace(
            former,
            queue_s=min(former.queue_s, times.queue_s) if self._choices else times.queue_s,
            prefill_s=max(former.prefill_s, times.prefill_s),
            held_s=max(former.held_s, times.held_s),
        )

    # ------------------------------------------------------------ the end

    @property
    def open_choices(self) -> list[int]:
        return [choice for choice in self._num_tokens if choice not in self._choices]

    def result(self, error: WeftError | None = None) -> GenerateResult:
        """Returns the terminal event for the current state. The trace in it is sorted by time."""
        outputs = None if error is not None else self._outputs
        return GenerateResult(
            worker_id=self._member_id,
            choices=tuple(self._choices[choice] for choice in sorted(self._choices)),
            num_prompt_tokens=len(self.request.token_ids),
            num_cached_tokens=self._num_cached_tokens,
            queue_s=self._times.queue_s,
            prefill_s=self._times.prefill_s,
            held_s=self._times.held_s,
            first_token_s=self._times.first_token_s,
            trace=tuple(sorted(self._trace, key=lambda event: event.at_s)),
            error=None if error is None else ErrorInfo.of(error),
            embedding=b"" if outputs is None else outputs.embedding,
            prompt_logprobs=None if outputs is None else outputs.logprobs,
        )


@dataclass(frozen=True, slots=True)
class _Times:
    queue_s: float = 0.0
    prefill_s: float = 0.0
    held_s: float = 0.0
    first_token_s: float = 0.0
