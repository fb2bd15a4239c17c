"""Explains the time of one request: `explain` computes from the record of a request what a person wants to know when it
was slow.

It brings the events of all hosts onto one axis (`host_clocks`), makes spans of them (`timeline`), compares what the
planner predicted of each stage with what the members measured (`worker_stages`, `item_stages`), and divides the time to
first token, and that of the whole request, into parts that add up to it (`first_token_parts`, `whole_json`).

All functions are pure. The parts of the time to first token use only differences of times of one clock, so they are
exact whatever the clocks of the hosts show; the timeline's spans of another host are as uncertain as the offset of that
host's clock, and say so. The module knows nothing of how events are recorded, of metrics or of HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fabric.contracts import EncodeResult, GenerateResult, MemberId, TraceEvent
from router.planning import RoutePlan

MODALITIES = ("video", "audio", "image")
"""Lists the modalities by the time that they take, the longest first. Others come after these."""
TEXT = "text"
WORKER_STAGES = ("queue", "prefill", "held", "first_token")
"""Names the stages that `worker_stages` compares."""
ITEM_STAGES = ("decode_wait", "decode", "ready", "encode")
"""Names the stages that `item_stages` compares of every item that was encoded."""


def modality_class(modalities: Iterable[str]) -> str:
    """Returns the modality class of a request with these media: video over audio over image over other modalities (in
    the order of the alphabet) over text."""
    there = set(modalities)
    known = (modality for modality in MODALITIES if modality in there)
    return next(known, min(there, default=TEXT))


class MemberAnswer(NamedTuple):
    """A `MemberAnswer` is what a member answered to one call."""

    attempt: int
    member_id: MemberId
    host: str
    """Names the machine of the member; it is empty if it is not known."""
    sent_at_s: float
    """This is the time on the router's clock at which the call was made."""
    received_at_s: float
    """This is the time on the router's clock at which the answer arrived."""
    result: GenerateResult | EncodeResult
    events: tuple[TraceEvent, ...]
    """Holds the events of the result, as far as the trace keeps them."""


# ------------------------------------------------------------ one axis


class HostClock(NamedTuple):
    """A `HostClock` brings times of one host onto the router's axis: `router_s = host_s + offset_s`, which is wrong by
    at most `uncertainty_s`."""

    offset_s: float
    uncertainty_s: float


SAME = HostClock(0.0, 0.0)


def host_clocks(
    answers: Iterable[MemberAnswer], own_host: str, attempt_to_first_token_s: Mapping[int, float]
) -> dict[str, HostClock]:
    """Returns the clock of each host that has answered. A member receives a call after the router has sent it, and the
    answer arrives after the member's last event, so both bound the offset; a worker's first token also happens before
    its frame arrives (`attempt_to_first_token_s` holds when it did). The offset is the middle of what all answers of a
    host leave. A host of the router's name has the router's own clock, unless the bounds contradict that."""
    host_to_bounds: dict[str, list[tuple[float, float]]] = {}
    for answer in answers:
        if not answer.events:
            continue
        low_s = answer.sent_at_s - min(event.at_s for event in answer.events)
        high_s = answer.received_at_s - max(event.at_s for event in answer.events)
        frame_s = attempt_to_first_token_s.get(answer.attempt)
        if frame_s is not None and isinstance(answer.result, GenerateResult):
            high_s = min([high_s, *(frame_s - event.at_s for event in answer.events if event.name == "first_token")])
        host_to_bounds.setdefault(answer.host, []).append((low_s, high_s))
    clocks = {}
    for host, bounds in host_to_bounds.items():
        low_s, high_s = max(low for low, _ in bounds), min(high for _, high in bounds)
        is_same = host == own_host != "" and low_s <= 0.0 <= high_s
        clocks[host] = SAME if is_same else HostClock((low_s + high_s) / 2, abs(high_s - low_s) / 2)
    return clocks


# ------------------------------------------------------------ the timeline


class TimeSpan(NamedTuple):
    """A `TimeSpan` is something that took time. Its times are seconds since the arrival of the request."""

    name: str
    member_id: MemberId
    begin_s: float
    end_s: float
    uncertainty_s: float
    """Says by how much both times may be shifted together, because they are of another host."""
    attempt: int | None
    detail: Mapping[str, object]


POINTS = frozenset(
    {"first_token", "preempted", "feature_needed", "encode_failed", "generate_failed", "worker_backed_up", "degraded"}
)
"""Lists the events that a timeline shows although they take no time."""


