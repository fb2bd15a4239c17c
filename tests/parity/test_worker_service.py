"""Tests the worker as its peers see it: ends, aborts, leases, features that fail, reports, events."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from worker_rig import ROUTER, WORKER, feature, loaded, prompt, reference, rig

from fabric.contracts import (
    AbortAttempt,
    ConfigError,
    EngineFailed,
    GenerateResult,
    KvEvents,
    KvSnapshot,
    ManualClock,
    SamplingParams,
    SnapshotRequest,
    StopConditions,
    TokenFrames,
    WorkerLost,
    split_hashes,
)
from fabric.transport.membership import FIRST_HEARTBEAT_S

IMAGE = ("Some words in front. ", 1, " What is it?")
LONG = StopConditions(max_tokens=4000, ignore_eos=True)


def names(result: GenerateResult) -> list[str]:
    return [event.name for event in result.trace]


def at(result: GenerateResult, name: str) -> list[float]:
    return [event.at_s for event in result.trace if event.name == name]


# ---------------------------------------------------------------- doorstep and trace


async def test_text_in_front_is_computed_before_the_feature_lands() -> None:
    of = prompt(*IMAGE)
    async with rig() as r:
        request = r.request(of)
        call = asyncio.ensure_future(r.service.generate(request))
        await r.until(lambda: r.service.report().engine.num_at_doorstep == 1)
        assert r.tokens(request) == []
        r.publish(request, of, 0)
        result = await call
        prefills = [event for event in result.trace if event.name == "prefill"]
        computed = {name: prefills[0].detail[name] for name in ("choice", "start", "end")}
        assert computed == {"choice": 0, "start": 0, "end": of.placeholders[0].offset}
        assert prefills[0].at_s < at(result, "unit_announced")[0] <= at(result, "unit_landed")[0] < prefills[1].at_s
        assert names(result)[0] == "received"
        assert names(result)[-2:] == ["first_token", "finished"] or names(result)[-1] == "finished"
        (held,) = [event for event in result.trace if event.name == "held"]
        assert held.at_s - held.detail["from_s"] == pytest.approx(result.held_s)
        assert prefills[0].at_s >= held.detail["from_s"] >= prefills[0].detail["from_s"]
        assert at(result, "unit_landed")[0] <= held.at_s
        assert 0 < result.prefill_s < result.first_token_s
        assert sum(event.detail["steps_s"] for event in prefills) == pytest.approx(result.prefill_s)
        assert result.queue_s + result.prefill_s + result.held_s <= result.first_token_s
        assert result.worker_id == WORKER


async def test_a_text_request_is_not_delayed_by_a_picture_that_is_late() -> None:
    of, text = prompt(*IMAGE), prompt("Only text.")
    async with rig() as r:
        picture_request, text_request = r.request(of), r.request(text)
        picture_call = asyncio.ensure_future(r.service.generate(picture_request))
        await r.until(lambda: r.service.report().engine.num_at_doorstep == 1)
        result = await r.service.generate(text_request)
        assert result.error is None
        assert not picture_call.done()
        r.publish(picture_request, of, 0)
        assert (await picture_call).error is None
        await r.assert_idle()


async def test_one_frames_message_per_step_and_router() -> None:
    prompts = [prompt("First."), prompt("Second."), prompt("Third.")]
    async with rig() as r:
        requests = [r.request(of, stop=StopConditions(6, ignore_eos=True)) for of in prompts]
        await asyncio.gather(*(r.service.generate(request) for request in requests))
        frames = r.router.of(TokenFrames)
        assert max(len(message.frames) for message in frames) == 3
        for message in frames:
            keys = [(frame.request_id, frame.choice) for frame in message.frames]
            assert len(keys) == len(set(keys))
        last = {frame.request_id: frame for message in frames for frame in message.frames}
        assert all(frame.finish_reason == "length" for frame in last.values())


# ---------------------------------------------------------------- ends and aborts


@pytest.mark.parametrize("how", ["cancel", "message", "lease"])
async def test_whatever_aborts_a_request_frees_everything(how: str) -> None:
    of = prompt(*IMAGE)
    clock = ManualClock() if how == "lease" else None
    async with rig(clock=clock, report_interval_s=0.01) as r:
        if how == "lease":
            r.heartbeat(lease_s=2.0)
        running, waiting = r.request(of, stop=LONG), r.request(of, stop=LONG)
        calls = [asyncio.ensure_future(r.service.generate(request)) for request in (running, waiting)]
        r.publish(running, of, 0)
        await r.until(lambda: len(r.tokens(running)) > 3)
        if how == "cancel":
            for call in calls:
                call.cancel()
            assert all(
                isinstance(ended, asyncio.CancelledError)
                for ended in await asyncio.gather(*calls, return_exceptions=True)
            )
        elif how == "message":
            for request in (running, waiting):
                r.router_plane.send(r.worker_plane.address, AbortAttempt(request.request_id, request.attempt))
        else:
            clock.advance(2.5)
        if how != "cancel":
            results = await asyncio.gather(*calls)
            assert [[c.finish_reason for c in result.choices] for result in results] == [["abort"], ["abort"]]
            assert results[0].choices[0].num_tokens >= len(r.tokens(running)) > 3
            assert all(result.error is None and names(result)[-1] == "aborted" for result in results)
        await r.assert_idle()
        assert len(r.releases) == 1


async def test_one_choice_can_be_aborted_alone() -> None:
    of = prompt("Tell me something.")
    async with rig() as r:
        request = r.request(of, num_choices=3, stop=LONG, sampling=SamplingParams(seed=5))
        call = asyncio.ensure_future(r.service.generate(request))
        await r.until(lambda: all(len(r.tokens(request, choice)) > 2 for choice in range(3)))
        r.router_plane.send(r.worker_plane.address, AbortAttempt(request.request_id, 0, (1,)))
        await r.until(lambda: r.service.report().engine.num_running == 2)
        before = [len(r.tokens(request, choice)) for choice in range(3)]
        await r.until(lambda: all(len(r.tokens(request, choice)) > before[choice] + 3 for choice in (0, 2)))
        assert len(r.tokens(request, 1)) == before[1]
        r.router_plane.send(r.worker_plane.address, AbortAttempt(request.request_id, 0))
        result = await call
        assert [choice.finish_reason for choice in result.choices] == ["abort"] * 3
        assert len({tuple(r.tokens(request, choice)[:8]) for choice in range(3)}) > 1, "choices draw differently"
        await r.assert_idle()


async def test_a_draw_does_not_depend_on_the_batch_or_the_attempt() -> None:
    of = prompt("Say anything.")
    sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=1234)
    stop = StopConditions(10, ignore_eos=True)
    async with rig(max_step_tokens=7) as r:
        alone = r.request(of, sampling=sampling, stop=stop)
        await r.service.generate(alone)
        crowd = [r.request(prompt(f"Another {i}."), sampling=SamplingParams(seed=i), stop=stop) for i in range(4)]
        again = r.request(of, sampling=sampling, stop=stop, num_choices=2)
        await asyncio.gather(*(r.service.generate(request) for request in (*crowd, again)))
        assert r.tokens(again, 0) == r.tokens(alone)
        assert r.tokens(again, 1) != r.tokens(alone)
        migrated = r.request(of, sampling=sampling, stop=stop, attempt=1, emitted=(tuple(r.tokens(alone)[:6]),))
        r.router.tokens[migrated.request_id, 1, 0] = r.tokens(alone)[:6]
        result = await r.service.generate(migrated)
        assert r.tokens(migrated) == r.tokens(alone)
        assert result.choices[0].num_tokens == 10


async def test_stop_and_end() -> None:
    of = prompt("Count.")
    tokens, _ = reference(of, 8)
    async with rig() as r:
        stopped = r.request(of, stop=StopConditions(8, stop_token_ids=(tokens[3],), ignore_eos=True))
        result = await r.service.generate(stopped)
        assert result.choices[0].finish_reason == "stop"
        assert r.tokens(stopped) == tokens[: tokens.index(tokens[3]) + 1]
        calls = [asyncio.ensure_future(r.service.generate(r.request(of, stop=LONG))) for _ in range(2)]
        await r.until(lambda: r.service.report().engine.num_running == 2)
        await r.service.stop()
        assert {(await call).error.code for call in calls} == {"worker_lost"}
        with pytest.raises(EngineFailed):
            r.service.check_health()
        late = await r.service.generate(r.request(of))
        assert late.error.code == "worker_lost", "another worker can serve it"


async def test_a_call_whose_router_is_dead_is_ended() -> None:
    """The call arrives after the router's lease has expired, and no heartbeat follows."""
    of = prompt(*IMAGE)
    clock = ManualClock()
    async with rig(clock=clock, report_interval_s=0.01) as r:
        r.heartbeat(lease_s=2.0)
        await r.until(lambda: r.router.reports)
        clock.advance(2.5)
        await r.until(lambda: len(r.service._routers) == 0)
        before = len(r.router.reports)
        call = asyncio.ensure_future(r.service.generate(r.request(of)))
        await r.until(lambda: r.service.report().engine.num_at_doorstep == 1)
        clock.advance(FIRST_HEARTBEAT_S + 0.1)
        async with asyncio.timeout(10.0):
            assert [choice.finish_reason for choice in (await call).choices] == ["abort"]
        await r.assert_idle()
        assert len(r.router.reports) <= before + 1


