"""Tests the router service against fake members: what it dispatches, and what comes back."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from msgspec import structs
from router_chats import chat, expected, image, read, text

from deploy.testing import FakeEncoder, FakeWorker, fake_cluster, settled
from deploy.testing.fake_members import BLOCK_SIZE, SCHEME
from fabric.contracts import (
    WEFT_KV,
    AbortAttempt,
    Aborted,
    ContextLengthExceeded,
    Draining,
    EngineStats,
    FeatureStats,
    InvalidMedia,
    InvalidRequest,
    KvEvents,
    KvScheme,
    MemberId,
    ModelNotFound,
    NoCapacity,
    Overloaded,
    SamplingParams,
    UnsupportedModality,
    WeftError,
    WorkerReport,
)
from router.api import ChatRequest, Usage
from router.planning import decode_costs
from router.planning.saved_costs import CostKey
from router.service import MAX_JOINS_PER_TURN


async def test_text_request_is_answered_with_exact_usage() -> None:
    async with fake_cluster() as cluster:
        texts, reasons, usage = await read(await cluster.service.open(chat()))
        answer = expected(cluster)
        assert texts == [answer]
        assert reasons == ["stop"]
        prompt = cluster.workers[0].requests[0].token_ids
        assert usage == Usage(len(prompt), len(answer.encode()) + 1, 0, {})
        assert cluster.encoders[0].requests == []


async def test_a_dead_plane_is_ill_health() -> None:
    async with fake_cluster() as cluster:
        cluster.service.check_health()
        cluster.service._context.plane.close()
        with pytest.raises(WeftError, match="message plane"):
            cluster.service.check_health()


async def test_prompts_are_hashed_by_the_schemes_of_the_workers(caplog: pytest.LogCaptureFixture) -> None:
    async with fake_cluster(num_workers=3) as cluster:
        first, second, third = (worker.member for worker in cluster.workers)
        coarse, other = KvScheme(WEFT_KV, 2 * BLOCK_SIZE), KvScheme("another-hash", BLOCK_SIZE)
        second, third = (structs.replace(each, kv_scheme=new) for each, new in ((second, coarse), (third, other)))
        cluster.service.update_members([])
        cluster.service.update_members([first, second, third])
        assert f"{third.member_id} hashes its KV by the unknown scheme 'another-hash'" in caplog.text
        builder = cluster.service._prompt_builder
        prompt = await builder.plan(await builder.read(chat("a long text " * 20)))
        assert set(prompt._scheme_to_hashes) == {SCHEME, coarse, other}
        hashed = {scheme: len(prompt.block_hashes(scheme)) // 16 for scheme in (SCHEME, coarse, other)}
        num_tokens = len(prompt.token_ids)
        assert hashed == {SCHEME: num_tokens // 16, coarse: num_tokens // 32, other: 0}
        assert prompt.block_hashes(SCHEME) is prompt.block_hashes(SCHEME)
        assert len(prompt.block_hashes(KvScheme(WEFT_KV, 1))) == 16 * num_tokens, "any scheme can be asked for"


async def test_image_goes_to_the_encoder_and_the_request_to_the_worker() -> None:
    async with fake_cluster() as cluster:
        stream = await cluster.service.open(chat([text("what is "), image(1), text(" and "), image(2)], priority=3))
        texts, _, usage = await read(stream)
        request = cluster.workers[0].requests[0]
        encode = cluster.encoders[0].requests[0]
        assert texts == [expected(cluster)]
        assert request.dispatched_items == (0, 1)
        assert encode.items == request.media
        assert encode.destination.worker_id == cluster.workers[0].member_id
        assert [item.part for item in encode.items] == ["messages.0.content.1", "messages.0.content.3"]
        assert (encode.request_id, encode.attempt, encode.age) == (request.request_id, request.attempt, request.age)
        assert encode.priority == request.priority == 3
        assert [run.length for run in request.placeholders] == [9, 9]
        assert usage.modality_to_tokens == {"image": 18}
        assert all(data.startswith(b"\x89PNG") for data in cluster.encoders[0].media)


async def test_the_worker_is_called_before_any_feature_is_there() -> None:
    async with fake_cluster() as cluster:
        cluster.encoders[0].gate = asyncio.Event()
        stream = await cluster.service.open(chat([image()]))
        await settled(lambda: len(cluster.workers[0].requests) == 1 and len(cluster.encoders[0].requests) == 1)
        assert not stream.is_started
        cluster.encoders[0].gate.set()
        assert (await read(stream))[0] == [expected(cluster)]


async def test_same_picture_twice_is_encoded_once() -> None:
    async with fake_cluster() as cluster:
        texts, _, _ = await read(await cluster.service.open(chat([image(3), image(3)])))
        assert texts == [expected(cluster)]
        assert len(cluster.mm_hashes()) == 1
        assert cluster.workers[0].requests[0].dispatched_items == (0, 1)


async def test_covered_prefix_needs_no_encoding_and_is_counted_as_cached() -> None:
    async with fake_cluster() as cluster:
        words = "a long enough text to fill a few blocks behind the picture " * 3
        await read(await cluster.service.open(chat([image(), text(words)])))
        await settled(lambda: cluster.service.cluster.prefix_stats().num_keys > 0)
        _, _, usage = await read(await cluster.service.open(chat([image(), text(words)])))
        assert len(cluster.encoders[0].requests) == 1
        assert cluster.workers[0].requests[1].dispatched_items == ()
        num_prompt = len(cluster.workers[0].requests[1].token_ids)
        assert usage.num_cached_tokens == num_prompt // BLOCK_SIZE * BLOCK_SIZE


async def test_feature_that_is_needed_after_all_is_encoded_then() -> None:
    async with fake_cluster() as cluster:
        words = "a long enough text to fill a few blocks behind the picture " * 3
        await read(await cluster.service.open(chat([image(), text(words)])))
        await settled(lambda: cluster.service.cluster.prefix_stats().num_keys > 0)
        cluster.workers[0].script.forgets_prefix = True
        texts, _, usage = await read(await cluster.service.open(chat([image(), text(words)])))
        assert texts == [expected(cluster)]
        assert usage.num_cached_tokens == 0
        first, second = cluster.encoders[0].requests
        assert second.items == first.items
        assert second.request_id == cluster.workers[0].requests[1].request_id


async def test_choices_differ_and_are_kept_apart() -> None:
    async with fake_cluster() as cluster:
        texts, reasons, usage = await read(await cluster.service.open(chat(n=3)))
        assert texts == [expected(cluster, choice) for choice in range(3)]
        assert reasons == ["stop"] * 3
        assert usage.num_completion_tokens == sum(len(each.encode()) + 1 for each in texts)


async def test_stop_string_ends_a_choice_at_the_worker_too() -> None:
    async with fake_cluster() as cluster:
        stream = await cluster.service.open(chat(stop=[" of "], n=2))
        texts, reasons, usage = await read(stream)
        assert texts == ["choice 0", "choice 1"]
        assert reasons == ["stop", "stop"]
        assert usage.num_completion_tokens == 2 * len("choice 0 of ")
        request = cluster.workers[0].requests[0]
        assert sorted(each.choices for each in cluster.workers[0].aborted) == [(0,), (1,)]
        assert {(each.request_id, each.attempt) for each in cluster.workers[0].aborted} == {(request.request_id, 0)}


async def test_length_keeps_a_half_character_out_until_the_end() -> None:
    async with fake_cluster() as cluster:
        await read(await cluster.service.open(chat()))
        cut = expected(cluster).encode().index("–".encode()) + 1
        texts, reasons, usage = await read(await cluster.service.open(chat(max_tokens=cut)))
        assert texts == [expected(cluster).encode()[:cut].decode(errors="replace")]
        assert (reasons, usage.num_completion_tokens) == (["length"], cut)


async def test_stop_token_id_is_counted_but_is_no_text() -> None:
    async with fake_cluster() as cluster:
        texts, _, usage = await read(await cluster.service.open(chat(stop_token_ids=[ord("o")])))
        assert texts == ["ch"]
        assert usage.num_completion_tokens == 3


async def test_ignored_eos_becomes_a_token_like_others() -> None:
    async with fake_cluster() as cluster:
        texts, reasons, usage = await read(await cluster.service.open(chat(ignore_eos=True, max_tokens=200)))
        assert texts[0].startswith(expected(cluster) * 2)
        assert (reasons, usage.num_completion_tokens) == (["length"], 200)


async def test_client_that_leaves_frees_everything_at_once() -> None:
    async with fake_cluster() as cluster:
        cluster.encoders[0].gate = asyncio.Event()
        stream = await cluster.service.open(chat([image()]))
        await settled(lambda: bool(cluster.encoders[0].requests and cluster.workers[0].requests))
        stream.close()
        request = cluster.workers[0].requests[0]
        abort = AbortAttempt(request.request_id, 0)
        await settled(lambda: cluster.workers[0].aborted == [abort] and cluster.encoders[0].aborted == [abort])
        await settled(lambda: cluster.workers[0].num_cancelled == 1 and cluster.encoders[0].num_cancelled == 1)
        with pytest.raises(Aborted):
            await read(stream)
        await settled(lambda: cluster.service.admission.num_in_flight == 0)


async def test_stream_closed_before_its_task_ran_ends_too() -> None:
    async with fake_cluster() as cluster:
        stream = await cluster.service.open(chat())
        stream.close()
        with pytest.raises(Aborted):
            await read(stream)
        await settled(lambda: cluster.service.admission.num_in_flight == 0)
        assert cluster.workers[0].requests == []


async def test_a_slow_reader_gets_everything_in_few_pieces_and_delays_nobody() -> None:
    async with fake_cluster() as cluster:
        slow = await cluster.service.open(chat("slow"))
        await slow.started()
        fast_texts, _, _ = await read(await cluster.service.open(chat("fast")))
        assert fast_texts == [expected(cluster)]
        await settled(lambda: slow.is_ended)
        pieces = [delta async for deltas in slow for delta in deltas]
        assert len(pieces) == 1
        assert pieces[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("request_", "kind", "param"),
    [
        (chat(model="other"), ModelNotFound, "model"),
        (chat([{"type": "input_audio", "input_audio": {}}]), UnsupportedModality, "messages.0.content.0"),
        (
            chat([text("a"), image() | {"image_url": {"url": "data:image/png;base64,AAAA"}}]),
            InvalidMedia,
            "messages.0.content.1",
        ),
        (chat("x" * 3000), ContextLengthExceeded, "messages"),
        (chat("x", max_tokens=2040), ContextLengthExceeded, "max_tokens"),
        (chat("x", logit_bias={"999999": 1}), InvalidRequest, "logit_bias"),
        (chat("x", logit_bias={"-1": 1}), InvalidRequest, "logit_bias"),
    ],
)
async def test_refused_before_any_member_hears_of_it(request_: ChatRequest, kind: type[WeftError], param: str) -> None:
    async with fake_cluster() as cluster:
        with pytest.raises(kind) as caught:
            await cluster.service.open(request_)
        assert caught.value.param == param
        assert cluster.workers[0].requests == []
        assert (await read(await cluster.service.open(chat())))[0] == [expected(cluster)]


async def test_a_prompt_that_breaks_the_router_is_counted_as_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not counted as a client that left, which is what a cancelled call means."""
    async with fake_cluster() as cluster:

        async def fail(*_: object) -> None:
            raise ZeroDivisionError("a bug of a plugin")

        monkeypatch.setattr(cluster.service._prompt_builder, "plan", fail)
        with pytest.raises(ZeroDivisionError):
            await cluster.service.open(chat())
        metric = cluster.service.metrics.registry.get_sample_value
        assert metric("weft_router_requests_total", {"code": "internal_error"}) == 1.0
        assert metric("weft_router_requests_total", {"code": "aborted"}) == 0
        assert cluster.service.admission.num_in_flight == 0


