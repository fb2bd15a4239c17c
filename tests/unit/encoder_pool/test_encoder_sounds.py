"""Tests sounds that wait for the device: a batch begins with the first in line and stays within its cost, and a sound
is dropped when its last waiter leaves."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from encoder_pool.planning import (
    DecodeLine,
    DecodeRoom,
    EncodeJob,
    EncodeJobs,
    EncodeWaiter,
    QueuedSound,
    choose_sounds,
    waiter_of,
)
from encoder_pool.planning.encode_job import Phase
from fabric.contracts import CallTurn, Destination, EncodeRequest, MediaItem, MemberId, MmHash, RequestId
from modalities.family import EncoderInput, Waveform

WAVEFORM = Waveform(np.zeros(4800, np.float32), 48000, 1600)
ROOM = DecodeRoom(max_cost=100, max_items=3, max_long_cost=100, max_long_items=1)


def free(modality: str, cost: int) -> float:
    return 0.0


def by_cost(modality: str, cost: int) -> float:
    return float(cost)


def sound(name: str, cost: int = 10, units: tuple[int, ...] = (2, 2)) -> MediaItem:
    return MediaItem(0, "audio", MmHash(name), (cost, 1, 1), units, cost, f"part.{name}")


def wish(item: MediaItem, number: int) -> EncodeWaiter:
    destination = Destination(MemberId("worker-1"), "local://worker-1")
    request_id = RequestId(f"req-{number}")
    request = EncodeRequest(request_id, 0, MemberId("router-1"), (item,), destination, (float(number), request_id))
    return waiter_of(request, CallTurn(number, request.age, 0.0), item, b"wav", 0.0)


def decoded(jobs: EncodeJobs, item: MediaItem, number: int = 1) -> tuple[EncodeJob, EncodeWaiter]:
    waiter = wish(item, number)
    job = jobs.join(waiter)
    jobs.decode_started(job)
    jobs.decoded_sound(job, WAVEFORM)
    return job, waiter


def inputs(item: MediaItem) -> list[EncoderInput]:
    return [EncoderInput("audio", np.zeros((5, 8), np.float32), (5, 1, 1)) for _ in item.unit_tokens]


@settings(deadline=None, max_examples=50)
@given(costs=st.lists(st.integers(1, 60), max_size=12), max_cost=st.integers(1, 100))
@example(costs=[4, 6], max_cost=10)
def test_a_batch_is_led_by_the_first_and_filled_within_its_cost(costs: list[int], max_cost: int) -> None:
    turns = [CallTurn(number, (float(number), ""), 0.0) for number in range(len(costs))]
    queued = [
        QueuedSound(turn.rank(0.0, 4.0, 0), MmHash(f"{turn.call}"), cost)
        for turn, cost in zip(turns, costs, strict=True)
    ]
    batch = choose_sounds(queued, max_cost)
    assert batch[:1] == queued[:1]
    cost = sum(one.cost for one in batch)
    assert cost <= max_cost or len(batch) == 1
    assert all(cost + left.cost > max_cost for left in set(queued) - set(batch)), "what fits is not left out"


def test_a_sound_waits_for_the_device_and_then_for_its_forward() -> None:
    jobs = EncodeJobs(patience=4.0, to_seconds=free)
    item = sound("a")
    job, _ = decoded(jobs, item)
    assert (job.phase, job.data) == (Phase.DECODED, b"")
    assert [one.mm_hash for one in jobs.queued_sounds()] == ["a"]
    totals = jobs.totals
    assert (list(jobs.queued_units()), totals.queued_cost, totals.num_prepared, totals.num_in_flight) == (
        [],
        10,
        1,
        1,
    )
    jobs.check_invariants()
    assert jobs.sound_started(item.mm_hash) == (job, WAVEFORM)
    assert list(jobs.queued_sounds()) == []
    jobs.check_invariants()
    jobs.decoded(job, inputs(item))
    assert job.phase is Phase.ENCODING
    assert [one.key.unit for one in jobs.queued_units()] == [0, 1]
    jobs.check_invariants()


def test_sounds_are_ranked_as_units_are() -> None:
    jobs = EncodeJobs(patience=4.0, to_seconds=by_cost)
    for number, (name, cost) in enumerate((("long", 30), ("short", 10), ("middle", 20))):
        decoded(jobs, sound(name, cost), number)
    ranked = list(jobs.queued_sounds())
    assert [one.mm_hash for one in ranked] == ["short", "middle", "long"]


def test_who_leaves_takes_the_sound_along_wherever_it_is() -> None:
    jobs = EncodeJobs(patience=4.0, to_seconds=free)
    item = sound("a")
    job, waiter = decoded(jobs, item)
    assert jobs.leave(waiter) is job
    assert (list(jobs.queued_sounds()), jobs.totals.queued_cost, jobs.is_live(job)) == ([], 0, False)
    job, waiter = decoded(jobs, item)
    jobs.sound_started(item.mm_hash)
    assert jobs.leave(waiter) is job, "on the device"
    assert not jobs.is_live(job)
    another, _ = decoded(jobs, item, 2)
    assert another is not job
    jobs.check_invariants()


def test_who_comes_while_it_is_on_the_device_is_served_too() -> None:
    jobs = EncodeJobs(patience=4.0, to_seconds=free)
    item = sound("a")
    job, first = decoded(jobs, item)
    jobs.sound_started(item.mm_hash)
    second = wish(item, 2)
    assert jobs.join(second) is job
    assert jobs.leave(first) is None
    jobs.decoded(job, inputs(item))
    assert len(list(jobs.queued_units())) == 2


def test_one_that_fails_on_the_device_ends_its_job() -> None:
    jobs = EncodeJobs(patience=4.0, to_seconds=free)
    item = sound("a")
    job, waiter = decoded(jobs, item)
    assert jobs.end(job) == [waiter]
    assert (list(jobs), list(jobs.queued_sounds())) == ([], [])


def test_a_waveform_counts_by_its_bytes_and_holds_no_decoder() -> None:
    jobs = EncodeJobs(patience=4.0, to_seconds=free)
    jobs.join(wish(sound("next"), 2))
    job, _ = decoded(jobs, sound("a"))
    following = DecodeLine(jobs, ROOM).next(0.0)
    assert following is not None, "no long item is being decoded"
    before = jobs.decoded_cost
    picture = MediaItem(0, "image", MmHash("p"), (1, 1, 10), (4,), 10, "part.p")
    other = jobs.join(wish(picture, 3))
    jobs.decode_started(other)
    jobs.decoded(other, [EncoderInput("image", np.zeros((10, 4 * 480), np.float32), (1, 1, 10))])
    assert jobs.decoded_cost == before / 4 + 10, "480 samples for a mel frame, four times as much for a patch"
    jobs.sound_started(job.item.mm_hash)
    jobs.decoded(job, inputs(job.item))
    assert jobs.decoded_cost == before / 4 + 10
