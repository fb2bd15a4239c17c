"""Tests what the router does when encoders are lost, busy or silent, and when features do not stay."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
from router_chats import chat, expected, image, read, text

from deploy.testing import FakeCluster, fake_cluster, settled
from fabric.contracts import (
    Aborted,
    ArenaFull,
    EncodeFailed,
    EncodeRequest,
    EncodeResult,
    EncoderLost,
    ErrorInfo,
    FeatureNeeded,
    GenerateRequest,
    GenerateResult,
    InvalidMedia,
    MachineBusy,
    MemberId,
    NoCapacity,
    Overloaded,
    UnitKey,
    WorkerBackedUp,
    WorkerLost,
)
from router.api import http_error
from router.prompt import MediumFile
from router.run.encode_dispatcher import EncodeDispatcher
from router.run.failures import Setbacks


async def test_an_item_that_is_late_is_tried_elsewhere_and_may_come_again() -> None:
    """Lateness is no fault of the medium: another encoder may be less busy, and a client may send the request again."""
    late = ErrorInfo.of(MachineBusy("this machine is too busy to decode it within 9 s"))
    async with fake_cluster(num_encoders=2) as cluster:
        cluster.encoders[0].failures = [late]
        cluster.encoders[1].failures = []
        for number in range(4):  # Either encoder may be asked first.
            await read(await cluster.service.open(chat([image(number)])))
        assert not cluster.encoders[0].failures
        for encoder in cluster.encoders:
            encoder.failures = [late] * 9
        with pytest.raises(MachineBusy) as caught:
            await read(await cluster.service.open(chat([image(99)])))
        assert caught.value.param == "messages.0.content.0"
        answer = http_error(caught.value)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")


async def test_every_encoder_is_asked_once_before_the_request_is_told_that_all_are_busy() -> None:
    """Each encoder has the whole time, and none of the request's attempts asks it again."""
    late = ErrorInfo.of(MachineBusy("this encoder is too busy", retry_after_s=0.001))
    async with fake_cluster(num_encoders=5, max_encodes_per_item=8) as cluster:
        for encoder in cluster.encoders:
            encoder.failures = [late] * 9
        with pytest.raises(MachineBusy):
            await read(await cluster.service.open(chat([image(1)])))
        asked = [request.time_left_s for encoder in cluster.encoders for request in encoder.requests]
        assert asked == [10.0] * 5
        assert {len(encoder.requests) for encoder in cluster.encoders} == {1}
        assert len(cluster.workers[0].requests) == 1
    async with fake_cluster(num_encoders=5, max_encodes_per_item=3) as cluster:
        for encoder in cluster.encoders:
            encoder.failures = [late] * 9
        with pytest.raises(MachineBusy):
            await read(await cluster.service.open(chat([image(1)])))
        assert sum(len(encoder.requests) for encoder in cluster.encoders) == 3


async def test_an_encoder_that_was_busy_for_one_request_is_asked_by_the_next() -> None:
    async with fake_cluster() as cluster:
        cluster.encoders[0].failures = [ErrorInfo.of(MachineBusy("this encoder is too busy"))]
        with pytest.raises(MachineBusy):
            await read(await cluster.service.open(chat([image(1)])))
        assert (await read(await cluster.service.open(chat([image(1)]))))[0] == [expected(cluster)]


async def test_an_item_that_was_late_goes_elsewhere_while_the_attempt_has_time() -> None:
    """The router does not try another encoder if the answer would come after the attempt's end."""
    late = ErrorInfo.of(MachineBusy("this encoder is too busy"))
    for timeout_s, num_asked in ((600.0, 2), (5.0, 1)):
        async with fake_cluster(num_encoders=2, dispatch_timeout_s=timeout_s, encode_grace_s=5.0) as cluster:
            for encoder in cluster.encoders:
                encoder.failures = [late] * 9
            with pytest.raises(MachineBusy):
                await read(await cluster.service.open(chat([image(1)])))
            assert sum(len(encoder.requests) for encoder in cluster.encoders) == num_asked


async def test_refusals_of_busy_encoders_are_not_tries_that_failed() -> None:
    """Three encoders are busy and one dies, as many as the item has tries; the refusals do not count, so the item can
    be tried again."""
    async with fake_cluster(num_encoders=5, max_encodes_per_item=4) as cluster:
        busy, lost = MachineBusy("this encoder is too busy"), EncoderLost("died")
        answers = iter([busy, busy, busy, lost])
        encode = cluster.pools.encode

        async def answer(encoder_id: MemberId, request: EncodeRequest, media: Sequence[MediumFile]) -> EncodeResult:
            if (error := next(answers, None)) is not None:
                raise error
            return await encode(encoder_id, request, media)

        cluster.pools.encode = answer
        assert (await read(await cluster.service.open(chat([image(1)]))))[0] == [expected(cluster)]


