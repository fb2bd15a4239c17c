"""Tests what the router does when workers, encoders or frames are lost: no token is repeated, none is missing, and
there is one terminal event."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest
from router_chats import chat, expected, image, read

from deploy.testing import FakeCluster, FakeWorker, fake_cluster, settled
from fabric.contracts import (
    AbortAttempt,
    DeadlineExceeded,
    EncodeResult,
    EngineFailed,
    GenerateResult,
    Overloaded,
    TokenFrame,
    TokenFrames,
    TransferFailed,
    WeftError,
    WorkerLost,
)
from router.run import RequestStream


def first_worker(cluster: FakeCluster) -> FakeWorker:
    return next(worker for worker in cluster.workers if worker.requests)


def all_scripts(cluster: FakeCluster, **fields: object) -> None:
    for worker in cluster.workers:
        for name, value in fields.items():
            setattr(worker.script, name, value)


async def collect_into(received: list[str], stream: RequestStream) -> None:
    async for deltas in stream:
        received += [delta.text for delta in deltas]


async def test_lost_worker_is_replaced_and_tokens_go_on_where_they_stopped() -> None:
    async with fake_cluster(num_workers=2) as cluster:
        all_scripts(cluster, pause_at=9)
        stream = await cluster.service.open(chat(n=2))
        await settled(lambda: all(choice.num_tokens == 9 for choice in stream.choices))
        first = first_worker(cluster)
        first.script.error, first.script.die_at = WorkerLost("died"), 9
        all_scripts(cluster, pause_at=None)
        first.script.resume.set()
        texts, reasons, usage = await read(stream)
        assert texts == [expected(cluster, 0), expected(cluster, 1)]
        assert reasons == ["stop", "stop"]
        second = next(worker for worker in cluster.workers if worker is not first)
        (again,) = second.requests
        assert again.attempt == 1
        assert again.emitted == tuple(tuple(expected(cluster, choice).encode()[:9]) for choice in range(2))
        assert again.sampling == first.requests[0].sampling
        assert again.age == first.requests[0].age
        assert usage.num_completion_tokens == sum(len(each.encode()) + 1 for each in texts)
        assert AbortAttempt(again.request_id, 0) in first.aborted


async def test_a_choice_that_ended_stays_ended_after_a_migration() -> None:
    async with fake_cluster(num_workers=2) as cluster:
        all_scripts(cluster, pause_at=12)
        stream = await cluster.service.open(chat(n=2, stop=["choice 0"]))
        await settled(lambda: stream.choices[1].num_tokens == 12)
        first = first_worker(cluster)
        first.script.error, first.script.die_at = WorkerLost("died"), 12
        all_scripts(cluster, pause_at=None)
        first.script.resume.set()
        texts, reasons, usage = await read(stream)
        assert texts == ["", expected(cluster, 1)]
        assert reasons == ["stop", "stop"]
        assert usage.num_completion_tokens == len("choice 0") + len(texts[1].encode()) + 1
        second = next(worker for worker in cluster.workers if worker is not first)
        assert AbortAttempt(second.requests[0].request_id, 1, (0,)) in second.aborted


async def test_member_that_left_is_not_tried_twice() -> None:
    async with fake_cluster(num_workers=2) as cluster:
        gone = cluster.workers[0]
        del cluster.pools.workers[gone.member_id]  # The directory hasn't noticed.
        for _ in range(4):
            assert (await read(await cluster.service.open(chat())))[1] == ["stop"]
        errors = cluster.service.metrics.registry.get_sample_value
        tried = errors("weft_router_dispatch_errors_total", {"kind": "generate", "code": "target_gone"})
        assert (tried or 0) <= 1
        assert len(cluster.workers[1].requests) == 4


async def test_request_that_costs_every_worker_its_life_is_blamed() -> None:
    async with fake_cluster(num_workers=4, max_attempts=3) as cluster:
        all_scripts(cluster, error=WorkerLost("died"), die_at=0)
        with pytest.raises(EngineFailed) as caught:
            await read(await cluster.service.open(chat()))
        assert caught.value.retryable is False
        assert sum(len(worker.requests) for worker in cluster.workers) == 3


async def test_the_only_worker_lost_says_so() -> None:
    async with fake_cluster() as cluster:
        all_scripts(cluster, error=WorkerLost("died"), die_at=0)
        with pytest.raises(WorkerLost):
            await read(await cluster.service.open(chat()))


async def test_busy_worker_is_left_for_another() -> None:
    async with fake_cluster(num_workers=2) as cluster:
        cluster.workers[0].script.error, cluster.workers[0].script.die_at = Overloaded("full"), 0
        for _ in range(3):
            assert (await read(await cluster.service.open(chat())))[1] == ["stop"]


async def test_error_of_the_engine_reaches_the_client_once() -> None:
    async with fake_cluster(num_workers=2) as cluster:
        all_scripts(cluster, error=EngineFailed("the step broke"), die_at=4)
        stream = await cluster.service.open(chat())
        with pytest.raises(EngineFailed, match="the step broke"):
            await read(stream)
        assert sum(len(worker.requests) for worker in cluster.workers) == 1


async def test_failure_after_tokens_comes_after_their_text() -> None:
    async with fake_cluster() as cluster:
        all_scripts(cluster, error=EngineFailed("the step broke"), die_at=4)
        stream = await cluster.service.open(chat())
        received: list[str] = []
        with pytest.raises(EngineFailed):
            await collect_into(received, stream)
        assert "".join(received) == expected(cluster)[:4]


async def test_a_bug_that_a_frame_meets_ends_its_request_and_no_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frames of both requests may come in one message."""
    async with fake_cluster() as cluster:
        worker = cluster.workers[0]
        worker.script.pause_at = 4
        broken, healthy = await cluster.service.open(chat()), await cluster.service.open(chat())
        await settled(lambda: broken.choices[0].num_tokens == healthy.choices[0].num_tokens == 4)

        def fails(*_: object) -> str:
            raise IndexError("a bug")

        monkeypatch.setattr(broken.choices[0], "push", fails)
        frames = [TokenFrame(stream.request_id, 0, 0, 4, (ord("x"),)) for stream in (broken, healthy)]
        cluster.service.arrivals.take(TokenFrames(worker.member_id, tuple(frames)))
        assert healthy.choices[0].num_tokens == 5, "the frame behind the broken one arrives"
        with pytest.raises(WeftError, match="an internal error occurred \\(IndexError\\)"):
            await read(broken)
        await settled(lambda: AbortAttempt(broken.request_id, 0) in worker.aborted)
        (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert record.getMessage() == f"request {broken.request_id} failed with an unexpected exception"
        assert record.request_id == broken.request_id
        assert not healthy.is_ended
        healthy.close()
        await settled(lambda: cluster.service.admission.num_in_flight == 0)


async def test_lost_frames_are_drawn_again() -> None:
    async with fake_cluster() as cluster:
        worker = cluster.workers[0]

        def lose_some(frames: list[TokenFrame]) -> list[TokenFrame]:
            return [frame for frame in frames if frame.attempt > 0 or not 5 <= frame.first_index < 8]

        worker.script.frames = lose_some
        texts, reasons, usage = await read(await cluster.service.open(chat()))
        assert texts == [expected(cluster)]
        assert reasons == ["stop"]
        assert usage.num_completion_tokens == len(texts[0].encode()) + 1
        assert worker.requests[1].emitted == (tuple(texts[0].encode()[:5]),)


async def test_lost_last_frame_is_told_by_the_terminal_event() -> None:
    async with fake_cluster(max_attempts=1) as cluster:
        cluster.workers[0].script.frames = lambda frames: [f for f in frames if f.finish_reason is None]
        with pytest.raises(TransferFailed, match="1 tokens"):
            await read(await cluster.service.open(chat()))


async def test_frames_may_trail_the_terminal_event(caplog: pytest.LogCaptureFixture) -> None:
    async with fake_cluster(gap_timeout_s=5.0) as cluster:
        worker = cluster.workers[0]
        held: list[TokenFrame] = []

        def hold(frames: list[TokenFrame]) -> list[TokenFrame]:
            held.extend(frames)
            return []

        worker.script.frames = hold
        stream = await cluster.service.open(chat())
        await settled(lambda: bool(worker.requests) and worker.num_open == 0)
        await asyncio.sleep(0)
        worker.script.frames = lambda frames: frames
        worker._send_frames(worker.requests[0], held[::-1])
        assert (await read(stream))[:2] == ([expected(cluster)], ["stop"])
        assert len(worker.requests) == 1
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


async def test_worker_that_let_our_lease_lapse_is_asked_again() -> None:
    async with fake_cluster() as cluster:
        worker = cluster.workers[0]
        worker.script.pause_at = 5
        stream = await cluster.service.open(chat())
        await settled(lambda: stream.choices[0].num_tokens == 5)
        worker.aborted.append(AbortAttempt(stream.request_id, 0))
        worker.script.resume.set()
        assert (await read(stream))[:2] == ([expected(cluster)], ["stop"])
        assert worker.requests[1].emitted == (tuple(expected(cluster).encode()[:5]),)


async def test_frames_of_another_attempt_or_worker_are_dropped() -> None:
    async with fake_cluster(num_workers=2) as cluster:
        all_scripts(cluster, pause_at=3)
        stream = await cluster.service.open(chat())
        await settled(lambda: stream.choices[0].num_tokens == 3)
        mine = first_worker(cluster)
        other = next(worker for worker in cluster.workers if worker is not mine)
        request = mine.requests[0]
        wrong = [TokenFrame(request.request_id, 1, 0, 3, (1, 2, 3)), TokenFrame(request.request_id, 0, 5, 0, (1,))]
        mine._send_frames(request, wrong)
        other._send_frames(request, [TokenFrame(request.request_id, 0, 0, 3, (1, 2, 3))])
        mine.script.resume.set()
        assert (await read(stream))[0] == [expected(cluster)]


async def test_worker_that_never_answers_meets_the_deadline() -> None:
    async with fake_cluster(dispatch_timeout_s=0.05) as cluster:
        cluster.workers[0].script.pause_at = 0
        with pytest.raises(DeadlineExceeded):
            await read(await cluster.service.open(chat()))
        await settled(lambda: cluster.workers[0].num_cancelled == 1)


async def test_worker_that_is_silent_after_the_last_token_is_not_waited_for() -> None:
    async with fake_cluster(settle_timeout_s=0.02) as cluster:
        cluster.workers[0].script.pause_at = 13
        stream = await cluster.service.open(chat(stop=[" of "]))
        texts, reasons, usage = await read(stream)
        assert (texts, reasons) == (["choice 0"], ["stop"])
        assert usage.num_completion_tokens == len("choice 0 of ")
        await settled(lambda: cluster.workers[0].num_cancelled == 1)


async def test_worker_lost_after_the_last_token_is_no_failure() -> None:
    async with fake_cluster() as cluster:
        worker = cluster.workers[0]
        worker.script.error, worker.script.die_at = WorkerLost("died"), 13
        texts, reasons, _ = await read(await cluster.service.open(chat(stop=[" of "])))
        assert (texts, reasons) == (["choice 0"], ["stop"])
        assert len(worker.requests) == 1


async def test_two_dispatches_share_no_context() -> None:
    import contextvars

    mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="empty")
    seen: list[str] = []
    async with fake_cluster() as cluster:
        generate, encode = cluster.pools.generate, cluster.pools.encode

        async def noting_generate(*args: Any) -> GenerateResult:
            seen.append(mark.get())
            return await generate(*args)

        async def noting_encode(*args: Any) -> EncodeResult:
            seen.append(mark.get())
            return await encode(*args)

        cluster.pools.generate, cluster.pools.encode = noting_generate, noting_encode
        mark.set("of the HTTP request")
        await read(await cluster.service.open(chat([image()])))
        assert seen == ["empty", "empty"]
        assert asyncio.current_task() is not None


