"""Turns the record of a request into spans, as tracing systems and Perfetto show them.

The members of a cluster already tell the router when they did what (`traces`), so a span needs no measurement of its
own, and costs nothing until a request has ended. `record_spans` makes a tree: the request, below it what the router
did and each call of a member, and below a call what that member did. Times of another host are as uncertain as its
clock; such a span says by how much. `chrome_trace` makes the form that Perfetto and `chrome://tracing` open, of one
request or of many.

All functions are pure. The module knows nothing of OpenTelemetry, of sampling or of HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Record = Mapping[str, Any]
"""A record as `RequestTrace.to_json` or `for_spans` returns it."""
Attributes = dict[str, str | int | float | bool]
ROUTER, ENCODER, WORKER = "router", "encoder", "worker"


@dataclass(slots=True)
class RecordSpan:
    """A `RecordSpan` is something that a part of the cluster did for a request."""

    name: str
    kind: str
    """Says what did it: `router`, `encoder` or `worker`."""
    member_id: str
    begin_s: float
    """Holds seconds since 1970, as `end_s` does."""
    end_s: float
    parent: RecordSpan | None = None
    attributes: Attributes = field(default_factory=dict)
    events: list[tuple[str, float, Attributes]] = field(default_factory=list)
    """Holds what happened at one moment: (name, seconds since 1970, attributes)."""
    error: str = ""


def record_spans(record: Record) -> list[RecordSpan]:
    """Returns the spans of a request that has ended, each after the one above it."""
    wall_s, router_id = float(record["received_at"]), str(record["router_id"])
    spans: Sequence[Record] = record.get("timeline") or ()
    own = [span for span in spans if span["member_id"] == router_id]
    root = RecordSpan("request", ROUTER, router_id, wall_s, wall_s, attributes=request_attributes(record))
    outcome = str(record.get("outcome", ""))
    root.error = "" if outcome in ("ok", "tokenized", "running") else outcome
    ended_s = [float(record.get("ended_s") or 0.0), *(float(span["end_s"]) for span in own)]
    ended_s += [float(event["time_s"]) for event in record.get("events") or () if event["member_id"] == router_id]
    root.end_s = wall_s + max(ended_s)
    made = [root]
    for span in own:
        _add(made, root, span, ROUTER, wall_s)
    workers = {str(each["plan"]["worker_id"]) for each in record.get("plans") or ()}
    calls: dict[tuple[str, Any], list[Record]] = {}
    for span in spans:
        if span["member_id"] != router_id:
            calls.setdefault((str(span["member_id"]), span["attempt"]), []).append(span)
    for (member_id, attempt), some in calls.items():
        kind = WORKER if member_id in workers else ENCODER
        call = RecordSpan(
            "encode" if kind == ENCODER else "generate",
            kind,
            member_id,
            wall_s + min(float(span["begin_s"]) for span in some),
            wall_s + max(float(span["end_s"]) for span in some),
            root,
            {"weft.attempt": int(attempt or 0)},
        )
        made.append(call)
        for span in some:
            _add(made, call, span, kind, wall_s)
    return made


def _add(made: list[RecordSpan], parent: RecordSpan, span: Record, kind: str, wall_s: float) -> None:
    """Adds a span of the timeline below `parent`, or an event to it if it took no time."""
    attributes = attributes_of(span.get("detail") or {})
    if span.get("uncertainty_s"):
        attributes["weft.uncertainty_s"] = float(span["uncertainty_s"])
    begin_s, end_s = wall_s + float(span["begin_s"]), wall_s + float(span["end_s"])
    if begin_s == end_s:
        parent.events.append((str(span["name"]), begin_s, attributes))
        return
    made.append(RecordSpan(str(span["name"]), kind, str(span["member_id"]), begin_s, end_s, parent, attributes))


def attributes_of(detail: Record, prefix: str = "weft.") -> Attributes:
    """Returns the details of an event as attributes. Lists and objects become their text."""
    return {
        f"{prefix}{name}": value if isinstance(value, str | int | float | bool) else str(value)
        for name, value in detail.items()
        if value is not None
    }


def request_attributes(record: Record) -> Attributes:
    """Returns what a whole request is, with the names of OpenTelemetry's conventions for generative models where they
    have one."""
    usage, timing, first = record.get("usage") or {}, record.get("timing") or {}, record.get("first_token") or {}
    found: dict[str, Any] = {
        "gen_ai.request.model": record.get("model"),
        "gen_ai.usage.input_tokens": record.get("num_prompt_tokens"),
        "gen_ai.usage.output_tokens": usage.get("completion_tokens"),
        "gen_ai.response.finish_reasons": ",".join(str(each) for each in record.get("finish_reasons") or ()),
        "weft.request_id": record.get("request_id"),
        "weft.modality": record.get("modality"),
        "weft.outcome": record.get("outcome"),
        "weft.tenant": record.get("tenant"),
        "weft.num_attempts": len(record.get("plans") or ()),
        "weft.first_token_s": timing.get("first_token_s"),
        "weft.predicted_ttft_s": first.get("predicted_s"),
        "weft.overlap_efficiency": first.get("overlap_efficiency"),
        "weft.longest_part": first.get("longest_part"),
    }
    return {name: value for name, value in found.items() if value not in (None, "")}


# ------------------------------------------------------------ for Perfetto


LANES = 64
"""A request has at most this many rows in one process; further spans share the last one."""


def chrome_trace(records: Iterable[Record]) -> dict[str, Any]:
    """Returns a trace in Chrome's format: a process for each member, and in it a row for each request, or several where
    its spans overlap without one containing the other. Times are microseconds since the first request."""
    listed = [record_spans(record) for record in records]
    zero_s = min((spans[0].begin_s for spans in listed), default=0.0)
    members = {span.member_id: span.kind for spans in listed for span in spans}
    order = {ROUTER: 0, ENCODER: 1, WORKER: 2}
    pids = {name: pid for pid, name in enumerate(sorted(members, key=lambda name: (order[members[name]], name)), 1)}
    events: list[dict[str, Any]] = []
    for name, pid in pids.items():
        events.append(_label("process_name", pid, 0, {"name": f"{members[name]} {name}"}))
        events.append(_label("process_sort_index", pid, 0, {"sort_index": pid}))
    for number, spans in enumerate(listed):
        request_id = str(spans[0].attributes.get("weft.request_id", number))
        pid_to_lanes: dict[int, list[list[RecordSpan]]] = {}
        for span in sorted(spans, key=lambda each: (each.begin_s, -each.end_s)):
            pid = pids[span.member_id]
            lanes = pid_to_lanes.setdefault(pid, [])
            tid = LANES * number + _lane_of(span, lanes) + 1
            events += _chrome_events(span, pid, tid, zero_s)
        for pid, lanes in pid_to_lanes.items():
            for lane in range(len(lanes)):
                events.append(_label("thread_name", pid, LANES * number + lane + 1, {"name": request_id}))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _label(name: str, pid: int, tid: int, args: Record) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _lane_of(span: RecordSpan, lanes: list[list[RecordSpan]]) -> int:
    """Returns the first lane whose open spans have all ended, or contain this span; the span is open there from now
    on. `lanes` holds the open spans of each."""
    for number, is_open in enumerate(lanes):
        while is_open and is_open[-1].end_s <= span.begin_s:
            is_open.pop()
        if not is_open or span.end_s <= is_open[-1].end_s or number == LANES - 1:
            is_open.append(span)
            return number
    lanes.append([span])
    return len(lanes) - 1


def _chrome_events(span: RecordSpan, pid: int, tid: int, zero_s: float) -> Iterable[dict[str, Any]]:
    """Returns a span as a complete event, and its events as instant ones of its row."""
    base = {"cat": span.kind, "pid": pid, "tid": tid}
    args = span.attributes | ({"error": span.error} if span.error else {})
    begin_us = _us(span.begin_s - zero_s)
    yield base | {"ph": "X", "name": span.name, "ts": begin_us, "dur": _us(span.end_s - span.begin_s), "args": args}
    for name, at_s, attributes in span.events:
        yield base | {"ph": "i", "s": "t", "name": name, "ts": _us(at_s - zero_s), "args": attributes}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
