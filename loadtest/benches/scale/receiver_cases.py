"""Measures the bookkeeping of the receiver and the engine per event, for features on their way to a worker and for
prompts that arrive.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np

from fabric.contracts import (
    ArenaFull,
    AttemptId,
    BlockHash,
    FeatureLog,
    FeatureTicket,
    GenerateRequest,
    ManualClock,
    MediaItem,
    MemberId,
    MmHash,
    PlaceholderRange,
    RequestId,
    SamplingParams,
    SequenceId,
    StopConditions,
    UnitKey,
    UnitReady,
)
from fabric.transport import ArenaUsage, LandedFeature
from llm_workers.engine_interface import Update
from llm_workers.features import FeatureEndpoint, FeatureStore, Listener, Receiver
from llm_workers.open_calls import OpenCalls
from llm_workers.scheduling import (
    BlockPool,
    FeatureReference,
    NextRead,
    ReleasedFeature,
    Scheduler,
    SequenceTokens,
    StepEvents,
)
from llm_workers.worker_config import WorkerConfig
from loadtest.benches.scale.scale_case import ScaleCase
from modalities.family import Positions

NUM_UNITS = 16
"""Counts the units of each request; each unit has one token."""
NUM_EVENTS = 64
LARGE, SMALL = 1 << 20, 4
"""`LARGE` is the number of bytes of a feature that finds no room, and `SMALL` that of a feature that does (a
float32)."""


def _request(name: str, age: float, num_tokens: int = 2 * NUM_UNITS, num_units: int = NUM_UNITS) -> GenerateRequest:
    media = tuple(
        MediaItem(index, "image", MmHash(f"{name}-{index}"), (1, 2, 2), (1,), 4, "") for index in range(num_units)
    )
    return GenerateRequest(
        request_id=RequestId(name),
        attempt=0,
        router_id=MemberId("router"),
        router_address="local://router",
        token_ids=tuple(range(num_tokens)),
        placeholders=tuple(PlaceholderRange(2 * index, 1, index, 0, 0) for index in range(num_units)),
        media=media,
        sampling=SamplingParams(),
        stop=StopConditions(max_tokens=16),
        age=(age, name),
        dispatched_items=tuple(range(num_units)),
    )


def _units(request: GenerateRequest) -> list[UnitKey]:
    return [item.unit_keys()[0] for item in request.media]


def _announcement(request: GenerateRequest, unit: UnitKey, nbytes: int) -> UnitReady:
    ticket = FeatureTicket("e", b"", 0, 0, nbytes, 1, (1, 1, 1), "float32", 60.0)
    return UnitReady(MemberId("e"), "local://e", request.request_id, request.attempt, unit, ticket)


class _Sink:
    """A `_Sink` has room for small features only. Its pulls end when `land` is called."""

    is_alive = True

    def __init__(self) -> None:
        self.pulls: list[tuple[FeatureTicket, Future[LandedFeature]]] = []

    def pull(self, ticket: FeatureTicket, timeout_s: float) -> Future[LandedFeature]:
        if ticket.nbytes > SMALL:
            raise ArenaFull("the arena has no room")
        future: Future[LandedFeature] = Future()
        self.pulls.append((ticket, future))
        return future

    def land(self) -> None:
        for ticket, future in self.pulls:
            future.set_result(LandedFeature(0, np.zeros(SMALL, np.uint8), ticket, 0.0))
        self.pulls.clear()

    def free(self, slot_id: int) -> None:
        pass

    def peer_dead(self, source: str) -> None:
        pass

    def usage(self) -> ArenaUsage:
        return ArenaUsage(0, 1 << 30, 0, 0, 0)

    def close(self) -> None:
        pass


class _Plane:
    """A `_Plane` accepts every message and delivers none. It also stands in for the engine, and collects the references
    that the engine is handed."""

    address = "local://worker"
    is_alive = True
    num_dropped = 0

    def __init__(self) -> None:
        self.held: dict[UnitKey, FeatureReference] = {}

    def start(self, handler: object) -> None:
        pass

    def send(self, address: str, message: object) -> bool:
        return True

    def forget(self, address: str) -> None:
        pass

    def close(self) -> None:
        pass

    def hold_feature(self, reference: FeatureReference) -> None:
        self.held[reference.unit] = reference

    def evict_feature(self, unit: UnitKey) -> None:
        pass


def _prepare_receiver(num_waiting: int) -> Callable[[], int]:
    """Prepares a request with sixteen units that arrives, has its units announced, pulled and read, and ends. Meanwhile
    `num_waiting` other requests wait for sixteen announced units each that find no room."""
    sink, plane, clock = _Sink(), _Plane(), ManualClock()
    listener = Listener(lambda *_: None, lambda _: None, lambda *_: None, lambda _: None)
    receiver = Receiver(FeatureEndpoint(MemberId("w"), plane, sink, clock), WorkerConfig(), (1, 1), plane, listener)
    loop = asyncio.new_event_loop()

    def come(request: GenerateRequest, nbytes: int) -> AttemptId:
        attempt = AttemptId(request.request_id, request.attempt)
        receiver.expect(attempt, request)
        for unit in _units(request):
            receiver.announce(_announcement(request, unit, nbytes))
        receiver.admit(attempt, _units(request))
        receiver.update_reads({unit: {attempt: NextRead(0, place)} for place, unit in enumerate(_units(request))})
        return attempt

    async def begin() -> None:
        receiver.start()

    loop.run_until_complete(begin())
    for number in range(num_waiting):
        come(_request(f"waiting-{number}", 1.0 + number), LARGE)
    numbers = itertools.count()

    async def serve() -> None:
        request = _request(f"served-{next(numbers)}", 0.0)
        attempt = come(request, SMALL)
        sink.land()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for unit in _units(request):
            receiver.update_reads({unit: {attempt: None}})
            receiver.release(ReleasedFeature(unit, (plane.held.pop(unit),)))
            receiver.settle()
        receiver.end(attempt)

    def run() -> int:
        loop.run_until_complete(serve())
        return 3 * NUM_UNITS

    return run


def _prepare_shared_unit(num_sharers: int) -> Callable[[], int]:
    """Prepares one more announcement of a unit that `num_sharers` requests wait for and that finds no room. The
    measured event includes the decisions on what to pull and what to release."""
    store = FeatureStore(WorkerConfig(), ManualClock(), FeatureLog(MemberId("worker"), 1))
    unit = UnitKey(MmHash("popular"), 0)
    for number in range(num_sharers):
        attempt = AttemptId(RequestId(f"r{number}"), 0)
        store.expect(attempt, (0, float(number), ""), {unit: (1, 1, 1)}, [unit])
        store.admit(attempt, [unit])
    requests = [_request(f"r{number}", 0.0, num_units=0) for number in range(NUM_EVENTS)]

    def run() -> int:
        for request in requests:
            store.announce(_announcement(request, unit, LARGE))
            assert store.next_pull() is not None
            store.take_releasable()
            store.take_needed()
        return len(requests)

    return run


def _prepare_reads(num_waiting: int) -> Callable[[], int]:
    """Prepares a request with sixteen units that is added, has its next reads reported, and is aborted, next to
    `num_waiting` other requests."""
    scheduler = Scheduler(WorkerConfig(num_blocks=64), 1 << 20, ManualClock())
    for number in range(num_waiting):
        request = _request(f"waiting-{number}", 1.0 + number)
        scheduler.add(scheduler.prepare(request, _positions(request)))
    scheduler.drain_reads()
    added = _request("added", 0.0)
    arrival = scheduler.prepare(added, _positions(added))

    def run() -> int:
        for _ in range(NUM_EVENTS):
            scheduler.add(arrival)
            assert len(scheduler.drain_reads()) == NUM_UNITS
            scheduler.abort(arrival.attempt_id)
            scheduler.drain_reads()
            scheduler.release_unneeded()
        return NUM_EVENTS

    return run


def _positions(request: GenerateRequest) -> Positions:
    return Positions(np.arange(len(request.token_ids), dtype=np.int64)[None], 0)


def _prepare_prompt(num_tokens: int) -> Callable[[], int]:
    """Prepares a prompt of `num_tokens` that is added on the engine's thread, and aborted."""
    scheduler = Scheduler(WorkerConfig(num_blocks=1 << 15), 1 << 20, ManualClock())
    request = _request("long", 0.0, num_tokens, num_units=0)
    arrival = scheduler.prepare(request, _positions(request))

    def run() -> int:
        for _ in range(NUM_EVENTS):
            scheduler.add(arrival)
            scheduler.abort(arrival.attempt_id)
        return NUM_EVENTS

    return run