async def test_a_request_whose_worker_was_lost_waits_for_another() -> None:
    """No other worker is there at that moment, and the router does not give up an accepted request before
    `capacity_wait_s`."""
    async with fake_cluster(num_workers=2, capacity_wait_s=30.0) as cluster:
        late = cluster.workers[1].member.member_id
        cluster.service.update_members([member for member in cluster.members if member.member_id != late])
        cluster.workers[0].script.error, cluster.workers[0].script.die_at = WorkerLost("died"), 2
        stream = await cluster.service.open(chat())
        lost = cluster.service.metrics.attempts.labels("worker_lost")
        await settled(
            lambda: sum(sample.value for sample in lost.collect()[0].samples if "_created" not in sample.name) == 1
        )
        assert not stream.is_ended
        cluster.publish()
        texts, reasons, _ = await read(stream)
        assert (texts, reasons) == ([expected(cluster)], ["stop"])


async def test_nothing_is_planned_onto_a_worker_that_reports_itself_lost() -> None:
    async with fake_cluster(num_workers=2) as cluster:
        lost, other = cluster.workers
        lost.plane.send(cluster.plane.address, msgspec.structs.replace(lost.report(1), is_lost=True))
        await asyncio.sleep(0)
        for _ in range(4):
            assert (await read(await cluster.service.open(chat())))[1] == ["stop"]
        assert (len(lost.requests), len(other.requests)) == (0, 4)
