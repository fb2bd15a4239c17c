"""Carries out the decisions of the intake: it takes announcements, pulls features through the feature channel, releases
them at the encoder, and requests missing features.

The worker controls its own memory: it pulls when the inbox has room, releases the unit at the encoder as soon as the
bytes have landed, and frees a slot as soon as the engine releases the unit. A unit is one separately encoded part of a
media item. The receiver lives in the event loop; the channel's transfer thread reads the bytes. This module knows
nothing of scheduling.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from math import prod
from typing import NamedTuple, Protocol

from fabric.channel import FeatureSink, LandedFeature
from fabric.clock import Clock
from fabric.dtypes import DTYPE_TO_BYTES
from fabric.errors import ArenaFull, FeatureMismatch, InvalidMedia, LeaseLost, ProtocolError, UnitTooLarge, WeftError
from fabric.ids import AttemptId, MemberId, UnitKey
from fabric.messages import FeatureTicket, GenerateRequest, MediaItem, UnitReady, UnitRelease
from fabric.plane import Plane
from llm_workers.config import WorkerConfig
from llm_workers.intake import Intake
from llm_workers.intake_entries import MissingUnit
from llm_workers.kept import KeptFeatures
from llm_workers.scheduling.events import NextRead

_LOG = logging.getLogger(__name__)


class EngineSide(Protocol):
    """Defines the calls that the receiver makes to the engine. They are thread-safe and never block."""

    def unit_landed(self, unit: UnitKey) -> None: ...

    def evict_unit(self, unit: UnitKey) -> None: ...


class Listener(NamedTuple):
    """Holds the callbacks through which the receiver reports to the service, in the event loop."""

    event: Callable[[AttemptId, str, UnitKey], None]
    """Reports `unit_announced`, `unit_landed` or `unit_reused` (a kept feature is used again) for the trace."""
    needed: Callable[[Sequence[MissingUnit]], None]
    failed: Callable[[AttemptId, WeftError], None]


class FeatureEndpoint(NamedTuple):
    """Holds this worker's id, its message plane, its end of the feature channel, and its clock."""

    member_id: MemberId
    plane: Plane
    sink: FeatureSink
    clock: Clock


