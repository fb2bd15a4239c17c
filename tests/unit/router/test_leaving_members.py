"""Members that are being stopped: they get nothing new, finish what they have, and pass on what takes too long."""

from __future__ import annotations

import asyncio

import pytest
from router_chats import chat, expected, image, read

from deploy.testing import FakeCluster, FakeWorker, fake_cluster, settled
from fabric.contracts import MemberId, WorkerLost
from router.leaving_members import LeavingMembers


def counted(cluster: FakeCluster, name: str, **labels: str) -> float:
    return cluster.service.metrics.registry.get_sample_value(name, labels) or 0.0


def pause_all(cluster: FakeCluster, at: int | None) -> None:
    for worker in cluster.workers:
        worker.script.pause_at = at


def busy_worker(cluster: FakeCluster) -> tuple[FakeWorker, FakeWorker]:
    """Returns the worker that has the request, and the other one."""
    first = next(worker for worker in cluster.workers if worker.num_open)
    return first, next(worker for worker in cluster.workers if worker is not first)


async def test_a_leaving_worker_gets_nothing_new_and_finishes_what_it_has() -> None:
    async with fake_cluster(num_workers=2) as cluster:
        pause_all(cluster, 5)
        stream = await cluster.service.open(chat())
        await settled(lambda: stream.choices[0].num_tokens == 5)
        first, other = busy_worker(cluster)
        cluster.service.update_leaving([first.member_id])
        pause_all(cluster, None)
        for _ in range(6):
            assert (await read(await cluster.service.open(chat())))[1] == ["stop"]
        assert (len(first.requests), len(other.requests)) == (1, 6)
        first.script.resume.set()
        texts, reasons, _ = await read(stream)
        assert (texts, reasons) == ([expected(cluster, 0)], ["stop"])
        assert counted(cluster, "weft_router_dispatch_errors_total", kind="generate", code="target_gone") == 0
        cluster.remove(first)
        cluster.publish()
        assert [member["member_id"] for member in cluster.service.members()] == ["encoder-0", other.member_id]


async def test_a_stream_that_outlasts_the_grace_moves_without_a_token_lost_or_doubled() -> None:
    async with fake_cluster(num_workers=2, leave_grace_s=0.0) as cluster:
        pause_all(cluster, 9)
        stream = await cluster.service.open(chat(n=2))
        await settled(lambda: all(choice.num_tokens == 9 for choice in stream.choices))
        first, other = busy_worker(cluster)
        other.script.pause_at = None
        cluster.service.update_leaving([first.member_id])
        texts, reasons, usage = await read(stream)
        assert texts == [expected(cluster, 0), expected(cluster, 1)]
        assert reasons == ["stop", "stop"]
        (again,) = other.requests
        assert again.emitted == tuple(tuple(expected(cluster, choice).encode()[:9]) for choice in range(2))
        assert usage.num_completion_tokens == sum(len(each.encode()) + 1 for each in texts)
        await settled(lambda: first.num_open == 0)
        assert first.num_cancelled == 1
        assert first.aborted
        assert counted(cluster, "weft_router_attempts_total", outcome="worker_leaving") == 1


async def test_moving_costs_no_attempt() -> None:
    async with fake_cluster(num_workers=4, leave_grace_s=0.0, max_attempts=1) as cluster:
        pause_all(cluster, 1)
        stream = await cluster.service.open(chat())
        left: list[MemberId] = []
        for number in range(1, 4):
            await settled(lambda number=number: stream.choices[0].num_tokens == number)
            left.append(busy_worker(cluster)[0].member_id)
            cluster.service.update_leaving(left)
            await settled(lambda: any(each.num_open and each.member_id not in left for each in cluster.workers))
        busy_worker(cluster)[0].script.resume.set()
        assert (await read(stream))[0] == [expected(cluster, 0)]
        assert len(set(left)) == 3


async def test_a_request_on_the_last_worker_waits_for_another_one() -> None:
    async with fake_cluster(num_workers=1, leave_grace_s=0.0, capacity_wait_s=5.0) as cluster:
        pause_all(cluster, 4)
        stream = await cluster.service.open(chat())
        await settled(lambda: stream.choices[0].num_tokens == 4)
        first = cluster.workers[0]
        cluster.service.update_leaving([first.member_id])
        assert cluster.service.readiness()[1]["num_workers"] == 0
        await settled(lambda: first.num_open == 0)
        cluster.add_worker()
        cluster.publish()
        assert (await read(stream))[0] == [expected(cluster, 0)]


async def test_a_leaving_encoder_gets_nothing_new_and_its_calls_go_on() -> None:
    async with fake_cluster(num_encoders=2) as cluster:
        for encoder in cluster.encoders:
            encoder.gate = asyncio.Event()
        stream = await cluster.service.open(chat([image(1)]))
        await settled(lambda: any(encoder.requests for encoder in cluster.encoders))
        first = next(encoder for encoder in cluster.encoders if encoder.requests)
        other = next(encoder for encoder in cluster.encoders if encoder is not first)
        assert other.gate is not None
        assert first.gate is not None
        other.gate.set()
        cluster.service.update_leaving([first.member_id])
        for number in range(4):
            assert (await read(await cluster.service.open(chat([image(10 + number)]))))[1] == ["stop"]
        assert len(first.requests) == 1
        assert len(other.requests) == 4
        first.gate.set()
        assert (await read(stream))[1] == ["stop"]
        assert first.num_cancelled == 0


async def test_nothing_that_a_leaving_member_has_cached_is_found() -> None:
    async with fake_cluster(num_workers=2) as cluster:
        await read(await cluster.service.open(chat()))
        await settled(lambda: cluster.service.cluster.prefix_stats().num_keys > 0)
        holder = next(worker for worker in cluster.workers if worker.requests)
        cluster.service.update_leaving([holder.member_id])
        assert cluster.service.cluster.prefix_stats().num_sources == 1
        asked = holder.snapshot_requests
        cluster.service.update_leaving([])  # It stays after all, so what it has is asked for and found again.
        await settled(lambda: holder.snapshot_requests > asked)
        assert cluster.service.cluster.prefix_stats().num_sources == 2


async def test_a_leaving_worker_that_dies_is_lost() -> None:
    async with fake_cluster(num_workers=2) as cluster:
        pause_all(cluster, 6)
        stream = await cluster.service.open(chat())
        await settled(lambda: stream.choices[0].num_tokens == 6)
        first, other = busy_worker(cluster)
        cluster.service.update_leaving([first.member_id])
        other.script.pause_at = None
        first.script.error, first.script.die_at = WorkerLost("died"), 6
        first.script.resume.set()
        assert (await read(stream))[0] == [expected(cluster, 0)]
        assert len(other.requests) == 1


async def test_a_member_that_stays_after_all_moves_nothing() -> None:
    moved: list[MemberId] = []
    leaving = LeavingMembers(0.0, moved.append)
    first, second = MemberId("a"), MemberId("b")
    assert leaving.update([first, second])
    assert not leaving.update([second, first])
    assert leaving.update([second])
    await settled(lambda: bool(moved))
    assert moved == [second]
    leaving.close()


@pytest.mark.parametrize("is_settled", [True, False])
async def test_a_request_that_has_all_its_text_does_not_move(is_settled: bool) -> None:
    async with fake_cluster(num_workers=2, leave_grace_s=0.0) as cluster:
        stream = await cluster.service.open(chat())
        texts = (await read(stream))[0] if is_settled else None
        cluster.service.update_leaving([cluster.workers[0].member_id])
        texts = texts or (await read(stream))[0]
        assert texts == [expected(cluster, 0)]
