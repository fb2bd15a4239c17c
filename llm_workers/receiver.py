"""Acts on the intake: announcements in, pulls through the feature channel, releases, requests for features.

The worker is in charge of its memory: it pulls when the inbox has room, tells the encoder as soon as the bytes have
landed, and frees a slot as soon as the engine lets go of the unit. Lives in the event loop; the channel's transfer
thread does the reading. Knows nothing of scheduling.
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
from fabric.errors import ArenaFull, FeatureMismatch, InvalidMedia, LeaseLost, ProtocolError, UnitTooLarge, WeftError
from fabric.ids import AttemptId, MemberId, UnitKey
from fabric.messages import FeatureTicket, GenerateRequest, MediaItem, UnitReady, UnitRelease
from fabric.plane import Plane
from llm_workers.config import WorkerConfig
from llm_workers.intake import Intake
from llm_workers.intake_entries import Need
from llm_workers.kept import KeptFeatures
from llm_workers.scheduling.events import NextRead

_LOG = logging.getLogger(__name__)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class EngineSide(Protocol):
    """What the receiver tells the engine; thread-safe, never blocks."""

    def unit_landed(self, unit: UnitKey) -> None: ...

    def evict_unit(self, unit: UnitKey) -> None: ...


class Listener(NamedTuple):
    """What the receiver tells the service, in the event loop."""

    event: Callable[[AttemptId, str, UnitKey], None]
    """`unit_announced`, `unit_landed` or `unit_reused` (it was kept), for the trace."""
    needed: Callable[[Sequence[Need]], None]
    failed: Callable[[AttemptId, WeftError], None]


class Endpoint(NamedTuple):
    """Who this worker is on the planes."""

    member_id: MemberId
    plane: Plane
    sink: FeatureSink
    clock: Clock


class Receiver:
    """A unit stays in `landed` until the engine has let go of it as often as it was told of it."""

    def __init__(
        self,
        endpoint: Endpoint,
        config: WorkerConfig,
        levels: tuple[int, int],
        engine: EngineSide,
        listener: Listener,
        landed: dict[UnitKey, LandedFeature],
    ) -> None:
        """`levels` is (num_levels, hidden_size) of the model's features; `landed` is filled here and read by the
        runner."""
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
        """Must be called in the event loop."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Cancels pulls and frees every slot."""
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
        """Announcements, pulls and features that are kept; 0 when idle."""
        return self._intake.num_held

    # ------------------------------------------------------------ requests

    def expect(self, attempt: AttemptId, request: GenerateRequest) -> None:
        """A request has come. Raises InvalidMedia if one of its features can never fit the inbox, ProtocolError if
        its placeholders name units that are not there."""
        rows = _planned_rows(request)
        total_bytes = self._endpoint.sink.usage().total_bytes
        shapes = {unit: self._shape(item, num_rows) for unit, (num_rows, item) in rows.items()}
        for unit, (_, item) in rows.items():
            nbytes = prod(shapes[unit]) * min(DTYPE_BYTES.values())
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
        """The engine has said what the attempt lacks."""
        for unit in self._intake.admit(attempt, missing):
            self._engine.unit_landed(unit)

    def need(self, attempt: AttemptId, unit: UnitKey, reason: str) -> None:
        """The engine needs a unit again."""
        if self._intake.need(attempt, unit, reason):
            self._engine.unit_landed(unit)

    def end(self, attempt: AttemptId) -> None:
        """The attempt has ended: announcements for it are given back."""
        self._expected_shapes.pop(attempt, None)
        self._intake.end(attempt)
        self.settle()

    def let_go(self, unit: UnitKey, num_told: int, missed_by: Iterable[AttemptId] = ()) -> None:
        """The engine does not read the unit any more, of which it was told `num_told` times."""
        self._intake.let_go(unit, num_told, missed_by)

    def distrust(self, units: Iterable[UnitKey]) -> None:
        """These may hold what they should not: as soon as the engine has let go of them they are freed and not kept.
        Who misses them gets another copy."""
        for unit in units:
            self.kept.distrust(unit, unit in self.landed)
            if unit in self.landed:
                self._intake.begin_evict(unit)

    def read_by(self, reads: Mapping[UnitKey, Mapping[AttemptId, NextRead | None]]) -> None:
        """What changed in the engine's word on who still has to read what, and where next; None: not any more."""
        self._intake.read_by(reads)

    def source_gone(self, source: str) -> None:
        """A transfer agent has left: its announcements are void, the router is asked for what they promised."""
        self._intake.forget_source(source)
        self.settle()

    # ------------------------------------------------------------ announcements and pulls

    def announced(self, ready: UnitReady) -> None:
        """An encoder says that a unit can be pulled."""
        attempt = AttemptId(ready.request_id, ready.attempt)
        self._listener.event(attempt, "unit_announced", ready.unit)
        self._intake.announce(ready)
        self._check(attempt, ready.unit, ready.ticket)
        self.settle()

    def settle(self) -> None:
        """Does whatever can be done now: gives back, frees, pulls, evicts, asks. Costs what has changed since the last
        call, however much waits."""
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
        """False if there is no room now: then room is being made, or a slot will be freed in time."""
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
        """True if there is room at once."""
        victim = self._intake.victim(unit)
        if victim is None:
            return False
        if self._intake.begin_evict(victim):
            self._engine.evict_unit(victim)
            return False
        self._free_unneeded()
        return True

    def _free_unneeded(self) -> None:
        """What the policy keeps goes to host memory; what was lent goes back there."""
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
        """Runs in the transfer thread, or wherever the pull was cancelled."""
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
        """Those who planned another number of rows fail; the others are told. What nobody planned is freed again."""
        self.landed[unit] = feature
        for attempt in self._intake.wanting(unit):
            if self._check(attempt, unit, feature.ticket):
                self._listener.event(attempt, "unit_landed", unit)
        if self._intake.landed(unit):
            self._engine.unit_landed(unit)

    def _reuse(self, unit: UnitKey) -> None:
        """A kept feature is read where it lies: nobody is asked for it and no room is made."""
        self.landed[unit] = self.kept.lend(unit)
        for attempt in self._intake.wanting(unit):
            if self._check(attempt, unit, self.landed[unit].ticket):
                self._listener.event(attempt, "unit_reused", unit)
        if self._intake.landed(unit, is_lent=True):
            self._engine.unit_landed(unit)

    def _check(self, attempt: AttemptId, unit: UnitKey, ticket: FeatureTicket) -> bool:
        """Fails the attempt when a feature is not what it planned. Unknown attempts are checked when they come."""
        shape = self._expected_shapes.get(attempt, {}).get(unit)
        if shape is None:
            return True
        if ticket.shape == shape and ticket.nbytes == prod(shape) * DTYPE_BYTES.get(ticket.dtype, 0):
            return True
        found = f"{ticket.shape} {ticket.dtype} in {ticket.nbytes} bytes"
        self._fail(
            [attempt], FeatureMismatch(f"the feature of {unit.mm_hash}:{unit.unit} is {found}, planned was {shape}")
        )
        return False

    def _shape(self, item: MediaItem, num_rows: int) -> tuple[int, int, int]:
        """Of a unit's feature, as it was planned."""
        return (item.num_levels or self._levels[0], num_rows, self._levels[1])

    def _fail(self, attempts: Iterable[AttemptId], error: WeftError) -> None:
        for attempt in attempts:
            self._listener.failed(attempt, error)

    def _release(self, ready: UnitReady) -> None:
        endpoint = self._endpoint
        release = UnitRelease(endpoint.member_id, ready.request_id, ready.attempt, ready.unit, ready.ticket.generation)
        endpoint.plane.send(ready.encoder_address, release)


def _planned_rows(request: GenerateRequest) -> dict[UnitKey, tuple[int, MediaItem]]:
    """Units in the order of the prompt -> rows and item. An item that was dispatched stands for its twins."""
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
