"""Tests requests that no member can serve at the moment: they wait for workers and encoders in order, and hold
nothing."""

from __future__ import annotations

import asyncio

import pytest
from router_chats import chat, expected, image, read, text

from deploy.testing import FakeCluster, FakeEncoder, fake_cluster, reply_text, settled
from fabric.contracts import (
    AbortAttempt,
    Aborted,
    EncodeFailed,
    EncoderLost,
    FeatureNeeded,
    ManualClock,
    MemberId,
    NoCapacity,
    Overloaded,
    TokenFrame,
    UnsupportedModality,
    WorkerLost,
)
from router.api import http_error
from router.planning.capacity_queue import FIRST_ON_THE_WAY
from router.run import RequestStream
from router.run.failures import Setbacks

WAIT_S = 120.0


def waiting(cluster: FakeCluster) -> int:
    value = cluster.service.metrics.registry.get_sample_value("weft_router_requests_waiting")
    assert value is not None
    return int(value)


def waits(cluster: FakeCluster, outcome: str) -> tuple[float, float]:
    """Returns how many waits ended with `outcome`, and the seconds that they took together."""
    read_sample = cluster.service.metrics.registry.get_sample_value
    names = (f"weft_router_capacity_wait_seconds_{part}" for part in ("count", "sum"))
    count, seconds = (read_sample(name, {"outcome": outcome}) or 0.0 for name in names)
    return count, seconds


def answer(stream: RequestStream) -> str:
    return reply_text(stream.prompt_token_ids, 7, 0)


async def in_line(cluster: FakeCluster, num_waiting: int) -> None:
    await settled(lambda: waiting(cluster) == num_waiting)


async def turns(number: int = 50) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_before_any_member_is_ready_requests_wait() -> None:
    clock = ManualClock()
    async with fake_cluster(num_workers=0, num_encoders=0, clock=clock, capacity_wait_s=WAIT_S) as cluster:
        about_text = await cluster.service.open(chat("hello"))
        about_picture = await cluster.service.open(chat([image(), text("?")]))
        await in_line(cluster, 2)
        clock.advance(30.0)
        cluster.add_worker()
        cluster.publish()
        assert (await read(about_text))[0] == [answer(about_text)]
        await in_line(cluster, 1)
        clock.advance(30.0)
        cluster.add_encoder()
        cluster.publish()
        assert (await read(about_picture))[0] == [answer(about_picture)]
        assert waits(cluster, "served") == (2, 30.0 + 60.0)
        assert waiting(cluster) == 0


async def test_the_only_encoder_is_waited_for_by_what_was_in_flight_and_by_what_came_after() -> None:
    async with fake_cluster(capacity_wait_s=WAIT_S) as cluster:
        (first,) = cluster.encoders
        first.gate = asyncio.Event()
        first.failures = [EncoderLost("died")] * 3
        begun = [await cluster.service.open(chat([image(seed), text("?")])) for seed in range(3)]
        await settled(lambda: len(first.requests) == 3)
        cluster.remove(first)
        first.gate.set()
        await in_line(cluster, 3)
        cluster.publish()
        late = [await cluster.service.open(chat([image(seed), text("?")])) for seed in range(3, 6)]
        await in_line(cluster, 6)
        worker = cluster.workers[0]
        await settled(lambda: worker.num_open == 0)
        assert {AbortAttempt(stream.request_id, 0) for stream in begun} <= set(worker.aborted), "nothing is held"
        second = cluster.add_encoder()
        cluster.publish()
        for stream in (*begun, *late):
            assert (await read(stream))[0] == [answer(stream)]
        assert [request.request_id for request in second.requests] == [s.request_id for s in (*begun, *late)]
        assert [request.attempt for request in second.requests] == [1, 1, 1, 0, 0, 0]


async def test_a_stream_with_tokens_waits_for_its_worker_and_goes_on() -> None:
    async with fake_cluster(capacity_wait_s=WAIT_S) as cluster:
        (first,) = cluster.workers
        first.script.pause_at = 9
        stream = await cluster.service.open(chat(n=2))
        await settled(lambda: all(choice.num_tokens == 9 for choice in stream.choices))
        first.script.error, first.script.die_at = WorkerLost("died"), 9
        first.script.resume.set()
        cluster.remove(first)
        await in_line(cluster, 1)
        cluster.publish()
        await turns()
        assert not stream.is_ended
        second = cluster.add_worker()
        cluster.publish()
        texts, reasons, _ = await read(stream)
        assert texts == [expected(cluster, 0), expected(cluster, 1)]
        assert reasons == ["stop", "stop"]
        assert second.requests[0].emitted == tuple(tuple(words.encode()[:9]) for words in texts)