async def test_sampling_parameters_reach_the_worker_as_they_were_meant() -> None:
    asked = {"min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": -1.5, "frequency_penalty": 2, "seed": 7}
    async with fake_cluster() as cluster:
        await read(await cluster.service.open(chat("x", **asked, logit_bias={"7": -100, "5": 0.5}, priority=-3)))
        sent = cluster.workers[0].requests[0]
    expected = SamplingParams(1.0, 1.0, 0, 7, 0.1, 1.2, -1.5, 2.0, ((7, -100.0), (5, 0.5)), is_seed_given=True)
    assert sent.sampling == expected
    assert sent.priority == -3


async def test_no_request_is_more_urgent_than_the_operator_allows() -> None:
    async with fake_cluster(min_priority=-1) as cluster:
        with pytest.raises(InvalidRequest, match="`priority` must be at least -1, not -2") as refused:
            await cluster.service.open(chat("x", priority=-2))
        assert refused.value.param == "priority"
        for allowed in (-1, 0, 5, None):
            await read(await cluster.service.open(chat("x", priority=allowed)))
        assert [call.priority for call in cluster.workers[0].requests] == [-1, 0, 5, 0]


async def test_in_flight_limit_refuses_and_recovers() -> None:
    async with fake_cluster(max_in_flight=1) as cluster:
        cluster.workers[0].script.pause_at = 3
        stream = await cluster.service.open(chat())
        with pytest.raises(Overloaded) as caught:
            await cluster.service.open(chat())
        assert caught.value.retry_after_s is not None
        cluster.workers[0].script.resume.set()
        await read(stream)
        assert (await read(await cluster.service.open(chat())))[1] == ["stop"]