class _Axis(NamedTuple):
    """An `_Axis` makes spans of one member's times."""

    member_id: MemberId
    attempt: int | None
    clock: HostClock
    zero_s: float

    def span(self, name: str, begin_s: float, end_s: float, detail: Mapping[str, object]) -> TimeSpan:
        shift_s = self.clock.offset_s - self.zero_s
        begin_s, end_s = begin_s + shift_s, end_s + shift_s
        return TimeSpan(name, self.member_id, begin_s, end_s, self.clock.uncertainty_s, self.attempt, detail)

    def spans_of(self, events: Iterable[TraceEvent]) -> list[TimeSpan]:
        """Returns the events that took time, and those of `POINTS`."""
        spans = []
        for event in events:
            detail = {name: value for name, value in event.detail.items() if name not in ("from_s", "attempt")}
            if "from_s" in event.detail or event.name in POINTS:
                spans.append(self.span(event.name, began_s(event), event.at_s, detail))
        return spans


def timeline(
    own: Sequence[TraceEvent],
    answers: Iterable[MemberAnswer],
    clocks: Mapping[str, HostClock],
    hash_to_item: Mapping[str, int],
    zero_s: float,
) -> list[TimeSpan]:
    """Returns the spans of a request, in the order in which they began. `own` holds the router's events, and
    `hash_to_item` maps the `mm_hash` of a medium to its index."""
    spans: list[TimeSpan] = []
    for event in own:
        attempt = event.detail.get("attempt")
        axis = _Axis(event.member_id, attempt if isinstance(attempt, int) else None, SAME, zero_s)
        spans += axis.spans_of([event])
    for answer in answers:
        axis = _Axis(answer.member_id, answer.attempt, clocks.get(answer.host, SAME), zero_s)
        spans += _way(answer, axis) + axis.spans_of(answer.events)
        if isinstance(answer.result, GenerateResult):
            spans += _worker_waits(answer.events, axis, hash_to_item)
        else:
            spans += _encoder_waits(answer.events, axis)
    return sorted(spans, key=lambda span: (span.begin_s, span.end_s))


def _way(answer: MemberAnswer, axis: _Axis) -> list[TimeSpan]:
    """Returns the span from the router's call to the member's receipt of it."""
    sent_s = answer.sent_at_s - axis.clock.offset_s
    return [axis.span("way", sent_s, e.at_s, {}) for e in answer.events[:1] if e.name == "received"]


def _worker_waits(events: Sequence[TraceEvent], axis: _Axis, hash_to_item: Mapping[str, int]) -> list[TimeSpan]:
    """Returns the spans that a worker's events only bound: the queue, the transfer of each unit, and the generation."""
    spans: list[TimeSpan] = []
    first = _first(events)
    begun = [began_s(event) for event in events if event.name in ("prefill", "held")]
    if "received" in first and begun:
        spans.append(axis.span("queue", first["received"].at_s, min(begun), {}))
    unit_to_announced_s: dict[str, float] = {}
    for event in events:
        units = event.detail.get("units", ()) if event.name in ("unit_announced", "unit_landed") else ()
        for unit in units:
            mm_hash, _, number = str(unit).partition(":")
            if event.name == "unit_announced":
                unit_to_announced_s.setdefault(unit, event.at_s)
            elif unit in unit_to_announced_s:
                where = {"item": hash_to_item.get(mm_hash), "unit": int(number) if number.isdigit() else number}
                spans.append(axis.span("transfer", unit_to_announced_s.pop(unit), event.at_s, where))
    if "first_token" in first and "finished" in first:
        last_s = max(event.at_s for event in events if event.name == "finished")
        spans.append(axis.span("generate", first["first_token"].at_s, last_s, {}))
    return spans


def _encoder_waits(events: Sequence[TraceEvent], axis: _Axis) -> list[TimeSpan]:
    """Returns the spans that an encoder's events only bound: the wait of each item for a decoder and for the device."""
    spans: list[TimeSpan] = []
    first = _first(events)
    received = first.get("received")
    for event in events if received is not None else ():
        if event.name != "decoded":
            continue
        assert received is not None
        item = event.detail.get("item")
        spans.append(axis.span("decode_queue", received.at_s, max(received.at_s, began_s(event)), {"item": item}))
        passes = [e for e in events if e.name in ("prepared", "unit_encoded") and e.detail.get("item") == item]
        begun_s = min(map(began_s, passes), default=event.at_s)
        if begun_s > event.at_s:
            spans.append(axis.span("encode_queue", event.at_s, begun_s, {"item": item}))
    return spans


def _first(events: Iterable[TraceEvent]) -> dict[str, TraceEvent]:
    """Returns the first event of each name."""
    first: dict[str, TraceEvent] = {}
    for event in events:
        first.setdefault(event.name, event)
    return first