async def test_an_encoder_needed_again_in_mid_stream_is_waited_for() -> None:
    """A preempted sequence needs its picture again, and the encoder has died in the meantime."""
    async with fake_cluster(capacity_wait_s=WAIT_S) as cluster:
        (worker,) = cluster.workers
        worker.script.pause_at = 9
        stream = await cluster.service.open(chat([image()]))
        await settled(lambda: stream.choices[0].num_tokens == 9)
        cluster.remove(cluster.encoders[0])
        cluster.publish()
        request = worker.requests[0]
        units = tuple(request.media[0].unit_keys())
        worker.plane.send(
            cluster.plane.address, FeatureNeeded(worker.member_id, request.request_id, 0, units, "preempted")
        )
        await in_line(cluster, 1)
        worker.script.resume.set()
        worker.script.pause_at = None
        worker.script.forgets_prefix = True
        cluster.add_encoder()
        cluster.publish()
        assert (await read(stream))[0] == [answer(stream)]
        assert worker.requests[1].emitted == (tuple(answer(stream).encode()[:9]),)


async def test_the_wait_ends_at_its_deadline_and_not_before() -> None:
    clock = ManualClock()
    async with fake_cluster(num_encoders=0, clock=clock, capacity_wait_s=WAIT_S) as cluster:
        stream = await cluster.service.open(chat([image()]))
        await in_line(cluster, 1)
        clock.advance(WAIT_S - 0.001)
        cluster.publish()
        await turns()
        assert not stream.is_ended
        clock.advance(0.001)
        cluster.publish()
        with pytest.raises(NoCapacity, match="no encoder is available for image, and none came within 120 s") as caught:
            await read(stream)
        answered = http_error(caught.value)
        assert answered.status == 503
        assert int(answered.headers["retry-after"]) >= 1
        assert waits(cluster, "expired") == (1, WAIT_S)


async def test_several_waits_share_one_deadline() -> None:
    clock = ManualClock()
    async with fake_cluster(num_workers=0, num_encoders=0, clock=clock, capacity_wait_s=WAIT_S) as cluster:
        stream = await cluster.service.open(chat("hello"))
        await in_line(cluster, 1)
        clock.advance(100.0)
        first = cluster.add_worker()
        first.script.error, first.script.die_at = WorkerLost("died"), 2
        cluster.publish()
        await settled(lambda: len(first.requests) == 1)
        cluster.remove(first)
        cluster.publish()
        await in_line(cluster, 1)
        clock.advance(19.0)
        cluster.publish()
        await turns()
        assert not stream.is_ended
        clock.advance(1.0)
        cluster.publish()
        with pytest.raises(WorkerLost):
            await read(stream)


async def test_without_a_timer_of_ours_the_deadline_comes_all_the_same() -> None:
    async with fake_cluster(num_encoders=0, capacity_wait_s=0.05) as cluster:
        with pytest.raises(NoCapacity):
            await read(await cluster.service.open(chat([image()])))


async def test_waiting_costs_nothing_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_cluster(num_encoders=0, capacity_wait_s=WAIT_S) as cluster:
        streams = [await cluster.service.open(chat([image(seed)])) for seed in range(5)]
        await in_line(cluster, 5)
        await turns()
        asked = 0
        can_serve = cluster.service.cluster.can_serve

        def count(*args: object) -> bool:
            nonlocal asked
            asked += 1
            return can_serve(*args)

        monkeypatch.setattr(type(cluster.service.cluster), "can_serve", lambda self, *args: count(*args))
        await turns(500)
        assert asked == 0
        cluster.publish()
        await turns()
        assert asked == 1, "five equal needs are one question"
        for stream in streams:
            stream.close()
        await settled(lambda: cluster.service.admission.num_in_flight == 0)