async def test_a_call_that_comes_behind_its_abort_is_not_begun() -> None:
    of = prompt(*IMAGE)
    async with rig() as r:
        request = r.request(of)
        r.router_plane.send(r.worker_plane.address, AbortAttempt(request.request_id, request.attempt))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        async with asyncio.timeout(10.0):
            result = await r.service.generate(request)
        assert result.error.code == "aborted"
        assert r.router.needed == []
        await r.assert_idle()


async def test_a_feature_that_fails_its_request_at_once_leaves_nothing_in_the_engine() -> None:
    """The feature is announced before the request arrives, and is larger than the inbox. The request ends before it is
    admitted, and must not be admitted after that."""
    of = prompt(*IMAGE)
    async with rig(inbox_bytes=feature(of, 0).nbytes * 3 // 4) as r:
        request = r.request(of, stop=LONG)
        r.publish(request, of, 0)
        await r.until(lambda: r.service.num_units_held == 1)
        result = await r.service.generate(request)
        assert result.error.code == "unit_too_large"
        assert (await r.service.generate(r.request(prompt("Only text.")))).error is None
        await r.assert_idle()


async def test_requests_that_cannot_be_served_are_answered() -> None:
    of = prompt(*IMAGE)
    async with rig(inbox_bytes=4096) as r:
        result = await r.service.generate(r.request(of))
        assert result.error.code == "invalid_media"
        assert result.error.param == "part.0"
        long = prompt("Hello.")
        result = await r.service.generate(r.request(long, token_ids=tuple([5] * 9000), placeholders=(), media=()))
        assert result.error.code == "context_length_exceeded"
        first = r.request(long, stop=LONG)
        call = asyncio.ensure_future(r.service.generate(first))
        await r.until(lambda: len(r.tokens(first)) > 1)
        assert (await r.service.generate(first)).error.code == "protocol_error"
        assert not call.done()
        call.cancel()
        await r.assert_idle()


# ---------------------------------------------------------------- reports and events


async def test_a_heartbeat_subscribes_and_events_add_up_to_the_snapshot() -> None:
    of = prompt(*IMAGE)
    async with rig(block_size=4, report_interval_s=0.01) as r:
        r.heartbeat()
        await r.until(lambda: r.router.reports)
        assert r.router.of(KvSnapshot) == [], "a snapshot comes when the router asks for it"
        r.router_plane.send(r.worker_plane.address, SnapshotRequest(ROUTER, r.router_plane.address))
        await r.until(lambda: r.router.of(KvSnapshot))
        assert r.router.of(KvSnapshot)[0].chains == ()
        request = r.request(of)
        result = await r.run(request, of)
        await r.until(
            lambda: any(
                request.request_id == key.request_id for report in r.router.reports for key in report.acknowledged
            )
        )
        r.router_plane.send(r.worker_plane.address, SnapshotRequest(ROUTER, r.router_plane.address))
        await r.until(lambda: len(r.router.of(KvSnapshot)) == 2)
        events = r.router.of(KvEvents)
        numbers = list(itertools.chain(*(range(m.first_seq, m.first_seq + len(m.events)) for m in events)))
        snapshot = r.router.of(KvSnapshot)[1]
        assert numbers == list(range(1, snapshot.last_seq + 1))
        told = [block for message in events for event in message.events for block in split_hashes(event.hashes)]
        held = [block for chain in snapshot.chains for block in split_hashes(chain.hashes)]
        num_computed = len(of.token_ids) + result.choices[0].num_tokens - 1
        assert sorted(told) == sorted(held)
        assert len(held) == num_computed // 4
        await r.until(lambda: r.router.reports[-1].engine.num_running == 0)
        report = r.router.reports[-1]
        assert report.engine.tokens_generated == result.choices[0].num_tokens
        assert report.engine.prompt_tokens_computed == len(of.token_ids)
        assert report.engine.kv_blocks_used == report.features.inbox_bytes_used == report.engine.num_features == 0
        # How the time of a step is divided between these two depends on the machine's load.
        assert report.step_overhead_s + report.prefill_s_per_token > 0
        assert [one.seq for one in r.router.reports] == sorted({one.seq for one in r.router.reports})


async def test_a_dead_plane_or_channel_is_ill_health() -> None:
    async with rig() as r:
        r.service.check_health()
        for name, part in (("feature channel", r.sink), ("message plane", r.worker_plane)):
            part.close()
            with pytest.raises(WorkerLost, match=name):
                r.service.check_health()


async def test_a_broken_engine_ends_every_request_and_the_health_check(monkeypatch: pytest.MonkeyPatch) -> None:
    of = prompt("Hello there.")
    async with rig() as r:
        request = r.request(of, stop=LONG)
        call = asyncio.ensure_future(r.service.generate(request))
        await r.until(lambda: len(r.tokens(request)) > 2)
        told = []
        r.service.on_lost(lambda: told.append("lost"))
        assert r.service.report().is_lost is False
        monkeypatch.setattr(r.service._engine._scheduler, "commit", None)
        assert (await call).error.code == "worker_lost"
        with pytest.raises(WorkerLost, match="died"):
            r.service.check_health()
        assert (await r.service.generate(r.request(of))).error.code == "worker_lost"
        assert r.service.report().is_lost is True
        assert told == ["lost"]


async def test_weights_that_compute_nothing_finite_are_refused_at_the_start() -> None:
    """A worker with such weights would be lost at its first request, and its replacement at the next."""

    class Spoilt:
        def __getattr__(self, name: str) -> Any:
            return getattr(loaded().model, name)

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return loaded().model.logits(hidden) * float("nan")

    parts = SimpleNamespace(family=loaded().family, model=Spoilt(), eos_token_ids=())
    with pytest.raises(ConfigError, match="the logits of a test prompt are not finite"):
        async with rig(parts=parts):
            pass