# ------------------------------------------------------------ predicted and actual


class StageTime(NamedTuple):
    """A `StageTime` compares what the plan predicted of a stage with what was measured, in seconds."""

    stage: str
    predicted_s: float
    actual_s: float
    member_id: MemberId
    item: int | None = None


def worker_stages(plan: RoutePlan, result: GenerateResult) -> list[StageTime]:
    """Compares the stages of the worker. `prefill` contains the step that gives the first token, because a step cannot
    be divided; `first_token` lasts from the receipt of the request to its first token, so the request's way to the
    worker and the token's way back are no part of it. There are none if the attempt
    failed, or if another worker answered than was planned."""
    if result.error is not None or result.worker_id != plan.worker_id:
        return []
    terms, worker = plan.explanation.winner, result.worker_id
    return [
        StageTime("queue", terms.queue_s, result.queue_s, worker),
        StageTime("prefill", terms.prefill_s + terms.first_token_s, result.prefill_s, worker),
        StageTime("held", terms.held_s, result.held_s, worker),
        StageTime("first_token", terms.ttft_s - terms.delivery_s, result.first_token_s, worker),
    ]


def item_stages(plan: RoutePlan, result: EncodeResult) -> list[StageTime]:
    """Compares the stages of the encoder, for each item that was encoded where the plan wanted it. A feature that the
    encoder had cached took none of these stages.

    `decode_wait`, `decode`, `device_prepare` and `encode` are the encoder's own measurements. `ready` lasts from the
    receipt until the item's first forward pass begins, and is known if the encoder's events say when that was."""
    index_to_terms = {terms.item_index: terms for terms in plan.explanation.winner.items}
    item_to_pass_s: dict[object, float] = {}
    for event in result.trace:
        if event.name == "unit_encoded":
            item_to_pass_s.setdefault(event.detail.get("item"), began_s(event))
    received_s = next((event.at_s for event in result.trace if event.name == "received"), None)
    stages: list[StageTime] = []
    for item in result.items:
        terms, times, index = index_to_terms.get(item.index), item.times, item.index
        if terms is None or terms.encoder_id != result.encoder_id or item.error is not None:
            continue
        if terms.is_cached or times.is_cache_hit:
            continue
        decode_s = times.decode_s + times.preprocess_s - times.device_prepare_s
        compared = [("decode_wait", terms.decode_wait_s, times.decode_wait_s), ("decode", terms.decode_s, decode_s)]
        if terms.device_prepare_s or times.device_prepare_s:
            compared.append(("device_prepare", terms.device_prepare_s, times.device_prepare_s))
        if received_s is not None and index in item_to_pass_s:
            ready_s = terms.landing_s - terms.transfer_s - terms.encode_s
            compared.append(("ready", ready_s, item_to_pass_s[index] - received_s))
        compared.append(("encode", terms.encode_s, times.encode_s))
        stages += [StageTime(*each, member_id=result.encoder_id, item=index) for each in compared]
    return stages


def landing_stages(plan: RoutePlan, spans: Iterable[TimeSpan], dispatched_s: float) -> list[StageTime]:
    """Compares, for each item, the transfer of its last unit and the landing of the whole item. The landing counts from
    the dispatch, at `dispatched_s` on the axis of the spans."""
    last: dict[object, TimeSpan] = {}
    for span in spans:
        item = span.detail.get("item")
        if span.name == "transfer" and span.attempt == plan.attempt_id.attempt:
            last[item] = max(span, last.get(item, span), key=lambda each: each.end_s)
    stages: list[StageTime] = []
    for terms in plan.explanation.winner.items:
        pull = last.get(terms.item_index)
        if pull is not None:
            actual_s, landed_s = pull.end_s - pull.begin_s, pull.end_s - dispatched_s
            stages.append(StageTime("transfer", terms.transfer_s, actual_s, plan.worker_id, terms.item_index))
            stages.append(StageTime("landing", terms.landing_s, landed_s, plan.worker_id, terms.item_index))
    return stages


# ------------------------------------------------------------ the time to first token


class FirstToken(NamedTuple):
    """A `FirstToken` says when a request's first token came, and of which attempt it was."""

    at_s: float
    attempt: int
    choice: int


def first_token_of(own: Iterable[TraceEvent]) -> FirstToken | None:
    for event in own:
        if event.name == "first_token":
            return FirstToken(event.at_s, int(event.detail.get("attempt", 0)), int(event.detail.get("choice", 0)))
    return None


