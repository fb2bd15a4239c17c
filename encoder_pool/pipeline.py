"""Leads media through the encoder: join a job, decode, batch, forward pass, stage, announce. It lives in one event
loop.

A *job* is one medium on its way through the encoder, and its *waiters* are the items of calls that wait for it.
Every change ends in `pump`, which starts what can start: decoding if a decoder is free, and the forward pass if the
device is idle. The pipeline has no timer: its owner calls `end_overdue` for the calls whose time is over. `planning/`
contains the decision of each step; `decoder` and `forward` contain the work.

The pipeline knows nothing of routers' subscriptions or of membership (the service handles those).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

from encoder_pool.decoder import DecodeBroke, Decoder
from encoder_pool.device_queue import DeviceQueue
from encoder_pool.encode_call import Announcer, Call
from encoder_pool.encoder_config import EncoderConfig
from encoder_pool.planning import (
    DecodeLine,
    DecodeRoom,
    EncodeJob,
    EncodeJobs,
    EncodeWaiter,
    FeatureSpec,
    FeatureTable,
    Forward,
    ForwardCosts,
    StageCosts,
    check_budget,
    refusal,
    waiter_of,
)
from fabric.contracts import (
    AttemptId,
    CallTurn,
    Clock,
    EncodeFailed,
    EncodeRequest,
    EncodeResult,
    ItemStats,
    MachineBusy,
    MediaItem,
    MemberId,
    MmHash,
    ProtocolError,
    TraceEvent,
    UnitKey,
    WeftError,
    WorkerBackedUp,
)
from modalities.family import EncoderInput

logger = logging.getLogger(__name__)

LEAST_RETRY_AFTER_S = 1.0
"""A call that was late is asked to wait at least this long before its retry: forward passes may be quick, but some step
was slow."""


class DecodeQueueState(NamedTuple):
    """Holds the queue of the decode processes in predicted seconds; the fields are those of `EncoderReport`."""

    num_processes: int
    queue_s: float
    short_s: float
    left_s: float


class Pipeline:
    """A `Pipeline` is the whole path of one encoder. It calls `on_change` (often) when gauges or the cache's contents
    have changed."""

    def __init__(
        self,
        encoder_id: MemberId,
        config: EncoderConfig,
        table: FeatureTable,
        announcer: Announcer,
        decoder: Decoder,
        forward: Forward,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        self._encoder_id = encoder_id
        self.config = config
        self._table = table
        self._announcer = announcer
        self._decoder = decoder
        self._clock = clock
        self._on_change = on_change
        self._numbers = count()
        self._number_to_call: dict[int, Call] = {}
        self._attempt_to_calls: dict[AttemptId, list[Call]] = {}
        self._deadlines: list[tuple[float, int]] = []
        """Keeps a heap of pairs: the time when a call's time is over, and the call's number. Some of the calls have
        already ended."""
        self._job_to_task: dict[EncodeJob, asyncio.Task[None]] = {}
        self._job_to_decode_start_s: dict[EncodeJob, float] = {}
        self.decode_costs = StageCosts()
        """Holds the measured costs of decoding and preprocessing an item."""
        self._held_back: dict[MemberId, dict[EncodeWaiter, None]] = {}
        """Holds, by worker, the waiters with a ready unit whose lease would exceed the worker's share of the
        arena."""
        self.jobs = EncodeJobs(config.patience, lambda modality, cost: self.costs.work_s(modality, cost), clock.now)
        self.stats = ItemStats()
        ended = (self._unit_ended, self._sound_ended)
        self.device_queue = DeviceQueue(config, self.jobs, table, forward, clock, ended)
        room = DecodeRoom(
            max_cost=config.max_decoded_cost,
            max_items=config.max_items_in_flight,
            max_long_cost=config.max_decoded_cost - config.max_batch_cost,
            max_long_items=decoder.num_parallel - 1,
            max_decode_bytes=config.decode_limits.total_bytes,
        )
        self._line = DecodeLine(
            self.jobs, room, self._job_to_task.keys(), config.passed_s, self.device_queue.is_blocked
        )

    def open(self, spec: FeatureSpec) -> None:
        """Begins to accept calls; `spec` describes the features of this model."""
        self.device_queue.spec = spec

    @property
    def costs(self) -> ForwardCosts:
        """Returns the measured costs of forward passes on this device."""
        return self.device_queue.costs

    @property
    def num_encoding(self) -> int:
        return len(self.device_queue.batch)

    @property
    def num_decoding(self) -> int:
        return len(self._job_to_task)

    @property
    def now_s(self) -> float:
        """Returns the present time on the encoder's clock."""
        return self._clock.now()

    def decode_queue(self) -> DecodeQueueState:
        """Returns what waits to be decoded and what is being decoded, in predicted seconds."""
        now_s, left = self._clock.now(), list[float]()
        for job, started_s in self._job_to_decode_start_s.items():
            predicted_s = self.decode_costs.seconds(job.item.work, job.item.cost)
            left.append(max(0.0, predicted_s - (now_s - started_s)))
        waiting_s = {False: 0.0, True: 0.0}
        for (modality, is_long), (num_items, cost) in self.jobs.totals.modality_to_undecoded.items():
            waiting_s[is_long] += self.decode_costs.seconds(modality, cost, num_items)
        num_processes = self._decoder.num_parallel
        return DecodeQueueState(
            num_processes,
            queue_s=sum(waiting_s.values()) + sum(left),
            short_s=waiting_s[False],
            left_s=min(left) if len(left) >= num_processes else 0.0,
        )

    @property
    def num_pending(self) -> int:
        """Counts the items of open calls that have no result yet."""
        return sum(call.num_open for call in self._number_to_call.values())

    def live_attempts(self) -> list[AttemptId]:
        return [call.attempt_id for call in self._number_to_call.values()]

    async def encode(self, request: EncodeRequest, media: Sequence[bytes]) -> EncodeResult:
        """Encodes the items and returns when every item was announced or has failed. Cancelling it drops what the call
        still waits for, and so does the end of its time (`EncodeRequest.time_left_s`).

        Raises Overloaded or WorkerBackedUp before any work was done, or ProtocolError.
        """
        if len(media) != len(request.items):
            raise ProtocolError(f"the call has {len(request.items)} items, but the bytes of {len(media)} media")
        if len({item.index for item in request.items}) != len(request.items):
            raise ProtocolError("two items of one request have the same index")
        now_s = self._clock.now()
        turn = CallTurn(next(self._numbers), request.age, now_s, priority=request.priority)
        call = Call(turn, request, asyncio.get_running_loop().create_future())
        wanted = self._admit(call, media)
        self._number_to_call[call.number] = call
        self._attempt_to_calls.setdefault(call.attempt_id, []).append(call)
        if request.time_left_s > 0:
            heapq.heappush(self._deadlines, (now_s + request.time_left_s, call.number))
        self._trace(call, "received", {"items": len(request.items)})
        try:
            for item, data in wanted:
                self._follow(call, item, data)
            self.pump()
            if request.items:
                await call.done
            return call.result(self._encoder_id)
        finally:
            del self._number_to_call[call.number]
            self._attempt_to_calls[call.attempt_id].remove(call)
            if not self._attempt_to_calls[call.attempt_id]:
                del self._attempt_to_calls[call.attempt_id]
            for waiter in call.waiters:
                self._leave(waiter)
            self.pump()

    def end_calls(self, is_meant: Callable[[EncodeRequest], bool], error: WeftError) -> int:
        """Fails the open items of the calls for which `is_meant` returns True; returns the number of calls."""
        return self._end([call for call in self._number_to_call.values() if is_meant(call.request)], error)

    def end_attempt(self, attempt_id: AttemptId, error: WeftError) -> int:
        """Fails the open items of the calls of one attempt without a search through other calls; returns the number of
        calls."""
        return self._end(list(self._attempt_to_calls.get(attempt_id, ())), error)

    def end_overdue(self) -> None:
        """Fails the open items of calls whose time is over, at every stage: the encoder is too busy for them, or their
        worker does not take its features. The owner must call it often."""
        now_s = self._clock.now()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, number = heapq.heappop(self._deadlines)
            if call := self._number_to_call.get(number):
                retry_after_s = max(LEAST_RETRY_AFTER_S, self.jobs.queued_s)
                for waiter in call.waiters:
                    if call.is_open(waiter):
                        self._fail(waiter, self._lateness(waiter, call.request.time_left_s, retry_after_s))
                self.pump()

    def _lateness(self, waiter: EncodeWaiter, limit_s: float, retry_after_s: float) -> WeftError:
        """Returns the error for an item that was not done in time; it names the worker or the encoder as the cause."""
        worker_id = waiter.destination.worker_id
        if self._is_beyond_share(waiter):
            message = (
                f"{worker_id} has not read its features within {limit_s:g} s, and its share of the encoder is full"
            )
            return WorkerBackedUp(message, retry_after_s=retry_after_s)
        message = f"this encoder is too busy to encode the medium within {limit_s:g} s"
        return MachineBusy(message, retry_after_s=retry_after_s)

    def _is_beyond_share(self, waiter: EncodeWaiter) -> bool:
        """Returns whether a missing unit is held back, or not made, because its worker's share of the arena is used
        up."""
        worker_id, spec = waiter.destination.worker_id, self.device_queue.spec
        assert spec is not None
        nbytes = spec.nbytes(waiter.item.unit_tokens[min(waiter.missing)], waiter.item.num_levels)
        return waiter in self._held_back.get(worker_id, ()) or not self._table.may_take(worker_id, nbytes)

    def _end(self, calls: Sequence[Call], error: WeftError) -> int:
        for call in calls:
            for waiter in call.waiters:
                if call.is_open(waiter):
                    self._fail(waiter, error)
        if calls:
            self.pump()
        return len(calls)

    def pump(self) -> None:
        """Starts every decoding and the forward pass, if they can start. It must be called whenever some step has
        ended."""
        self._announce_held_back()
        while len(self._job_to_task) < self._decoder.num_parallel:
            job = self._line.next(self._clock.now(), has_shares=self._table.has_shares)
            if job is None and (in_the_way := self._line.in_the_way(self._clock.now())):
                self._put_back(in_the_way)
                continue
            if job is None:
                break
            self.jobs.decode_started(job)
            self._job_to_decode_start_s[job] = self._clock.now()
            task = self._job_to_task[job] = asyncio.create_task(self._decode(job))
            # This is not at the end of the coroutine, because a task that is cancelled before it begins runs none of
            # it.
            task.add_done_callback(partial(self._decode_ended, job))
        self.device_queue.start(self.pump)
        self.device_queue.busy.roll(self._clock.now())
        self._on_change()

    # ------------------------------------------------------------ waiters

    def _admit(self, call: Call, media: Sequence[bytes]) -> list[tuple[MediaItem, bytes]]:
        """Returns the items to encode, each content once. Items that can't be encoded get their result here. Raises
        Overloaded or WorkerBackedUp."""
        spec = self.device_queue.spec
        assert spec is not None, "the service opens the pipeline before it takes calls"
        arena_bytes, max_decode_bytes = self._table.total_bytes, self.config.decode_limits.total_bytes
        wanted: dict[MmHash, tuple[MediaItem, bytes]] = {}
        for item, data in zip(call.request.items, media, strict=True):
            if error := refusal(item, self.config.modalities, spec, arena_bytes, max_decode_bytes):
                call.fail(item, error)
                self.stats.num_received += 1
                self.stats.num_failed += 1
            else:
                wanted.setdefault(item.mm_hash, (item, data))
        items = [item for item, _ in wanted.values()]
        worker_id = call.request.destination.worker_id if self._table.has_shares else None
        check_budget(items, self.jobs, self._table.is_ready, self.config.max_queue_cost, worker_id)
        return list(wanted.values())

    def _follow(self, call: Call, item: MediaItem, data: bytes) -> None:
        self.stats.num_received += 1
        waiter = waiter_of(call.request, call.turn, item, data, self._clock.now())
        call.waiters.append(waiter)
        if self._enter(waiter):
            assert self.device_queue.spec is not None
            self.stats.num_cache_hits += 1
            self.stats.cache_hit_bytes += self.device_queue.spec.nbytes(item.num_tokens, item.num_levels)
            call.succeed(waiter, self._clock.now(), is_cache_hit=True)

    def _enter(self, waiter: EncodeWaiter) -> bool:
        """Announces the units that are ready and joins a job for the rest, unless the waiter has joined one.
        Returns True if no unit is missing any more."""
        for unit in sorted(waiter.missing):
            key = UnitKey(waiter.item.mm_hash, unit)
            if not self._table.is_ready(key):
                continue
            if not self._may_announce(waiter, key):
                self._held_back.setdefault(waiter.destination.worker_id, {})[waiter] = None
                return False
            if not self._announce(waiter, key):
                return False
        if waiter.missing and not self.jobs.has_joined(waiter):
            self.jobs.join(waiter)
        return not waiter.missing

    def _may_announce(self, waiter: EncodeWaiter, key: UnitKey) -> bool:
        return self._table.may_lease(waiter.destination.worker_id, key)

    def _announce_held_back(self) -> None:
        """Announces units to waiters that were held back because their worker's share was used up. For each worker it
        stops at the first waiter whose unit still exceeds the share."""
        for worker_id in list(self._held_back):
            waiters = self._held_back[worker_id]
            while (waiter := next(iter(waiters), None)) and self._may_enter(waiter):
                del waiters[waiter]
                if self._enter(waiter):
                    self._succeed(waiter)
            if not waiters:
                del self._held_back[worker_id]

    def _may_enter(self, waiter: EncodeWaiter) -> bool:
        """Returns whether the first ready unit that the waiter misses may be announced, or no missing unit is
        ready."""
        keys = (UnitKey(waiter.item.mm_hash, unit) for unit in sorted(waiter.missing))
        ready = next((key for key in keys if self._table.is_ready(key)), None)
        return ready is None or self._may_announce(waiter, ready)

    def _announce(self, waiter: EncodeWaiter, key: UnitKey) -> bool:
        """Announces a unit. Returns False if the worker can't be reached; then the waiter has failed."""
        assert self.device_queue.spec is not None
        if not self._announcer.announce(waiter, key, self.device_queue.spec):
            self._fail(waiter, WorkerBackedUp(f"{waiter.destination.worker_id} does not accept announcements"))
            return False
        waiter.missing.remove(key.unit)
        self._trace_item(waiter, "unit_announced", unit=key.unit)
        return True

    def _succeed(self, waiter: EncodeWaiter) -> None:
        """Records the success of a waiter that misses no unit any more."""
        self.jobs.note_waits(waiter)
        is_cache_hit = not waiter.encode_s  # otherwise a pass made units while it followed a job
        self._number_to_call[waiter.call].succeed(waiter, self._clock.now(), is_cache_hit=is_cache_hit)
        self._leave(waiter)

    def _fail(self, waiter: EncodeWaiter, error: WeftError) -> None:
        self._number_to_call[waiter.call].fail(waiter.item, error)
        self.stats.num_failed += 1
        self._leave(waiter)

    def _leave(self, waiter: EncodeWaiter) -> None:
        self._held_back.get(waiter.destination.worker_id, {}).pop(waiter, None)
        ended = self.jobs.leave(waiter)
        if ended is not None:
            self._job_ended(ended)
        elif (left := self.jobs.find(waiter.item.mm_hash)) and not left.waiters:
            self._stop_decoding(left)

    def _job_ended(self, job: EncodeJob) -> None:
        """Stops the decoding of a job that has nothing left to make. Waiters that miss units which it could no
        longer make start another job."""
        self._stop_decoding(job)
        for waiter in self.jobs.take_waiters(job):
            if self._enter(waiter):
                self._succeed(waiter)

    def _stop_decoding(self, job: EncodeJob) -> None:
        if task := self._job_to_task.get(job):
            task.cancel()

    # ------------------------------------------------------------ decoding

    async def _decode(self, job: EncodeJob) -> None:
        began_s = self._clock.now()
        try:
            decoded = await self._decoder.decode(job.data, job.item, lambda units: self._decoded(job, units))
        except DecodeBroke as error:
            logger.warning("%s", error)
            self._retry(job)
        except WeftError as error:
            self._fail_job(job, error)
        except Exception as error:
            # This is the top of a job's task: without it the waiters would wait for ever.
            names = ", ".join(dict.fromkeys(waiter.attempt_id.request_id for waiter in job.waiters))
            logger.exception("decoding of %s failed", job.item.mm_hash, extra={"request_id": names})
            self._fail_job(job, EncodeFailed(f"decoding failed ({type(error).__name__})"))
        else:
            self.stats.num_decoded += 1
            self.stats.decode_s += decoded.decode_s
            self.stats.preprocess_s += decoded.preprocess_s
            now_s = self._clock.now()
            # What is left of the time is the way between the processes, which a request waits for as well.
            preprocess_s = max(decoded.preprocess_s, now_s - began_s - decoded.decode_s)
            self.decode_costs.observe(job.item.work, job.item.cost, decoded.decode_s + preprocess_s, now_s)
            for waiter in job.waiters:
                waiter.decode_s, waiter.preprocess_s = decoded.decode_s, preprocess_s
                self._trace_item(waiter, "decoded", from_s=began_s)
            if decoded.waveform is None:
                self.jobs.decoded(job, decoded.inputs)
            else:
                self.jobs.decoded_sound(job, decoded.waveform)

    def _decode_ended(self, job: EncodeJob, task: asyncio.Task[None]) -> None:
        del self._job_to_task[job], self._job_to_decode_start_s[job]
        self.pump()

    def _decoded(self, job: EncodeJob, inputs: list[EncoderInput]) -> None:
        """Stores the next units of a job while others are still to come."""
        if self.jobs.decoded_part(job, inputs):
            self.pump()

    def _sound_ended(
        self, job: EncodeJob, outcome: list[EncoderInput] | WeftError, seconds: float, batch_cost: int
    ) -> None:
        """Handles a sound after the device has made its units, in a batch of `batch_cost` that took `seconds`, or has
        failed. The job may have ended meanwhile."""
        if isinstance(outcome, WeftError):
            self._fail_job(job, outcome)
        elif self.jobs.is_live(job):
            for waiter in job.waiters:
                waiter.preprocess_s += seconds
                waiter.device_prepare_s += seconds
                waiter.device_prepare_cost += batch_cost
                self._trace_item(waiter, "prepared", from_s=self.device_queue.batch_began_s)
            self.jobs.decoded(job, outcome)

    def _fail_job(self, job: EncodeJob, error: WeftError) -> None:
        if not self.jobs.is_live(job):
            return
        for waiter in self.jobs.end(job):
            self._fail(waiter, error)

    def _retry(self, job: EncodeJob) -> None:
        """Ends a job that failed although the item is not known to be at fault; each waiter has one more try."""
        for waiter in self.jobs.end(job):
            if waiter.num_retries_left == 0:
                self._fail(waiter, EncodeFailed("decoding the medium crashes the process that decodes it"))
                continue
            waiter.num_retries_left -= 1
            self.jobs.join(waiter)

    def _put_back(self, job: EncodeJob) -> None:
        """Drops what was decoded of a job to make room for others; its waiters join another job."""
        waiters = self.jobs.end(job)
        self._stop_decoding(job)
        for waiter in waiters:
            if self._enter(waiter):
                self._succeed(waiter)

    # ------------------------------------------------------------ units that were made

    def _unit_ended(self, key: UnitKey, error: WeftError | None) -> None:
        """Handles a unit that was made or failed: informs every waiter that misses it, and ends the job after its
        last unit."""
        for waiter in self.jobs.waiters_missing(key):
            self._deliver(waiter, key, error)
        self._table.waiters_informed(key)
        job = self.jobs.forward_ended(key)
        if job is not None:
            self.stats.num_encoded += error is None and not job.is_broken
            self._job_ended(job)

    def _deliver(self, waiter: EncodeWaiter, key: UnitKey, error: WeftError | None) -> None:
        """Passes a unit that was made, or failed, to a waiter that misses it. If the unit can't be announced yet, the
        waiter stays in the job, and its other units are made meanwhile."""
        if error is not None:
            self._fail(waiter, error)
            return
        self._trace_item(waiter, "unit_encoded", unit=key.unit, from_s=self.device_queue.batch_began_s)
        if not self._may_announce(waiter, key):
            self._held_back.setdefault(waiter.destination.worker_id, {})[waiter] = None
            return
        if self._announce(waiter, key) and not waiter.missing:
            self._succeed(waiter)

    def _trace_item(self, waiter: EncodeWaiter, name: str, **detail: object) -> None:
        """Adds an event of an item to the trace of its call."""
        self._trace(self._number_to_call[waiter.call], name, {"item": waiter.item.index} | detail)

    def _trace(self, call: Call, name: str, detail: dict[str, object]) -> None:
        call.trace.append(TraceEvent(self._clock.now(), self._encoder_id, name, detail))
