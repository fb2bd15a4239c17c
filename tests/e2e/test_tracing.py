"""Tests that the spans of requests reach a collector, in the client's trace, and that their times fit the record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from cluster_process import ClusterProcess, start_cluster
from span_collector import SpanCollector, span_collector

from deploy.demo import ask
from deploy.demo.tasks.catalogue import TASKS

CLIENT = "4bf92f3577b34da6a3ce929d0e0e47{:02x}"
PARENT = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def collector() -> Iterator[SpanCollector]:
    with span_collector() as running:
        yield running


@pytest.fixture(scope="module")
def cluster(collector: SpanCollector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    headers = tmp_path_factory.mktemp("headers") / "headers"
    headers.write_text("# of the collector\nx-key: secret\n")
    tracing = {"endpoint": collector.url, "sample_ratio": 0.0, "headers_file": str(headers)}
    with start_cluster(in_process=True, tracing=tracing) as running:
        yield running


def chat(client: httpx.Client, model: str, number: int, flags: str = "01", seed: int = 0) -> httpx.Response:
    task = next(each for each in TASKS if each.name == "colour")
    sample = task.draw(np.random.default_rng(seed), 0)
    body = {"model": model, "messages": ask.messages(sample), "temperature": 0, "max_tokens": 16}
    headers = {"traceparent": f"00-{CLIENT.format(number)}-{PARENT}-{flags}"}
    answer = client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200
    return answer


def test_a_sampled_request_has_spans_of_every_part_in_the_clients_trace(
    cluster: ClusterProcess, collector: SpanCollector
) -> None:
    with cluster.client() as client:
        answer = chat(client, cluster.model, 1)
        record = client.get(f"/weft/requests/{answer.json()['id']}").json()
    trace_id = CLIENT.format(1)
    assert record["trace_id"] == trace_id
    version, answered, span_id, flags = answer.headers["traceresponse"].split("-")
    assert (version, answered, flags) == ("00", trace_id, "01")
    collector.wait(lambda: len(collector.of_trace(trace_id)) > 10)
    spans = collector.of_trace(trace_id)
    by_service: dict[str, set[str]] = {}
    for resource, span in spans:
        by_service.setdefault(resource["service.name"], set()).add(span.name)
    assert {"request", "read", "prompted", "planned"} <= by_service["weft-router"]
    assert {"encode", "decoded", "unit_encoded"} <= by_service["weft-encoder"]
    assert {"generate", "prefill", "transfer"} <= by_service["weft-worker"]
    ids = {span.span_id.hex(): span for _, span in spans}
    roots = [span for _, span in spans if span.parent_span_id.hex() not in ids]
    assert [(root.name, root.parent_span_id.hex(), root.span_id.hex()) for root in roots] == [
        ("request", PARENT, span_id)
    ]
    (root,) = roots
    attributes = {each.key: each.value for each in root.attributes}
    assert attributes["weft.outcome"].string_value == "ok"
    assert attributes["gen_ai.usage.input_tokens"].int_value == record["num_prompt_tokens"]
    # The spans lie within the request, and the longest are as long as the record says.
    for _, span in spans:
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano + 1e6
    took_s = (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9
    assert took_s == pytest.approx(record["timing"]["total_s"], rel=0.5, abs=0.01)
    assert {each.get("x-key") for each in collector.headers} == {"secret"}


def test_requests_that_the_client_does_not_sample_are_not_sent(
    cluster: ClusterProcess, collector: SpanCollector
) -> None:
    with cluster.client() as client:
        unsampled = chat(client, cluster.model, 2, flags="00")
        plain = client.post(
            "/v1/completions", json={"model": cluster.model, "prompt": "one two", "max_tokens": 1, "temperature": 0}
        )
        # This one ends later and is sent, so the others would have been sent by then.
        chat(client, cluster.model, 3, seed=1)
    assert unsampled.headers["traceresponse"].endswith("-00")
    assert plain.headers["traceresponse"].endswith("-00")
    collector.wait(lambda: bool(collector.of_trace(CLIENT.format(3))))
    assert collector.of_trace(CLIENT.format(2)) == []
    assert collector.of_trace(plain.headers["traceresponse"].split("-")[1]) == []


def test_a_refused_request_is_an_error_in_the_trace(cluster: ClusterProcess, collector: SpanCollector) -> None:
    trace_id = CLIENT.format(4)
    body = {"model": cluster.model, "messages": [{"role": "user", "content": "word " * 20_000}]}
    with cluster.client() as client:
        answer = client.post("/v1/chat/completions", json=body, headers={"traceparent": f"00-{trace_id}-{PARENT}-01"})
    assert answer.status_code == 400
    collector.wait(lambda: bool(collector.of_trace(trace_id)))
    (span,) = [span for _, span in collector.of_trace(trace_id) if span.name == "request"]
    assert span.status.code == 2
    assert span.status.message == answer.json()["error"]["code"]


def test_several_prompts_are_spans_of_one_trace(cluster: ClusterProcess, collector: SpanCollector) -> None:
    trace_id = CLIENT.format(5)
    body = {"model": cluster.model, "prompt": ["one", "two", "three"], "max_tokens": 1}
    with cluster.client() as client:
        headers = {"traceparent": f"00-{trace_id}-{PARENT}-01"}
        assert client.post("/v1/completions", json=body, headers=headers).status_code == 200

    def roots() -> list[str]:
        named = [span for _, span in collector.of_trace(trace_id) if span.name == "request"]
        return [span.span_id.hex() for span in named]

    collector.wait(lambda: len(roots()) == 3)
    assert len(set(roots())) == 3


def test_spans_of_the_last_minute_are_a_file_for_perfetto(cluster: ClusterProcess) -> None:
    with cluster.client() as client:
        ids = [chat(client, cluster.model, 6, seed=seed).headers["x-weft-request-id"] for seed in (2, 3)]
        found = client.get("/weft/spans", params={"seconds": "60", "limit": "2"}).json()
        one = client.get("/weft/spans", params={"request_id": ids[0]}).json()
        missing = client.get("/weft/spans", params={"request_id": "none"})
        wrong = client.get("/weft/spans", params={"seconds": "0"})
    rows = {each["args"]["name"] for each in found["traceEvents"] if each["name"] == "thread_name"}
    assert rows == set(ids)
    kinds = {each["cat"] for each in found["traceEvents"] if each["ph"] == "X"}
    assert kinds == {"router", "encoder", "worker"}
    assert {each["args"]["name"] for each in one["traceEvents"] if each["name"] == "thread_name"} == {ids[0]}
    assert (missing.status_code, wrong.status_code) == (404, 400)
    assert wrong.json()["error"]["param"] == "seconds"


def test_a_collector_that_does_not_answer_delays_no_request(tmp_path: Path) -> None:
    tracing = {"endpoint": "http://127.0.0.1:9/v1/traces", "sample_ratio": 1.0, "timeout_s": 1}
    with start_cluster(in_process=True, tracing=tracing) as running, running.client() as client:
        for seed in range(3):
            chat(client, running.model, 7, seed=seed)
        assert client.get("/health/ready").status_code == 200
