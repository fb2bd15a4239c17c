"""Tests the HTTP edge over fake members: statuses, headers, order of events, limits, and clients that disconnect."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from asgi_exchange import Exchange
from edge_client import events, served
from msgspec import structs
from router_chats import chat_body, expected, image, text

from deploy.testing import TINY_MODEL, FakeCluster, fake_cluster, settled
from fabric.contracts import EngineFailed, ErrorInfo, InvalidMedia, TokenFrame, WorkerLost
from router.edge import create_app

CHAT = "/v1/chat/completions"


def exchange(cluster: FakeCluster, body: bytes, **headers: str) -> Exchange:
    return Exchange(create_app(cluster.service), "POST", CHAT, headers).feed(body)


# ---------------------------------------------------------------- These tests cover answers.


async def test_completion() -> None:
    async with served() as (cluster, client):
        response = await client.post(CHAT, content=chat_body())
        body = response.json()
        assert response.status_code == 200
        assert body["choices"][0]["message"] == {"role": "assistant", "content": expected(cluster), "refusal": None}
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["model"] == TINY_MODEL
        assert body["usage"]["prompt_tokens"] == len(cluster.workers[0].requests[0].token_ids)
        assert body["usage"]["completion_tokens"] == len(expected(cluster).encode()) + 1
        assert response.headers["x-request-id"] == cluster.workers[0].requests[0].request_id
        assert response.headers["openai-processing-ms"].isdigit()


async def test_every_answer_says_how_long_it_took() -> None:
    async with served() as (cluster, client):
        asked = [
            ("POST", CHAT, chat_body()),
            ("POST", CHAT, b"{"),
            ("POST", "/v1/embeddings", b"{}"),
            ("POST", "/tokenize", b'{"prompt": "a"}'),
            ("POST", "/detokenize", b'{"tokens": [97]}'),
            ("POST", CHAT, b"x" * (cluster.service.config.max_body_bytes + 1)),
            ("GET", "/v1/models", b""),
            ("GET", "/v1/models/other", b""),
            ("GET", "/nothing", b""),
        ]
        answers = [await client.request(method, path, content=content) for method, path, content in asked]
        assert [answer.status_code for answer in answers] == [200, 400, 400, 200, 200, 413, 200, 404, 404]
        assert all(answer.headers["openai-processing-ms"].isdigit() for answer in answers)
        wrong = await client.post(CHAT, content=b"", headers={"content-type": "text/plain"})
        assert (wrong.status_code, wrong.headers["openai-processing-ms"].isdigit()) == (415, True)


async def test_stream_order_with_usage() -> None:
    async with served() as (cluster, client):
        body = chat_body([image(), text("?")], stream=True, n=2, stream_options={"include_usage": True})
        response = await client.post(CHAT, content=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["openai-processing-ms"].isdigit()
        *chunks, usage, done = events(response.content)
        assert done == "[DONE]"
        assert usage["choices"] == []
        assert usage["usage"]["prompt_tokens_details"]["image_tokens"] == 9
        assert all(chunk["usage"] is None for chunk in chunks)
        assert len({chunk["id"] for chunk in chunks}) == 1
        for choice in range(2):
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice]
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(each["delta"].get("content", "") for each in mine) == expected(cluster, choice)
            assert [each["finish_reason"] for each in mine][-2:] == [None, "stop"]
            assert mine[-1]["delta"] == {}


async def test_stream_without_usage_has_no_usage_chunk() -> None:
    async with served() as (_, client):
        response = await client.post(CHAT, content=chat_body(stream=True))
        *chunks, done = events(response.content)
        assert done == "[DONE]"
        assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


async def test_a_streamed_answer_without_text_has_an_event_with_an_empty_one() -> None:
    """`vllm bench serve` counts a request as failed if no event after the first one has text."""
    async with served() as (cluster, client):
        cluster.workers[0].script.reply = ""
        response = await client.post(CHAT, content=chat_body(stream=True, n=2))
        chunks = [chunk["choices"][0] for chunk in events(response.content)[:-1]]
        for choice in range(2):
            deltas = [chunk["delta"] for chunk in chunks if chunk["index"] == choice]
            assert deltas == [{"role": "assistant", "content": ""}, {"content": ""}, {}]


async def test_label_is_echoed_if_it_is_fit_and_never_becomes_an_id() -> None:
    async with served() as (cluster, client):
        good = await client.post(CHAT, content=chat_body(), headers={"x-request-id": "trace-1/2"})
        assert good.headers["x-request-id"] == "trace-1/2"
        internal = cluster.workers[0].requests[0].request_id
        assert good.headers["x-weft-request-id"] == internal != "trace-1/2"
        for bad in ("a b", "x" * 129, "<script>"):
            response = await client.post(CHAT, content=chat_body(), headers={"x-request-id": bad})
            assert response.headers["x-request-id"] == response.headers["x-weft-request-id"]


async def test_models() -> None:
    async with served() as (_, client):
        listed = (await client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == [TINY_MODEL]
        assert (await client.get(f"/v1/models/{TINY_MODEL}")).json()["object"] == "model"
        missing = await client.get("/v1/models/org/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_health_and_readiness() -> None:
    async with served(num_encoders=0) as (cluster, client):
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/health/live")).status_code == 200
        waiting = await client.get("/health/ready")
        assert (waiting.status_code, waiting.json()["modalities_without_encoder"]) == (503, ["image"])
        cluster.service.update_members([])
        assert (await client.get("/health/ready")).json()["num_workers"] == 0
    async with served() as (_, client):
        assert (await client.get("/health/ready")).status_code == 200


async def test_trace_of_a_request_by_either_id() -> None:
    async with served() as (_, client):
        response = await client.post(CHAT, content=chat_body([image()]), headers={"x-request-id": "mine"})
        completion_id = response.json()["id"]
        trace = (await client.get(f"/weft/requests/{completion_id}")).json()
        assert trace["label"] == "mine"
        assert trace["usage"] == response.json()["usage"]
        assert trace["timing"].keys() == {"total_s", "prompt_s", "worker_s", "first_token_s", "each_token_s"}
        assert 0 < trace["timing"]["first_token_s"] <= trace["timing"]["total_s"]
        assert {"received", "planned", "dispatched", "prefill", "first_token", "finished"} <= {
            event["name"] for event in trace["events"]
        }
        again = await client.get(f"/weft/requests/{response.headers['x-weft-request-id']}")
        assert again.json() == trace
        assert (await client.get("/weft/requests/mine")).status_code == 404


# ---------------------------------------------------------------- These tests cover the records of requests.


async def test_a_request_that_asks_for_it_gets_its_record_in_the_answer() -> None:
    async with served(num_workers=2) as (_, client):
        content = [image(), text("?")]
        plain = (await client.post(CHAT, content=chat_body(content, weft={}))).json()
        assert "weft" not in plain
        body = (await client.post(CHAT, content=chat_body(content, weft={"explain": True}))).json()
        record = body["weft"]["explain"]
        assert record == (await client.get(f"/weft/requests/{body['id']}")).json()
        assert (record["outcome"], record["modality"], record["usage"]) == ("ok", "image", body["usage"])
        (plan,) = record["plans"]
        assert {plan["plan"]["worker_id"], "worker-0", "worker-1"} == {"worker-0", "worker-1"}
        parts = record["first_token"]["parts"]
        assert sum(parts.values()) == pytest.approx(record["first_token"]["at_s"])


@pytest.mark.parametrize("has_usage", [True, False])
async def test_a_streamed_answer_has_the_record_in_its_last_chunk(has_usage: bool) -> None:
    async with served() as (_, client):
        fields = {"stream_options": {"include_usage": True}} if has_usage else {}
        body = chat_body(stream=True, weft={"explain": True}, **fields)
        *chunks, last, done = events((await client.post(CHAT, content=body)).content)
        assert done == "[DONE]"
        assert (last["choices"], "usage" in last) == ([], has_usage)
        assert last["weft"]["explain"]["request_id"] == last["id"].removeprefix("chatcmpl-")
        assert last["weft"]["explain"]["outcome"] == "ok"
        assert all(chunk["choices"] and "weft" not in chunk for chunk in chunks)


async def test_the_record_in_the_answer_has_every_attempt() -> None:
    async with served(num_workers=2) as (cluster, client):
        for worker in cluster.workers:
            worker.script.error, worker.script.die_at = WorkerLost("died"), 5

        def revive(frames: list[TokenFrame]) -> list[TokenFrame]:
            for worker in cluster.workers:
                if len(worker.requests) == 0:
                    worker.script.die_at = None
            return frames

        for worker in cluster.workers:
            worker.script.frames = revive
        body = (await client.post(CHAT, content=chat_body(weft={"explain": True}))).json()
        record = body["weft"]["explain"]
        assert [entry["attempt"] for entry in record["plans"]] == [0, 1]
        first, second = (entry["plan"]["worker_id"] for entry in record["plans"])
        assert first != second
        assert [e["detail"]["worker"] for e in record["events"] if e["name"] == "generate_failed"] == [first]
        assert record["first_token"]["attempt"] == 0
        parts = record["first_token"]["parts"]
        assert "worker" in parts, "the worker that died has reported nothing"
        assert sum(parts.values()) == pytest.approx(record["first_token"]["at_s"])


@pytest.mark.parametrize(
    ("weft", "param"), [({"explain": "yes"}, "weft.explain"), ({"explian": True}, "weft.explian"), (7, "weft")]
)
async def test_options_of_weft_are_checked(weft: object, param: str) -> None:
    async with served() as (_, client):
        response = await client.post(CHAT, content=chat_body(weft=weft))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


async def test_browsers_get_a_page_and_other_clients_json() -> None:
    async with served() as (_, client):
        answered = await client.post(CHAT, content=chat_body([image()]), headers={"x-request-id": "mine"})
        name = answered.json()["id"]
        browser = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
        pages = [
            await client.get(f"/weft/requests/{name}", headers=browser),
            await client.get(f"/weft/requests/{name}.html"),
            await client.get(f"/weft/requests/{name}", params={"format": "html"}),
            await client.get("/weft/requests", headers=browser),
        ]
        for page in pages:
            assert page.status_code == 200
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            assert "default-src 'none'" in page.headers["content-security-policy"]
            assert name.removeprefix("chatcmpl-") in page.text
        for plain in (
            await client.get(f"/weft/requests/{name}"),
            await client.get(f"/weft/requests/{name}", headers=browser, params={"format": "json"}),
        ):
            assert plain.json()["request_id"] == name.removeprefix("chatcmpl-")


async def test_the_latest_requests_are_listed_and_filtered() -> None:
    async with served() as (cluster, client):
        bodies = [chat_body(), chat_body([image(), text("?")]), chat_body(model="other"), chat_body()]
        for body in bodies:
            await client.post(CHAT, content=body)
        listed = (await client.get("/weft/requests")).json()
        assert listed["routers_without_answer"] == []
        outcomes = [(each["modality"], each["outcome"]) for each in listed["requests"]]
        assert outcomes == [("text", "ok"), ("text", "model_not_found"), ("image", "ok"), ("text", "ok")]
        times = [each["received_at"] for each in listed["requests"]]
        assert times == sorted(times, reverse=True)
        newest = listed["requests"][0]
        assert newest["request_id"] == cluster.workers[0].requests[-1].request_id
        assert 0 < newest["first_token_s"] <= newest["total_s"]
        assert {each["stage"] for each in listed["requests"]} == {"ended"}
        for query, expected_outcomes in (
            ({"limit": 2}, outcomes[:2]),
            ({"outcome": "ok"}, [outcomes[0], outcomes[2], outcomes[3]]),
            ({"modality": "image"}, [outcomes[2]]),
            ({"outcome": "ok", "modality": "video"}, []),
        ):
            found = (await client.get("/weft/requests", params=query)).json()["requests"]
            assert [(each["modality"], each["outcome"]) for each in found] == expected_outcomes


@pytest.mark.parametrize(
    ("query", "param"),
    [({"limit": "0"}, "limit"), ({"limit": "1001"}, "limit"), ({"limit": "²"}, "limit"), ({"format": "xml"}, "format")],
)
async def test_a_list_with_a_bad_query_is_refused(query: dict[str, str], param: str) -> None:
    async with served() as (_, client):
        response = await client.get("/weft/requests", params=query)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_request_that_no_router_knows_is_named() -> None:
    async with served(max_traces=3) as (_, client):
        response = await client.get("/weft/requests/chatcmpl-req-<b>")
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("not_found", "request_id")
        assert "`req-<b>`" in error["message"]
        assert "latest 3 requests" in error["message"]


# ---------------------------------------------------------------- These tests cover refusals.


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_request", None),
        (b"", 400, "invalid_request", None),
        (chat_body(model="other"), 404, "model_not_found", "model"),
        (chat_body(functions=[{}]), 400, "invalid_request", "functions"),
        (chat_body([text("a"), {"type": "hologram"}]), 400, "invalid_request", "messages.0.content.1"),
        (chat_body([{"type": "input_audio", "input_audio": {}}]), 400, "unsupported_modality", "messages.0.content.0"),
        (chat_body([{"type": "file", "file": {}}]), 400, "invalid_request", "messages.0.content.0.file.file_data"),
        (
            chat_body([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]),
            400,
            "invalid_request",
            "messages.0.content.0",
        ),
        (
            chat_body([{"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}]),
            400,
            "invalid_media",
            "messages.0.content.0",
        ),
        (
            chat_body([{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8gd29ybGQ="}}]),
            400,
            "invalid_media",
            "messages.0.content.0",
        ),
        (chat_body([image(index) for index in range(5)]), 400, "invalid_request", "messages.0.content.4"),
        (chat_body(n=9), 400, "invalid_request", "n"),
        (chat_body(stop=[""]), 400, "invalid_request", "stop"),
        (chat_body(stop=["x"] * 17), 400, "invalid_request", "stop"),
        (chat_body(stop_token_ids=[262]), 400, "invalid_request", "stop_token_ids"),
        (chat_body(max_tokens=4, min_tokens=5), 400, "invalid_request", "min_tokens"),
    ],
)
async def test_bad_requests_are_named_and_the_cluster_serves_on(
    body: bytes, status: int, code: str, param: str | None
) -> None:
    async with served() as (cluster, client):
        response = await client.post(CHAT, content=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (status, code, param)
        assert error["type"] == "invalid_request_error"
        assert "x-request-id" in response.headers
        assert cluster.workers[0].requests == []
        assert (await client.post(CHAT, content=chat_body())).status_code == 200


@pytest.mark.parametrize("place", ["parse", "_prompt_builder.read"])
async def test_a_defect_is_answered_without_its_words(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words of an exception may hold paths, addresses, or what another client has sent; the log has them."""

    async def fails(*_: object, **__: object) -> object:
        raise PermissionError(13, "Permission denied", "/srv/secret/key")

    async with fake_cluster() as cluster:
        owner_name, _, name = place.rpartition(".")
        monkeypatch.setattr(getattr(cluster.service, owner_name) if owner_name else cluster.service, name, fails)
        transport = httpx.ASGITransport(create_app(cluster.service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://weft") as client:
            response = await client.post(CHAT, content=chat_body())
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        assert response.json()["error"]["message"] == "an internal error occurred (PermissionError)"
        assert "secret" not in response.text + str(response.headers)


async def test_long_prompt_names_both_numbers() -> None:
    async with served(max_model_len=64) as (_, client):
        response = await client.post(CHAT, content=chat_body("x" * 80))
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "64 tokens" in error["message"]
        assert str(80 + len("<user\n>><assistant\n") - 1) in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_unknown_routes_answer_in_the_envelope(method: str, path: str, status: int, code: str) -> None:
    async with served() as (_, client):
        response = await client.request(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_overload_says_when_to_come_back() -> None:
    async with served(max_in_flight=1, retry_after_s=3.0) as (cluster, client):
        cluster.workers[0].script.pause_at = 1
        first = asyncio.create_task(client.post(CHAT, content=chat_body()))
        await settled(lambda: bool(cluster.workers[0].requests))
        refused = await client.post(CHAT, content=chat_body())
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        cluster.workers[0].script.resume.set()
        assert (await first).status_code == 200


async def test_no_worker_is_503_with_retry_after() -> None:
    async with served(num_workers=0) as (_, client):
        for stream in (False, True):
            response = await client.post(CHAT, content=chat_body(stream=stream))
            assert (response.status_code, response.json()["error"]["code"]) == (503, "no_capacity")
            assert int(response.headers["retry-after"]) >= 1


async def test_a_request_that_costs_workers_is_not_to_be_retried() -> None:
    async with served(num_workers=2) as (cluster, client):
        for worker in cluster.workers:
            worker.script.error, worker.script.die_at = WorkerLost("died"), 0
        response = await client.post(CHAT, content=chat_body())
        assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")


# ---------------------------------------------------------------- These tests cover bodies.


async def test_declared_length_over_the_limit_is_refused_before_reading() -> None:
    async with fake_cluster(max_body_bytes=1000) as cluster:
        app = create_app(cluster.service)
        one = Exchange(app, "POST", CHAT, {"content-length": "1001"})
        await one.until(lambda: len(one.sent) == 2)
        assert (one.status, json.loads(one.body)["error"]["code"]) == (413, "body_too_large")
        assert one.headers["connection"] == "close"
        one.leave()
        await one.ended()


async def test_a_length_of_thousands_of_digits_is_no_number() -> None:
    async with fake_cluster() as cluster:
        one = Exchange(create_app(cluster.service), "POST", CHAT, {"content-length": "9" * 5000})
        await one.until(lambda: len(one.sent) == 2)
        assert (one.status, json.loads(one.body)["error"]["code"]) == (400, "invalid_request")
        one.leave()
        await one.ended()


async def test_chunked_body_over_the_limit_is_refused_while_it_comes() -> None:
    async with fake_cluster(max_body_bytes=1000) as cluster:
        one = Exchange(create_app(cluster.service), "POST", CHAT)
        for _ in range(3):
            one.feed(b"x" * 400, is_last=False)
        await one.until(lambda: len(one.sent) == 2)
        assert one.status == 413
        assert cluster.service.admission.bodies_bytes == 0
        one.feed(b"x" * 400, is_last=True)
        await one.ended()


async def test_bodies_of_all_requests_have_one_budget() -> None:
    async with fake_cluster(max_bodies_bytes=1500, max_body_bytes=1000) as cluster:
        app = create_app(cluster.service)
        first = Exchange(app, "POST", CHAT).feed(b"x" * 900, is_last=False)
        await settled(lambda: cluster.service.admission.bodies_bytes == 900)
        second = await Exchange(app, "POST", CHAT).feed(b"x" * 900).feed(b"").ended()
        assert (second.status, json.loads(second.body)["error"]["code"]) == (429, "overloaded")
        first.leave()
        await first.ended()


# -------------------------------------------------------- These tests cover clients that disconnect or are slow.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause_at", [0, 3])
async def test_a_client_that_leaves_ends_its_request(stream: bool, pause_at: int) -> None:
    async with fake_cluster() as cluster:
        worker = cluster.workers[0]
        worker.script.pause_at = pause_at
        one = exchange(cluster, chat_body(stream=stream))
        await settled(lambda: bool(worker.requests))
        if stream and pause_at:
            await one.until(lambda: len(one.sent) >= 2)
        one.leave()
        await one.ended()
        await settled(lambda: worker.num_cancelled == 1 and len(worker.aborted) == 1)
        assert cluster.service.admission.num_in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_handler_that_is_cancelled_ends_its_request(stream: bool) -> None:
    async with fake_cluster() as cluster:
        worker = cluster.workers[0]
        worker.script.pause_at = 3
        one = exchange(cluster, chat_body(stream=stream))
        await settled(lambda: bool(worker.requests))
        one.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one.task
        await settled(lambda: worker.num_cancelled == 1)
        assert cluster.service.admission.num_in_flight == 0


async def test_headers_wait_for_the_first_token() -> None:
    async with fake_cluster() as cluster:
        worker = cluster.workers[0]
        worker.script.pause_at = 0
        one = exchange(cluster, chat_body(stream=True))
        await settled(lambda: bool(worker.requests))
        assert one.sent == []
        worker.script.pause_at = None
        worker.script.resume.set()
        await one.ended()
        assert one.status == 200


async def test_failure_before_the_first_token_has_its_status_even_when_streaming() -> None:
    async with served() as (cluster, client):
        cluster.encoders[0].failures = [ErrorInfo.of(InvalidMedia("truncated"))]
        response = await client.post(CHAT, content=chat_body([text("see"), image()], stream=True))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages.0.content.1"


async def test_failure_in_mid_stream_is_an_event() -> None:
    async with served() as (cluster, client):
        worker = cluster.workers[0]
        worker.script.error, worker.script.die_at = EngineFailed("the step broke"), 4
        response = await client.post(CHAT, content=chat_body(stream=True))
        assert response.status_code == 200
        *chunks, last = events(response.content)
        received = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert received == expected(cluster)[:4]
        assert last["error"] == {
            "message": "the step broke",
            "type": "server_error",
            "param": None,
            "code": "engine_failed",
        }


async def test_a_full_socket_holds_up_its_own_stream_alone() -> None:
    async with fake_cluster() as cluster:
        app = create_app(cluster.service)
        slow = Exchange(app, "POST", CHAT).feed(chat_body("slow", stream=True, ignore_eos=True, max_tokens=600))
        await slow.until(lambda: len(slow.sent) >= 2)
        slow.can_write.clear()
        fast = await Exchange(app, "POST", CHAT).feed(chat_body("fast", stream=True)).ended()
        assert fast.body.endswith(b"data: [DONE]\n\n")
        await settled(lambda: cluster.workers[0].num_open == 0)
        num_sent = len(slow.sent)
        slow.can_write.set()
        await slow.ended()
        assert len(slow.sent) <= num_sent + 4
        chunks = events(slow.body)[:-1]
        received = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert len(received.encode()) > 500


async def test_a_reader_that_takes_nothing_has_left() -> None:
    async with fake_cluster(write_timeout_s=0.02) as cluster:
        cluster.workers[0].script.pause_at = 3
        one = exchange(cluster, chat_body(stream=True))
        await one.until(lambda: len(one.sent) >= 2)
        one.can_write.clear()
        cluster.workers[0].script.resume.set()
        await one.ended()
        await settled(lambda: cluster.service.admission.num_in_flight == 0)
        assert not one.body.endswith(b"data: [DONE]\n\n")


async def test_prometheus_finds_the_members_that_show_their_own_metrics() -> None:
    async with served() as (cluster, client):
        assert (await client.get("/weft/prometheus-targets")).json() == []
        worker = structs.replace(cluster.workers[0].member, http_address="10.0.0.7:4321")
        cluster.service.update_members([worker])
        answer = await client.get("/weft/prometheus-targets")
        assert answer.headers["content-type"] == "application/json"
        labels = {"weft_kind": "worker", "weft_member": "worker-0"}
        assert answer.json() == [{"targets": ["10.0.0.7:4321"], "labels": labels}]
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "weft_router_requests_in_flight 0.0" in metrics.text.splitlines()
