"""Checks the pipeline under every interleaving of calls, decoders, forward passes, leases and aborts, over a tiny
arena.

The pipeline, jobs, feature table and arena are real; the test drives the decoder and the forward by hand, so that
work that normally runs in processes and threads ends in any order, with success or failure. In every interleaving
memory stays within its bounds, a feature that a worker may still read stays in place, and once leases end every call
gets exactly one answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from encoder_doubles import HandDecoder, HandForward, OpenDecode, RecordingPlane
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from encoder_pool.decode_process import Decoded
from encoder_pool.decoder import DecodeBroke
from encoder_pool.encode_call import Announcer
from encoder_pool.encoder_config import DEFAULT_LIMITS, EncoderConfig
from encoder_pool.pipeline import Pipeline
from encoder_pool.planning import FeatureSpec, FeatureTable, ForwardResult, LeaseKey, SoundResult
from fabric.contracts import (
    Aborted,
    AttemptId,
    Destination,
    EncodeFailed,
    EncodeRequest,
    EncodeResult,
    FeatureLog,
    InvalidMedia,
    ManualClock,
    MediaItem,
    MemberId,
    MmHash,
    Overloaded,
    RequestId,
    UnitKey,
    WeftError,
    WorkerBackedUp,
    WorkerLost,
)
from fabric.transport import LocalChannelHub, LocalFeatureSource
from modalities.family import EncoderInput, Waveform

SPEC = FeatureSpec(1, 16, "float32")
TOTAL_BYTES = 100
MODALITY_TO_DECODE_BYTES = {"image": 40, "video": 70, "audio": 30}
"""Gives the bytes that decoding takes: two pictures are decoded at once, or a video and a sound, but never a video and
a picture."""
CONFIG = EncoderConfig(
    modalities=("image", "video", "audio"),
    decode_limits=dataclasses.replace(DEFAULT_LIMITS, total_bytes=TOTAL_BYTES),
    num_decode_processes=0,
    max_batch_cost=20,
    max_items_in_flight=3,
    max_queue_cost=60,
    max_decoded_cost=30,
    lease_s=10.0,
    patience=2.0,
)
ARENA_BYTES = 1200
KINDS: dict[str, tuple[int, tuple[int, ...]]] = {
    "small": (4, (2,)),
    "wide": (16, (12,)),
    "given": (1, (6,)),  # its features come from the client
    "dear": (25, (2,)),  # its cost is high for few rows
    "film": (24, (4, 4, 4, 4, 4, 4)),  # the arena never holds all of it at once
    "clip": (9, (3, 2, 4)),
    "song": (10, (3, 3)),  # the device makes its units
    "word": (5, (2,)),
    "brim": (7, (18,)),  # it fits the arena but for its generation word, which shows only when memory is asked for
    "overflow": (12, (2, 18, 2)),  # the same holds for its middle unit; its other units may be in the same batch
    "huge": (8, (100,)),  # it never fits the arena
}
"""Maps a kind to its cost in patches and its rows per unit."""
SOUNDS = ("song", "word")


class OpenCall(NamedTuple):
    request: EncodeRequest
    task: asyncio.Task[EncodeResult]
    received_s: float


class PipelineMachine(RuleBasedStateMachine):
    @initialize(overhead_s=st.sampled_from([0.0, 0.01]))
    def build(self, overhead_s: float) -> None:
        """Builds the pipeline; without the `overhead_s` of a forward pass, the units of one request are never fused."""
        self.overhead_s = overhead_s
        self.loop = asyncio.new_event_loop()
        self.clock, self.plane = ManualClock(), RecordingPlane()
        self.decoder, self.forward = HandDecoder(), HandForward(CONFIG.max_batch_cost)
        encoder_id = MemberId("encoder-1")
        self.source = LocalFeatureSource(LocalChannelHub(), "encoder-1", ARENA_BYTES)
        self.table = FeatureTable(self.source, self.clock, CONFIG.lease_s, FeatureLog(encoder_id, 1))
        for worker_id in ("worker-1", "worker-2"):
            self.table.worker_came(MemberId(worker_id))
        announcer = Announcer(encoder_id, self.plane, self.source, self.table, CONFIG.lease_s)
        self.pipeline = Pipeline(
            encoder_id, CONFIG, self.table, announcer, self.decoder, self.forward, self.clock, lambda: None
        )
        for cost in (4, 40):
            self.pipeline.costs.observe("image", cost, overhead_s + 1e-5 * cost)
            self.pipeline.costs.observe("video", cost, overhead_s + 3e-5 * cost)
            self.pipeline.costs.observe("audio", cost, overhead_s + 2e-5 * cost)
        self.pipeline.open(SPEC)
        self.calls: list[OpenCall] = []
        self.num_calls = 0

    def settle(self) -> None:
        """Runs the loop until nothing is ready to run."""
        for _ in range(8):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def in_loop(self, action: Callable[[], object]) -> None:
        async def act() -> None:
            action()

        self.loop.run_until_complete(act())
        self.settle()

    @rule(
        media=st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, 1)), min_size=1, max_size=3),
        worker=st.sampled_from(["worker-1", "worker-2"]),
        is_aborted=st.sampled_from([False, False, False, True]),
        time_left_s=st.sampled_from([0.0, 0.0, 3.0, 12.0]),
    )
    def call(
        self, media: list[tuple[str, int]], worker: str, is_aborted: bool = False, time_left_s: float = 0.0
    ) -> None:
        """Starts a call; `is_aborted` aborts it in the same turn of the event loop in which it came."""
        self.num_calls += 1
        items = []
        for index, (kind, number) in enumerate(media):
            cost, units = KINDS[kind]
            part = f"part.{self.num_calls}.{index}"
            modality = "audio" if kind in SOUNDS else "video" if len(units) > 1 else "image"
            item = MediaItem(index, modality, MmHash(f"{kind}-{number}"), (1, 1, cost), units, cost, part)
            is_given = kind == "given"
            decode_bytes = 0 if is_given else MODALITY_TO_DECODE_BYTES[modality]
            items.append(msgspec.structs.replace(item, decode_bytes=decode_bytes, is_given=is_given))
        request = EncodeRequest(
            request_id=RequestId(f"req-{self.num_calls}"),
            attempt=0,
            router_id=MemberId("router-1"),
            items=tuple(items),
            destination=Destination(MemberId(worker), f"local://{worker}"),
            age=(float(self.num_calls), ""),
            time_left_s=time_left_s,
        )
        before = self.pipeline.jobs.totals.queued_cost
        task = self.loop.create_task(self.pipeline.encode(request, [b"file"] * len(items)))
        if is_aborted:
            self.loop.call_soon(self.pipeline.end_calls, lambda one: one is request, Aborted("aborted"))
        self.settle()
        if task.done() and isinstance(task.exception(), Overloaded | WorkerBackedUp):
            assert 0 < before == self.pipeline.jobs.totals.queued_cost, "refused before any work, and not when idle"
            return
        self.calls.append(OpenCall(request, task, self.clock.now()))

    def streaming(self) -> list[OpenDecode]:
        return [one for one in self.decoder.open if one.num_left > 1 and one.item.modality == "video"]

    @precondition(lambda self: self.streaming())
    @rule(data=st.data(), number=st.integers(1, 3))
    def hand_over_units(self, data: st.DataObject, number: int) -> None:
        """Hands over some units, but never the last; the last ones come with the end of the decoding."""
        one = data.draw(st.sampled_from(self.streaming()))
        self.in_loop(lambda: one.on_units(one.inputs(min(number, one.num_left - 1))))

    @precondition(lambda self: self.decoder.open)
    @rule(data=st.data(), outcome=st.sampled_from(["ok", "ok", "ok", "ok", "invalid", "broke", "bug"]))
    def end_decode(self, data: st.DataObject, outcome: str) -> None:
        self._end_decode(data.draw(st.sampled_from(self.decoder.open)), outcome)

    @rule(num_rounds=st.integers(1, 4))
    def work_well(self, num_rounds: int) -> None:
        """Advances decoders and the forward, so that runs reach cached features, full arenas and evictions."""
        for _ in range(num_rounds):
            for one in list(self.decoder.open):
                self._end_decode(one, "ok")
            if self.forward.sounds is not None:
                self._end_sounds(set())
            if self.forward.job is not None:
                self._end_forward(set())

    def _end_decode(self, one: OpenDecode, outcome: str) -> None:
        if outcome == "ok" and one.item.modality == "audio":
            one.future.set_result(Decoded([], 0.1, waveform=Waveform(np.zeros(1, np.float32), 1, 1)))
        elif outcome == "ok":
            one.future.set_result(Decoded(one.inputs(one.num_left), 0.1))
        elif outcome == "invalid":
            one.future.set_exception(InvalidMedia(f"{one.item.part}: broken", param=one.item.part))
        else:
            one.future.set_exception(DecodeBroke("a process died") if outcome == "broke" else ValueError("a bug"))
        self.settle()

    @precondition(lambda self: self.forward.job)
    @rule(failing=st.sets(st.integers(0, 3), max_size=2))
    def end_forward(self, failing: set[int]) -> None:
        self._end_forward(failing)

    def _end_forward(self, failing: set[int]) -> None:
        assert self.forward.job is not None
        (units, done), self.forward.job = self.forward.job, None
        errors: list[WeftError | None] = []
        for index, unit in enumerate(units):
            unit.buffer[:] = unit.num_tokens
            errors.append(EncodeFailed("poisoned") if index in failing else None)
        done(ForwardResult(errors, self.overhead_s + 1e-5 * sum(unit.num_tokens for unit in units)))
        self.settle()

    @precondition(lambda self: self.forward.sounds)
    @rule(failing=st.sets(st.integers(0, 3), max_size=2))
    def end_sounds(self, failing: set[int]) -> None:
        self._end_sounds(failing)

    def _end_sounds(self, failing: set[int]) -> None:
        assert self.forward.sounds is not None
        (sounds, done), self.forward.sounds = self.forward.sounds, None
        outcomes: list[list[EncoderInput] | WeftError] = []
        for index, (_, item) in enumerate(sounds):
            inputs = [EncoderInput(item.modality, np.zeros((1, 1), np.float32), item.grid) for _ in item.unit_tokens]
            outcomes.append(EncodeFailed("poisoned") if index in failing else inputs)
        done(SoundResult(outcomes, 0.001))
        self.settle()

    @precondition(lambda self: self.plane.sent)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(self.plane.sent))
        attempt_id = AttemptId(message.request_id, message.attempt)
        call = next(one for one in self.all_requests() if one.request_id == message.request_id)
        key = LeaseKey(call.destination.worker_id, attempt_id, message.unit)
        self.table.release(key, message.ticket.generation)
        self.in_loop(self.pipeline.pump)

    def all_requests(self) -> list[EncodeRequest]:
        return [call.request for call in self.calls]

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.calls)).task.cancel()
        self.settle()

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.calls)).request
        attempt_id = AttemptId(request.request_id, request.attempt)
        self.in_loop(lambda: self.pipeline.end_attempt(attempt_id, Aborted("aborted")))
        self.table.end_attempt(attempt_id)
        self.in_loop(self.pipeline.pump)

    @rule()
    def worker_leaves(self) -> None:
        gone = MemberId("worker-2")
        self.in_loop(
            lambda: self.pipeline.end_calls(lambda one: one.destination.worker_id == gone, WorkerLost("it left"))
        )
        self.table.end_worker(gone)
        self.in_loop(self.pipeline.pump)

    @rule()
    def worker_stops_or_begins_to_listen(self) -> None:
        self.plane.is_refusing = not self.plane.is_refusing

    @rule(seconds=st.sampled_from([1.0, 5.0, CONFIG.lease_s]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.table.expire()
        self.in_loop(self.pipeline.end_overdue)
        self.in_loop(self.pipeline.pump)

    @invariant()
    def no_call_is_open_past_its_time(self) -> None:
        for request, task, received_s in self.calls:
            if request.time_left_s and not task.done():
                assert self.clock.now() < received_s + request.time_left_s

    @invariant()
    def everything_is_accounted_for(self) -> None:
        self.table.check_invariants()
        self.pipeline.jobs.check_invariants()
        assert self.table.usage().num_encoding == self.pipeline.num_encoding
        open_calls = [call for call in self.calls if not call.task.done()]
        assert len(self.pipeline.live_attempts()) == len(open_calls)
        for job in self.pipeline.jobs:
            assert len(set(map(id, job.waiters))) == len(job.waiters)
        keys = {UnitKey(message.unit.mm_hash, message.unit.unit) for message in self.plane.sent}
        assert not any(key.mm_hash.startswith("huge") for key in keys)

    @invariant()
    def what_is_decoded_at_once_fits_the_budget(self) -> None:
        assert sum(one.item.decode_bytes for one in self.decoder.open) <= TOTAL_BYTES

    @invariant()
    def the_forward_is_never_idle_for_nothing(self) -> None:
        if self.forward.is_busy:
            return
        assert not list(self.pipeline.jobs.queued_sounds())
        if list(self.pipeline.jobs.queued_units()):
            usage = self.table.usage()
            assert usage.num_leases > 0, "units wait, the forward is idle, and nobody holds the arena"

    @invariant()
    def answers_are_whole(self) -> None:
        for request, task, _ in self.calls:
            if not task.done() or task.cancelled():
                continue
            result = task.result()
            assert [one.index for one in result.items] == [item.index for item in request.items]
            sent = {message.unit for message in self.plane.sent if message.request_id == request.request_id}
            for item, one in zip(request.items, result.items, strict=True):
                if one.error is None:
                    assert set(item.unit_keys()) <= sent
                else:
                    assert one.error.param == item.part
                    assert "broken" not in one.error.message or item.part in one.error.message
                assert one.error is not None or not item.mm_hash.startswith("huge")

    def teardown(self) -> None:
        """Lets time pass while decoders and forwards work, and checks that every call ends and that all memory is free
        or cached."""
        if not hasattr(self, "loop"):
            return
        self.plane.is_refusing = False
        for _ in range(200):
            self.work_well(1)
            self.pass_time(CONFIG.lease_s)
            self.everything_is_accounted_for()
        assert all(call.task.done() for call in self.calls), "a call waits for ever"
        self.answers_are_whole()
        usage = self.table.usage()
        assert (usage.used_bytes, usage.num_leases, self.pipeline.jobs.totals.queued_cost) == (0, 0, 0)
        assert not self.decoder.open
        self.loop.close()
        self.source.close()


TestPipeline = PipelineMachine.TestCase
TestPipeline.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)


def test_units_evicted_before_a_waiter_came_are_made_again() -> None:
    """A video is larger than the arena: when the second request joins, the first units have been evicted and the job
    has already made them. The request takes the units that the job still makes, then starts another job for the
    rest."""
    machine = PipelineMachine()
    machine.build(0.01)
    machine.table.end_worker(MemberId("worker-2"))  # the other worker may take all of the arena
    machine.call([("film", 0)], "worker-1")
    machine.work_well(2)
    machine.pass_time(CONFIG.lease_s)
    machine.call([("film", 0)], "worker-1")
    machine.work_well(1)
    first, second = machine.calls
    assert first.task.done()
    assert not second.task.done()
    machine.pass_time(CONFIG.lease_s)
    machine.work_well(2)
    assert second.task.result().items[0].error is None
    units = [message.unit.unit for message in machine.plane.sent if message.request_id == "req-2"]
    assert sorted(units) == [0, 1, 2, 3, 4, 5]
    machine.everything_is_accounted_for()
    machine.teardown()


def test_a_bug_in_decoding_fails_whoever_wants_the_content_and_no_later_call(caplog: pytest.LogCaptureFixture) -> None:
    machine = PipelineMachine()
    machine.build(0.01)
    machine.call([("clip", 0)], "worker-1")
    machine.call([("clip", 0)], "worker-2")
    machine._end_decode(machine.decoder.open[0], "bug")
    for call in machine.calls:
        error = call.task.result().items[0].error
        assert error is not None
        assert (error.code, "ValueError" in error.message) == ("encode_failed", True)
    (record,) = caplog.records
    assert record.request_id == ", ".join(call.request.request_id for call in machine.calls)
    assert record.exc_info is not None
    machine.call([("clip", 0)], "worker-1")
    machine.work_well(4)
    assert machine.calls[-1].task.result().items[0].error is None
    machine.teardown()


def test_sounds_are_heard_together_and_one_that_fails_alone() -> None:
    machine = PipelineMachine()
    machine.build(0.01)
    machine.call([("small", 0)], "worker-1")
    machine._end_decode(machine.decoder.open[0], "ok")
    machine.call([("word", 0), ("word", 1)], "worker-1")
    for one in list(machine.decoder.open):
        machine._end_decode(one, "ok")
    assert machine.forward.sounds is None, "a picture is in the forward"
    machine._end_forward(set())
    assert machine.forward.sounds is not None
    heard = [sound.item.mm_hash for sound in machine.forward.sounds[0]]
    assert sorted(heard) == ["word-0", "word-1"]
    machine._end_sounds({heard.index("word-1")})
    machine.work_well(3)
    good, bad = machine.calls[-1].task.result().items
    assert good.error is None
    assert good.times.preprocess_s > 0
    assert bad.error is not None
    assert bad.error.code == "encode_failed"
    machine.teardown()


def test_a_call_that_ends_before_its_decoding_began_leaves_the_decoder_free() -> None:
    machine = PipelineMachine()
    machine.build(0.01)
    for number in range(machine.decoder.num_parallel):
        machine.call([("small", number)], "worker-1", is_aborted=True)
        assert machine.calls[-1].task.done()
        assert not machine.decoder.open, "it never began"
    assert machine.pipeline.num_decoding == 0
    machine.call([("small", 0)], "worker-1")
    machine.work_well(2)
    assert machine.calls[-1].task.result().items[0].error is None
    machine.teardown()