def _prepare_rest(num_blocks: int) -> Callable[[], int]:
    """Prepares a worker that becomes idle with a pool of `num_blocks` cached blocks."""
    pool, holder = BlockPool(num_blocks), SequenceId(RequestId("r"), 0, 0)
    blocks = pool.allocate(holder, num_blocks)
    hashes = [BlockHash(number.to_bytes(16, "little")) for number in range(num_blocks)]
    pool.publish(holder, None, blocks, hashes)
    pool.free(holder, blocks)

    def run() -> int:
        for _ in range(8):
            pool.check_at_rest(256)
        return 8

    return run


def _prepare_calls(num_open: int) -> Callable[[], int]:
    """Prepares a step's update with one token that reaches a worker with `num_open` open calls."""
    calls = OpenCalls(MemberId("w"), _Plane(), ManualClock())

    async def open_all() -> None:
        for number in range(num_open):
            calls.open(_request(f"r{number}", 0.0, num_units=0))

    asyncio.new_event_loop().run_until_complete(open_all())
    sequence_id = SequenceId(RequestId("r0"), 0, 0)

    def updates() -> Iterator[Update]:
        for index in range(NUM_EVENTS):
            tokens = (SequenceTokens(sequence_id, index, (1,), None),)
            yield Update(events=StepEvents(tokens, (), (), (), ()))

    def run() -> int:
        for update in updates():
            calls.apply(update)
        return NUM_EVENTS

    return run


CASES = (
    ScaleCase("receive a unit (announce, pull, release), requests waiting with 16 units", 64, _prepare_receiver),
    ScaleCase("announce a shared unit, requests that wait for it", 256, _prepare_shared_unit),
    ScaleCase("add a request and tell its reads, requests waiting with 16 units", 100, _prepare_reads),
    ScaleCase("add a prompt on the engine's thread, tokens", 3_200, _prepare_prompt),
    ScaleCase("come to rest, blocks cached", 16_384, _prepare_rest),
    ScaleCase("take a step's update, calls open", 128, _prepare_calls),
)
