"""Keeps the state of one open `generate` call: its trace, the outcome of each choice, and the result built from them.

This module is pure. It knows nothing of the engine or of the message plane and the feature channel: the service reports
each event to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from fabric.errors import ErrorInfo, WeftError
from fabric.ids import AttemptId, MemberId, UnitKey
from fabric.messages import ChoiceResult, GenerateRequest, GenerateResult, TraceEvent
from llm_workers.scheduling.events import AdmittedSequences, FinishedSequence, SequenceTimes, SequenceTokens

MAX_PREFILL_EVENTS = 128
"""Limits the prefill events of one trace. Beyond this number, the trace merges chunks that follow each other into one
event, so that it stays small."""


@dataclass(frozen=True, slots=True)
class _Times:
    queue_s: float = 0.0
    prefill_s: float = 0.0
    held_s: float = 0.0
    first_token_s: float = 0.0


class OpenAttempt:
    """An `OpenAttempt` is one attempt of a request that this worker processes. It ends when every choice has a result,
    or with an error."""

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

    def prefilled(self, choice: int, start: int, end: int, at_s: float) -> None:
        """Records that the prompt tokens `[start, end)` of a choice were computed."""
        self._num_prefill_events += 1
        if self._num_prefill_events > MAX_PREFILL_EVENTS:
            for index in range(len(self._trace) - 1, -1, -1):
                last = self._trace[index]
                if last.name == "prefill" and last.detail["choice"] == choice and last.detail["end"] == start:
                    self._trace[index] = TraceEvent(at_s, last.member_id, last.name, {**last.detail, "end": end})
                    return
        self.note("prefill", at_s, choice=choice, start=start, end=end)

    def generated(self, tokens: SequenceTokens, at_s: float) -> None:
        """Records new tokens of a choice."""
        if not self._times.first_token_s and tokens.token_ids:
            self._times = replace(self._times, first_token_s=at_s - self._received_at_s)
            self.note("first_token", at_s)
        choice = tokens.sequence_id.choice
        self._num_tokens[choice] = max(self._num_tokens[choice], tokens.first_index + len(tokens.token_ids))

    def finished(self, finished: FinishedSequence, at_s: float) -> None:
        """Records that a choice has ended. The first choice computes the prompt for all choices, so the number of
        cached tokens of the attempt is the number that the first choice found."""
        choice = finished.sequence_id.choice
        if choice == 0:
            self._num_cached_tokens = finished.num_cached_tokens
        self._take_times(finished.times)
        self._choices[choice] = ChoiceResult(choice, finished.finish_reason, finished.num_tokens)
        self.note("finished", at_s, choice=choice, reason=finished.finish_reason)

    def aborted(self, choice: int, times: SequenceTimes, at_s: float) -> None:
        """Records that a choice was aborted."""
        self._take_times(times)
        self._choices[choice] = ChoiceResult(choice, "abort", self._num_tokens[choice])
        self.note("aborted", at_s, choice=choice)

    def _take_times(self, times: SequenceTimes) -> None:
        """Merges the times of a choice into the times of the attempt. The choice that starts first determines the queue
        time; the slowest choice determines the prefill time and the held time."""
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
        )