async def test_no_worker_is_no_capacity() -> None:
    async with fake_cluster(num_workers=0) as cluster:
        with pytest.raises(NoCapacity):
            await read(await cluster.service.open(chat()))
        assert cluster.service.readiness()[0] is False


async def test_readiness_wants_an_encoder_for_each_modality() -> None:
    async with fake_cluster(num_encoders=0) as cluster:
        is_ready, state = cluster.service.readiness()
        assert (is_ready, state["modalities_without_encoder"]) == (False, ["image"])
        encoder = FakeEncoder(cluster.hub, "encoder-late")
        cluster.service.update_members([*cluster.members, encoder.member])
        assert cluster.service.readiness()[0] is True
        encoder.plane.close()


async def test_who_joins_is_subscribed_and_asked_for_what_it_holds() -> None:
    async with fake_cluster() as cluster:
        late = FakeWorker(cluster.hub, "worker-late", cluster.codec)
        late.plane.start(late.handle)
        cluster.pools.workers[late.member_id] = late
        cluster.publish()
        await settled(lambda: len(late.heartbeats) >= 1 and late.snapshot_requests == 1)
        assert late.heartbeats[0].lease_s == cluster.service.config.lease_s
        assert late.heartbeats[0].address == cluster.plane.address
        late.plane.close()


