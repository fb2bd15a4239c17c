"""Records what happened to recent requests, for people to read: the plans with their explanations, and the events of
every part of the cluster.

Traces are kept in a bounded ring, and each router keeps those of its own requests. A `TraceSearch` finds a request
whichever router is asked: it asks the other routers over the message plane. Traces keep no request alive (they hold no
media and no text). What a trace means, in times on one axis, is computed when it is read (`explained_request`). The
module knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import msgspec

from fabric.contracts import (
    Clock,
    EncodeResult,
    GenerateResult,
    Member,
    MemberId,
    PlaneMessage,
    RequestId,
    StageResult,
    TraceEvent,
    TraceQuestion,
    TraceReply,
)
from router.observe.explained_request import (
    MemberAnswer,
    explain,
    first_token_json,
    first_token_of,
    laid_out,
    modality_class,
)
from router.observe.span_context import SpanContext
from router.planning import PairScores, RoutePlan

_LOG = logging.getLogger(__name__)
Records = list[dict[str, Any]]
RUNNING = "running"
"""This is the outcome of a request that has not ended."""
MAX_WITH_PAIRS = 32
"""This many records keep the scores of pairs, of which each may take some hundred kilobytes."""
ALWAYS_KEPT = frozenset({"planned", "first_token", "finished", "aborted"})
"""Nothing can be said of a request's time without these events of the router, which are few. The encoders' events of a
request with many media would leave no room for them."""
EVENT_TO_STAGE = {
    "received": "reading",
    "read": "prompting",
    "prompted": "planning",
    "waiting": "waiting",
    "waited": "planning",
    "planned": "dispatched",
    "first_token": "generating",
    "generate_failed": "planning",
    "finished": "ended",
    "aborted": "ended",
}
"""Maps an event of the router to what a request does after it; other events change nothing of that. A request that is
dispatched has its media encoded and its prompt computed, until its first token."""


class RequestTrace:
    """A `RequestTrace` is the record of one request. Times are seconds of the monotonic clock of a member's host.
    `host` is the router's own, and `wall_s` is the time of the request's arrival in seconds since 1970."""

    def __init__(
        self,
        request_id: RequestId,
        member_id: MemberId,
        clock: Clock,
        max_events: int,
        host: str = "",
        wall_s: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.wall_s = wall_s
        self.span: SpanContext | None = None
        """Names the request's span in a tracing system, if one is used."""
        self.keeps_pairs = False
        """Says that the record wants the scores of all pairs with each plan (`add_plan`)."""
        self.on_end: Callable[[RequestTrace], None] = lambda _: None
        self._member_id = member_id
        self._clock = clock
        self._max_events = max_events
        self._host = host
        self._events: list[TraceEvent] = []
        self._num_dropped = 0
        self._facts: dict[str, object] = {}
        self._plans: list[RoutePlan] = []
        self._attempt_to_pairs: dict[int, PairScores] = {}
        self._answers: list[MemberAnswer] = []

    # ------------------------------------------------------------ what happened

    def add(self, name: str, **detail: object) -> None:
        """Adds an event of the router itself, with the current time. An event that took time has its beginning in
        `from_s`. The events of `ALWAYS_KEPT` are kept beyond `max_events` too."""
        event = TraceEvent(self._clock.now(), self._member_id, name, dict(detail))
        if name in ALWAYS_KEPT:
            self._events.append(event)
        else:
            self._extend([event])

    def add_answer(self, attempt: int, host: str, sent_at_s: float, result: GenerateResult | EncodeResult) -> None:
        """Adds what a member on `host` has answered to a call that the router made at `sent_at_s`: its events, and its
        own measurements, but not the outputs of the prompt, which may be large. It is called when the answer
        arrives."""
        if isinstance(result, GenerateResult) and (result.embedding or result.prompt_logprobs is not None):
            result = msgspec.structs.replace(result, embedding=b"", prompt_logprobs=None)
        member_id = result.worker_id if isinstance(result, GenerateResult) else result.encoder_id
        kept = self._extend(result.trace)
        self._answers.append(MemberAnswer(attempt, member_id, host, sent_at_s, self._clock.now(), result, kept))

    def add_stage(self, attempt: int, model_stage: str, result: StageResult) -> None:
        """Adds what a stage behind the thinker has answered: its chunks, its times and its own events."""
        self._extend(result.trace)
        self.add(
            "stage_ended",
            attempt=attempt,
            member=result.member_id,
            stage=model_stage,
            num_chunks_in=result.num_chunks_in,
            num_chunks_out=result.num_chunks_out,
            num_outputs=result.num_outputs,
            first_chunk_s=result.first_chunk_s,
            first_output_s=result.first_output_s,
            waited_s=result.waited_s,
            computed_s=result.computed_s,
        )

    def _extend(self, events: Sequence[TraceEvent]) -> tuple[TraceEvent, ...]:
        """Adds events and returns those that were kept. Events beyond `max_events` are counted, but not kept."""
        kept = tuple(events[: max(0, self._max_events - len(self._events))])
        self._events += kept
        self._num_dropped += len(events) - len(kept)
        return kept

    def note(self, **facts: object) -> None:
        """Sets facts of the whole request: outcome, usage, label."""
        self._facts.update(facts)

    def end(self, **facts: object) -> None:
        """Sets the last facts of the whole request, among them its outcome. Answers of members may still come."""
        self.note(**facts)
        self.on_end(self)

    def add_plan(self, plan: RoutePlan, pairs: PairScores | None = None) -> None:
        """Adds the plan of an attempt, and the scores of all pairs at the same moment if they were asked for."""
        self._plans.append(plan)
        if pairs is not None:
            self._attempt_to_pairs[plan.attempt_id.attempt] = pairs

    def drop_pairs(self) -> None:
        """Forgets the scores of pairs, which take most of the memory of a record that has them, and wants no more."""
        self.keeps_pairs = False
        self._attempt_to_pairs = {}

    # ------------------------------------------------------------ for people to read

    @property
    def modality(self) -> str:
        """Returns the modality class of the request; see `modality_class`."""
        media = self._facts.get("media") or ()
        assert isinstance(media, Sequence)
        return modality_class(item["modality"] for item in media)

    @property
    def stage(self) -> str:
        """Returns what the request does now, by the router's latest event: a value of `EVENT_TO_STAGE`."""
        own = (event.name for event in reversed(self._events) if event.member_id == self._member_id)
        return next((EVENT_TO_STAGE[name] for name in own if name in EVENT_TO_STAGE), "reading")

    def _first_token_s(self) -> float | None:
        """Returns the time from the beginning of the record to the first token, or None while there is none."""
        first = first_token_of(self._events)
        return None if first is None else first.at_s - self._events[0].at_s

    def _ended_after_s(self) -> float | None:
        """Returns the time from the beginning of the record to the router's last event, or None while the request
        runs."""
        if self._facts.get("outcome", RUNNING) == RUNNING or not self._events:
            return None
        return max(event.at_s for event in self._events if event.member_id == self._member_id) - self._events[0].at_s

    def summary(self) -> dict[str, object]:
        """Returns the few facts by which a list of requests shows this one."""
        facts = self._facts
        timing, usage = plain(facts.get("timing")) or {}, facts.get("usage") or {}
        assert isinstance(timing, Mapping)
        assert isinstance(usage, Mapping)
        return {
            "request_id": self.request_id,
            "received_at": self.wall_s,
            "modality": self.modality,
            "outcome": facts.get("outcome", RUNNING),
            "stage": self.stage,
            "first_token_s": timing.get("first_token_s") if timing else self._first_token_s(),
            "total_s": timing.get("total_s") if timing else self._ended_after_s(),
            "num_prompt_tokens": facts.get("num_prompt_tokens"),
            "num_completion_tokens": usage.get("completion_tokens"),
            "num_attempts": len(self._plans),
            "label": facts.get("label"),
            "router_id": self._member_id,
        }

    def public_json(self) -> dict[str, object]:
        """Returns the part of the record that a client without the rights of an operator may see."""
        shown = {name: plain(self._facts[name]) for name in PUBLIC_FACTS if name in self._facts}
        return {"request_id": self.request_id, "received_at": self.wall_s, "modality": self.modality} | shown

    def to_json(self) -> dict[str, object]:
        """Returns the whole record as JSON values: the facts, the plans with their explanations, the events in order of
        time, and what `explain` computes of them."""
        explained = explain(self._member_id, self._host, self._events, self._answers, self._plans, self._facts)
        head: dict[str, object] = {
            "request_id": self.request_id,
            "router_id": self._member_id,
            "received_at": self.wall_s,
            "modality": self.modality,
            "outcome": RUNNING,
            **({} if self.span is None else {"trace_id": self.span.trace_hex}),
            # The record may be read in a thread, while an answer still adds to it.
            **{name: plain(fact) for name, fact in dict(self._facts).items()},
        }
        plans = [self._plan_json(plan) for plan in self._plans]
        shown = plain(explained)
        assert isinstance(shown, dict)
        return head | {"plans": plans, "num_events_dropped": self._num_dropped} | shown

    def _plan_json(self, plan: RoutePlan) -> dict[str, object]:
        attempt = plan.attempt_id.attempt
        pairs = self._attempt_to_pairs.get(attempt)
        shown: dict[str, object] = {"attempt": attempt, "plan": plain(plan)}
        return shown if pairs is None else shown | {"pairs": plain(pairs.pairs), "num_pairs": pairs.num_pairs}

    def for_spans(self) -> dict[str, object]:
        """Returns the part of the record of which spans are made, which takes a fraction of the time of the whole."""
        facts = dict(self._facts)
        laid = laid_out(self._member_id, self._host, self._events, self._answers, facts)
        return {
            "request_id": self.request_id,
            "router_id": self._member_id,
            "received_at": self.wall_s,
            "modality": self.modality,
            "outcome": RUNNING,
            **{name: facts[name] for name in SPAN_FACTS if name in facts},
            "timing": plain(facts.get("timing")),
            "plans": [{"plan": {"worker_id": plan.worker_id}} for plan in self._plans],
            "ended_s": max((event.at_s - laid.zero_s for event in laid.own), default=0.0),
            "timeline": [span._asdict() for span in laid.spans],
            "first_token": first_token_json(laid.own, self._answers, self._plans, laid.first),
        }


