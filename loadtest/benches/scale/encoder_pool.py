"""The encoder's bookkeeping with a lot stored and a lot waiting: the arena, the feature table, the queue."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from encoder_pool.planning.feature_log import FeatureLog
from encoder_pool.planning.features import FeatureTable
from encoder_pool.planning.lease_book import LeaseKey
from fabric.channel import ArenaUsage, SourceSlot
from fabric.clock import ManualClock
from fabric.ids import AttemptId, MemberId, MmHash, RequestId, UnitKey
from fabric.messages import FeatureTicket
from fabric.slots import HEADER_BYTES
from fabric.source_memory import SourceMemory
from loadtest.benches.scale.case import ScaleCase

SLOT_BYTES = 1024
NUM_EVENTS = 200
NUM_TOGETHER = 16
"""Slots that one large feature takes."""
ROUTER, WORKER = MemberId("router"), MemberId("worker")


class MemorySource:
    """Keeps `FeatureSource` without a transport."""

    def __init__(self, total_bytes: int) -> None:
        self._memory = SourceMemory("source", total_bytes)
        self.allocate, self.free = self._memory.allocate, self._memory.free
        self.set_idle, self.set_busy = self._memory.set_idle, self._memory.set_busy
        self.victims = self._memory.victims
        self.is_alive = True

    def usage(self) -> ArenaUsage:
        return self._memory.usage()

    def ticket(self, slot: SourceSlot, shape: tuple[int, int, int], dtype: str, lease_s: float) -> FeatureTicket:
        return self._memory.ticket(slot, shape, dtype, lease_s, metadata=b"")

    def close(self) -> None: ...


class FullTable:
    """A table whose arena is full of equal features, cached but for each eighth if `is_leased`."""

    def __init__(self, num_slots: int, is_leased: bool = False) -> None:
        self.numbers = count()
        log = FeatureLog(MemberId("encoder"), 1)
        self.table = FeatureTable(MemorySource(num_slots * SLOT_BYTES), ManualClock(), 60.0, log)
        self.log = log
        for number in range(num_slots):
            unit = self.store(1)
            if is_leased and number % 8 == 0:
                self.table.lease(LeaseKey(WORKER, AttemptId(RequestId(unit.mm_hash), 0), unit), ROUTER)

    def store(self, num_slots: int) -> UnitKey:
        """One more feature, of the size of so many."""
        unit = UnitKey(MmHash(f"{next(self.numbers):032x}"), 0)
        assert self.table.reserve(unit, num_slots * SLOT_BYTES - HEADER_BYTES, 1) is not None
        self.table.complete(unit)
        return unit


def _evict_one(num_slots: int) -> Callable[[], int]:
    full = FullTable(num_slots)

    def run() -> int:
        for _ in range(NUM_EVENTS):
            full.store(1)
        full.log.drain()
        return NUM_EVENTS

    return run


def _evict_neighbours(num_slots: int) -> Callable[[], int]:
    full = FullTable(num_slots)

    def run() -> int:
        for _ in range(NUM_EVENTS // NUM_TOGETHER):
            full.store(NUM_TOGETHER)
            for _ in range(NUM_TOGETHER):
                full.store(1)
        full.log.drain()
        return NUM_EVENTS // NUM_TOGETHER * NUM_TOGETHER

    return run


def _refuse(num_slots: int) -> Callable[[], int]:
    full = FullTable(num_slots, is_leased=True)
    wanted = UnitKey(MmHash("large"), 0)

    def run() -> int:
        for _ in range(NUM_EVENTS):
            assert full.table.reserve(wanted, 8 * SLOT_BYTES, 1) is None
        return NUM_EVENTS

    return run


def _usage(num_slots: int) -> Callable[[], int]:
    full = FullTable(num_slots, is_leased=True)

    def run() -> int:
        for _ in range(NUM_EVENTS):
            full.table.usage()
        return NUM_EVENTS

    return run


def _end_attempt(num_slots: int) -> Callable[[], int]:
    full = FullTable(num_slots, is_leased=True)
    units = [full.store(1) for _ in range(NUM_EVENTS)]

    def run() -> int:
        for unit in units:
            attempt_id = AttemptId(RequestId(unit.mm_hash), 0)
            full.table.lease(LeaseKey(WORKER, attempt_id, unit), ROUTER)
            full.table.end_attempt(attempt_id)
        return NUM_EVENTS

    return run


CASES = (
    ScaleCase("encoder: evict a feature for another, slots stored", 1600, _evict_one),
    ScaleCase("encoder: evict neighbours for a large feature, slots stored", 1600, _evict_neighbours),
    ScaleCase("encoder: refuse what leases leave no room for, slots stored", 1600, _refuse),
    ScaleCase("encoder: read the arena's usage, slots stored", 1600, _usage),
    ScaleCase("encoder: lease a feature and end its attempt, slots stored", 1600, _end_attempt),
)