async def test_heartbeats_go_to_every_member_again_and_again() -> None:
    async with fake_cluster(num_workers=2, heartbeat_s=0.001) as cluster:
        await settled(lambda: all(len(worker.heartbeats) >= 3 for worker in cluster.workers))
        addresses = {heartbeat.address for worker in cluster.workers for heartbeat in worker.heartbeats}
        assert addresses == {cluster.plane.address}


async def test_a_gap_in_events_asks_for_a_snapshot() -> None:
    async with fake_cluster() as cluster:
        worker = cluster.workers[0]
        await settled(lambda: worker.snapshot_requests == 1)
        worker.plane.send(cluster.plane.address, KvEvents(worker.member_id, 1, 40, ()))
        await settled(lambda: worker.snapshot_requests == 2)
        assert worker.snapshot_requests == 2


async def test_trace_tells_the_plan_and_every_part() -> None:
    async with fake_cluster(num_workers=2) as cluster:
        stream = await cluster.service.open(chat([image(), text("and?")]), label="mine")
        await read(stream)
        trace = cluster.service.traces.get(stream.request_id)
        assert trace is not None
        record = trace.to_json()
        names = [event["name"] for event in record["events"]]
        assert [name for name in names if name in ("received", "planned", "first_token", "finished")] == [
            "received",
            "planned",
            "first_token",
            "finished",
        ]
        assert names.count("dispatched") == 2
        assert "prefill" in names
        assert (record["label"], record["outcome"], record["finish_reasons"]) == ("mine", "ok", ["stop"])
        plan = record["plans"][0]["plan"]
        assert plan["worker_id"] in {worker.member_id for worker in cluster.workers}
        assert plan["explanation"]["winner"]["ttft_s"] == plan["predicted_ttft_s"]
        assert plan["explanation"]["runner_up"]["worker_id"] != plan["worker_id"]


async def test_traces_are_a_bounded_ring() -> None:
    async with fake_cluster(max_traces=2) as cluster:
        streams = [await cluster.service.open(chat()) for _ in range(3)]
        for stream in streams:
            await read(stream)
        assert [cluster.service.traces.get(each.request_id) is not None for each in streams] == [False, True, True]