def first_token_parts(
    own: Sequence[TraceEvent],
    answers: Iterable[MemberAnswer],
    plan: RoutePlan,
    first: FirstToken,
) -> dict[str, float]:
    """Divides the time to first token into parts that add up to it. `plan` is that of the attempt that gave the token.
    The parts before the dispatch are of the router's clock. If the worker has answered, its own measurements divide
    what follows, and `way` is what they leave: the way of the request to the worker and of the token back."""
    zero_s = own[0].at_s
    planned_s = plan.planned_at_s
    spent = {name: _spent_s(own, name, planned_s) for name in ("read", "prompted", "waited")}
    fetches = [event for event in own if event.name == "fetched"]
    if fetches:  # All of a request's media are fetched at once, and that is a part of the reading.
        fetched_s = max(event.at_s for event in fetches) - min(map(began_s, fetches))
        spent = {"fetched": fetched_s} | spent | {"read": spent["read"] - fetched_s}
    first_s = min([planned_s, *(began_s(event) for event in own if event.name == "planned")])
    waits_s = _spent_s([event for event in own if event.at_s > first_s], "waited", planned_s)
    parts = {**spent, "earlier_attempts": planned_s - first_s - waits_s}
    parts["router"] = planned_s - zero_s - sum(parts.values())
    dispatched_s = min(
        (e.at_s for e in own if e.name == "planned" and e.detail.get("attempt") == first.attempt), default=planned_s
    )
    parts["plan"] = dispatched_s - planned_s
    worker_s = first.at_s - dispatched_s
    reported = [
        answer
        for answer in answers
        if answer.attempt == first.attempt and isinstance(answer.result, GenerateResult) and answer.result.first_token_s
    ]
    if not reported:
        return parts | {"worker": worker_s}
    result, events = reported[0].result, reported[0].events
    assert isinstance(result, GenerateResult)
    token = _first(events).get("first_token")
    until_s, choice = (float("inf"), first.choice) if token is None else (token.at_s, token.detail.get("choice"))
    mine = [event for event in events if event.at_s <= until_s and event.detail.get("choice") == choice]
    inside = {
        "queue": result.queue_s,
        "prefill": sum(_seconds(event) for event in mine if event.name == "prefill"),
        "held": sum(_seconds(event) for event in mine if event.name == "held"),
    }
    inside["between_steps"] = result.first_token_s - sum(inside.values())
    return parts | {"way": worker_s - result.first_token_s} | inside


def _spent_s(events: Iterable[TraceEvent], name: str, until_s: float) -> float:
    """Returns the sum of the times of the router's events of one name that ended before `until_s`."""
    return sum(_seconds(event) for event in events if event.name == name and event.at_s <= until_s)


def began_s(event: TraceEvent) -> float:
    """Returns when an event began. An event that took no time began when it happened."""
    from_s = event.detail.get("from_s")
    return float(from_s) if isinstance(from_s, int | float) else event.at_s


def _seconds(event: TraceEvent) -> float:
    """Returns how long an event took. One that stands for several steps names the sum of their times."""
    steps_s = event.detail.get("steps_s")
    return float(steps_s) if isinstance(steps_s, int | float) else event.at_s - began_s(event)


# ------------------------------------------------------------ all of it


def explain(
    router_id: MemberId,
    own_host: str,
    events: Sequence[TraceEvent],
    answers: Sequence[MemberAnswer],
    plans: Sequence[RoutePlan],
    facts: Mapping[str, object],
) -> dict[str, object]:
    """Returns what the record of a request says of its time, as objects and lists: `clocks`, `events`, `timeline`,
    `stages`, `first_token` and `whole`. The first event is the arrival of the request."""
    laid = laid_out(router_id, own_host, events, answers, facts)
    first_token = first_token_json(laid.own, answers, plans, laid.first)
    return {
        "clocks": [{"host": host, **clock._asdict()} for host, clock in laid.clocks.items()],
        "events": _listed(events, answers, laid.clocks, laid.zero_s),
        "timeline": [span._asdict() for span in laid.spans],
        "stages": _stages(laid.own, answers, plans, laid.spans, laid.zero_s),
        "first_token": first_token,
        "whole": whole_json(laid, {} if first_token is None else first_token["parts"]),
    }


class LaidOut(NamedTuple):
    """A `LaidOut` holds the times of a request on one axis, and what they were computed from."""

    own: list[TraceEvent]
    """Holds the router's events."""
    zero_s: float
    """Is the time of the arrival on the router's clock."""
    first: FirstToken | None
    clocks: dict[str, HostClock]
    spans: list[TimeSpan]