SPAN_FACTS = ("outcome", "model", "num_prompt_tokens", "usage", "finish_reasons", "tenant")
"""Names the facts of a request that its span has."""
PUBLIC_FACTS = ("outcome", "finish_reasons", "timing", "usage", "media", "num_prompt_tokens", "degraded", "ignored")
"""Names the facts of a request that its own client may see, where the rest is for operators: they tell nothing of the
members of the cluster and of the requests of others."""


class RequestFilter(msgspec.Struct, frozen=True):
    """A `RequestFilter` says which requests a list shows. An empty `outcome` or `modality` means all."""

    limit: int = 50
    outcome: str = ""
    modality: str = ""

    def takes(self, summary: Mapping[str, object]) -> bool:
        is_outcome = self.outcome in ("", summary["outcome"])
        return is_outcome and self.modality in ("", summary["modality"])


class TraceRing:
    """A `TraceRing` holds the most recent traces, by request id, and passes each to `on_end` when its request ends. The
    newest `MAX_WITH_PAIRS` of those that keep scores of pairs still have them."""

    def __init__(self, max_traces: int, on_end: Callable[[RequestTrace], None] = lambda _: None) -> None:
        self.max_traces = max_traces
        self._on_end = on_end
        self._traces: OrderedDict[RequestId, RequestTrace] = OrderedDict()
        self._with_pairs: deque[RequestTrace] = deque()

    def put(self, trace: RequestTrace) -> None:
        trace.on_end = self._on_end
        self._traces[trace.request_id] = trace
        while len(self._traces) > self.max_traces:
            self._traces.popitem(last=False)
        if trace.keeps_pairs:
            self._with_pairs.append(trace)
            if len(self._with_pairs) > MAX_WITH_PAIRS:
                self._with_pairs.popleft().drop_pairs()

    def get(self, request_id: str) -> RequestTrace | None:
        return self._traces.get(RequestId(request_id))

    def latest(self, wanted: RequestFilter) -> list[dict[str, object]]:
        """Returns the summaries of the requests that the filter takes, the newest first."""
        summaries = (trace.summary() for trace in reversed(self._traces.values()))
        return list(itertools.islice(filter(wanted.takes, summaries), wanted.limit))

    def __len__(self) -> int:
        return len(self._traces)


