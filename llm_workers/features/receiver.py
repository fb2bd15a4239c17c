"""Carries out the decisions of the feature store: it takes announcements, pulls features through the feature channel,
releases them at the encoder, and requests missing features.

The worker controls its own memory: it pulls when the inbox has room, releases the unit at the encoder as soon as the
bytes have landed, and frees a slot as soon as the engine releases the unit. A unit is one separately encoded part of a
media item. The receiver lives in the event loop; the channel's transfer thread reads the bytes. This module knows
nothing of scheduling, and knows of units only the pulls that are running.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from copy import copy
from math import prod
from typing import NamedTuple, Protocol

from fabric.contracts import (
    DTYPE_TO_BYTES,
    ArenaFull,
    AttemptId,
    Clock,
    FeatureLog,
    FeatureMismatch,
    FeatureStats,
    FeatureTicket,
    GenerateRequest,
    InvalidMedia,
    LeaseLost,
    MediaItem,
    Member,
    MemberId,
    ProtocolError,
    UnitKey,
    UnitReady,
    UnitRelease,
    UnitTooLarge,
    WeftError,
    WorkerLost,
)
from fabric.transport import FeatureSink, LandedFeature, Plane
from llm_workers.features.feature_entries import Shape
from llm_workers.features.feature_store import FeatureStore, MissingUnit
from llm_workers.features.link_meter import LinkMeter
from llm_workers.features.pull_log import PullLog
from llm_workers.scheduling import FeatureReference, Reads, ReleasedFeature
from llm_workers.worker_config import WorkerConfig

_LOG = logging.getLogger(__name__)


class Receiver:
    """Receives the features of this worker. A feature stays in memory until the engine has given back every reference
    to it."""

    def __init__(
        self,
        endpoint: FeatureEndpoint,
        config: WorkerConfig,
        levels: tuple[int, int],
        engine: FeatureEngine,
        listener: Listener,
    ) -> None:
        """Creates a receiver with an empty store. `levels` is (num_levels, hidden_size) of the model's features."""
        self._endpoint, self._config, self._levels = endpoint, config, levels
        self._engine, self._listener = engine, listener
        self.kept_log = FeatureLog(endpoint.member_id, 1)
        """Tells routers how the features change that are kept after prefill."""
        self.store = FeatureStore(config, endpoint.clock, self.kept_log)
        self.pull_log = PullLog()
        self.link_meter = LinkMeter(endpoint.member_id)
        self._pulls: set[Future[LandedFeature]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_at_rest = True

    def start(self) -> None:
        """Enables pulls. It must be called in the event loop."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Cancels all pulls and frees every slot."""
        self._loop = None
        for pull in list(self._pulls):
            pull.cancel()
        for feature in self.store.clear():
            self._endpoint.sink.free(feature.slot_id)

    def stats(self) -> FeatureStats:
        """Returns the numbers of this moment, which no later event changes."""
        usage = self._endpoint.sink.usage()
        stats = copy(self.store.stats)
        stats.inbox_bytes_used = usage.used_bytes
        stats.inbox_bytes_total = usage.total_bytes
        stats.num_quarantined = usage.num_quarantined
        stats.kept_bytes_used = self.store.host_cache.used_bytes
        return stats

    def check_at_rest(self) -> None:
        """Asserts, once after the last attempt has ended, a bounded part of what must hold for the store."""
        is_at_rest = not self.store.num_attempts
        if is_at_rest and not self._is_at_rest:
            self.store.check_at_rest()
        self._is_at_rest = is_at_rest

    # ------------------------------------------------------------ requests

    def expect(self, attempt: AttemptId, request: GenerateRequest) -> None:
        """Registers the attempt of a request that has arrived. Raises InvalidMedia if one of its features can never fit
        into the inbox, and ProtocolError if its placeholders name units that do not exist."""
        rows = _planned_rows(request)
        total_bytes = self._endpoint.sink.usage().total_bytes
        shapes = {unit: self._shape(item, num_rows) for unit, (num_rows, item) in rows.items()}
        for unit, (_, item) in rows.items():
            nbytes = prod(shapes[unit]) * min(DTYPE_TO_BYTES.values())
            if nbytes > total_bytes:
                message = f"the feature needs at least {nbytes} bytes, but a worker's inbox has {total_bytes}"
                raise InvalidMedia(message, param=item.part)
        dispatched = [unit for unit, (_, item) in rows.items() if item.index in request.dispatched_items]
        self._is_at_rest = False
        self.store.expect(attempt, (request.priority, *request.age), shapes, dispatched)
        for unit in rows:
            if (feature := self.store.feature(unit)) is not None:
                self._check(attempt, unit, feature.ticket)
        self.settle()

    def admit(self, attempt: AttemptId, missing: Iterable[UnitKey]) -> None:
        """Records the units that the attempt lacks according to the engine."""
        self._hand_over(self.store.admit(attempt, missing))

    def need(self, attempt: AttemptId, unit: UnitKey, reason: str) -> None:
        """Records that the engine needs a unit again."""
        reference = self.store.need(attempt, unit, reason)
        if reference is not None:
            self._engine.hold_feature(reference)

    def end(self, attempt: AttemptId) -> None:
        """Records that the attempt has ended and gives back the announcements for it."""
        self.store.end(attempt)
        self.settle()

    def release(self, released: ReleasedFeature) -> None:
        """Takes back references of the engine. The attempts in `missed_by` need the unit again."""
        self._hand_over(self.store.release(released))

    def distrust(self, units: Iterable[UnitKey]) -> None:
        """Distrusts units whose bytes may be wrong. As soon as the engine has released them, they are freed and not
        kept. An attempt that misses such a unit gets another copy."""
        # The engine has given up the references that it held, but another one may be on its way to it.
        for unit in self.store.distrust(units):
            self._engine.evict_feature(unit)

    def update_reads(self, reads: Reads) -> None:
        """Records changes in the engine's reports of which attempt still has to read which unit, and where the next
        read is. None means that the attempt does not read the unit any more."""
        self.store.update_reads(reads)

    def drop_source(self, source: str) -> None:
        """Drops the announcements of a transfer agent that has left, and asks the router for the units that they
        announced."""
        self.store.drop_source(source)
        self.settle()

    def _hand_over(self, references: Iterable[FeatureReference]) -> None:
        for reference in references:
            self._engine.hold_feature(reference)

    # ------------------------------------------------------------ announcements and pulls

    def announce(self, ready: UnitReady) -> None:
        """Takes an announcement of an encoder that a unit can be pulled."""
        attempt = AttemptId(ready.request_id, ready.attempt)
        self._listener.event(attempt, "unit_announced", ready.unit)
        self.store.announce(ready)
        self._check(attempt, ready.unit, ready.ticket)
        self.settle()

    def settle(self) -> None:
        """Carries out everything that is possible now: frees units, reuses kept features, gives announcements back,
        pulls, evicts and requests features. The cost depends on the number of changes since the last call and not on
        the number of waiting units."""
        self._free_unneeded()
        for unit in self.store.take_lendable():
            self._reuse(unit)
        for ready in self.store.take_releasable():
            self._release(ready)
        if self._loop is not None:
            while (first := self.store.next_pull()) is not None and self._pull(first):
                pass
        needs = self.store.take_needed()
        if needs:
            self._listener.needed(needs)

    def _pull(self, ready: UnitReady) -> bool:
        """Starts a pull. Returns False if there is no room now; then either an eviction is under way, or a later
        release frees a slot."""
        unit = ready.unit
        try:
            pull = self._endpoint.sink.pull(ready.ticket, self._config.pull_timeout_s)
        except ArenaFull:
            return self._make_room(unit)
        except WeftError as error:
            self.link_meter.failed(ready.ticket.source)
            self.store.begin_pull(unit)
            self.store.fail_pull(unit, "transfer_failed")
            self._release(ready)
            if isinstance(error, UnitTooLarge):
                self._fail(self.store.attempts_of(unit), error)
            return True
        self.store.begin_pull(unit)
        self.pull_log.begin(pull, ready.ticket.source, ready.ticket.nbytes, self._endpoint.clock.now())
        self._pulls.add(pull)
        pull.add_done_callback(lambda done: self._call_soon(self._pulled, ready, done))
        return True

    def _make_room(self, unit: UnitKey) -> bool:
        """Evicts a unit to make room for `unit`. Returns True if there is room at once."""
        victim = self.store.victim(unit)
        if victim is None:
            return False
        if self.store.begin_eviction(victim):
            self._engine.evict_feature(victim)
            return False
        self._free_unneeded()
        return True

    def _free_unneeded(self) -> None:
        for feature in self.store.take_unneeded():
            self._endpoint.sink.free(feature.slot_id)

    def _call_soon(
        self,
        callback: Callable[[UnitReady, Future[LandedFeature]], None],
        ready: UnitReady,
        done: Future[LandedFeature],
    ) -> None:
        """Passes a finished pull to the event loop. It runs in the transfer thread, or in the thread that cancelled the
        pull."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, ready, done)
        elif not done.cancelled() and done.exception() is None:
            self._endpoint.sink.free(done.result().slot_id)

    def _pulled(self, ready: UnitReady, done: Future[LandedFeature]) -> None:
        try:
            self._record_pull(ready, done)
        except Exception:
            # This is the top of a callback of the event loop. The unit would stay in the state `PULLING`, so the
            # requests that read it would wait for ever.
            name = ready.request_id
            _LOG.exception("the pull of %s for %s can't be recorded", ready.unit, name, extra={"request_id": name})
            self._listener.broken(WorkerLost("the pull of a feature can't be recorded"))

    def _record_pull(self, ready: UnitReady, done: Future[LandedFeature]) -> None:
        self._pulls.discard(done)
        self._release(ready)
        if done.cancelled() or done.exception() is not None:
            self.pull_log.fail(done)
            self.link_meter.failed(ready.ticket.source)
        else:
            landed, ticket = done.result(), ready.ticket
            self.pull_log.end(done, landed.seconds)
            self.link_meter.landed(
                ticket.source, ticket.nbytes, landed.seconds, landed.read_s, is_staged=landed.is_staged
            )
        if done.cancelled() or self._loop is None:
            self.store.fail_pull(ready.unit, "transfer_failed")
            if not done.cancelled() and done.exception() is None:
                self._endpoint.sink.free(done.result().slot_id)
            return
        error = done.exception()
        if error is None:
            self._land(ready.unit, done.result())
        else:
            name = ready.request_id
            _LOG.info("the pull of %s for %s has failed: %s", ready.unit, name, error, extra={"request_id": name})
            self.store.fail_pull(ready.unit, "lease_lost" if isinstance(error, LeaseLost) else "transfer_failed")
        self.settle()

    def _land(self, unit: UnitKey, feature: LandedFeature) -> None:
        """Records a landed unit. Attempts that planned another number of rows fail; for the other attempts the landing
        is reported. A unit that no attempt planned is freed again."""
        self._check_all(unit, feature.ticket, "unit_landed")
        reference = self.store.land(unit, feature)
        if reference is not None:
            self._engine.hold_feature(reference)

    def _reuse(self, unit: UnitKey) -> None:
        """Lends a kept feature, which the runner then reads from its host memory. The feature is not requested from any
        encoder and needs no room in the inbox."""
        reference = self.store.lend(unit)
        feature = self.store.feature(unit)
        assert feature is not None, f"{unit} was lent but is not in memory"
        self._check_all(unit, feature.ticket, "unit_reused")
        if reference is not None:
            self._engine.hold_feature(reference)

    def _check_all(self, unit: UnitKey, ticket: FeatureTicket, event: str) -> None:
        """Reports the event to the attempts that contain the unit and planned it so, and fails the others."""
        for attempt in self.store.attempts_of(unit):
            if self._check(attempt, unit, ticket):
                self._listener.event(attempt, event, unit)

    def _check(self, attempt: AttemptId, unit: UnitKey, ticket: FeatureTicket) -> bool:
        """Fails the attempt and returns False if the feature differs from the plan of the attempt. Otherwise
        returns True, also for an attempt that has not arrived yet, which is checked when it arrives."""
        shape = self.store.planned_shape(attempt, unit)
        if shape is None:
            return True
        if ticket.shape == shape and ticket.nbytes == prod(shape) * DTYPE_TO_BYTES.get(ticket.dtype, 0):
            return True
        found = f"{ticket.shape} {ticket.dtype} in {ticket.nbytes} bytes"
        message = f"the feature of {unit.mm_hash}:{unit.unit} is {found}, but the plan has shape {shape}"
        self._fail([attempt], FeatureMismatch(message))
        return False

    def _shape(self, item: MediaItem, num_rows: int) -> Shape:
        """Returns the planned shape of a unit's feature."""
        return (item.num_levels or self._levels[0], num_rows, self._levels[1])

    def _fail(self, attempts: Iterable[AttemptId], error: WeftError) -> None:
        for attempt in attempts:
            self._listener.failed(attempt, error)

    def _release(self, ready: UnitReady) -> None:
        endpoint = self._endpoint
        release = UnitRelease(endpoint.member_id, ready.request_id, ready.attempt, ready.unit, ready.ticket.generation)
        endpoint.plane.send(ready.encoder_address, release)


class FeatureEndpoint(NamedTuple):
    """Holds this worker's id, its message plane, its end of the feature channel, and its clock."""

    member_id: MemberId
    plane: Plane
    sink: FeatureSink
    clock: Clock


class FeatureEngine(Protocol):
    """Defines the calls that the receiver makes to an engine. They are thread-safe and never block. The engine gives
    back every reference exactly as it was handed over, in a `ReleasedFeature`."""

    def hold_feature(self, reference: FeatureReference) -> None:
        """Hands the engine a reference, through which it may read the feature until it gives the reference back."""
        ...

    def evict_feature(self, unit: UnitKey) -> None:
        """Asks the engine to give back all references to the unit, even if sequences need it. An engine that holds none
        does not answer."""
        ...


class Listener(NamedTuple):
    """Holds the callbacks through which the receiver reports to the service, in the event loop."""

    event: Callable[[AttemptId, str, UnitKey], None]
    """Reports `unit_announced`, `unit_landed` or `unit_reused` (a kept feature is used again) for the trace."""
    needed: Callable[[Sequence[MissingUnit]], None]
    failed: Callable[[AttemptId, WeftError], None]
    broken: Callable[[WeftError], None]
    """Reports that the receiver can't go on, so the worker is lost."""


def _planned_rows(request: GenerateRequest) -> dict[UnitKey, tuple[int, MediaItem]]:
    """Maps each unit, in the order of the prompt, to its number of rows and its item. If several items have the same
    hash, the item that was dispatched represents them. Raises ProtocolError if a placeholder names media that the
    request does not have."""
    rows: dict[UnitKey, tuple[int, MediaItem]] = {}
    by_dispatch = {item.mm_hash: item for item in request.media if item.index in request.dispatched_items}
    try:
        for run in request.placeholders:
            item = request.media[run.item]
            unit = item.unit_keys()[run.unit]
            rows.setdefault(unit, (item.unit_tokens[run.unit], by_dispatch.get(item.mm_hash, item)))
    except IndexError:
        raise ProtocolError("placeholders name media that the request does not have") from None
    return rows


class Peers:
    """Tracks the other members of the cluster. A member that has left counts as confirmed dead, and the worker gives up
    everything that waits for it. It lives in the event loop and knows nothing of requests."""

    def __init__(self, plane: Plane, sink: FeatureSink, receiver: Receiver) -> None:
        self._plane, self._sink, self._receiver = plane, sink, receiver
        self._members: dict[MemberId, Member] = {}

    def get(self, member_id: MemberId) -> Member | None:
        return self._members.get(member_id)

    def update(self, members: Sequence[Member]) -> list[MemberId]:
        """Takes the list of all current members. For each member that has left, it gives up quarantined slots and
        announcements and closes the connection. Returns the routers among the members that left."""
        now = {member.member_id: member for member in members}
        left = [self._members[member_id] for member_id in self._members.keys() - now.keys()]
        for gone in left:
            if gone.transfer_agent:
                self._sink.peer_dead(gone.transfer_agent)
                self._receiver.drop_source(gone.transfer_agent)
            self._plane.forget(gone.address)
        self._members = now
        self._receiver.link_meter.update(members)
        return [gone.member_id for gone in left if gone.kind == "router"]