def laid_out(
    router_id: MemberId,
    own_host: str,
    events: Sequence[TraceEvent],
    answers: Sequence[MemberAnswer],
    facts: Mapping[str, object],
) -> LaidOut:
    own = [event for event in events if event.member_id == router_id]
    zero_s = own[0].at_s if own else 0.0
    first = first_token_of(own)
    clocks = host_clocks(answers, own_host, {} if first is None else {first.attempt: first.at_s})
    media = facts.get("media") or ()
    assert isinstance(media, Sequence)
    hash_to_item = {item["mm_hash"]: index for index, item in reversed(list(enumerate(media)))}
    return LaidOut(own, zero_s, first, clocks, timeline(own, answers, clocks, hash_to_item, zero_s))


def _listed(
    events: Iterable[TraceEvent], answers: Iterable[MemberAnswer], clocks: Mapping[str, HostClock], zero_s: float
) -> list[dict[str, object]]:
    """Returns the events in order of time. `time_s` counts from the arrival of the request, and `at_s` is the time of
    the clock of the member's host."""
    member_to_clock = {answer.member_id: clocks.get(answer.host, SAME) for answer in answers}
    timed = [(event.at_s + member_to_clock.get(event.member_id, SAME).offset_s - zero_s, event) for event in events]
    timed.sort(key=lambda pair: pair[0])
    return [
        {"time_s": time_s, "at_s": e.at_s, "member_id": e.member_id, "name": e.name, "detail": e.detail}
        for time_s, e in timed
    ]


def _stages(
    own: Iterable[TraceEvent],
    answers: Sequence[MemberAnswer],
    plans: Iterable[RoutePlan],
    spans: Sequence[TimeSpan],
    zero_s: float,
) -> list[dict[str, object]]:
    """Returns the stages of all attempts. The stage `ttft` is that of the attempt that gave the first token; it lasts
    from the dispatch to the token's arrival at the router."""
    first = first_token_of(own)
    listed: list[dict[str, object]] = []
    for plan in plans:
        attempt = plan.attempt_id.attempt
        stages: list[StageTime] = []
        for answer in answers:
            if answer.attempt == attempt and isinstance(answer.result, EncodeResult):
                stages += item_stages(plan, answer.result)
        stages += landing_stages(plan, spans, plan.planned_at_s - zero_s)
        for answer in answers:
            if answer.attempt == attempt and isinstance(answer.result, GenerateResult):
                stages += worker_stages(plan, answer.result)
        if first is not None and first.attempt == attempt:
            actual_s = first.at_s - plan.planned_at_s
            stages.append(StageTime("ttft", plan.predicted_ttft_s, actual_s, plan.worker_id))
        listed += [{"attempt": attempt, **stage._asdict()} for stage in stages]
    return listed


def first_token_json(
    own: Sequence[TraceEvent], answers: Iterable[MemberAnswer], plans: Iterable[RoutePlan], first: FirstToken | None
) -> dict[str, Any] | None:
    """Returns when the first token came and what the time until then was spent on, or None if there was none."""
    plan = next((each for each in plans if first is not None and each.attempt_id.attempt == first.attempt), None)
    if first is None or plan is None:
        return None
    actual_s = first.at_s - plan.planned_at_s
    parts = first_token_parts(own, answers, plan, first)
    return {
        "at_s": first.at_s - own[0].at_s,
        "attempt": first.attempt,
        "predicted_s": plan.predicted_ttft_s,
        "actual_s": actual_s,
        "lower_bound_s": plan.lower_bound_s,
        "overlap_efficiency": plan.lower_bound_s / actual_s if actual_s > 0 else None,
        "parts": parts,
        "longest_part": max(parts, key=lambda name: parts[name]),
    }


def whole_json(laid: LaidOut, first_parts: Mapping[str, float]) -> dict[str, object] | None:
    """Returns the time of a whole request, and what it was spent on: the parts of the time to first token, the
    generation of the other tokens as workers measured it, and `returned`, which is what these leave of the time until
    the request ended. Returns None if it has not ended, or had no token."""
    ended_s = next((event.at_s for event in reversed(laid.own) if event.name in ("finished", "aborted")), None)
    if ended_s is None or not first_parts:
        return None
    total_s = ended_s - laid.zero_s
    left_s = total_s - sum(first_parts.values())
    # A worker's first token may take longer on its way than the last one; the difference is no part of any stage.
    generated_s = min(left_s, sum(span.end_s - span.begin_s for span in laid.spans if span.name == "generate"))
    return {"total_s": total_s, "parts": {**first_parts, "generate": generated_s, "returned": left_s - generated_s}}
