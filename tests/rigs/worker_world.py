"""Simulates the surroundings of the receiver: encoders that announce, a channel that is slow or fails, and an engine
that reads, preempts and answers late. Every queue between them is explicit, so that a test chooses any interleaving."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fabric.contracts import (
    ArenaFull,
    AttemptId,
    FeatureTicket,
    GenerateRequest,
    LeaseLost,
    ManualClock,
    MediaItem,
    MemberId,
    MmHash,
    PlaceholderRange,
    RequestId,
    SamplingParams,
    StopConditions,
    UnitKey,
    UnitReady,
    UnitRelease,
    WeftError,
)
from fabric.transport import ArenaUsage, LandedFeature
from llm_workers.features import FeatureEndpoint, FeatureStore, Listener, Receiver
from llm_workers.features.feature_entries import ReadTurn, UnitState
from llm_workers.features.feature_store import LOST, MissingUnit
from llm_workers.scheduling import FeatureReference, NextRead, Reads, ReleasedFeature
from llm_workers.worker_config import WorkerConfig

NUM_LEVELS, HIDDEN, ROW_BYTES = 2, 4, 2 * 4 * 4

AttemptUnits = tuple[AttemptId, list[UnitKey]]
EngineCommand = (
    tuple[Literal["add"], AttemptId, list[UnitKey]]
    | tuple[Literal["abort"], AttemptId]
    | tuple[Literal["hold"], FeatureReference]
    | tuple[Literal["evict"], UnitKey]
)
TurnUpdate = tuple[
    list[UnitKey],
    list[ReleasedFeature],
    Reads,
    list[AttemptUnits],
    list[tuple[AttemptId, UnitKey]],
    list[AttemptId],
]
"""Holds what a turn distrusts, released, read, admitted (with the units that are missing), needs again, and ended."""


def unit_of(name: str) -> UnitKey:
    return UnitKey(MmHash(name), 0)


def request_of(name: str, age: float, units: list[tuple[str, int]], dispatched: list[int]) -> GenerateRequest:
    """Returns a request; `units` lists `(name, rows)` of one-unit media in the order of the prompt."""
    media = tuple(MediaItem(i, "image", MmHash(n), (1, 2, 2), (rows,), 4, f"p{i}") for i, (n, rows) in enumerate(units))
    offsets = np.cumsum([1, *(rows + 1 for _, rows in units)])
    return GenerateRequest(
        request_id=RequestId(name),
        attempt=0,
        router_id=MemberId("router"),
        router_address="local://router",
        token_ids=tuple(range(int(offsets[-1]))),
        placeholders=tuple(
            PlaceholderRange(int(at), rows, i, 0, 0)
            for i, (at, (_, rows)) in enumerate(zip(offsets, units, strict=False))
        ),
        media=media,
        sampling=SamplingParams(),
        stop=StopConditions(max_tokens=1),
        age=(age, name),
        dispatched_items=tuple(dispatched),
    )


class Sink:
    """A `Sink` is an inbox of `total_bytes` whose pulls end when the test says so."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.slots: dict[int, int] = {}
        self.pulls: list[tuple[FeatureTicket, int, Future[LandedFeature]]] = []
        self._next = 0

    def pull(self, ticket: FeatureTicket, timeout_s: float) -> Future[LandedFeature]:
        if sum(self.slots.values()) + ticket.nbytes > self.total_bytes:
            raise ArenaFull("no room")
        self._next += 1
        self.slots[self._next] = ticket.nbytes
        self.pulls.append((ticket, self._next, Future()))
        return self.pulls[-1][2]

    def end_pull(self, index: int, is_lost: bool) -> None:
        ticket, slot_id, future = self.pulls.pop(index)
        if is_lost:
            del self.slots[slot_id]
            future.set_exception(LeaseLost("given away"))
        else:
            future.set_result(LandedFeature(slot_id, np.zeros(ticket.nbytes, np.uint8), ticket, 0.0))

    def free(self, slot_id: int) -> None:
        del self.slots[slot_id]

    def usage(self) -> ArenaUsage:
        return ArenaUsage(sum(self.slots.values()), self.total_bytes, len(self.slots), 0, 0)