# ------------------------------------------------------------ the traces of all routers

ANSWER_LIMIT_S = 1.0
"""Another router gets this much time to answer; it looks only into its memory."""


class Found(NamedTuple):
    """Holds what the routers have answered, as JSON values, and which routers have not answered."""

    records: Records
    asked: tuple[MemberId, ...]
    """Holds the other routers that were asked."""
    silent: tuple[MemberId, ...]


class TraceSearch:
    """A `TraceSearch` finds requests in the ring of its own router and in those of the others, which it asks over the
    message plane. It lives in the event loop. A router that does not answer in time delays the search, but does not
    make it fail."""

    def __init__(
        self,
        router_id: MemberId,
        address: str,
        ring: TraceRing,
        send: Callable[[str, PlaneMessage], bool],
        limit_s: float = ANSWER_LIMIT_S,
    ) -> None:
        self._router_id = router_id
        self._address = address
        self._ring = ring
        self._send = send
        self._limit_s = limit_s
        self._router_to_address: dict[MemberId, str] = {}
        self._numbers = itertools.count(1)
        self._waiting: dict[tuple[MemberId, int], asyncio.Future[Records]] = {}
        """Holds the answers that have not come. One that is cancelled will not come: its router has left or can't be
        reached."""

    def update_members(self, members: Iterable[Member]) -> set[str]:
        """Takes the directory's current list of members. Questions to a router that has left end without an answer.
        Returns the addresses of the routers that have left."""
        others = (each for each in members if each.kind == "router" and each.member_id != self._router_id)
        before, self._router_to_address = self._router_to_address, {each.member_id: each.address for each in others}
        for (router_id, _), answer in self._waiting.items():
            if router_id not in self._router_to_address:
                answer.cancel()
        return set(before.values()) - set(self._router_to_address.values())

    def handle(self, message: TraceQuestion | TraceReply) -> None:
        """Answers a question of another router, or takes an answer. An answer that comes too late is dropped."""
        if isinstance(message, TraceReply):
            answer = self._waiting.get((message.router_id, message.number))
            if answer is not None and not answer.done():
                self._take(answer, message)
            return
        if message.request_id:
            trace = self._ring.get(message.request_id)
            records = [] if trace is None else [trace.to_json()]
        else:
            records = self._ring.latest(RequestFilter(message.limit, message.outcome, message.modality))
        reply = TraceReply(self._router_id, message.number, msgspec.json.encode(records))
        self._send(message.address, reply)

    def _take(self, answer: asyncio.Future[Records], reply: TraceReply) -> None:
        try:
            answer.set_result(msgspec.json.decode(reply.records, type=Records))
        except msgspec.MsgspecError as error:
            _LOG.warning("the reply of %s about requests can't be read: %s", reply.router_id, error)
            answer.cancel()

    async def find(self, request_id: str) -> Found:
        """Returns the record of a request, wherever it ran. Other routers are asked only if this one has no record."""
        own = self._ring.get(request_id)
        if own is not None:
            return Found([own.to_json()], (), ())
        return await self._ask(TraceQuestion(self._router_id, self._address, 0, RequestId(request_id)), True)

    async def latest(self, wanted: RequestFilter) -> Found:
        """Returns the summaries of the requests of all routers that the filter takes, the newest first."""
        question = TraceQuestion(
            self._router_id, self._address, 0, RequestId(""), wanted.limit, wanted.outcome, wanted.modality
        )
        found = await self._ask(question, False)
        records = [*self._ring.latest(wanted), *found.records]
        records.sort(key=_wall_s, reverse=True)
        return found._replace(records=records[: wanted.limit])

    async def _ask(self, question: TraceQuestion, is_one_enough: bool) -> Found:
        """Asks all other routers, and waits until all have answered or the time is over. With `is_one_enough`, it stops
        at the first answer that has a record."""
        number = next(self._numbers)
        question = msgspec.structs.replace(question, number=number)
        answers: dict[MemberId, asyncio.Future[Records]] = {}
        for router_id, address in self._router_to_address.items():
            answers[router_id] = self._waiting[router_id, number] = asyncio.get_running_loop().create_future()
            if not self._send(address, question):
                answers[router_id].cancel()
        try:
            records = await self._gather(set(answers.values()), is_one_enough)
        finally:
            for router_id, answer in answers.items():
                del self._waiting[router_id, number]
                answer.cancel()
        silent = tuple(router_id for router_id, answer in answers.items() if answer.cancelled())
        return Found(records, tuple(answers), silent)

    async def _gather(self, open_answers: set[asyncio.Future[Records]], is_one_enough: bool) -> Records:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._limit_s
        records: Records = []
        while open_answers and not (records and is_one_enough):
            left_s = max(0.0, deadline_s - loop.time())
            done, open_answers = await asyncio.wait(open_answers, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for answer in done:
                if not answer.cancelled():
                    records += answer.result()
        return records


def _wall_s(summary: Mapping[str, object]) -> float:
    received_at = summary.get("received_at")
    return received_at if isinstance(received_at, float) else 0.0


# ------------------------------------------------------------ JSON values


def plain(value: object) -> object:
    """Converts a value to JSON values: structs, dataclasses and named tuples become objects, numbers of numpy become
    plain ones, and other types become their text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {str(key): plain(each) for key, each in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [plain(each) for each in value]
    return str(value)