async def test_who_waits_is_in_flight_and_who_leaves_frees_the_place() -> None:
    async with fake_cluster(num_encoders=0, capacity_wait_s=WAIT_S, max_in_flight=2) as cluster:
        streams = [await cluster.service.open(chat([image(seed)])) for seed in range(2)]
        await in_line(cluster, 2)
        with pytest.raises(Overloaded):
            await cluster.service.open(chat([image(9)]))
        streams[0].close()
        with pytest.raises(Aborted):
            await read(streams[0])
        await in_line(cluster, 1)
        await settled(lambda: cluster.service.admission.num_in_flight == 1)
        assert waits(cluster, "left")[0] == 1
        third = await cluster.service.open(chat([image(9)]))
        encoder = cluster.add_encoder()
        cluster.publish()
        for stream in (streams[1], third):
            assert (await read(stream))[0] == [answer(stream)]
        assert len(encoder.requests) == 2, "nothing was sent for the one that left"


async def test_a_router_that_stops_ends_those_that_wait() -> None:
    async with fake_cluster(num_encoders=0, capacity_wait_s=WAIT_S) as cluster:
        streams = [await cluster.service.open(chat([image(seed)])) for seed in range(3)]
        await in_line(cluster, 3)
        await cluster.service.stop()
        for stream in streams:
            with pytest.raises(Aborted):
                await read(stream)
        assert waiting(cluster) == 0


async def test_what_no_encoder_serves_by_config_is_refused_at_once() -> None:
    """A cluster with `encoders.replicas: 0` takes no pictures, so there is no encoder to wait for."""
    async with fake_cluster(num_encoders=0, capacity_wait_s=WAIT_S, max_items_per_prompt={"image": 0}) as cluster:
        with pytest.raises(UnsupportedModality):
            await cluster.service.open(chat([image()]))
        assert waiting(cluster) == 0


async def test_text_is_not_held_up_by_pictures_that_wait() -> None:
    async with fake_cluster(num_encoders=0, capacity_wait_s=WAIT_S) as cluster:
        picture = await cluster.service.open(chat([image()]))
        await in_line(cluster, 1)
        words = await cluster.service.open(chat("hello"))
        assert (await read(words))[0] == [answer(words)]
        assert waiting(cluster) == 1
        picture.close()
        await settled(lambda: cluster.service.admission.num_in_flight == 0)


async def test_released_in_order_few_at_a_time_and_no_newcomer_overtakes() -> None:
    num_waiting = 3 * FIRST_ON_THE_WAY
    async with fake_cluster(num_encoders=0, capacity_wait_s=WAIT_S) as cluster:
        streams = [await cluster.service.open(chat([image(seed)])) for seed in range(num_waiting)]
        await in_line(cluster, num_waiting)
        encoder = cluster.add_encoder()
        encoder.gate = asyncio.Event()
        cluster.publish()
        streams.append(await cluster.service.open(chat([image(999)])))
        await settled(lambda: len(encoder.requests) == FIRST_ON_THE_WAY)
        await turns(200)
        assert len(encoder.requests) == FIRST_ON_THE_WAY, "a member that has just started gets no herd"
        assert waiting(cluster) == num_waiting + 1 - FIRST_ON_THE_WAY
        encoder.gate.set()
        for stream in streams:
            assert (await read(stream))[0] == [answer(stream)]
        assert [request.request_id for request in encoder.requests] == [stream.request_id for stream in streams]