async def test_a_file_that_goes_to_another_encoder_is_the_same_object() -> None:
    """Otherwise a cluster on Ray would put it into the object store again."""
    async with fake_cluster(num_encoders=3) as cluster:
        answers = iter([EncoderLost("died"), MachineBusy("this encoder is too busy")])
        encode, carried = cluster.pools.encode, []

        async def answer(encoder_id: MemberId, request: EncodeRequest, media: Sequence[MediumFile]) -> EncodeResult:
            carried.append(tuple(media))
            if (error := next(answers, None)) is not None:
                raise error
            return await encode(encoder_id, request, media)

        cluster.pools.encode = answer
        assert (await read(await cluster.service.open(chat([image(1), image(2)]))))[0] == [expected(cluster)]
        sent = [id(file) for files in carried for file in files]
        assert len(sent) >= 4
        assert len(set(sent)) == 2


async def test_items_of_a_call_that_were_late_together_go_elsewhere_together() -> None:
    """The items go to the next encoder in one call, so that they have the time of all of them there, too."""
    async with fake_cluster() as cluster:
        first = cluster.encoders[0]
        first.failures, first.gate = [ErrorInfo.of(MachineBusy("this encoder is too busy"))], asyncio.Event()
        stream = await cluster.service.open(chat([image(1), image(2)]))
        await settled(lambda: len(first.requests) == 1)
        second = cluster.add_encoder()
        cluster.publish()
        first.gate.set()
        assert (await read(stream))[0] == [expected(cluster)]
        (request,) = second.requests
        assert ([item.index for item in request.items], request.time_left_s) == ([0, 1], 20.0)


async def test_an_answer_that_is_there_counts_though_the_router_comes_to_it_late() -> None:
    """On a busy machine the router's loop may stand still for longer than the encoder may take."""
    async with fake_cluster(encode_timeout_ms={"image": 50}, encode_grace_s=0.0) as cluster:
        encoder = cluster.encoders[0]
        encoder.gate = asyncio.Event()
        stream = await cluster.service.open(chat([image(1)]))
        await settled(lambda: len(encoder.requests) == 1)
        encoder.gate.set()
        began_s = time.monotonic()
        while time.monotonic() < began_s + 0.1:  # Nothing else in this loop runs.
            pass
        assert (await read(stream))[0] == [expected(cluster)]


async def test_encoder_that_is_lost_hands_its_items_to_another() -> None:
    async with fake_cluster(num_encoders=2) as cluster:
        for encoder in cluster.encoders:
            encoder.failures = []
        cluster.encoders[0].failures = [EncoderLost("died")]
        cluster.encoders[1].failures = [EncoderLost("died")]
        used = cluster.encoders
        stream = await cluster.service.open(chat([image(1), text("?")]))
        await settled(lambda: any(encoder.requests for encoder in used))
        first = next(encoder for encoder in used if encoder.requests)
        second = next(encoder for encoder in used if encoder is not first)
        second.failures = []
        assert (await read(stream))[0] == [expected(cluster)]
        assert second.requests[0].items == first.requests[0].items
        assert second.requests[0].attempt == 0
        assert len(cluster.workers[0].requests) == 1


async def test_an_encoder_that_refused_a_call_is_free_of_it_at_once() -> None:
    """Otherwise the planner would take it for loaded, and other requests would wait there for the feature, until the
    request has its whole answer."""
    async with fake_cluster(num_encoders=2) as cluster:
        refusals = iter([Overloaded("the queue of this encoder is full", retry_after_s=0.1)])
        encode, asked = cluster.pools.encode, []

        async def answer(encoder_id: MemberId, request: EncodeRequest, media: Sequence[MediumFile]) -> EncodeResult:
            asked.append(encoder_id)
            if (error := next(refusals, None)) is not None:
                raise error
            return await encode(encoder_id, request, media)

        cluster.pools.encode = answer
        for encoder in cluster.encoders:
            encoder.gate = asyncio.Event()
        stream = await cluster.service.open(chat([image(1)]))
        await settled(lambda: len(asked) == 2 and any(encoder.requests for encoder in cluster.encoders))
        refused, second = asked
        encoders = cluster.service.cluster.columns(0.0).encoders
        slots = encoders.member_to_slot
        assert (encoders.num_open[slots[refused]], encoders.num_open[slots[second]]) == (0, 1)
        assert encoders.pending_units[slots[refused]] == 0.0
        for encoder in cluster.encoders:
            encoder.gate.set()
        assert (await read(stream))[0] == [expected(cluster)]


