"""Leads media through the encoder: join a flight, decode, batch, forward pass, stage, announce. It lives in one event
loop.

A *flight* is one medium on its way through the encoder, and its *followers* are the items of calls that wait for it.
Every change ends in `pump`, which starts what can start: decoding if a decoder is free, and the forward pass if the
device is idle. The pipeline has no timer: its owner calls `end_late` for the calls whose time is over. `planning/`
contains the decision of each step; `decode` and `forward` contain the work.

The pipeline knows nothing of routers' subscriptions or of membership (the service handles those).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from encoder_pool.announcer import Announcer
from encoder_pool.call import Call
from encoder_pool.config import EncoderConfig
from encoder_pool.decode import DecodeBroke, Decoder
from encoder_pool.lane import Lane
from encoder_pool.planning.admission import check_budget, refusal
from encoder_pool.planning.cost import ForwardCosts
from encoder_pool.planning.decode_line import DecodeLine
from encoder_pool.planning.features import FeatureSpec, FeatureTable
from encoder_pool.planning.flight import DecodeRoom, EncodeJob, EncodeWaiter, follower_of
from encoder_pool.planning.flights import Flights
from encoder_pool.planning.forward_job import Forward
from encoder_pool.planning.tally import EncoderTally
from encoder_pool.planning.turns import CallTurn
from fabric.clock import Clock
from fabric.errors import EncodeFailed, MachineBusy, ProtocolError, WeftError, WorkerBackedUp
from fabric.ids import AttemptId, MemberId, MmHash, UnitKey
from fabric.messages import EncodeRequest, EncodeResult, MediaItem, TraceEvent
from modalities.family import EncoderInput

logger = logging.getLogger(__name__)

LEAST_RETRY_AFTER_S = 1.0
"""A call that was late is asked to wait at least this long before its retry: forward passes may be quick, but some step
was slow."""


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
        self._config = config
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
        self._flight_to_task: dict[EncodeJob, asyncio.Task[None]] = {}
        self._held_back: dict[MemberId, dict[EncodeWaiter, None]] = {}
        """Holds, by worker, the followers with a ready unit whose lease would exceed the worker's share of the
        arena."""
        self.flights = Flights(config.patience, lambda modality, cost: self.costs.work_s(modality, cost))
        self.tally = EncoderTally()
        ended = (self._unit_ended, self._sound_ended)
        self.lane = Lane(config, self.flights, table, forward, clock, self.tally, ended)
        room = DecodeRoom(
            max_cost=config.max_decoded_cost,
            max_items=config.max_items_in_flight,
            max_long_cost=config.max_decoded_cost - config.max_batch_cost,
            max_long_items=decoder.num_parallel - 1,
            max_decode_bytes=config.decode_limits.total_bytes,
        )
        self._line = DecodeLine(self.flights, room, self._flight_to_task.keys(), config.passed_s, self.lane.is_blocked)

    def open(self, spec: FeatureSpec) -> None:
        """Begins to accept calls; `spec` describes the features of this model."""
        self.lane.spec = spec

    @property
    def costs(self) -> ForwardCosts:
        """Returns the measured costs of forward passes on this device."""
        return self.lane.costs

    @property
    def num_encoding(self) -> int:
        return len(self.lane.batch)

    @property
    def num_decoding(self) -> int:
        return len(self._flight_to_task)

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
            raise ProtocolError(f"{len(request.items)} items came with {len(media)} media")
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
            for follower in call.followers:
                self._leave(follower)
            self.pump()

    def end_calls(self, is_meant: Callable[[EncodeRequest], bool], error: WeftError) -> int:
        """Fails the open items of the calls for which `is_meant` returns True; returns the number of calls."""
        return self._end([call for call in self._number_to_call.values() if is_meant(call.request)], error)

    def end_attempt(self, attempt_id: AttemptId, error: WeftError) -> int:
        """Fails the open items of the calls of one attempt without a search through other calls; returns the number of
        calls."""
        return self._end(list(self._attempt_to_calls.get(attempt_id, ())), error)

    def end_late(self) -> None:
        """Fails the open items of calls whose time is over, at every stage: the encoder is too busy for them, or their
        worker does not take its features. The owner must call it often."""
        now_s = self._clock.now()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, number = heapq.heappop(self._deadlines)
            if call := self._number_to_call.get(number):
                retry_after_s = max(LEAST_RETRY_AFTER_S, self.flights.queued_s)
                for follower in call.followers:
                    if call.is_open(follower):
                        self._fail(follower, self._lateness(follower, call.request.time_left_s, retry_after_s))
                self.pump()

    def _lateness(self, follower: EncodeWaiter, limit_s: float, retry_after_s: float) -> WeftError:
        """Returns the error for an item that was not done in time; it names the worker or the encoder as the cause."""
        worker_id = follower.destination.worker_id
        if self._is_beyond_share(follower):
            message = f"{worker_id} has not taken within {limit_s:g} s what is held for it, and its share is used up"
            return WorkerBackedUp(message, retry_after_s=retry_after_s)
        message = f"this encoder is too busy to encode it within {limit_s:g} s"
        return MachineBusy(message, retry_after_s=retry_after_s)

    def _is_beyond_share(self, follower: EncodeWaiter) -> bool:
        """Returns whether a missing unit is held back, or not made, because its worker's share of the arena is used
        up."""
        worker_id, spec = follower.destination.worker_id, self.lane.spec
        assert spec is not None
        nbytes = spec.nbytes(follower.item.unit_tokens[min(follower.missing)], follower.item.num_levels)
        return follower in self._held_back.get(worker_id, ()) or not self._table.may_take(worker_id, nbytes)

    def _end(self, calls: Sequence[Call], error: WeftError) -> int:
        for call in calls:
            for follower in call.followers:
                if call.is_open(follower):
                    self._fail(follower, error)
        if calls:
            self.pump()
        return len(calls)

    def pump(self) -> None:
        """Starts every decoding and the forward pass, if they can start. It must be called whenever some step has
        ended."""
        self._announce_held_back()
        while len(self._flight_to_task) < self._decoder.num_parallel:
            flight = self._line.next(self._clock.now(), has_shares=self._table.has_shares)
            if flight is None and (in_the_way := self._line.in_the_way(self._clock.now())):
                self._put_back(in_the_way)
                continue
            if flight is None:
                break
            self.flights.decode_started(flight)
            task = self._flight_to_task[flight] = asyncio.create_task(self._decode(flight))
            # This is not at the end of the coroutine, because a task that is cancelled before it begins runs none of
            # it.
            task.add_done_callback(partial(self._decode_ended, flight))
        self.lane.start(self.pump)
        self.lane.busy.roll(self._clock.now())
        self._on_change()

    # ------------------------------------------------------------ followers

    def _admit(self, call: Call, media: Sequence[bytes]) -> list[tuple[MediaItem, bytes]]:
        """Returns the items to encode, each content once. Items that can't be encoded get their result here. Raises
        Overloaded or WorkerBackedUp."""
        spec = self.lane.spec
        assert spec is not None, "the service opens the pipeline before it takes calls"
        arena_bytes = self._table.usage().total_bytes
        wanted: dict[MmHash, tuple[MediaItem, bytes]] = {}
        for item, data in zip(call.request.items, media, strict=True):
            max_decode_bytes = self._config.decode_limits.total_bytes
            if error := refusal(item, self._config.modalities, spec, arena_bytes, max_decode_bytes):
                call.fail(item, error)
                self.tally.num_items += 1
                self.tally.num_items_failed += 1
            else:
                wanted.setdefault(item.mm_hash, (item, data))
        items = [item for item, _ in wanted.values()]
        worker_id = call.request.destination.worker_id if self._table.has_shares else None
        check_budget(items, self.flights, self._table.is_ready, self._config.max_queue_cost, worker_id)
        return list(wanted.values())

    def _follow(self, call: Call, item: MediaItem, data: bytes) -> None:
        self.tally.num_items += 1
        follower = follower_of(call.request, call.turn, item, data, self._clock.now())
        call.followers.append(follower)
        if self._enter(follower):
            assert self.lane.spec is not None
            self.tally.num_cache_hits += 1
            self.tally.cache_hit_bytes += self.lane.spec.nbytes(item.num_tokens, item.num_levels)
            call.succeed(follower, self._clock.now(), is_cache_hit=True)

    def _enter(self, follower: EncodeWaiter) -> bool:
        """Announces the units that are ready and joins a flight for the rest, unless the follower has joined one.
        Returns True if no unit is missing any more."""
        for unit in sorted(follower.missing):
            key = UnitKey(follower.item.mm_hash, unit)
            if not self._table.is_ready(key):
                continue
            if not self._may_announce(follower, key):
                self._held_back.setdefault(follower.destination.worker_id, {})[follower] = None
                return False
            if not self._announce(follower, key):
                return False
        if follower.missing and not self.flights.is_followed(follower):
            self.flights.join(follower)
        return not follower.missing

    def _may_announce(self, follower: EncodeWaiter, key: UnitKey) -> bool:
        return self._table.may_lease(follower.destination.worker_id, key)

    def _announce_held_back(self) -> None:
        """Announces units to followers that were held back because their worker's share was used up. For each worker it
        stops at the first follower whose unit still exceeds the share."""
        for worker_id in list(self._held_back):
            followers = self._held_back[worker_id]
            while (follower := next(iter(followers), None)) and self._may_enter(follower):
                del followers[follower]
                if self._enter(follower):
                    self._succeed(follower)
            if not followers:
                del self._held_back[worker_id]

    def _may_enter(self, follower: EncodeWaiter) -> bool:
        """Returns whether the first ready unit that the follower misses may be announced, or no missing unit is
        ready."""
        keys = (UnitKey(follower.item.mm_hash, unit) for unit in sorted(follower.missing))
        ready = next((key for key in keys if self._table.is_ready(key)), None)
        return ready is None or self._may_announce(follower, ready)

    def _announce(self, follower: EncodeWaiter, key: UnitKey) -> bool:
        """Announces a unit. Returns False if the worker can't be reached; then the follower has failed."""
        call = self._number_to_call[follower.call]
        assert self.lane.spec is not None
        if not self._announcer.announce(follower, key, self.lane.spec):
            self._fail(follower, WorkerBackedUp(f"{follower.destination.worker_id} takes no announcements"))
            return False
        follower.missing.remove(key.unit)
        self._trace(call, "unit_announced", {"item": follower.item.index, "unit": key.unit})
        return True

    def _succeed(self, follower: EncodeWaiter) -> None:
        """Records the success of a follower that misses no unit any more."""
        is_cache_hit = not follower.encode_s  # otherwise a pass made units while it followed a flight
        self._number_to_call[follower.call].succeed(follower, self._clock.now(), is_cache_hit=is_cache_hit)
        self._leave(follower)

    def _fail(self, follower: EncodeWaiter, error: WeftError) -> None:
        self._number_to_call[follower.call].fail(follower.item, error)
        self.tally.num_items_failed += 1
        self._leave(follower)

    def _leave(self, follower: EncodeWaiter) -> None:
        self._held_back.get(follower.destination.worker_id, {}).pop(follower, None)
        ended = self.flights.leave(follower)
        if ended is not None:
            self._flight_ended(ended)
        elif (left := self.flights.find(follower.item.mm_hash)) and not left.followers:
            self._stop_decoding(left)

    def _flight_ended(self, flight: EncodeJob) -> None:
        """Stops the decoding of a flight that has nothing left to make. Followers that miss units which it could no
        longer make start another flight."""
        self._stop_decoding(flight)
        for follower in self.flights.take_followers(flight):
            if self._enter(follower):
                self._succeed(follower)

    def _stop_decoding(self, flight: EncodeJob) -> None:
        if task := self._flight_to_task.get(flight):
            task.cancel()

    # ------------------------------------------------------------ decoding

    async def _decode(self, flight: EncodeJob) -> None:
        try:
            decoded = await self._decoder.decode(flight.data, flight.item, lambda units: self._decoded(flight, units))
        except DecodeBroke as error:
            logger.warning("%s", error)
            self._retry(flight)
        except WeftError as error:
            self._fail_flight(flight, error)
        except Exception as error:  # this is the top of an item's task: otherwise the followers would wait for ever
            logger.exception("decoding of %s failed", flight.item.mm_hash)
            self._fail_flight(flight, EncodeFailed(f"decoding failed ({type(error).__name__})"))
        else:
            self.tally.num_decoded += 1
            self.tally.decode_s += decoded.decode_s
            self.tally.preprocess_s += decoded.preprocess_s
            for follower in flight.followers:
                follower.decode_s, follower.preprocess_s = decoded.decode_s, decoded.preprocess_s
            if decoded.waveform is None:
                self.flights.decoded(flight, decoded.inputs)
            else:
                self.flights.decoded_sound(flight, decoded.waveform)

    def _decode_ended(self, flight: EncodeJob, task: asyncio.Task[None]) -> None:
        del self._flight_to_task[flight]
        self.pump()

    def _decoded(self, flight: EncodeJob, inputs: list[EncoderInput]) -> None:
        """Stores the next units of a flight while others are still to come."""
        if self.flights.decoded_part(flight, inputs):
            self.pump()

    def _sound_ended(self, flight: EncodeJob, outcome: list[EncoderInput] | WeftError, seconds: float) -> None:
        """Handles a sound after the device has made its units, in a batch that took `seconds`, or has failed. The
        flight may have ended meanwhile."""
        if isinstance(outcome, WeftError):
            self._fail_flight(flight, outcome)
        elif self.flights.is_live(flight):
            for follower in flight.followers:
                follower.preprocess_s += seconds
            self.flights.decoded(flight, outcome)

    def _fail_flight(self, flight: EncodeJob, error: WeftError) -> None:
        if not self.flights.is_live(flight):
            return
        for follower in self.flights.end(flight):
            self._fail(follower, error)

    def _retry(self, flight: EncodeJob) -> None:
        """Ends a flight that failed although the item is not known to be at fault; each follower has one more try."""
        for follower in self.flights.end(flight):
            if follower.num_retries_left == 0:
                self._fail(follower, EncodeFailed("decoding this item ends the process it runs in"))
                continue
            follower.num_retries_left -= 1
            self.flights.join(follower)

    def _put_back(self, flight: EncodeJob) -> None:
        """Drops what was decoded of a flight to make room for others; its followers join another flight."""
        followers = self.flights.end(flight)
        self._stop_decoding(flight)
        for follower in followers:
            if self._enter(follower):
                self._succeed(follower)

    # ------------------------------------------------------------ units that were made

    def _unit_ended(self, key: UnitKey, error: WeftError | None) -> None:
        """Handles a unit that was made or failed: informs every follower that misses it, and ends the flight after its
        last unit."""
        for follower in self.flights.followers_missing(key):
            self._deliver(follower, key, error)
        self._table.told(key)
        flight = self.flights.forward_ended(key)
        if flight is not None:
            self.tally.num_items_encoded += error is None and not flight.is_broken
            self._flight_ended(flight)

    def _deliver(self, follower: EncodeWaiter, key: UnitKey, error: WeftError | None) -> None:
        """Passes a unit that was made, or failed, to a follower that misses it. If the unit can't be announced yet, the
        follower stays in the flight, and its other units are made meanwhile."""
        if error is not None:
            self._fail(follower, error)
            return
        call = self._number_to_call[follower.call]
        self._trace(call, "unit_encoded", {"item": follower.item.index, "unit": key.unit})
        if not self._may_announce(follower, key):
            self._held_back.setdefault(follower.destination.worker_id, {})[follower] = None
            return
        if self._announce(follower, key) and not follower.missing:
            self._succeed(follower)

    def _trace(self, call: Call, name: str, detail: dict[str, object]) -> None:
        call.trace.append(TraceEvent(self._clock.now(), self._encoder_id, name, detail))
