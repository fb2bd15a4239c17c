"""Runs several encoders and workers in one process, with real parts except for the models: pipelines, feature tables
and arenas, local channel and plane, receivers, engines and schedulers. It serves the property that some request always
advances.

The forward writes bytes that follow from the unit, the executor checks that it reads those bytes, and tokens must be
those of a run with unlimited memory. The router is a loop that answers `FeatureNeeded`. The test turns the engines by
hand.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
from paged_fake import PagedFake, positions_of

from encoder_pool.decode_process import Decoded, OnUnits
from encoder_pool.encode_call import Announcer
from encoder_pool.encoder_config import EncoderConfig
from encoder_pool.pipeline import Pipeline
from encoder_pool.planning import FeatureSpec, FeatureTable, ForwardResult, ForwardUnit, LeaseKey
from fabric.contracts import (
    AttemptId,
    Destination,
    EncodeRequest,
    FeatureLog,
    FeatureNeeded,
    GenerateRequest,
    GenerateResult,
    ManualClock,
    MediaItem,
    MemberId,
    PlaneMessage,
    TokenFrames,
    UnitKey,
    UnitReady,
    UnitRelease,
    WeftError,
)
from fabric.transport import LocalChannelHub, LocalFeatureSink, LocalFeatureSource, LocalHub, LocalPlane
from llm_workers.engine import Engine
from llm_workers.engine_interface import Update
from llm_workers.features import FeatureEndpoint, Listener, Receiver
from llm_workers.open_calls import OpenCalls
from llm_workers.scheduling import FeatureReferences, Scheduler, StepPlan, StepResult
from llm_workers.worker_config import WorkerConfig
from modalities.family import EncoderInput

HIDDEN = 16
SPEC = FeatureSpec(1, HIDDEN, "float32")
LEASE_S = 10.0
MAX_MODEL_LEN = 60
MAX_ROUNDS = 1000


def content(unit: UnitKey) -> int:
    return (int(unit.mm_hash, 16) + unit.unit) % 251


class QuickDecoder:
    """Implements `Decoder`; an input's grid carries the unit's content to the forward."""

    num_parallel = 2

    async def decode(self, data: bytes, item: MediaItem, on_units: OnUnits) -> Decoded:
        pixels = np.zeros((1, 1), np.float32)
        inputs = [EncoderInput("image", pixels, (content(unit), 1, 1)) for unit in item.unit_keys()]
        for unit in inputs[:-1]:  # while the next unit is decoded, the previous one may be encoded
            await asyncio.sleep(0)
            on_units([unit])
        await asyncio.sleep(0)
        return Decoded(inputs[-1:], 0.1)


class QuickForward:
    """Implements `Forward`; a batch is done in the next turn of the loop."""

    def submit(self, units: Sequence[ForwardUnit], done: Callable[[ForwardResult], None]) -> None:
        asyncio.get_running_loop().call_soon(self._run, units, done)

    def _run(self, units: Sequence[ForwardUnit], done: Callable[[ForwardResult], None]) -> None:
        for unit in units:
            unit.buffer[:] = unit.input.grid[0]
        done(ForwardResult([None] * len(units), 0.01))


class Encoder:
    def __init__(self, world: World, number: int, arena_bytes: int) -> None:
        self.member_id = MemberId(f"encoder-{number}")
        self.plane = LocalPlane(world.hub, f"local://{self.member_id}")
        self.source = LocalFeatureSource(world.channel, self.member_id, arena_bytes)
        self.table = FeatureTable(self.source, world.clock, LEASE_S, FeatureLog(self.member_id, 1))
        config = EncoderConfig(("image",), num_decode_processes=0, max_batch_cost=16, lease_s=LEASE_S)
        announcer = Announcer(self.member_id, self.plane, self.source, self.table, LEASE_S)
        self.pipeline = Pipeline(
            self.member_id, config, self.table, announcer, QuickDecoder(), QuickForward(), world.clock, lambda: None
        )
        self.pipeline.open(SPEC)
        self.plane.start(self._on_message)

    def _on_message(self, message: PlaneMessage) -> None:
        assert isinstance(message, UnitRelease)
        key = LeaseKey(message.worker_id, AttemptId(message.request_id, message.attempt), message.unit)
        self.table.release(key, message.generation)
        self.pipeline.pump()

    def tick(self) -> None:
        self.table.expire()
        self.pipeline.pump()


class CheckedExecutor:
    """Runs the fake model and checks byte for byte what has landed."""

    def __init__(self, config: WorkerConfig, references: FeatureReferences) -> None:
        self._fake = PagedFake(config.num_blocks, config.block_size)
        self._references = references

    def execute(self, plan: StepPlan) -> StepResult:
        for unit in {splice.unit for chunk in plan.chunks for splice in chunk.splices}:
            assert (self._references.feature(unit).buffer == content(unit)).all(), f"{unit}: bytes of another feature"
        self._fake.features = set(self._references.readable_units())
        return self._fake.execute(plan)


class Worker:
    """Does what `WorkerService` does, without torch and with the engine in this thread."""

    def __init__(self, world: World, number: int, inbox_bytes: int, config: WorkerConfig) -> None:
        self.member_id = MemberId(f"worker-{number}")
        self.plane = LocalPlane(world.hub, f"local://{self.member_id}")
        self.sink = LocalFeatureSink(world.channel, self.member_id, inbox_bytes)
        self.scheduler = Scheduler(config, MAX_MODEL_LEN, world.clock)
        self.num_turns = 0
        self._updates: list[Update] = []
        executor = CheckedExecutor(config, self.scheduler.references)
        self.engine = Engine(self.scheduler, executor, world.clock, self._updates.append)
        self.calls = OpenCalls(self.member_id, self.plane, world.clock)
        listener = Listener(self.calls.unit_event, self.calls.needed, self._fail, _raise)
        endpoint = FeatureEndpoint(self.member_id, self.plane, self.sink, world.clock)
        self.receiver = Receiver(endpoint, config, (1, HIDDEN), self.engine, listener)
        self.receiver.start()
        self.plane.start(self._on_message)

    def _on_message(self, message: PlaneMessage) -> None:
        assert isinstance(message, UnitReady)
        self.receiver.announce(message)

    def _fail(self, attempt_id: AttemptId, error: Exception) -> None:
        raise AssertionError(f"{attempt_id}: {error}")

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        attempt_id = AttemptId(request.request_id, request.attempt)
        call = self.calls.open(request)
        try:
            self.receiver.expect(attempt_id, request)
            self.engine.add(request, positions_of(request))
            return await call.future
        finally:
            self.calls.close(attempt_id)
            self.receiver.end(attempt_id)

    def turn(self) -> None:
        """Runs one turn of the engine and applies its update."""
        self.engine._is_idle = False  # it must not sleep until a command comes
        assert self.engine._turn()
        self.scheduler.check_invariants()
        for update in self._updates:
            assert not update.failed, update.failed
            for released in update.released:
                self.receiver.release(released)
            self.receiver.update_reads(update.reads)
            for attempt_id, admission in update.admitted:
                self.receiver.admit(attempt_id, admission.missing_units)
            for sequence_id, unit, reason in update.needed:
                self.receiver.need(sequence_id.attempt_id, unit, reason)
            self.calls.apply(update)
        self._updates.clear()
        self.receiver.settle()
        self.receiver.store.check_invariants()


class World:
    """Connects encoders, workers and a router; it must be made in the event loop. `num_stalls` counts how often nothing
    moved until leases expired."""

    def __init__(self, arenas: Sequence[int], inboxes: Sequence[int], config: WorkerConfig) -> None:
        self.hub, self.channel, self.clock = LocalHub(), LocalChannelHub(), ManualClock()
        self.encoders = [Encoder(self, number, nbytes) for number, nbytes in enumerate(arenas)]
        self.workers = [Worker(self, number, nbytes, config) for number, nbytes in enumerate(inboxes)]
        self.router = LocalPlane(self.hub, "local://router")
        self.router.start(self._on_message)
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.num_stalls = 0
        self.num_encodings = 0
        self._requests: dict[str, tuple[GenerateRequest, Worker]] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._turns = itertools.count()
        self._num_messages = 0

    # ------------------------------------------------------------ the router

    def begin(self, request: GenerateRequest, worker: int, item_to_encoder: Sequence[int]) -> None:
        self._requests[request.request_id] = (request, self.workers[worker])
        self._spawn(self.workers[worker].generate(request))
        encoder_to_items: dict[int, list[MediaItem]] = {}
        dispatched = [request.media[index] for index in request.dispatched_items]
        for item in {item.mm_hash: item for item in reversed(dispatched)}.values():
            encoder_to_items.setdefault(item_to_encoder[item.index], []).append(item)
        for encoder, items in encoder_to_items.items():
            self._encode(request, encoder, items)

    def _encode(self, request: GenerateRequest, encoder: int, items: Sequence[MediaItem]) -> None:
        self.num_encodings += 1
        worker = self._requests[request.request_id][1]
        destination = Destination(worker.member_id, worker.plane.address)
        order = tuple(sorted(items, key=lambda item: item.index))
        call = EncodeRequest(
            request.request_id, 0, MemberId("router"), order, destination, request.age, request.priority
        )
        self._spawn(self.encoders[encoder].pipeline.encode(call, [b"file"] * len(order)))

    def _on_message(self, message: PlaneMessage) -> None:
        self._num_messages += 1
        if isinstance(message, FeatureNeeded):
            request, _ = self._requests[message.request_id]
            hashes = {unit.mm_hash for unit in message.units}
            items = {item.mm_hash: item for item in reversed(request.media) if item.mm_hash in hashes}
            self._encode(request, next(self._turns) % len(self.encoders), list(items.values()))
        elif isinstance(message, TokenFrames):
            for frame in message.frames:
                tokens = self.tokens.setdefault((frame.request_id, frame.choice), [])
                assert frame.first_index == len(tokens)
                tokens.extend(frame.token_ids)

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

    # ------------------------------------------------------------ time

    async def round(self) -> None:
        """Delivers every message, ends every pull and gives every engine a turn."""
        for worker in self.workers:
            worker.turn()
        for _ in range(12):
            await asyncio.sleep(0)
        while any(worker.receiver._pulls for worker in self.workers):  # noqa: ASYNC110 - a state of several threads
            await asyncio.sleep(50e-6)

    async def finish(self, patience: int, max_stalls: int) -> None:
        """Runs until every request has ended. When nothing moves for `patience` rounds, leases expire."""
        seen, num_still, rounds = self._progress(), 0, iter(range(MAX_ROUNDS))
        while any(not task.done() for task in self._tasks):
            assert next(rounds, None) is not None, "much moves and nothing ends"
            await self.round()
            now = self._progress()
            num_still = num_still + 1 if now == seen else 0
            seen = now
            if num_still >= patience:
                self.num_stalls += 1
                assert self.num_stalls <= max_stalls, "nothing advances any more"
                self.clock.advance(LEASE_S + 1)
                for encoder in self.encoders:
                    encoder.tick()
                num_still = 0
        for task in self._tasks:
            task.result()

    def _progress(self) -> tuple[int, ...]:
        stats = [worker.scheduler.stats() for worker in self.workers]
        computed = sum(each.prompt_tokens_computed + each.tokens_generated for each in stats)
        encoded = sum(encoder.pipeline.device_queue.stats.num_batches for encoder in self.encoders)
        return (computed, encoded, self._num_messages, sum(task.done() for task in self._tasks))

    async def close(self) -> None:
        """Closes everything. Raises `AssertionError` if a resource is held that no request needs."""
        for _ in range(3):
            await self.round()
        for worker in self.workers:
            stats = worker.scheduler.stats()
            assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used, stats.num_features) == (0, 0, 0, 0)
            assert worker.receiver.store.num_held == 0
            worker.receiver.check_at_rest()
            assert worker.sink.usage().used_bytes == 0
            worker.receiver.stop()
            worker.sink.close()
        for encoder in self.encoders:
            usage = encoder.table.usage()
            assert (usage.used_bytes, usage.num_leases, encoder.pipeline.jobs.totals.queued_cost) == (0, 0, 0)
            encoder.source.close()
        for plane in (self.router, *(one.plane for one in (*self.workers, *self.encoders))):
            plane.close()


def _raise(error: WeftError) -> None:
    """Lets a bug of the receiver fail the test instead of the worker."""
    raise error