async def test_last_encoder_lost_ends_the_request() -> None:
    async with fake_cluster() as cluster:
        cluster.encoders[0].failures = [EncoderLost("died")]
        with pytest.raises(EncoderLost):
            await read(await cluster.service.open(chat([image()])))
        await settled(lambda: cluster.workers[0].num_cancelled == 1)
        assert (await read(await cluster.service.open(chat("text goes on"))))[1] == ["stop"]


async def test_transient_item_error_goes_elsewhere() -> None:
    async with fake_cluster(num_encoders=2) as cluster:
        full = ErrorInfo.of(ArenaFull("no room"))
        for encoder in cluster.encoders:
            encoder.failures = [full]
        stream = await cluster.service.open(chat([image()]))
        await settled(lambda: any(encoder.requests for encoder in cluster.encoders))
        next(encoder for encoder in cluster.encoders if not encoder.requests).failures = []
        assert (await read(stream))[0] == [expected(cluster)]


async def test_encoder_that_let_our_lease_lapse_is_asked_again() -> None:
    """The encoder aborts what the router asked for, but it is well, and it is the only one there is."""
    async with fake_cluster() as cluster:
        encoder = cluster.encoders[0]
        encoder.failures = [ErrorInfo.of(Aborted("router-0 has left"))]
        assert (await read(await cluster.service.open(chat([image()]))))[0] == [expected(cluster)]
        assert len(encoder.requests) == 2
        assert len(cluster.workers[0].requests) == 1


async def test_an_attempt_that_was_dispatched_never_lends_its_number_to_another() -> None:
    """This also holds when a member answers that there is no capacity: messages on the way for that attempt must not
    count for the next."""
    async with fake_cluster(num_workers=3, capacity_wait_s=30.0) as cluster:
        errors = iter([WorkerLost("died"), NoCapacity("none here")])
        serve, attempts = cluster.pools.generate, []

        async def generate(worker_id: MemberId, request: GenerateRequest) -> GenerateResult:
            attempts.append(request.attempt)
            if (error := next(errors, None)) is not None:
                raise error
            return await serve(worker_id, request)

        cluster.pools.generate = generate
        texts, reasons, _ = await read(await cluster.service.open(chat()))
        assert (texts, reasons) == ([expected(cluster)], ["stop"])
        assert attempts == [0, 1, 2]


async def test_encoder_that_saw_our_worker_leave_is_not_blamed() -> None:
    async with fake_cluster(num_workers=2, capacity_wait_s=0.0) as cluster:
        encoder = cluster.encoders[0]
        encoder.failures = [ErrorInfo.of(WorkerLost("worker has left"))]
        assert (await read(await cluster.service.open(chat([image()]))))[0] == [expected(cluster)]
        first, second = encoder.requests
        assert second.attempt == 1
        assert second.destination.worker_id != first.destination.worker_id


@pytest.mark.parametrize("is_refused_whole", [True, False])
@pytest.mark.parametrize("retry_after_s", [None, 0.0])
async def test_a_worker_that_is_backed_up_is_left_for_another_and_the_encoder_is_kept(
    is_refused_whole: bool, retry_after_s: float | None
) -> None:
    """The number of such workers does not matter: each is tried once, and the request does not return to a worker that
    looks idle before it has tried the others. An immediate refusal does not count as an attempt that failed; a refusal
    of an item that was already accepted does, because it has cost the request time."""
    max_attempts = 2 if is_refused_whole else 5
    error = WorkerBackedUp("the worker takes nothing", retry_after_s=retry_after_s)
    async with fake_cluster(num_workers=5, num_encoders=1, max_attempts=max_attempts, capacity_wait_s=0.0) as cluster:
        encoder = cluster.encoders[0]
        encoder.failures = [error if is_refused_whole else ErrorInfo.of(error)] * 4
        assert (await read(await cluster.service.open(chat([image()]))))[0] == [expected(cluster)]
        assert len({one.destination.worker_id for one in encoder.requests}) == 5
        assert [one.attempt for one in encoder.requests] == [0, 1, 2, 3, 4]
        assert (await read(await cluster.service.open(chat([image(1)]))))[1] == ["stop"], "the encoder is in use"


async def test_without_another_worker_a_backed_up_one_is_told_at_once() -> None:
    async with fake_cluster(num_workers=2, num_encoders=2, capacity_wait_s=3600.0) as cluster:
        for encoder in cluster.encoders:
            encoder.failures = [WorkerBackedUp("the worker takes nothing")] * 9
        stream = await cluster.service.open(chat([image()]))
        async with asyncio.timeout(10.0):
            with pytest.raises(WorkerBackedUp) as caught:
                await read(stream)
        answer = http_error(caught.value)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert sum(len(encoder.requests) for encoder in cluster.encoders) == 2, "once for each worker"