class Receiver:
    """Receives the features of this worker. A unit stays in `landed` until the engine has answered every report of it
    with a release."""

    def __init__(
        self,
        endpoint: FeatureEndpoint,
        config: WorkerConfig,
        levels: tuple[int, int],
        engine: EngineSide,
        listener: Listener,
        landed: dict[UnitKey, LandedFeature],
    ) -> None:
        """Creates a receiver. `levels` is (num_levels, hidden_size) of the model's features. The receiver fills
        `landed`, and the runner reads it."""
        self._endpoint, self._config, self._levels = endpoint, config, levels
        self._engine, self._listener = engine, listener
        self._intake = Intake(endpoint.clock, config.unclaimed_unit_ttl_s, config.unit_wait_s)
        self._expected_shapes: dict[AttemptId, dict[UnitKey, tuple[int, int, int]]] = {}
        self._pulls: set[Future[LandedFeature]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.landed = landed
        self.kept = KeptFeatures(
            config.keep_features, config.kept_bytes, config.is_prefix_cache_enabled, config.speculation.max_tokens > 0
        )

    def start(self) -> None:
        """Enables pulls. It must be called in the event loop."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Cancels all pulls and frees every slot."""
        self._loop = None
        for pull in list(self._pulls):
            pull.cancel()
        for unit, feature in self.landed.items():
            if not self.kept.is_lent(unit):
                self._endpoint.sink.free(feature.slot_id)
        self.landed.clear()
        self.kept.clear()

    @property
    def num_held(self) -> int:
        """Returns the number of announcements, running pulls and landed units; it is 0 when the worker is idle."""
        return self._intake.num_held

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
                message = f"its feature needs at least {nbytes} bytes, a worker's inbox has {total_bytes}"
                raise InvalidMedia(message, param=item.part)
        dispatched = [unit for unit, (_, item) in rows.items() if item.index in request.dispatched_items]
        self._expected_shapes[attempt] = shapes
        self._intake.expect(attempt, (request.priority, *request.age), list(rows), dispatched)
        for unit in rows:
            if unit in self.landed:
                self._check(attempt, unit, self.landed[unit].ticket)
        self.settle()

    def admit(self, attempt: AttemptId, missing: Iterable[UnitKey]) -> None:
        """Records the units that the attempt lacks according to the engine."""
        for unit in self._intake.admit(attempt, missing):
            self._engine.unit_landed(unit)

    def need(self, attempt: AttemptId, unit: UnitKey, reason: str) -> None:
        """Records that the engine needs a unit again."""
        if self._intake.need(attempt, unit, reason):
            self._engine.unit_landed(unit)

    def end(self, attempt: AttemptId) -> None:
        """Records that the attempt has ended and gives back the announcements for it."""
        self._expected_shapes.pop(attempt, None)
        self._intake.end(attempt)
        self.settle()

    def let_go(self, unit: UnitKey, num_told: int, missed_by: Iterable[AttemptId] = ()) -> None:
        """Records that the engine does not read the unit any more. The release answers `num_told` reports of the unit.
        The attempts in `missed_by` need the unit again."""
        self._intake.let_go(unit, num_told, missed_by)

    def distrust(self, units: Iterable[UnitKey]) -> None:
        """Distrusts units whose bytes may be wrong. As soon as the engine has released them, they are freed and not
        kept. An attempt that misses such a unit gets another copy."""
        for unit in units:
            self.kept.distrust(unit, unit in self.landed)
            if unit in self.landed:
                self._intake.begin_evict(unit)

    def read_by(self, reads: Mapping[UnitKey, Mapping[AttemptId, NextRead | None]]) -> None:
        """Records changes in the engine's reports of which attempt still has to read which unit, and where the next
        read is. None means that the attempt does not read the unit any more."""
        self._intake.read_by(reads)

    def source_gone(self, source: str) -> None:
        """Drops the announcements of a transfer agent that has left, and asks the router for the units that they
        announced."""
        self._intake.forget_source(source)
        self.settle()

    # ------------------------------------------------------------ announcements and pulls

    def announced(self, ready: UnitReady) -> None:
        """Takes an announcement of an encoder that a unit can be pulled."""
        attempt = AttemptId(ready.request_id, ready.attempt)
        self._listener.event(attempt, "unit_announced", ready.unit)
        self._intake.announce(ready)
        self._check(attempt, ready.unit, ready.ticket)
        self.settle()

    def settle(self) -> None:
        """Carries out everything that is possible now: frees units, reuses kept features, gives announcements back,
        pulls, evicts and requests features. The cost depends on the number of changes since the last call and not on
        the number of waiting units."""
        self._free_unneeded()
        for unit in self._intake.take_kept(self.kept):
            self._reuse(unit)
        for ready in self._intake.take_releasable():
            self._release(ready)
        if self._loop is not None:
            while (ready := self._intake.next_pull()) is not None and self._pull(ready):
                pass
        needs = self._intake.take_needed()
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
            self._intake.begin_pull(unit)
            self._intake.pull_failed(unit, "transfer_failed")
            self._release(ready)
            if isinstance(error, UnitTooLarge):
                self._fail(self._intake.wanting(unit), error)
            return True
        self._intake.begin_pull(unit)
        self._pulls.add(pull)
        pull.add_done_callback(lambda done: self._call_soon(self._pulled, ready, done))
        return True

    def _make_room(self, unit: UnitKey) -> bool:
        """Evicts a unit to make room for `unit`. Returns True if there is room at once."""
        victim = self._intake.victim(unit)
        if victim is None:
            return False
        if self._intake.begin_evict(victim):
            self._engine.evict_unit(victim)
            return False
        self._free_unneeded()
        return True

    def _free_unneeded(self) -> None:
        """Frees the landed units that are not needed. A feature that the policy keeps is copied to host memory, and a
        lent feature goes back to the kept features."""
        for unit in self._intake.take_freeable():
            feature = self.landed.pop(unit)
            if self.kept.is_lent(unit):
                self.kept.give_back(unit)
            else:
                self.kept.offer(unit, feature)
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
        self._pulls.discard(done)
        self._release(ready)
        if done.cancelled() or self._loop is None:
            self._intake.pull_failed(ready.unit, "transfer_failed")
            if not done.cancelled() and done.exception() is None:
                self._endpoint.sink.free(done.result().slot_id)
            return
        error = done.exception()
        if error is None:
            self._land(ready.unit, done.result())
        else:
            name = ready.request_id
            _LOG.info("pull of %s for %s failed: %s", ready.unit, name, error, extra={"request_id": name})
            self._intake.pull_failed(ready.unit, "lease_lost" if isinstance(error, LeaseLost) else "transfer_failed")
        self.settle()

    def _land(self, unit: UnitKey, feature: LandedFeature) -> None:
        """Records a landed unit. Attempts that planned another number of rows fail; for the other attempts the landing
        is reported. A unit that no attempt planned is freed again."""
        self.landed[unit] = feature
        for attempt in self._intake.wanting(unit):
            if self._check(attempt, unit, feature.ticket):
                self._listener.event(attempt, "unit_landed", unit)
        if self._intake.landed(unit):
            self._engine.unit_landed(unit)

    def _reuse(self, unit: UnitKey) -> None:
        """Lands a kept feature, which the runner then reads from its host memory. The feature is not requested from any
        encoder and needs no room in the inbox."""
        self.landed[unit] = self.kept.lend(unit)
        for attempt in self._intake.wanting(unit):
            if self._check(attempt, unit, self.landed[unit].ticket):
                self._listener.event(attempt, "unit_reused", unit)
        if self._intake.landed(unit, is_lent=True):
            self._engine.unit_landed(unit)

    def _check(self, attempt: AttemptId, unit: UnitKey, ticket: FeatureTicket) -> bool:
        """Fails the attempt and returns False if the feature differs from the plan of the attempt. Otherwise
        returns True, also for an attempt that has not arrived yet, which is checked when it arrives."""
        shape = self._expected_shapes.get(attempt, {}).get(unit)
        if shape is None:
            return True
        if ticket.shape == shape and ticket.nbytes == prod(shape) * DTYPE_TO_BYTES.get(ticket.dtype, 0):
            return True
        found = f"{ticket.shape} {ticket.dtype} in {ticket.nbytes} bytes"
        self._fail(
            [attempt], FeatureMismatch(f"the feature of {unit.mm_hash}:{unit.unit} is {found}, planned was {shape}")
        )
        return False

    def _shape(self, item: MediaItem, num_rows: int) -> tuple[int, int, int]:
        """Returns the planned shape of a unit's feature."""
        return (item.num_levels or self._levels[0], num_rows, self._levels[1])

    def _fail(self, attempts: Iterable[AttemptId], error: WeftError) -> None:
        for attempt in attempts:
            self._listener.failed(attempt, error)

    def _release(self, ready: UnitReady) -> None:
        endpoint = self._endpoint
        release = UnitRelease(endpoint.member_id, ready.request_id, ready.attempt, ready.unit, ready.ticket.generation)
        endpoint.plane.send(ready.encoder_address, release)


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
