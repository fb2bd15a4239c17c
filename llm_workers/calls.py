"""Keeps the open `generate` calls of a worker and applies the updates of the engine and the events of the receiver to
them.

It sends messages that concern one request to the router of that request: token frames, and requests for features. It
lives in the event loop. This module knows nothing of the engine's commands.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Sequence

from fabric.clock import Clock
from fabric.errors import WeftError
from fabric.ids import AttemptId, MemberId, UnitKey
from fabric.messages import FeatureNeeded, GenerateRequest, GenerateResult, TokenFrame, TokenFrames
from fabric.plane import Plane
from llm_workers.attempts import OpenAttempt
from llm_workers.features import MissingUnit
from llm_workers.scheduling.events import StepEvents
from llm_workers.updates import Update

MEMORY = 4096
"""Limits how many aborted attempts are remembered."""


class OpenCall:
    """An `OpenCall` is an attempt and the future that its `generate` call waits for."""

    def __init__(self, attempt: OpenAttempt) -> None:
        self.attempt = attempt
        self.future: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()

    def end(self, error: WeftError | None = None) -> None:
        """Resolves the future with the result, or with `error` in it. Only the first call has an effect."""
        if not self.future.done():
            self.future.set_result(self.attempt.result(error))


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

    def fail_all(self, error: WeftError) -> None:
        for call in self._calls.values():
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
        for sequence_id, start, end in events.prefill:
            if call := self._calls.get(sequence_id.attempt_id):
                call.attempt.prefilled(sequence_id.choice, start, end, at_s)
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
