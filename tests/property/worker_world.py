"""Simulates the surroundings of the receiver: encoders that announce, a channel that is slow or fails, and an engine
that reads, preempts and answers late. Every queue between them is explicit, so that a test chooses any interleaving."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from fabric.channel import ArenaUsage, LandedFeature
from fabric.clock import ManualClock
from fabric.errors import ArenaFull, LeaseLost, WeftError
from fabric.ids import AttemptId, MemberId, MmHash, RequestId, UnitKey
from fabric.messages import (
    FeatureTicket,
    GenerateRequest,
    MediaItem,
    PlaceholderRange,
    SamplingParams,
    StopConditions,
    UnitReady,
    UnitRelease,
)
from llm_workers.config import WorkerConfig
from llm_workers.intake import Intake
from llm_workers.receiver import FeatureEndpoint, Listener, Receiver
from llm_workers.scheduling.events import NextRead
from llm_workers.turns import ReadTurn

NUM_LEVELS, HIDDEN, ROW_BYTES = 2, 4, 2 * 4 * 4


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
        self.pulls: list[tuple[FeatureTicket, int, Future]] = []
        self._next = 0

    def pull(self, ticket: FeatureTicket, timeout_s: float) -> Future:
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
    clock: ManualClock = field(default_factory=ManualClock)
    address: str = "local://worker"
    num_announced: int = 0
    releases: list[UnitRelease] = field(default_factory=list)
    failed: dict[AttemptId, WeftError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sink = Sink(self.total_bytes)
        self.landed: dict[UnitKey, LandedFeature] = {}
        self.commands: deque = deque()
        self.updates: deque = deque()
        self.coming: list[tuple[AttemptId, UnitKey]] = []
        """Holds the announcements that encoders will make."""
        self.rows: dict[UnitKey, int] = {}
        self.live: dict[AttemptId, GenerateRequest] = {}
        self.reading: dict[AttemptId, Reading] = {}
        self.held: dict[UnitKey, int] = {}
        self.told: dict[tuple[UnitKey, AttemptId], NextRead] = {}
        endpoint = FeatureEndpoint(MemberId("worker"), self, self.sink, self.clock)
        listener = Listener(lambda *_: None, self._needed, self.failed.__setitem__)
        config = WorkerConfig(unclaimed_unit_ttl_s=5.0)
        self.receiver = Receiver(endpoint, config, (NUM_LEVELS, HIDDEN), self, listener, self.landed)
        self.receiver.start()

    # ------------------------------------------------------------ the plane and the engine, as the receiver sees them

    def send(self, address: str, message: UnitRelease) -> bool:
        self.releases.append(message)
        return True

    def unit_landed(self, unit: UnitKey) -> None:
        self.commands.append(("landed", unit))

    def evict_unit(self, unit: UnitKey) -> None:
        self.commands.append(("evict", unit))

    def _needed(self, needs) -> None:
        for attempt, unit, _ in needs:
            assert (attempt, unit) not in self.coming, "asked for what is on its way"
            self.coming.append((attempt, unit))

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
        self.receiver.announced(UnitReady(MemberId("e"), "local://e", request_id, number, unit, ticket))

    async def end_pull(self, index: int, is_lost: bool) -> None:
        self.sink.end_pull(index, is_lost)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    # ------------------------------------------------------------ the engine's turn

    def turn(self, preempt: int | None = None) -> None:
        """Runs one turn: it obeys commands, releases units, preempts an attempt if asked, reads one unit for every
        attempt that can read, and releases units again."""
        let_go, admitted, needed, ended = [], [], [], []
        while self.commands:
            self._obey(self.commands.popleft(), let_go, admitted)
        self._let_go_unneeded(let_go)
        if preempt is not None and self.reading:
            attempt = list(self.reading)[preempt % len(self.reading)]
            self.reading[attempt].at = 0
            needed = [(attempt, unit) for unit in dict.fromkeys(self.reading[attempt].units) if unit not in self.held]
        for attempt, one in list(self.reading.items()):
            if one.at < len(one.units) and one.units[one.at] in self.held:
                assert one.units[one.at] in self.landed, "the engine reads what was freed"
                is_lent = self.receiver.kept.is_lent(one.units[one.at])
                assert is_lent or self.landed[one.units[one.at]].slot_id in self.sink.slots
                one.at += 1
            if one.at == len(one.units):
                del self.reading[attempt]
                ended.append(attempt)
        self._let_go_unneeded(let_go)
        self.updates.append((let_go, self._changed_reads(), admitted, needed, ended))

    def _changed_reads(self) -> dict[UnitKey, dict[AttemptId, NextRead | None]]:
        """Returns the reads that differ from those of the last update."""
        reads = {(unit, key): read for key, one in self.reading.items() for unit, read in one.next_reads().items()}
        changed: dict[UnitKey, dict[AttemptId, NextRead | None]] = {}
        for unit, attempt in self.told.keys() | reads.keys():
            if self.told.get((unit, attempt)) != reads.get((unit, attempt)):
                changed.setdefault(unit, {})[attempt] = reads.get((unit, attempt))
        self.told = reads
        return changed

    def _obey(self, command: tuple, let_go: list, admitted: list) -> None:
        kind, subject = command[:2]
        if kind == "add":
            self.reading[subject] = Reading(command[2])
            admitted.append((subject, [unit for unit in dict.fromkeys(command[2]) if unit not in self.held]))
        elif kind == "abort":
            self.reading.pop(subject, None)
        elif kind == "landed":
            self.held[subject] = self.held.get(subject, 0) + 1
        elif subject in self.held:
            missed = tuple(attempt for attempt, one in self.reading.items() if subject in one.units[one.at :])
            let_go.append((subject, self.held.pop(subject), missed))

    def _let_go_unneeded(self, let_go: list) -> None:
        needed = {unit for one in self.reading.values() for unit in one.units[one.at :]}
        let_go.extend((unit, self.held.pop(unit), ()) for unit in list(self.held) if unit not in needed)

    def deliver(self) -> None:
        """Applies one update of the engine to the receiver."""
        let_go, reads, admitted, needed, ended = self.updates.popleft()
        for each in let_go:
            self.receiver.let_go(*each)
        self.receiver.read_by(reads)
        for attempt, missing in admitted:
            self.receiver.admit(attempt, missing)
        for attempt, unit in needed:
            self.receiver.need(attempt, unit, "preempted")
        for attempt in ended:
            if self.live.pop(attempt, None) is not None:
                self.receiver.end(attempt)
        self.receiver.settle()


def assert_settled(receiver: Receiver) -> None:
    """Checks, by a search of everything that the intake knows, that nothing is left to do but wait: `settle`, which
    uses marks and queues, must reach the same result as the search."""
    intake, now_s = receiver._intake, receiver._endpoint.clock.now()
    for unit, num_told in intake._landed.items():
        is_expected = any(not known.is_admitted and unit in known.order for known in intake._attempts.values())
        assert num_told or (is_expected and unit not in intake._evicting), f"{unit} could be freed"
    announced = {unit: list(tickets.values()) for unit, tickets in intake._announced._by_unit.items()}
    for unit, tickets in announced.items():
        for ticket in tickets:
            known = intake._attempts.get(ticket.attempt)
            is_early = known is None and ticket.attempt not in intake._ended and ticket.at_s > now_s - intake._ttl_s
            assert is_early or (known is not None and known.wants(unit)), f"{ticket} is of no use"
    for attempt, known in intake._attempts.items():
        for unit in known.missing:
            is_awaited = now_s - known.awaited.get(unit, -1e9) < intake._wait_s
            assert is_awaited or unit in announced or unit in intake._pulling, f"{attempt} waits for {unit}"
        for unit in known.missing if known.is_admitted else known.order:
            is_here = unit in intake._landed or unit in intake._pulling
            assert is_here or unit not in receiver.kept, f"{unit} lies among the kept"
    pulls = {unit: turn for unit in announced if (turn := _first_turn(intake, unit, is_pull=True)) is not None}
    assert intake._to_pull._orders == pulls
    first = intake._to_pull.first()
    assert first is None if not pulls else first[:2] == min((turn, unit) for unit, turn in pulls.items())
    in_inbox = [unit for unit in intake._landed if unit not in intake._lent]
    uses = {unit: turn for unit in in_inbox if (turn := _first_turn(intake, unit, is_pull=False)) is not None}
    assert {unit: order.turn for unit, order in intake._to_evict._orders.items()} == uses
    last = intake._to_evict.first()
    assert last is None if not uses else last[0].turn == max(uses.values())


def _first_turn(intake: Intake, unit: UnitKey, is_pull: bool) -> ReadTurn | None:
    """Returns the first turn among the attempts that want the unit pulled (`is_pull`) or that still have to read it."""
    if is_pull and (unit in intake._pulling or unit in intake._landed):
        return None
    named = intake._users[unit].named if unit in intake._users else {}
    turns = []
    for attempt, known in intake._attempts.items():
        is_reader = unit in known.order and (not named or attempt in named or not known.is_admitted)
        if known.wants(unit) if is_pull else is_reader:
            read = NextRead(0, known.order[unit])
            if known.is_admitted:
                read = named.get(attempt, read)
            turns.append(ReadTurn(known.is_admitted and attempt not in named, known.rank, read))
    return min(turns, default=None)
