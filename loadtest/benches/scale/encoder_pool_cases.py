"""Measures the encoder's bookkeeping while much is stored and many requests wait: the arena, the feature table, the
queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count

import msgspec
import numpy as np

from encoder_pool.decode_process import Decoded, OnUnits
from encoder_pool.encode_call import Announcer
from encoder_pool.encoder_config import EncoderConfig
from encoder_pool.pipeline import Pipeline
from encoder_pool.planning import (
    CostEstimate,
    DecodeLine,
    DecodeRoom,
    EncodeJobs,
    FeatureSpec,
    FeatureTable,
    ForwardResult,
    ForwardUnit,
    LeaseKey,
    SoundJob,
    SoundResult,
    choose_batch,
    waiter_of,
)
from fabric.contracts import (
    AttemptId,
    CallTurn,
    Destination,
    EncodeRequest,
    EncodeResult,
    FeatureLog,
    ManualClock,
    MediaItem,
    MemberId,
    MmHash,
    PlaneMessage,
    RequestId,
    UnitKey,
)
from fabric.transport import HEADER_BYTES, Handler, SourceMemory
from loadtest.benches.scale.scale_case import ScaleCase
from modalities.family import EncoderInput

SLOT_BYTES = 1024
NUM_EVENTS = 200
NUM_TOGETHER = 16
"""One large feature takes this many slots."""
COST = 1024
"""A picture has this many patches."""
NUM_PUMPED = 50
PIXELS = np.zeros((1, 1), np.float32)
ROUTER, WORKER = MemberId("router"), MemberId("worker")


class MemorySource(SourceMemory):
    """Implements `FeatureSource` without a transport."""

    is_alive = True

    def close(self) -> None: ...


class FullTable:
    """A `FullTable` has an arena full of equal features. All are cached; with `is_leased`, every eighth is leased
    instead."""

    def __init__(self, num_slots: int, is_leased: bool = False) -> None:
        self.numbers = count()
        log = FeatureLog(MemberId("encoder"), 1)
        self.source = MemorySource("source", num_slots * SLOT_BYTES)
        self.table = FeatureTable(self.source, ManualClock(), 60.0, log)
        self.log = log
        for number in range(num_slots):
            unit = self.store(1)
            if is_leased and number % 8 == 0:
                self.table.lease(LeaseKey(WORKER, AttemptId(RequestId(unit.mm_hash), 0), unit), ROUTER)

    def store(self, num_slots: int) -> UnitKey:
        """Stores one more feature, of the size of `num_slots` slots."""
        unit = UnitKey(MmHash(f"{next(self.numbers):032x}"), 0)
        assert self.table.reserve(unit, num_slots * SLOT_BYTES - HEADER_BYTES, 1) is not None
        self.table.complete(unit)
        return unit


def _evict_one(num_slots: int) -> Callable[[], int]:
    full = FullTable(num_slots)

    def run() -> int:
        for _ in range(NUM_EVENTS):
            full.store(1)
        full.log.drain()
        return NUM_EVENTS

    return run


def _evict_neighbours(num_slots: int) -> Callable[[], int]:
    full = FullTable(num_slots)

    def run() -> int:
        for _ in range(NUM_EVENTS // NUM_TOGETHER):
            full.store(NUM_TOGETHER)
            for _ in range(NUM_TOGETHER):
                full.store(1)
        full.log.drain()
        return NUM_EVENTS // NUM_TOGETHER * NUM_TOGETHER

    return run


def _refuse(num_slots: int) -> Callable[[], int]:
    full = FullTable(num_slots, is_leased=True)
    wanted = UnitKey(MmHash("large"), 0)

    def run() -> int:
        for _ in range(NUM_EVENTS):
            assert full.table.reserve(wanted, 8 * SLOT_BYTES, 1) is None
        return NUM_EVENTS

    return run


def _claim(num_slots: int) -> Callable[[], int]:
    full = FullTable(num_slots, is_leased=True)

    def run() -> int:
        for _ in range(NUM_EVENTS):
            assert len(full.source.claim(16 * SLOT_BYTES - HEADER_BYTES) or ()) == 16
            full.source.unclaim()
        return NUM_EVENTS

    return run


def _usage(num_slots: int) -> Callable[[], int]:
    full = FullTable(num_slots, is_leased=True)

    def run() -> int:
        for _ in range(NUM_EVENTS):
            full.table.usage()
        return NUM_EVENTS

    return run


def _end_attempt(num_slots: int) -> Callable[[], int]:
    full = FullTable(num_slots, is_leased=True)
    units = [full.store(1) for _ in range(NUM_EVENTS)]

    def run() -> int:
        for unit in units:
            attempt_id = AttemptId(RequestId(unit.mm_hash), 0)
            full.table.lease(LeaseKey(WORKER, attempt_id, unit), ROUTER)
            full.table.end_attempt(attempt_id)
        return NUM_EVENTS

    return run


class QuickDecoder:
    """Implements `Decoder`; a picture is decoded at once."""

    num_parallel = 2

    async def decode(self, data: bytes, item: MediaItem, on_units: OnUnits) -> Decoded:
        return Decoded([EncoderInput(item.modality, PIXELS, item.grid)], 0.0)


class HeldForward:
    """Implements `Forward`; a forward pass ends when the bench calls `end`."""

    def __init__(self) -> None:
        self.job: tuple[int, Callable[[ForwardResult], None]] | None = None

    def submit(self, units: Sequence[ForwardUnit], done: Callable[[ForwardResult], None]) -> None:
        self.job = (len(units), done)

    def submit_sounds(self, sounds: Sequence[SoundJob], done: Callable[[SoundResult], None]) -> None:
        raise AssertionError("no sounds were asked for")

    def end(self) -> None:
        assert self.job is not None
        (num_units, done), self.job = self.job, None
        done(ForwardResult([None] * num_units, 0.01 * num_units))


class SilentPlane:
    address, num_dropped, is_alive = "local://encoder", 0, True

    def start(self, handler: Handler) -> None: ...

    def send(self, address: str, message: PlaneMessage) -> bool:
        return True

    def forget(self, address: str) -> None: ...

    def close(self) -> None: ...


class BusyPipeline:
    """A `BusyPipeline` is a pipeline with `num_queued` waiting pictures, each of a call of its own. They are encoded
    one by one, and for each that is done another arrives."""

    def __init__(self, num_queued: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._numbers = count()
        config = EncoderConfig(("image",), num_decode_processes=0, max_queue_cost=2**40)
        clock, self._forward = ManualClock(), HeldForward()
        self._clock = clock
        source = MemorySource("source", 2**20)
        self._table = FeatureTable(source, clock, 60.0, FeatureLog(MemberId("encoder"), 1))
        announcer = Announcer(MemberId("encoder"), SilentPlane(), source, self._table, 60.0)
        self._pipeline = Pipeline(
            MemberId("encoder"), config, self._table, announcer, QuickDecoder(), self._forward, clock, lambda: None
        )
        self._pipeline.open(FeatureSpec(1, 8, "float32"))
        for cost in (COST, 2 * COST):
            self._pipeline.costs.observe("image", cost, 1e-5 * cost)
        self._tasks: set[asyncio.Task[EncodeResult]] = set()
        for _ in range(num_queued):
            self._come()
        self._settle()

    def run(self) -> int:
        num_done = 0
        while num_done < NUM_PUMPED:
            self._forward.end()
            self._settle()
            self._table.end_worker(WORKER)
            ended = {task for task in self._tasks if task.done()} if not num_done % 20 else set()
            self._tasks -= ended
            self._come()
            self._settle()
            num_done += 1
        return num_done

    def run_overdue(self) -> int:
        """Measures calls whose time is over before they are served."""
        for _ in range(NUM_PUMPED):
            self._come(time_left_s=1.0)
            self._settle()
            self._clock.advance(1.0)
            self._pipeline.end_overdue()
            self._settle()
        overdue = {task for task in self._tasks if task.done()}
        self._tasks -= overdue
        assert len(overdue) == NUM_PUMPED
        assert all(one.error is not None for task in overdue for one in task.result().items)
        return NUM_PUMPED

    def __del__(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.close()

    def _come(self, time_left_s: float = 0.0) -> None:
        number = next(self._numbers)
        item = MediaItem(0, "image", MmHash(f"{number:032x}"), (1, 32, 32), (4,), COST, "part")
        request_id = RequestId(f"req-{number}")
        destination = Destination(WORKER, "local://worker")
        request = EncodeRequest(request_id, 0, ROUTER, (item,), destination, (float(number), request_id))
        request = msgspec.structs.replace(request, time_left_s=time_left_s)
        self._tasks.add(self._loop.create_task(self._pipeline.encode(request, [b"file"])))

    def _settle(self) -> None:
        """Runs the loop until a forward pass is under way and nothing else is ready to run."""
        for _ in range(6):
            self._loop.call_soon(self._loop.stop)
            self._loop.run_forever()


def _pump(num_queued: int) -> Callable[[], int]:
    return BusyPipeline(num_queued).run


def _overdue(num_queued: int) -> Callable[[], int]:
    return BusyPipeline(num_queued).run_overdue


def _choose_batch(num_queued: int) -> Callable[[], int]:
    """Prepares decoded units of many calls; every second unit is too large for the batch."""
    jobs = EncodeJobs(4.0, lambda modality, cost: 1e-5 * cost)
    for number in range(num_queued):
        cost = COST if number % 2 else 20 * COST
        item = MediaItem(0, "image", MmHash(f"{number:032x}"), (1, 32, 32), (4,), cost, "part")
        age = (float(number), f"req-{number}")
        request = EncodeRequest(RequestId(age[1]), 0, ROUTER, (item,), Destination(WORKER, "local://worker"), age)
        job = jobs.join(waiter_of(request, CallTurn(number, age, 0.0), item, b"file", 0.0))
        jobs.decode_started(job)
        jobs.decoded(job, [EncoderInput("image", PIXELS, item.grid)])
    estimate = CostEstimate(1e-5, 0.01)

    def run() -> int:
        for _ in range(NUM_EVENTS // 4):
            assert len(choose_batch(jobs.queued_units(), 16 * COST, lambda _: estimate)) == 16
        return NUM_EVENTS // 4

    return run


def _find_to_decode(num_waiting: int) -> Callable[[], int]:
    """Prepares one item that is being decoded, and waiting items of which none has room next to it or next to the item
    that is due."""
    jobs = EncodeJobs(4.0, lambda modality, cost: 1e-5 * cost)
    room = DecodeRoom(max_cost=2 * COST, max_items=32, max_long_cost=2 * COST, max_long_items=1)
    line = DecodeLine(jobs, room)
    for number in range(num_waiting):
        cost = COST if number == 0 else 2 * COST
        item = MediaItem(0, "image", MmHash(f"{number:032x}"), (1, 32, 32), (4,), cost, "part")
        age, worker_id = (float(number), f"req-{number}"), MemberId(f"worker-{number % 8}")
        request = EncodeRequest(RequestId(age[1]), 0, ROUTER, (item,), Destination(worker_id, "local://worker"), age)
        jobs.join(waiter_of(request, CallTurn(number, age, 0.0), item, b"file", 0.0))
    first = line.next(0.0)
    assert first is not None
    jobs.decode_started(first)

    def run() -> int:
        for _ in range(NUM_EVENTS // 4):
            assert line.next(1.0, has_shares=True) is None
            assert line.in_the_way(1.0) is None
        return NUM_EVENTS // 4

    return run


CASES = (
    ScaleCase("encoder: encode a picture, pictures queued", 200, _pump),
    ScaleCase("encoder: answer a call that is late, pictures queued", 200, _overdue),
    ScaleCase("encoder: choose a batch, units queued", 200, _choose_batch),
    ScaleCase("encoder: evict a feature for another, slots stored", 1600, _evict_one),
    ScaleCase("encoder: evict neighbours for a large feature, slots stored", 1600, _evict_neighbours),
    ScaleCase("encoder: refuse what leases leave no room for, slots stored", 1600, _refuse),
    ScaleCase("encoder: claim a range among leases and give it up, slots stored", 1600, _claim),
    ScaleCase("encoder: look for an item that has room to be decoded, items waiting", 200, _find_to_decode),
    ScaleCase("encoder: read the arena's usage, slots stored", 1600, _usage),
    ScaleCase("encoder: lease a feature and end its attempt, slots stored", 1600, _end_attempt),
)
