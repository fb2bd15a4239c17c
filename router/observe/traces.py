"""Records what happened to recent requests, for people to read: the plan with its explanation, and the events of every
part of the cluster.

Traces are kept in a bounded ring. They keep no request alive (they hold no media and no text). The module knows nothing
of HTTP.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from fabric.contracts import Clock, MemberId, RequestId, TraceEvent


class RequestTrace:
    """A `RequestTrace` is the record of one request. Times are seconds of the host's monotonic clock."""

    def __init__(self, request_id: RequestId, member_id: MemberId, clock: Clock, max_events: int) -> None:
        self.request_id = request_id
        self._member_id = member_id
        self._clock = clock
        self._max_events = max_events
        self._events: list[TraceEvent] = []
        self._num_dropped = 0
        self._facts: dict[str, object] = {}
        self._plans: list[object] = []

    def add(self, name: str, **detail: object) -> None:
        """Adds an event of the router itself, with the current time."""
        self.extend([TraceEvent(self._clock.now(), self._member_id, name, dict(detail))])

    def extend(self, events: Iterable[TraceEvent]) -> None:
        """Adds events that a result brought. Counts, but does not keep, events beyond `max_events`."""
        for event in events:
            if len(self._events) < self._max_events:
                self._events.append(event)
            else:
                self._num_dropped += 1

    def note(self, **facts: object) -> None:
        """Sets facts of the whole request: outcome, usage, label."""
        self._facts.update(facts)

    def add_plan(self, attempt: int, plan: object) -> None:
        self._plans.append({"attempt": attempt, "plan": plain(plan)})

    def to_json(self) -> dict[str, object]:
        """Returns the record as JSON values, with the events in order of time (parts on one host share a clock)."""
        events = sorted(self._events, key=lambda event: event.at_s)
        listed = [{"at_s": e.at_s, "member_id": e.member_id, "name": e.name, "detail": plain(e.detail)} for e in events]
        head: dict[str, object] = {
            "request_id": self.request_id,
            **{name: plain(fact) for name, fact in self._facts.items()},
        }
        return head | {"plans": list(self._plans), "events": listed, "num_events_dropped": self._num_dropped}


class TraceRing:
    """A `TraceRing` holds the most recent traces, by request id."""

    def __init__(self, max_traces: int) -> None:
        self._max_traces = max_traces
        self._traces: OrderedDict[RequestId, RequestTrace] = OrderedDict()

    def put(self, trace: RequestTrace) -> None:
        self._traces[trace.request_id] = trace
        while len(self._traces) > self._max_traces:
            self._traces.popitem(last=False)

    def get(self, request_id: str) -> RequestTrace | None:
        return self._traces.get(RequestId(request_id))

    def __len__(self) -> int:
        return len(self._traces)


def plain(value: object) -> object:
    """Converts a value to JSON values: dataclasses and named tuples become objects, and other types become their
    text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {str(key): plain(each) for key, each in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [plain(each) for each in value]
    return str(value)