async def test_stop_ends_open_requests_with_a_word() -> None:
    async with fake_cluster() as cluster:
        cluster.workers[0].script.pause_at = 2
        stream = await cluster.service.open(chat())
        await stream.started()
        await cluster.service.stop()
        with pytest.raises(Aborted):
            await read(stream)


async def test_a_drain_lets_what_was_accepted_end_and_takes_nothing_new() -> None:
    async with fake_cluster() as cluster:
        cluster.encoders[0].gate = asyncio.Event()
        stream = await cluster.service.open(chat([image()]))
        draining = asyncio.create_task(cluster.service.drain(limit_s=3600))
        await settled(lambda: cluster.service.admission.is_closed)
        with pytest.raises(Draining) as refused:
            await cluster.service.open(chat())
        assert refused.value.retry_after_s is not None
        is_ready, state = cluster.service.readiness()
        assert (is_ready, state["status"]) == (False, "draining")
        assert not draining.done()
        cluster.encoders[0].gate.set()
        assert (await read(stream))[0] == [expected(cluster)]
        assert await draining == 0


async def test_a_drain_ends_at_its_limit_and_says_how_many_are_left() -> None:
    async with fake_cluster() as cluster:
        cluster.encoders[0].gate = asyncio.Event()
        streams = [await cluster.service.open(chat([image(seed)])) for seed in (1, 2)]
        assert await cluster.service.drain(limit_s=0) == 2
        for stream in streams:
            stream.close()
        await settled(lambda: cluster.service.admission.num_in_flight == 0)


async def test_a_drain_of_an_idle_router_ends_at_once() -> None:
    async with fake_cluster() as cluster:
        assert await cluster.service.drain(limit_s=3600) == 0
        assert await cluster.service.drain(limit_s=3600) == 0, "asked for twice, it waits for nothing"


async def test_a_router_keeps_what_it_has_learned_for_the_next_one(tmp_path: Path) -> None:
    path, key = tmp_path / "costs.json", CostKey("worker", "", "", "prefill")
    async with fake_cluster(costs_file=path) as cluster:
        worker_id = cluster.workers[0].member_id
        report = WorkerReport(
            worker_id, 99, 99, (), EngineStats(), FeatureStats(), prefill_s_per_token=0.125, step_overhead_s=0.5
        )
        cluster.service.arrivals.take(report)
        assert not path.exists()
    saved = decode_costs(path.read_bytes(), cluster.service.config.model_name, 0.0)
    assert saved.key_to_line[key].line == (0.5, 0.125)
    async with fake_cluster(costs_file=path) as cluster:
        assert cluster.service.cluster.learned(0.0, time.time()).key_to_line[key].line == (0.5, 0.125)


async def test_members_that_join_at_once_are_taken_over_several_turns() -> None:
    async with fake_cluster() as cluster:
        service, heard = cluster.service, cluster.workers[0].member
        many = [structs.replace(heard, member_id=MemberId(f"many-{index}")) for index in range(250)]
        service.update_members([*cluster.members, *many])
        num_first = len(service._context.members)
        assert num_first == len(cluster.members) + MAX_JOINS_PER_TURN
        service.update_members([*cluster.members, *many[10:]])
        await settled(lambda: len(service._context.members) == len(cluster.members) + 240)
        await asyncio.sleep(0)
        assert set(service._context.members) == {each.member_id for each in (*cluster.members, *many[10:])}
        cluster.publish()
        assert len(service._context.members) == len(cluster.members), "those that leave do so at once"


async def test_members_with_metrics_of_their_own_are_named_for_prometheus() -> None:
    async with fake_cluster() as cluster:
        assert cluster.service.prometheus_targets() == []
        shown = [
            structs.replace(each, http_address=f"10.0.0.1:{9000 + index}") for index, each in enumerate(cluster.members)
        ]
        cluster.service.update_members(shown)
        assert cluster.service.prometheus_targets() == [
            {"targets": ["10.0.0.1:9001"], "labels": {"weft_kind": "encoder", "weft_member": "encoder-0"}},
            {"targets": ["10.0.0.1:9000"], "labels": {"weft_kind": "worker", "weft_member": "worker-0"}},
        ]
