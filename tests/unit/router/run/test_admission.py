"""Tests which requests a router takes: room for their KV blocks, deadlines, classes, tenants and budgets. A request
that is refused has cost no member anything."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import AbstractAsyncContextManager

import httpx
import msgspec
import planning_samples
import pytest
from router_chats import chat, chat_body, expected, image, read, text

from deploy.testing import TINY_MODEL, FakeCluster, fake_cluster, reply_text, settled
from fabric.contracts import (
    ContextLengthExceeded,
    DeadlineOutOfReach,
    EngineStats,
    FeatureStats,
    InvalidMedia,
    InvalidRequest,
    ManualClock,
    Overloaded,
    WorkerLost,
    WorkerReport,
)
from router.api import http_error
from router.edge import create_app
from router.router_config import ANONYMOUS, RouterConfig, Tenant
from router.run import Admission, Caller, RequestStream, TenantLedger
from router.run.admission import BATCH_PRIORITY, SMALL_BODY_BYTES, AttemptUsage, RequestTerms, predicted_encoder_s

BLOCK = 16
NUM_BLOCKS = 100
WAIT_S = 120.0
CHAT = "/v1/chat/completions"


def waiting_cluster(**settings: object) -> AbstractAsyncContextManager[FakeCluster]:
    return fake_cluster(**{"clock": ManualClock(), "capacity_wait_s": WAIT_S, **settings})


def report(cluster: FakeCluster, used: int, seq: int, at: int = 0, **fields: object) -> None:
    """Lets a worker report that sequences use this many of its blocks."""
    worker = cluster.workers[at]
    engine = EngineStats(kv_blocks_used=used, kv_blocks_total=NUM_BLOCKS)
    known = {"engine": engine, "features": FeatureStats(inbox_bytes_total=65536)}
    made: WorkerReport = msgspec.structs.replace(worker.report(seq), **(known | fields))
    worker.plane.send(cluster.plane.address, made)


async def reported(cluster: FakeCluster, used: int, seq: int, **fields: object) -> None:
    report(cluster, used, seq, **fields)
    last, name = cluster.service.reports.workers, cluster.workers[0].member_id
    await settled(lambda: name in last and last[name].seq == seq)


async def in_line(cluster: FakeCluster, num_waiting: int) -> None:
    read_sample = cluster.service.metrics.registry.get_sample_value
    await settled(lambda: read_sample("weft_router_requests_waiting") == num_waiting)
    for _ in range(20):
        await asyncio.sleep(0)
    assert read_sample("weft_router_requests_waiting") == num_waiting


def count(cluster: FakeCluster, name: str, **labels: str) -> float:
    return cluster.service.metrics.registry.get_sample_value(f"weft_router_{name}", labels) or 0.0


def answer(stream: RequestStream) -> str:
    return reply_text(stream.prompt_token_ids, 7, 0)


def facts(cluster: FakeCluster, stream: RequestStream) -> dict[str, object]:
    trace = cluster.service.traces.get(stream.request_id)
    assert trace is not None
    return trace.to_json()


# ------------------------------------------------------------ room


async def test_a_request_waits_for_blocks_and_asks_no_encoder_meanwhile() -> None:
    async with waiting_cluster() as cluster:
        await reported(cluster, NUM_BLOCKS, 1)
        about_picture = await cluster.service.open(chat([image(), text("?")]))
        about_text = await cluster.service.open(chat("hello"))
        await in_line(cluster, 2)
        assert not cluster.workers[0].requests
        assert not cluster.encoders[0].requests
        await reported(cluster, NUM_BLOCKS - 60, 2)
        assert (await read(about_picture))[0] == [answer(about_picture)]
        assert (await read(about_text))[0] == [answer(about_text)]
        events = [event["name"] for event in facts(cluster, about_picture)["events"]]
        assert events.index("admission") < events.index("waited") < events.index("dispatched")


async def test_a_small_request_passes_a_large_one_that_has_no_room() -> None:
    async with waiting_cluster() as cluster:
        await reported(cluster, 50, 1)
        large = await cluster.service.open(chat("x" * 70 * BLOCK))
        await in_line(cluster, 1)
        small = await cluster.service.open(chat("hello"))
        assert (await read(small))[0] == [answer(small)]
        await in_line(cluster, 1)
        await reported(cluster, 0, 2)
        assert (await read(large))[0] == [answer(large)]


async def test_a_prompt_that_no_worker_can_ever_hold_is_refused_before_an_encoder_is_asked() -> None:
    async with waiting_cluster(max_model_len=8192) as cluster:
        await reported(cluster, 0, 1)
        stream = await cluster.service.open(chat([image(), text("x" * (NUM_BLOCKS + 1) * BLOCK)]))
        with pytest.raises(ContextLengthExceeded, match="the largest worker has room for 1600") as caught:
            await read(stream)
        assert http_error(caught.value).status == 400
        assert caught.value.param == "messages"
        assert not cluster.encoders[0].requests
        assert not cluster.workers[0].requests
        labels = {"tenant": "anonymous", "service_class": "interactive"}
        assert count(cluster, "admissions_total", **labels, outcome="context_length_exceeded") == 1


async def test_a_medium_whose_feature_no_inbox_can_hold_is_refused_by_its_part() -> None:
    async with waiting_cluster(max_model_len=8192) as cluster:
        engine = EngineStats(kv_blocks_total=10 * NUM_BLOCKS)
        await reported(cluster, 0, 1, engine=engine)
        stream = await cluster.service.open(chat([text("?"), image(width=32 * 45, height=32 * 46)]))
        with pytest.raises(InvalidMedia, match=r"takes 66304 bytes as a feature, .* has 65536") as caught:
            await read(stream)
        assert caught.value.param == "messages.0.content.1"


async def test_a_wait_for_blocks_that_takes_too_long_ends_with_the_predicted_time() -> None:
    """The prompt lacks blocks that come back at 10 per second."""
    async with waiting_cluster() as cluster:
        await reported(cluster, NUM_BLOCKS, 1, residence_s=10.0)
        stream = await cluster.service.open(chat("x" * (20 * BLOCK - 40)))
        await in_line(cluster, 1)
        cluster.service._context.clock.advance(WAIT_S)
        await reported(cluster, NUM_BLOCKS, 2, residence_s=10.0)
        with pytest.raises(Overloaded, match="no worker has had room") as caught:
            await read(stream)
        answered = http_error(caught.value)
        num_blocks = -(-len(stream.prompt_token_ids) // BLOCK)
        assert caught.value.retry_after_s == pytest.approx(num_blocks / 10)
        assert (answered.status, answered.headers["retry-after"]) == (429, "2")
        assert not cluster.workers[0].requests


async def test_a_request_that_has_begun_is_not_refused_for_room() -> None:
    """Its worker dies, and the other one has no room; after the wait it queues there, and keeps its tokens."""
    async with waiting_cluster(num_workers=2) as cluster:
        first, second = cluster.workers
        reports = cluster.service.reports.workers
        report(cluster, 0, 1)
        report(cluster, NUM_BLOCKS, 1, at=1)
        await settled(lambda: len(reports) == 2)
        first.script.error, first.script.die_at = WorkerLost("died"), 9
        stream = await cluster.service.open(chat("hello"))
        await settled(lambda: stream.choices[0].num_tokens == 9)
        cluster.remove(first)
        cluster.publish()
        await in_line(cluster, 1)
        cluster.service._context.clock.advance(WAIT_S)
        report(cluster, NUM_BLOCKS, 2, at=1)
        assert (await read(stream))[0] == [answer(stream)]
        assert second.requests[0].emitted == (tuple(answer(stream).encode()[:9]),)


async def test_without_waiting_a_full_worker_queues_the_request_itself() -> None:
    async with waiting_cluster(capacity_wait_s=0.0) as cluster:
        await reported(cluster, NUM_BLOCKS, 1)
        stream = await cluster.service.open(chat("hello"))
        assert (await read(stream))[0] == [answer(stream)]


async def test_a_worker_that_is_too_small_is_never_chosen() -> None:
    async with waiting_cluster(num_workers=2, max_model_len=8192) as cluster:
        small, large = cluster.workers
        engine = EngineStats(kv_blocks_total=10 * NUM_BLOCKS)
        report(cluster, 0, 1)
        large.plane.send(cluster.plane.address, msgspec.structs.replace(large.report(1), engine=engine))
        await settled(lambda: len(cluster.service.reports.workers) == 2)
        for _ in range(4):
            stream = await cluster.service.open(chat("x" * (NUM_BLOCKS + 1) * BLOCK))
            assert (await read(stream))[0] == [answer(stream)]
        assert (len(small.requests), len(large.requests)) == (0, 4)


# ------------------------------------------------------------ deadlines


async def test_a_request_whose_first_token_would_come_too_late_is_refused_with_the_time_to_wait() -> None:
    async with waiting_cluster() as cluster:
        await reported(cluster, 0, 1, prefill_s_per_token=0.5, step_overhead_s=0.0)
        late = await cluster.service.open(chat([image(), text("hello")], weft={"ttft_deadline_ms": 1000}))
        with pytest.raises(DeadlineOutOfReach, match="the first token is predicted in") as caught:
            await read(late)
        assert not cluster.encoders[0].requests
        assert not cluster.workers[0].requests
        answered = http_error(caught.value)
        assert answered.status == 429
        error = json.loads(answered.body)["error"]
        assert (error["code"], error["param"]) == ("deadline_out_of_reach", "weft.ttft_deadline_ms")
        assert answered.headers["x-should-retry"] == "false"
        in_time = await cluster.service.open(chat([image(), text("hello")], weft={"ttft_deadline_ms": 600_000}))
        assert (await read(in_time))[0] == [answer(in_time)]
        predicted_s = facts(cluster, in_time)["plans"][0]["plan"]["predicted_ttft_s"]
        assert caught.value.retry_after_s == pytest.approx(predicted_s - 1.0, rel=0.05)


async def test_the_prediction_contains_the_wait_at_the_gate() -> None:
    """The prompt takes about three blocks, which come back at one per second; idle, it would take milliseconds."""
    async with waiting_cluster() as cluster:
        await reported(cluster, NUM_BLOCKS, 1, residence_s=100.0)
        ahead = [await cluster.service.open(chat("hello")) for _ in range(3)]
        await in_line(cluster, 3)
        stream = await cluster.service.open(chat("hello", weft={"ttft_deadline_ms": 2000}))
        with pytest.raises(DeadlineOutOfReach) as caught:
            await read(stream)
        num_tokens = len(stream.prompt_token_ids)
        wait_s = 3 * num_tokens / BLOCK + -(-num_tokens // BLOCK)
        assert caught.value.retry_after_s == pytest.approx(wait_s - 2.0, abs=0.1)
        await reported(cluster, 0, 2)
        for stream in ahead:
            await read(stream)


async def test_a_deadline_also_ends_the_wait_at_the_gate() -> None:
    """No rate is known, so the request waits; the blocks do not come back in time."""
    async with waiting_cluster() as cluster:
        await reported(cluster, NUM_BLOCKS, 1)
        stream = await cluster.service.open(chat("hello", weft={"ttft_deadline_ms": 5000}))
        await in_line(cluster, 1)
        cluster.service._context.clock.advance(4.9)
        await reported(cluster, NUM_BLOCKS, 2)
        await in_line(cluster, 1)
        cluster.service._context.clock.advance(0.2)
        await reported(cluster, NUM_BLOCKS, 3)
        with pytest.raises(DeadlineOutOfReach):
            await read(stream)


async def test_a_tenant_has_a_deadline_that_a_request_may_replace() -> None:
    tenant = Tenant("acme", ttft_deadline_ms=1500)
    now = 10.0
    assert RequestTerms.of(chat(), Caller(tenant), 60.0, now).first_token_by_s == 11.5
    assert RequestTerms.of(chat(weft={"ttft_deadline_ms": 500}), Caller(tenant), 60.0, now).first_token_by_s == 10.5
    assert RequestTerms.of(chat(), Caller(), 60.0, now).first_token_by_s is None


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("weft", {"ttft_deadline_ms": 0}, "weft.ttft_deadline_ms"),
        ("weft", {"deadline": 5}, "weft.deadline"),
        ("weft", 5, "weft"),
        ("service_tier", "cheap", "service_tier"),
    ],
)
def test_a_wrong_field_is_refused_by_name(field: str, value: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**{field: value})
    assert caught.value.param == param


# ------------------------------------------------------------ classes


@pytest.mark.parametrize(
    ("tier", "own", "is_batch"),
    [
        (None, "interactive", False),
        ("auto", "interactive", False),
        ("priority", "interactive", False),
        ("flex", "interactive", True),
        (None, "batch", True),
        ("priority", "batch", True),
    ],
)
def test_the_class_comes_from_the_tenant_and_the_tier(tier: str | None, own: str, is_batch: bool) -> None:
    fields = {} if tier is None else {"service_tier": tier}
    terms = RequestTerms.of(chat(**fields), Caller(Tenant("t", service_class=own)), 60.0, 0.0)
    assert terms.is_batch == is_batch


async def test_interactive_requests_go_ahead_of_batch_at_the_gate_and_at_members() -> None:
    async with waiting_cluster() as cluster:
        await reported(cluster, NUM_BLOCKS, 1)
        batch = await cluster.service.open(chat([image(), text("a")], service_tier="flex", priority=-5))
        await in_line(cluster, 1)
        interactive = await cluster.service.open(chat([image(), text("b")], priority=5))
        await in_line(cluster, 2)
        await reported(cluster, 0, 2)
        for stream in (batch, interactive):
            assert (await read(stream))[0] == [answer(stream)]
        worker, encoder = cluster.workers[0], cluster.encoders[0]
        assert [each.request_id for each in worker.requests] == [interactive.request_id, batch.request_id]
        assert [each.priority for each in worker.requests] == [5, BATCH_PRIORITY - 5]
        assert {each.priority for each in encoder.requests} == {5, BATCH_PRIORITY - 5}


async def test_a_batch_request_leaves_spare_blocks_until_it_has_aged() -> None:
    async with waiting_cluster(batch_wait_s=30.0) as cluster:
        await reported(cluster, 90, 1)
        batch = await cluster.service.open(chat("hello", service_tier="flex"))
        await in_line(cluster, 1)
        interactive = await cluster.service.open(chat("hello"))
        assert (await read(interactive))[0] == [answer(interactive)]
        await in_line(cluster, 1)
        cluster.service._context.clock.advance(30.0)
        await reported(cluster, 90, 2)
        assert (await read(batch))[0] == [answer(batch)]
        assert cluster.workers[0].requests[-1].priority == 0, "it counts as interactive now"


# ------------------------------------------------------------ text and media


async def test_text_is_answered_while_media_wait_everywhere() -> None:
    """Some requests with pictures wait at the gate for an encoder, and others hold their place at a slow encoder."""
    async with waiting_cluster(max_in_flight=16) as cluster:
        (encoder,) = cluster.encoders
        encoder.gate = asyncio.Event()
        held = [await cluster.service.open(chat([image(seed)])) for seed in range(7)]
        await settled(lambda: len(encoder.requests) == 7)
        cluster.remove(encoder)
        encoder.gate.set()
        cluster.publish()
        await in_line(cluster, 7)
        waiting = [await cluster.service.open(chat([image(seed)])) for seed in range(7, 14)]
        await in_line(cluster, 14)
        with pytest.raises(Overloaded, match="14 requests with media are in flight, and this router takes at most 14"):
            await cluster.service.open(chat([image(14)]))
        for words in ("hello", "again", "and again"):
            stream = await cluster.service.open(chat(words))
            assert (await read(stream))[0] == [answer(stream)]
        for stream in (*held, *waiting):
            stream.close()
        await settled(lambda: cluster.service.admission.num_in_flight == 0)


def admission(**settings: object) -> tuple[Admission, ManualClock]:
    clock = ManualClock()
    return Admission(RouterConfig(TINY_MODEL, 1.0, BLOCK, **settings), clock), clock


def test_large_bodies_leave_room_for_small_ones() -> None:
    limits, _ = admission(max_bodies_bytes=16 * SMALL_BODY_BYTES)
    large, small = limits.admit(), limits.admit()
    large.grow(15 * SMALL_BODY_BYTES)
    with pytest.raises(Overloaded, match=f"{SMALL_BODY_BYTES} of these are kept for bodies of up to"):
        large.grow(1)
    small.grow(SMALL_BODY_BYTES)
    with pytest.raises(Overloaded):
        small.grow(1)


# ------------------------------------------------------------ tenants


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


ACME = Tenant("acme", (digest("sk-acme"), digest("sk-acme-2")), max_in_flight=1)
OTHER = Tenant("other", (digest("sk-other"),), service_class="batch", cache_salt="secret")


async def test_keys_and_budgets_of_tenants_over_http() -> None:
    async with fake_cluster(tenants=(ACME, OTHER)) as cluster:
        transport = httpx.ASGITransport(create_app(cluster.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://weft") as client:
            for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic sk-acme"}):
                refused = await client.post(CHAT, content=chat_body(), headers=headers)
                assert refused.status_code == 401
                assert refused.json()["error"]["code"] == "invalid_api_key"
                assert refused.headers["www-authenticate"] == "Bearer"
            assert not cluster.workers[0].requests
            unknown = {"tenant": "unknown", "service_class": "unknown"}
            assert count(cluster, "admissions_total", **unknown, outcome="invalid_api_key") == 3
            taken = await client.post(CHAT, content=chat_body(), headers={"authorization": "Bearer sk-acme"})
            assert taken.json()["choices"][0]["message"]["content"] == expected(cluster)
            place = cluster.service.admission.admit(Caller(ACME))
            full = await client.post(CHAT, content=chat_body(), headers={"authorization": "bearer sk-acme-2"})
            assert (full.status_code, full.json()["error"]["code"]) == (429, "overloaded")
            other = await client.post(CHAT, content=chat_body(), headers={"authorization": "Bearer sk-other"})
            assert other.status_code == 200
            place.release()
        last = cluster.workers[0].requests[-1]
        assert (last.priority, last.cache_salt) == (BATCH_PRIORITY, "6:secret/")
        assert count(cluster, "admissions_total", tenant="other", service_class="batch", outcome="dispatched") == 1


def test_prompts_in_flight_have_budgets_and_the_wait_comes_from_what_was_given_back() -> None:
    limits, clock = admission(max_prompt_tokens=1000, tenants=(Tenant("acme", max_prompt_tokens=100),))
    acme = Caller(Tenant("acme"))
    first, second, other = limits.admit(acme), limits.admit(acme), limits.admit()
    first.take_prompt(5000)
    first.release()
    clock.advance(1.0)
    other.take_prompt(950)
    with pytest.raises(Overloaded, match="would have 1050 tokens, and this router takes at most 1000") as caught:
        second.take_prompt(100)
    rate = 5000 * 2.718281828 ** (-1 / 10) / 10
    assert caught.value.retry_after_s == pytest.approx(50 / rate)
    other.release()
    second.take_prompt(90)
    third = limits.admit(acme)
    with pytest.raises(Overloaded, match="the tenant acme may have at most 100"):
        third.take_prompt(11)
    second.release()
    third.release()
    assert (limits.prompt_tokens, limits.num_in_flight) == (0, 0)


def test_a_tenant_without_a_key_has_its_budgets_though_it_is_called_anonymous() -> None:
    own = Tenant(ANONYMOUS.name, max_in_flight=1, max_prompt_tokens=10)
    limits, _ = admission(tenants=(own,))
    first = limits.admit(Caller(own))
    with pytest.raises(Overloaded, match="of the tenant anonymous are in flight, which may have 1"):
        limits.admit(Caller(own))
    first.take_prompt(10)
    first.release()
    assert limits.num_in_flight == 0


def test_the_wait_for_a_place_of_media_comes_from_requests_with_media() -> None:
    """Texts end all the time, and free none of the places that media may have."""
    limits, clock = admission(max_in_flight=8)
    with_media = [limits.admit() for _ in range(7)]
    for ticket in with_media:
        ticket.enter_media()
    for _ in range(100):
        limits.admit().release()
    late = limits.admit()
    with pytest.raises(Overloaded, match="7 requests with media are in flight") as caught:
        late.enter_media()
    assert caught.value.retry_after_s == RouterConfig(TINY_MODEL, 1.0, BLOCK).retry_after_s
    with_media[0].release()
    late.enter_media()
    clock.advance(1.0)
    with_media[1].release()
    other = limits.admit()
    other.enter_media()
    with pytest.raises(Overloaded) as caught:
        limits.admit().enter_media()
    assert caught.value.retry_after_s == pytest.approx(10.0 / (1.0 + 2.718281828 ** (-1 / 10)))


@pytest.mark.parametrize(("wait_s", "shown"), [(0.0, "1"), (2.1, "3"), (1e9, "60"), (float("inf"), "60")])
def test_retry_after_is_a_whole_number_of_seconds_whatever_was_predicted(wait_s: float, shown: str) -> None:
    assert http_error(Overloaded("full", retry_after_s=wait_s)).headers["retry-after"] == shown


async def test_a_prompt_beyond_the_budget_is_refused_before_any_member_is_asked() -> None:
    async with fake_cluster(max_prompt_tokens=200) as cluster:
        cluster.workers[0].script.pause_at = 2
        first = await cluster.service.open(chat("x" * 100))
        await settled(lambda: len(cluster.workers[0].requests) == 1)
        with pytest.raises(Overloaded, match="this router takes at most 200"):
            await cluster.service.open(chat([image(), text("x" * 100)]))
        assert not cluster.encoders[0].requests
        cluster.workers[0].script.resume.set()
        await read(first)
        cluster.workers[0].script.pause_at = None
        second = await cluster.service.open(chat([image(), text("x" * 100)]))
        assert (await read(second))[0] == [answer(second)]


# ------------------------------------------------------------ charges


async def test_a_tenant_is_charged_for_what_its_requests_really_used() -> None:
    async with fake_cluster(tenants=(ACME,), tokens_per_encoder_second=1000.0) as cluster:
        ledger, charged = cluster.service._context.ledger, 0.0
        for _ in range(2):
            ticket = cluster.service.admission.admit(Caller(ACME))
            _, _, usage = await read(await cluster.service.open(chat([image(), text("hello")]), ticket))
            ticket.release()
            charged += usage.num_prompt_tokens - usage.num_cached_tokens + usage.num_completion_tokens
            assert count(cluster, "tenant_tokens_total", tenant="acme") == charged
        assert usage.num_cached_tokens > 0
        # The fake encoder reports a forward pass of 2 ms that a picture had to itself.
        encoder_s = 0.002 * len(cluster.encoders[0].requests)
        assert count(cluster, "tenant_encoder_seconds_total", tenant="acme") == pytest.approx(encoder_s)
        assert ledger.shares.time_of("acme") == pytest.approx(charged + 1000.0 * encoder_s)


async def test_tenants_take_turns_for_blocks_by_what_they_were_charged() -> None:
    """Both tenants wait. One has prompts ten times as long, so of its requests only every tenth or so is served."""
    tenants = (Tenant("long", (digest("a"),)), Tenant("short", (digest("b"),)))
    async with waiting_cluster(tenants=tenants, batch_wait_s=1e6) as cluster:
        await reported(cluster, NUM_BLOCKS, 1)
        admit = cluster.service.admission.admit
        tickets = []
        for number in range(6):
            for tenant, words in zip(tenants, ("x" * 1500, "y" * 20), strict=True):
                tickets.append(admit(Caller(tenant)))
                await cluster.service.open(chat(f"{number} {words}", max_tokens=2), tickets[-1])
        await in_line(cluster, 12)
        await reported(cluster, 0, 2)
        await in_line(cluster, 0)
        worker = cluster.workers[0]
        await settled(lambda: len(worker.requests) == 12 and worker.num_open == 0)
        order = ["short" if len(each.token_ids) < 200 else "long" for each in worker.requests]
        assert order[:7].count("long") == 1
        for ticket in tickets:
            ticket.release()


def test_a_tenant_is_charged_for_every_picture_of_its_request() -> None:
    """All pictures go to one encoder. Those that occur twice are encoded once."""

    def charged(*numbers: int) -> float:
        media = [planning_samples.image(at, digit=str(number)) for at, number in enumerate(numbers)]
        seen = planning_samples.snapshot([planning_samples.worker("w")], [planning_samples.encoder("e")])
        return predicted_encoder_s(planning_samples.plan_route(planning_samples.query(*media, 10), seen, now=0.0))

    one_s = planning_samples.ENCODE.at(256)
    assert charged(1) == pytest.approx(one_s)
    own_s = planning_samples.ENCODE.per_unit_s * 256
    assert charged(*range(8)) >= 8 * own_s
    assert charged(1, 1, 1) == charged(1)


def test_the_length_of_answers_is_learned_by_tenant() -> None:
    class Counted:
        def observe_charge(self, tenant: str, num_tokens: int, encoder_s: float) -> None:
            return

    ledger = TenantLedger(RouterConfig(TINY_MODEL, 1.0, BLOCK), Counted())
    for _ in range(100):
        ledger.settle("long", 0.0, AttemptUsage(10, 2000, 0.0, num_choices=2))
    ledger.settle("long", 0.0, AttemptUsage(10, 1, 0.0, is_complete=False))
    assert ledger._tenant_to_answer_tokens["long"] == pytest.approx(1000.0, rel=0.01)
    assert ledger.shares.time_of("long") == pytest.approx(100 * 2010 + 11)
