"""Tests the sampling of requests, the spans of their records, and the export of these."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from router.observe import SpanContext, SpanExport, TracingSettings, beside, chrome_trace, read_traceparent
from router.observe.record_spans import RecordSpan, record_spans
from router.observe.span_context import Sampler
from router.observe.span_export import MAX_RESOURCES, MAX_WAITING, OtelSpans

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{SPAN}-01"


class TestTheContext:
    def test_a_header_is_read_and_written(self) -> None:
        found = read_traceparent(HEADER)
        assert found == SpanContext(int(TRACE, 16), int(SPAN, 16), True)
        assert found.header() == HEADER
        assert read_traceparent(f" {HEADER[:-1]}0 ") == SpanContext(int(TRACE, 16), int(SPAN, 16), False)

    @pytest.mark.parametrize(
        "header",
        [
            None,
            "",
            "00",
            HEADER.upper(),
            f"ff-{TRACE}-{SPAN}-01",
            f"00-{'0' * 32}-{SPAN}-01",
            f"00-{TRACE}-{'0' * 16}-01",
            f"{HEADER}-more",
            f"00-{TRACE[1:]}-{SPAN}-01",
            f"00-{TRACE}-{SPAN}-0x",
            "0" * 10_000,
        ],
    )
    def test_an_invalid_header_counts_as_none(self, header: str | None) -> None:
        assert read_traceparent(header) is None

    def test_a_later_version_may_have_more_parts(self) -> None:
        found = read_traceparent(f"01-{TRACE}-{SPAN}-01-and-more")
        assert found is not None
        assert found.trace_hex == TRACE

    @given(st.text())
    def test_any_text_is_read_without_an_error(self, text: str) -> None:
        found = read_traceparent(text)
        assert found is None or read_traceparent(found.header()) == found

    def test_the_requests_of_one_exchange_are_beside_each_other(self) -> None:
        span = SpanContext(1, 2, True, 3)
        other = beside(span)
        assert other is not None
        assert (other.trace_id, other.is_sampled, other.parent_id) == (1, True, 3)
        assert other.span_id != 2
        assert beside(None) is None


class TestTheSampler:
    def sampler(self, ratio: float, now_s: Sequence[float] = (0.0,), **more: Any) -> Sampler:
        times = itertools.chain(now_s, itertools.repeat(now_s[-1]))
        return Sampler(TracingSettings("http://c", ratio, **{"max_requests_per_s": 1e9, **more}), lambda: next(times))

    @pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
    def test_a_share_of_the_requests_is_sampled(self, ratio: float) -> None:
        sampler = self.sampler(ratio)
        found = [sampler.begin(None) for _ in range(4000)]
        assert sum(each.is_sampled for each in found) / 4000 == pytest.approx(ratio, abs=0.03)
        assert len({each.trace_id for each in found}) == len({each.span_id for each in found}) == 4000

    @pytest.mark.parametrize("is_sampled", [True, False])
    def test_a_clients_decision_holds_and_its_span_is_the_parent(self, is_sampled: bool) -> None:
        client = SpanContext(7, 8, is_sampled)
        found = self.sampler(0.0 if is_sampled else 1.0).begin(client)
        assert (found.trace_id, found.parent_id, found.is_sampled) == (7, 8, is_sampled)
        assert found.span_id != 8

    def test_the_ratio_decides_where_clients_are_not_followed(self) -> None:
        found = self.sampler(0.0, follows_clients=False).begin(SpanContext(7, 8, True))
        assert (found.trace_id, found.parent_id, found.is_sampled) == (7, 8, False)

    def test_all_routers_take_the_same_traces(self) -> None:
        ids = [SpanContext(trace_id, 1, False) for trace_id in range(0, 2**64, 2**55 + 1)]
        one, other = (self.sampler(0.3, follows_clients=False) for _ in range(2))
        assert [one.begin(each).is_sampled for each in ids] == [other.begin(each).is_sampled for each in ids]

    def test_no_client_can_make_it_export_more_than_the_limit(self) -> None:
        client = SpanContext(7, 8, True)
        sampler = self.sampler(1.0, [0.0, *[0.0] * 10, 0.5, *[0.5] * 9], max_requests_per_s=4.0)
        assert sum(sampler.begin(client).is_sampled for _ in range(10)) == 4
        assert sum(sampler.begin(client).is_sampled for _ in range(10)) == 2


def span(
    name: str, member: str, begin_s: float, end_s: float, attempt: int | None = 0, **detail: object
) -> dict[str, Any]:
    times = {"begin_s": begin_s, "end_s": end_s, "uncertainty_s": detail.pop("uncertainty_s", 0.0)}
    return {"name": name, "member_id": member, "attempt": attempt, "detail": detail, **times}


RECORD: dict[str, Any] = {
    "request_id": "r1",
    "router_id": "R",
    "received_at": 1000.0,
    "modality": "image",
    "outcome": "ok",
    "model": "weft-demo",
    "num_prompt_tokens": 47,
    "usage": {"completion_tokens": 2},
    "finish_reasons": ["stop"],
    "plans": [{"attempt": 0, "plan": {"worker_id": "W"}}],
    "events": [{"name": "finished", "member_id": "R", "time_s": 0.9}],
    "timeline": [
        span("read", "R", 0.0, 0.1, None),
        span("way", "W", 0.1, 0.12),
        span("way", "E", 0.1, 0.13),
        span("decoded", "E", 0.13, 0.3, item=0),
        span("prefill", "W", 0.12, 0.4, start=0, end=17),
        span("transfer", "W", 0.35, 0.45, uncertainty_s=0.01),
        span("first_token", "W", 0.5, 0.5, choice=0),
        span("generate", "W", 0.5, 0.8),
    ],
}


class TestSpansOfARecord:
    def test_calls_of_members_stand_below_the_request_and_their_work_below_them(self) -> None:
        made = record_spans(RECORD)
        tree = [(each.name, each.kind, None if each.parent is None else each.parent.name) for each in made]
        assert tree == [
            ("request", "router", None),
            ("read", "router", "request"),
            ("generate", "worker", "request"),
            ("way", "worker", "generate"),
            ("prefill", "worker", "generate"),
            ("transfer", "worker", "generate"),
            ("generate", "worker", "generate"),
            ("encode", "encoder", "request"),
            ("way", "encoder", "encode"),
            ("decoded", "encoder", "encode"),
        ]

    def test_times_are_those_of_the_clock_on_the_wall(self) -> None:
        request, read, call, *_ = record_spans(RECORD)
        assert (request.begin_s, request.end_s) == (1000.0, 1000.9)
        assert (read.begin_s, read.end_s) == (1000.0, 1000.1)
        assert (call.begin_s, call.end_s) == (1000.1, 1000.8)
        assert call.events == [("first_token", 1000.5, {"weft.choice": 0})]

    def test_attributes_say_what_the_request_is_and_how_certain_a_time_is(self) -> None:
        request, *others = record_spans(RECORD)
        assert request.attributes["gen_ai.usage.input_tokens"] == 47
        assert request.attributes["gen_ai.usage.output_tokens"] == 2
        assert request.attributes["weft.outcome"] == "ok"
        assert request.error == ""
        transfer = next(each for each in others if each.name == "transfer")
        assert transfer.attributes == {"weft.uncertainty_s": 0.01}

    def test_a_failed_request_is_an_error(self) -> None:
        assert record_spans(RECORD | {"outcome": "engine_failed"})[0].error == "engine_failed"

    def test_a_request_that_was_refused_has_one_span(self) -> None:
        record = {"request_id": "r2", "router_id": "R", "received_at": 5.0, "outcome": "invalid_request"}
        (only,) = record_spans(record)
        assert (only.name, only.begin_s, only.end_s, only.error) == ("request", 5.0, 5.0, "invalid_request")


class TestPerfettosForm:
    def test_every_member_is_a_process_and_every_span_an_event(self) -> None:
        events = chrome_trace([RECORD])["traceEvents"]
        names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        assert list(names.values()) == ["router R", "encoder E", "worker W"]
        whole = [event for event in events if event["ph"] == "X"]
        assert len(whole) == len(record_spans(RECORD))
        prefill = next(event for event in whole if event["name"] == "prefill")
        assert (names[prefill["pid"]], prefill["ts"], prefill["dur"]) == ("worker W", 120000.0, 280000.0)
        (token,) = (event for event in events if event["ph"] == "i")
        assert (token["name"], token["ts"]) == ("first_token", 500000.0)

    @given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10)), max_size=30))
    def test_spans_of_a_row_do_not_overlap_unless_one_contains_the_other(self, times: list[tuple[int, int]]) -> None:
        timeline = [span(f"s{n}", "W", begin, begin + length + 1) for n, (begin, length) in enumerate(times)]
        events = [e for e in chrome_trace([RECORD | {"timeline": timeline}])["traceEvents"] if e["ph"] == "X"]
        for one, other in itertools.combinations(events, 2):
            if (one["pid"], one["tid"]) != (other["pid"], other["tid"]):
                continue
            first, later = sorted((one, other), key=lambda e: (e["ts"], -e["dur"]))
            first_end, later_end = first["ts"] + first["dur"], later["ts"] + later["dur"]
            assert later["ts"] >= first_end or later_end <= first_end

    def test_no_request_is_an_empty_trace(self) -> None:
        assert chrome_trace([]) == {"traceEvents": [], "displayTimeUnit": "ms"}


@dataclass
class Ended:
    span: SpanContext | None
    record: dict[str, object]

    def for_spans(self) -> dict[str, object]:
        return self.record


class Collected(SpanExporter):
    def __init__(self, *results: SpanExportResult) -> None:
        self.spans: list[ReadableSpan] = []
        self._results = itertools.chain(results, itertools.repeat(SpanExportResult.SUCCESS))

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return next(self._results)


SAMPLED = SpanContext(7, 8, True, 9)
ON = TracingSettings("http://collector/v1/traces")


class TestTheExport:
    def test_spans_of_sampled_requests_are_sent(self) -> None:
        collected = Collected()
        export = SpanExport(ON, {"service.namespace": "weft"}, make_exporter=lambda _: collected)
        export.end(Ended(SAMPLED, RECORD))
        export.end(Ended(SpanContext(1, 2, False), RECORD))
        export.end(Ended(None, RECORD))
        export.close()
        assert len(collected.spans) == len(record_spans(RECORD)) == export.counts.num_spans_sent
        request, *others = collected.spans
        assert (request.context.trace_id, request.context.span_id, request.parent.span_id) == (7, 8, 9)
        assert {each.context.trace_id for each in others} == {7}
        assert others[0].parent.span_id == 8
        services = {each.resource.attributes["service.name"] for each in collected.spans}
        assert services == {"weft-router", "weft-encoder", "weft-worker"}
        assert request.start_time == 1_000_000_000_000

    def test_spans_that_the_collector_does_not_take_are_counted(self) -> None:
        export = SpanExport(ON, {}, make_exporter=lambda _: Collected(SpanExportResult.FAILURE))
        export.end(Ended(SAMPLED, RECORD))
        export.close()
        assert export.counts == (0, len(record_spans(RECORD)), 0)
        values = {s.labels.get("outcome"): s.value for metric in export.collect() for s in metric.samples}
        assert (values["sent"], values["failed"]) == (0, len(record_spans(RECORD)))

    def test_records_beyond_the_limit_are_dropped_and_counted(self) -> None:
        export = SpanExport(ON, {}, now=lambda: 0.0, make_exporter=lambda _: Collected())
        export._thread = threading_stub = _Never()
        for _ in range(MAX_WAITING + 3):
            export.end(Ended(SAMPLED, RECORD))
        assert export.counts.num_requests_dropped == 3
        assert threading_stub.num_joined == 0

    def test_a_record_that_can_not_be_read_hides_no_other(self) -> None:
        collected = Collected()
        export = SpanExport(ON, {}, make_exporter=lambda _: collected)
        export.end(Ended(SAMPLED, {"request_id": "broken"}))
        export.end(Ended(SAMPLED, RECORD))
        export.close()
        assert export.counts.num_spans_sent == len(record_spans(RECORD))

    def test_other_settings_take_effect_while_it_runs(self) -> None:
        made: list[tuple[str | None, Collected]] = []

        def make(settings: TracingSettings) -> Collected:
            made.append((settings.endpoint, Collected()))
            return made[-1][1]

        export = SpanExport(TracingSettings(), {}, make_exporter=make)
        export.reconfigure(TracingSettings("http://a", 1.0))
        assert export.begin(None).is_sampled
        export.reconfigure(TracingSettings("http://b", 0.0))
        assert not export.begin(None).is_sampled
        export.end(Ended(SAMPLED, RECORD))
        export.close()
        assert [(endpoint, len(collected.spans)) for endpoint, collected in made] == [("http://b", 10)]

    def test_without_an_endpoint_no_request_has_a_span(self) -> None:
        export = SpanExport(TracingSettings(), {})
        assert export.begin(SAMPLED) is None
        assert not export.is_on
        export.close()

    def test_spans_of_one_member_share_a_resource_whose_hash_is_that_of_the_sdk(self) -> None:
        otel = OtelSpans({"service.namespace": "weft"})
        first, second = (otel.of(record_spans(RECORD), SAMPLED) for _ in range(2))
        resources = {id(span.resource): span.resource for span in (*first, *second)}
        assert len(resources) == len({(span.kind, span.member_id) for span in record_spans(RECORD)})
        for resource in resources.values():
            plain = Resource(dict(resource.attributes))
            assert (resource, hash(resource)) == (plain, hash(plain))

    def test_the_resources_of_members_that_have_left_are_not_kept_for_ever(self) -> None:
        otel = OtelSpans({})
        for number in range(2 * MAX_RESOURCES):
            otel.of([RecordSpan("request", "router", f"R{number}", 1.0, 2.0)], SAMPLED)
        assert len(otel._resources) <= MAX_RESOURCES

    def test_the_error_of_a_request_is_the_status_of_its_span(self) -> None:
        failed = RecordSpan("request", "router", "R", 1.0, 2.0, error="engine_failed")
        (made,) = OtelSpans({}).of([failed], SAMPLED)
        assert made.status.is_ok is False
        assert made.attributes["error.type"] == "engine_failed"


class _Never:
    """Stands for a thread that does not run."""

    num_joined = 0