def test_a_worker_that_backs_up_again_and_again_uses_up_attempts() -> None:
    setbacks, error = Setbacks(exclusion_s=7.0), WorkerBackedUp("the worker takes nothing")
    for worker in ("worker-0", "worker-1", "worker-0", "worker-1"):
        setbacks.worker_refused(MemberId(worker))
        setbacks.attempt_lost(error, is_counted=True)
    assert setbacks.num_failed_attempts == 2
    assert setbacks.is_only_busy


def test_an_item_that_was_late_for_its_workers_sake_counts_each_time() -> None:
    setbacks, error = Setbacks(exclusion_s=7.0), WorkerBackedUp("the worker takes nothing")
    for worker in ("worker-0", "worker-1", "worker-2"):
        setbacks.exclude(MemberId(worker), error, now=0.0)
        setbacks.attempt_lost(error, is_counted=True)
    assert setbacks.num_failed_attempts == 3


async def test_the_only_encoder_being_busy_is_told_at_once() -> None:
    async with fake_cluster(capacity_wait_s=3600.0) as cluster:
        cluster.encoders[0].failures = [Overloaded("full", retry_after_s=2.0)]
        stream = await cluster.service.open(chat([image()]))
        async with asyncio.timeout(10.0):
            with pytest.raises(Overloaded):
                await read(stream)


async def test_broken_picture_is_the_clients_fault_and_named() -> None:
    async with fake_cluster() as cluster:
        cluster.encoders[0].failures = [ErrorInfo.of(InvalidMedia("truncated"))]
        stream = await cluster.service.open(chat([text("see"), image()]))
        with pytest.raises(InvalidMedia) as caught:
            await stream.started()
        assert caught.value.param == "messages.0.content.1"
        await settled(lambda: cluster.workers[0].num_cancelled == 1)
        assert len(cluster.workers[0].aborted) == 1


async def test_feature_that_never_stays_is_given_up() -> None:
    async with fake_cluster(max_encodes_per_item=3) as cluster:
        cluster.workers[0].script.pause_at = 0
        stream = await cluster.service.open(chat([image()]))
        await settled(lambda: len(cluster.encoders[0].requests) == 1)
        request = cluster.workers[0].requests[0]
        units = tuple(request.media[0].unit_keys())
        lost = FeatureNeeded(cluster.workers[0].member_id, request.request_id, 0, units, "lease_lost")
        for num_sent in (2, 3):
            cluster.workers[0].plane.send(cluster.plane.address, lost)
            await settled(lambda num_sent=num_sent: len(cluster.encoders[0].requests) == num_sent)
        cluster.workers[0].plane.send(cluster.plane.address, lost)
        with pytest.raises(EncodeFailed) as caught:
            await read(stream)
        assert caught.value.param == "messages.0.content.0"


def dispatcher_of(cluster: FakeCluster) -> EncodeDispatcher:
    (run,) = cluster.service._runs.values()
    assert run._attempt is not None
    assert run._attempt._dispatcher is not None
    return run._attempt._dispatcher


async def test_a_slow_encoder_is_not_asked_twice_and_one_whose_word_was_lost_is() -> None:
    async with fake_cluster() as cluster:
        encoder, worker = cluster.encoders[0], cluster.workers[0]
        encoder.gate, worker.script.pause_at = asyncio.Event(), 0
        stream = await cluster.service.open(chat([image()]))
        await settled(lambda: len(worker.requests) == len(encoder.requests) == 1)
        request = worker.requests[0]
        lost = FeatureNeeded(worker.member_id, request.request_id, 0, tuple(request.media[0].unit_keys()), "lost")
        trace, dispatcher = cluster.service.traces.get(request.request_id), dispatcher_of(cluster)
        assert trace is not None
        worker.plane.send(cluster.plane.address, lost)
        await settled(lambda: any(event.name == "feature_needed" for event in trace._events))
        assert len(dispatcher._calls) == 1
        encoder.gate.set()
        await settled(lambda: not dispatcher._calls)
        worker.plane.send(cluster.plane.address, lost)
        await settled(lambda: len(encoder.requests) == 2)
        worker.script.resume.set()
        assert (await read(stream))[1] == ["stop"]


async def test_unit_of_nobody_is_ignored() -> None:
    async with fake_cluster() as cluster:
        cluster.workers[0].script.pause_at = 0
        stream = await cluster.service.open(chat())
        await settled(lambda: len(cluster.workers[0].requests) == 1)
        request = cluster.workers[0].requests[0]
        strange = FeatureNeeded(cluster.workers[0].member_id, request.request_id, 0, (UnitKey("ff", 0),), "preempted")
        cluster.workers[0].plane.send(cluster.plane.address, strange)
        cluster.workers[0].script.resume.set()
        assert (await read(stream))[1] == ["stop"]