@dataclass
class Reading:
    """A `Reading` is an admitted attempt in the engine: it reads its units in order, some of them more than once."""

    units: list[UnitKey]
    at: int = 0

    def next_reads(self) -> dict[UnitKey, NextRead]:
        return {unit: NextRead(0, self.units.index(unit, self.at)) for unit in self.units[self.at :]}


@dataclass
class World:
    total_bytes: int
    config: WorkerConfig = field(default_factory=lambda: WorkerConfig(unclaimed_unit_ttl_s=5.0))
    clock: ManualClock = field(default_factory=ManualClock)
    address: str = "local://worker"
    num_announced: int = 0
    releases: list[UnitRelease] = field(default_factory=list)
    failed: dict[AttemptId, WeftError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sink = Sink(self.total_bytes)
        self.commands: deque[EngineCommand] = deque()
        self.updates: deque[TurnUpdate] = deque()
        self.coming: list[tuple[AttemptId, UnitKey]] = []
        """Holds the announcements that encoders will make."""
        self.rows: dict[UnitKey, int] = {}
        self.live: dict[AttemptId, GenerateRequest] = {}
        self.reading: dict[AttemptId, Reading] = {}
        self.held: dict[UnitKey, list[FeatureReference]] = {}
        """Holds the references of the engine."""
        self.told: dict[tuple[UnitKey, AttemptId], NextRead] = {}
        endpoint = FeatureEndpoint(MemberId("worker"), self, self.sink, self.clock)
        listener = Listener(lambda *_: None, self._needed, self.failed.__setitem__, _raise)
        self.receiver = Receiver(endpoint, self.config, (NUM_LEVELS, HIDDEN), self, listener)
        self.receiver.start()

    # ------------------------------------------------------------ the plane and the engine, as the receiver sees them

    def send(self, address: str, message: UnitRelease) -> bool:
        self.releases.append(message)
        return True

    @property
    def landed(self) -> set[UnitKey]:
        """Returns the units whose features are in memory, the lent ones included."""
        entries = self.receiver.store._entries
        return {unit for unit, entry in entries.items() if entry.feature is not None}

    def hold_feature(self, reference: FeatureReference) -> None:
        self.commands.append(("hold", reference))

    def evict_feature(self, unit: UnitKey) -> None:
        self.commands.append(("evict", unit))

    def _needed(self, needs: Sequence[MissingUnit]) -> None:
        for attempt, unit, reason in needs:
            if (attempt, unit) not in self.coming:
                self.coming.append((attempt, unit))
            else:  # it is slower than `unit_wait_s`
                assert reason == LOST, "asked for what is on its way"

    # ------------------------------------------------------------ requests and encoders

    def begin(self, request: GenerateRequest) -> None:
        attempt = AttemptId(request.request_id, request.attempt)
        units = [request.media[run.item].unit_keys()[0] for run in request.placeholders]
        self.rows |= {
            unit: request.media[run.item].unit_tokens[0] for unit, run in zip(units, request.placeholders, strict=True)
        }
        self.live[attempt] = request
        self.receiver.expect(attempt, request)
        self.commands.append(("add", attempt, units))

    def will_announce(self, request: GenerateRequest) -> None:
        """Lets its encoders work: each dispatched unit gets one announcement, whether or not the request has
        arrived."""
        for index in request.dispatched_items:
            unit = request.media[index].unit_keys()[0]
            self.rows[unit] = request.media[index].unit_tokens[0]
            key = (AttemptId(request.request_id, request.attempt), unit)
            if key not in self.coming:
                self.coming.append(key)

    def abort(self, attempt: AttemptId) -> None:
        if self.live.pop(attempt, None) is not None:
            self.commands.append(("abort", attempt))
            self.receiver.end(attempt)

    def announce(self, index: int) -> None:
        (request_id, number), unit = self.coming.pop(index)
        self.num_announced += 1
        shape = (NUM_LEVELS, self.rows[unit], HIDDEN)
        ticket = FeatureTicket("e", b"", 0, 0, self.rows[unit] * ROW_BYTES, self.num_announced, shape, "float32", 60.0)
        self.receiver.announce(UnitReady(MemberId("e"), "local://e", request_id, number, unit, ticket))

    async def end_pull(self, index: int, is_lost: bool) -> None:
        self.sink.end_pull(index, is_lost)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    # ------------------------------------------------------------ the engine's turn

    def turn(self, preempt: int | None = None, distrust: int | None = None) -> None:
        """Runs one turn: it obeys commands, releases units, preempts an attempt or distrusts a unit if asked, reads one
        unit for every attempt that can read, and releases units again."""
        distrusted: list[UnitKey] = []
        released: list[ReleasedFeature] = []
        admitted: list[AttemptUnits] = []
        needed: list[tuple[AttemptId, UnitKey]] = []
        ended: list[AttemptId] = []
        while self.commands:
            self._obey(self.commands.popleft(), released, admitted)
        self._release_unneeded(released)
        if preempt is not None and self.reading:
            attempt = list(self.reading)[preempt % len(self.reading)]
            self.reading[attempt].at = 0
            needed = [(attempt, unit) for unit in dict.fromkeys(self.reading[attempt].units) if unit not in self.held]
        if distrust is not None and self.held:
            distrusted = [list(self.held)[distrust % len(self.held)]]
            self._obey(("evict", distrusted[0]), released, admitted)
        for attempt, one in list(self.reading.items()):
            if one.at < len(one.units) and one.units[one.at] in self.held:
                self._read(one.units[one.at])
                one.at += 1
            if one.at == len(one.units):
                del self.reading[attempt]
                ended.append(attempt)
        self._release_unneeded(released)
        self.updates.append((distrusted, released, self._changed_reads(), admitted, needed, ended))

    def _read(self, unit: UnitKey) -> None:
        """Checks that what every reference to the unit leads to is still in memory."""
        for reference in self.held[unit]:
            assert self.receiver.store.feature(unit) is reference.feature, "the engine reads what was freed"
            is_lent = self.receiver.store.host_cache.is_lent(unit)
            assert is_lent or reference.feature.slot_id in self.sink.slots

    def _changed_reads(self) -> Reads:
        """Returns the reads that differ from those of the last update."""
        reads = {(unit, key): read for key, one in self.reading.items() for unit, read in one.next_reads().items()}
        changed: dict[UnitKey, dict[AttemptId, NextRead | None]] = {}
        for unit, attempt in self.told.keys() | reads.keys():
            if self.told.get((unit, attempt)) != reads.get((unit, attempt)):
                changed.setdefault(unit, {})[attempt] = reads.get((unit, attempt))
        self.told = reads
        return changed

    def _obey(self, command: EngineCommand, released: list[ReleasedFeature], admitted: list[AttemptUnits]) -> None:
        match command:
            case ("add", attempt, units):
                self.reading[attempt] = Reading(units)
                admitted.append((attempt, [unit for unit in dict.fromkeys(units) if unit not in self.held]))
            case ("abort", attempt):
                self.reading.pop(attempt, None)
            case ("hold", reference):
                self.held.setdefault(reference.unit, []).append(reference)
            case ("evict", unit) if unit in self.held:
                missed = tuple(attempt for attempt, one in self.reading.items() if unit in one.units[one.at :])
                released.append(ReleasedFeature(unit, tuple(self.held.pop(unit)), missed))

    def _release_unneeded(self, released: list[ReleasedFeature]) -> None:
        needed = {unit for one in self.reading.values() for unit in one.units[one.at :]}
        unneeded = [unit for unit in self.held if unit not in needed]
        released.extend(ReleasedFeature(unit, tuple(self.held.pop(unit))) for unit in unneeded)

    def deliver(self) -> None:
        """Applies one update of the engine to the receiver."""
        distrusted, released, reads, admitted, needed, ended = self.updates.popleft()
        self.receiver.distrust(distrusted)
        for each in released:
            self.receiver.release(each)
        self.receiver.update_reads(reads)
        for attempt, missing in admitted:
            self.receiver.admit(attempt, missing)
        for attempt, unit in needed:
            self.receiver.need(attempt, unit, "preempted")
        for attempt in ended:
            if self.live.pop(attempt, None) is not None:
                self.receiver.end(attempt)
        self.receiver.settle()


def assert_settled(receiver: Receiver) -> None:
    """Checks, by a search of everything that the store knows, that nothing is left to do but wait: `settle`, which
    uses marks and queues, must reach the same result as the search."""
    store, now_s = receiver.store, receiver._endpoint.clock.now()
    store.check_invariants()
    for unit, entry in store._entries.items():
        if entry.state is UnitState.LANDED:
            is_expected = any(not needs.is_admitted and unit in needs.order for needs in store._attempts.values())
            assert is_expected, f"{unit} could be freed"
            assert not entry.is_evicting, f"{unit} could be evicted"
        for one in entry.announced:
            needs = store._attempts.get(one.attempt)
            is_fresh = one.at_s > now_s - store._config.unclaimed_unit_ttl_s
            is_early = needs is None and one.attempt not in store._ended and is_fresh
            assert is_early or (needs is not None and needs.wants(unit)), f"{one} is of no use"
    for attempt, needs in store._attempts.items():
        for unit in needs.missing:
            is_awaited = now_s - needs.awaited.get(unit, -1e9) < store._config.unit_wait_s
            is_coming = store._entries[unit].announced or store.state(unit) is UnitState.PULLING
            assert is_awaited or is_coming, f"{attempt} waits for {unit}"
        for unit in needs.missing if needs.is_admitted else needs.order:
            assert store.state(unit) is not UnitState.KEPT, f"{unit} is kept and wanted"
    announced = [unit for unit, entry in store._entries.items() if entry.announced]
    pulls = {unit: turn for unit in announced if (turn := _first_turn(store, unit, is_pull=True)) is not None}
    assert {unit: store._to_pull._item_to_entry[unit][0] for unit in store._to_pull} == pulls
    first = store._to_pull.peek()
    assert first is None if not pulls else first[:2] == min((turn, unit) for unit, turn in pulls.items())
    in_inbox = [unit for unit, entry in store._entries.items() if entry.feature is not None and not entry.is_lent]
    uses = {unit: turn for unit in in_inbox if (turn := _first_turn(store, unit, is_pull=False)) is not None}
    assert {unit: store._to_evict._item_to_entry[unit][0].turn for unit in store._to_evict} == uses
    last = store._to_evict.peek()
    assert last is None if not uses else last[0].turn == max(uses.values())


def _first_turn(store: FeatureStore, unit: UnitKey, is_pull: bool) -> ReadTurn | None:
    """Returns the first turn among the attempts that want the unit pulled (`is_pull`) or that still have to read it."""
    if is_pull and store.state(unit) in (UnitState.PULLING, UnitState.LANDED, UnitState.READ):
        return None
    named = store._entries[unit].readers.named if unit in store._entries else {}
    turns = []
    for attempt, needs in store._attempts.items():
        is_reader = unit in needs.order and (not named or attempt in named or not needs.is_admitted)
        if needs.wants(unit) if is_pull else is_reader:
            read = NextRead(0, needs.order[unit])
            if needs.is_admitted:
                read = named.get(attempt, read)
            turns.append(ReadTurn(needs.is_admitted and attempt not in named, needs.rank, read))
    return min(turns, default=None)


def _raise(error: WeftError) -> None:
    """Lets a bug of the receiver fail the test instead of the worker."""
    raise error