async def test_two_encoders_that_come_together_share_those_that_waited() -> None:
    async with fake_cluster(num_encoders=0, capacity_wait_s=WAIT_S) as cluster:
        streams = [await cluster.service.open(chat([image(seed)])) for seed in range(FIRST_ON_THE_WAY)]
        await in_line(cluster, FIRST_ON_THE_WAY)
        both = [cluster.add_encoder(), cluster.add_encoder()]
        for encoder in both:
            encoder.gate = asyncio.Event()
        cluster.publish()
        await settled(lambda: sum(len(encoder.requests) for encoder in both) == FIRST_ON_THE_WAY)
        assert [len(encoder.requests) for encoder in both] == [FIRST_ON_THE_WAY // 2] * 2
        for encoder in both:
            assert encoder.gate is not None
            encoder.gate.set()
        for stream in streams:
            assert (await read(stream))[0] == [answer(stream)]


async def test_an_encoder_that_is_there_again_is_used_once_its_exclusion_ends() -> None:
    """The router lost its call to the encoder, but the encoder never left."""
    clock = ManualClock()
    async with fake_cluster(clock=clock, capacity_wait_s=WAIT_S, exclusion_s=7.0) as cluster:
        (encoder,) = cluster.encoders
        encoder.failures = [EncoderLost("can't be reached")]
        stream = await cluster.service.open(chat([image()]))
        await in_line(cluster, 1)
        clock.advance(6.9)
        cluster.publish()
        await turns()
        assert len(encoder.requests) == 1
        clock.advance(0.2)
        cluster.publish()
        assert (await read(stream))[0] == [answer(stream)]
        assert len(encoder.requests) == 2


async def test_the_end_of_an_exclusion_wakes_by_itself() -> None:
    async with fake_cluster(capacity_wait_s=WAIT_S, exclusion_s=0.05) as cluster:
        cluster.encoders[0].failures = [EncoderLost("can't be reached")]
        stream = await cluster.service.open(chat([image()]))
        assert (await read(stream))[0] == [answer(stream)]


async def test_a_picture_that_kills_every_encoder_is_given_up() -> None:
    async with fake_cluster(num_encoders=0, capacity_wait_s=WAIT_S) as cluster:
        stream = await cluster.service.open(chat([text("see"), image()]))
        killed: list[FakeEncoder] = []
        for _ in range(3):
            await in_line(cluster, 1)
            encoder = cluster.add_encoder()
            encoder.failures = [EncoderLost("died")]
            cluster.publish()
            await settled(lambda encoder=encoder: len(encoder.requests) == 1)
            cluster.remove(encoder)
            cluster.publish()
            killed.append(encoder)
        with pytest.raises(EncodeFailed, match="3 encoders were lost") as caught:
            await read(stream)
        assert caught.value.param == "messages.0.content.1"
        assert caught.value.retryable is False


async def test_the_last_token_may_come_while_the_request_waits() -> None:
    """The worker dies after it has sent its last frame, which is still on the way."""
    async with fake_cluster(capacity_wait_s=WAIT_S) as cluster:
        (worker,) = cluster.workers
        held: list[TokenFrame] = []

        def hold_last(frames: list[TokenFrame]) -> list[TokenFrame]:
            held.extend(frame for frame in frames if frame.finish_reason)
            return [frame for frame in frames if not frame.finish_reason]

        worker.script.frames = hold_last
        stream = await cluster.service.open(chat())
        await settled(lambda: bool(held))
        cluster.remove(worker)
        cluster.publish()
        await in_line(cluster, 1)
        worker.script.frames = lambda frames: frames
        worker._send_frames(worker.requests[0], held)
        texts, reasons, _ = await read(stream)
        assert (texts, reasons) == ([answer(stream)], ["stop"])
        await in_line(cluster, 0)


async def test_a_line_moves_faster_with_each_that_arrives() -> None:
    """New requests join the line in the meantime, so a busy cluster would never empty it at a fixed pace."""
    async with fake_cluster(num_encoders=0, capacity_wait_s=WAIT_S) as cluster:
        num_waiting = 4 * FIRST_ON_THE_WAY
        streams = [await cluster.service.open(chat([image(seed)])) for seed in range(num_waiting)]
        await in_line(cluster, num_waiting)
        encoder = cluster.add_encoder()
        encoder.gate = asyncio.Event()
        cluster.publish()
        await settled(lambda: len(encoder.requests) == FIRST_ON_THE_WAY)
        begun, encoder.gate = encoder.gate, asyncio.Event()
        begun.set()
        for stream in streams[:FIRST_ON_THE_WAY]:
            assert (await read(stream))[0] == [answer(stream)]
        await settled(lambda: len(encoder.requests) == 3 * FIRST_ON_THE_WAY)
        await turns(200)
        assert len(encoder.requests) == 3 * FIRST_ON_THE_WAY, "twice as many as before are on the way"
        encoder.gate.set()
        for stream in streams[FIRST_ON_THE_WAY:]:
            assert (await read(stream))[0] == [answer(stream)]


def test_an_encoder_lost_with_many_items_of_a_request_counts_once() -> None:
    setbacks = Setbacks(exclusion_s=7.0)
    for _ in range(5):
        setbacks.encoder_failed(MemberId("encoder-1"), EncoderLost("its device fails"))
    setbacks.encoder_failed(MemberId("encoder-2"), EncoderLost("its device fails"))
    with pytest.raises(EncodeFailed, match="3 encoders were lost"):
        setbacks.encoder_failed(MemberId("encoder-3"), EncoderLost("its device fails"))
