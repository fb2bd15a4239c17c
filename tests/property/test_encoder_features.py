"""Checks the feature table against a model, over a tiny real arena: leases protect features, and memory never leaks or
overflows."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from encoder_pool.planning import FeatureTable, LeaseKey
from fabric.contracts import AttemptId, FeatureLog, ManualClock, MemberId, MmHash, RequestId, UnitKey, UnitTooLarge
from fabric.transport import LocalChannelHub, LocalFeatureSource, SourceSlot

NUM_UNITS = 2
"""This is the number of units of every item."""
LEASE_S = 10.0
ARENA_BYTES = 1024
UNIT_BYTES = 64
"""This is the arena's allocation unit in bytes: every slot takes a whole number of them, one of which is for its
header."""


def num_units(nbytes: int) -> int:
    return 1 + -(-nbytes // UNIT_BYTES)


units = st.builds(UnitKey, st.sampled_from([MmHash(name) for name in "abcd"]), st.integers(0, NUM_UNITS - 1))
workers = st.sampled_from([MemberId("worker-1"), MemberId("worker-2")])
routers = st.sampled_from([MemberId("router-1"), MemberId("router-2")])
attempts = st.builds(AttemptId, st.sampled_from([RequestId("req-1"), RequestId("req-2")]), st.integers(0, 1))


class FeatureTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.source = LocalFeatureSource(LocalChannelHub(), "encoder-1", ARENA_BYTES)
        self.base = self.source.slots.address
        self.log = FeatureLog(MemberId("encoder-1"), 1)
        self.table = FeatureTable(self.source, self.clock, LEASE_S, self.log)
        self.encoding: dict[UnitKey, SourceSlot] = {}
        self.ready: dict[UnitKey, SourceSlot] = {}
        """Lists ready units; those without a lease are in order of use, the least recently used first."""
        self.leases: dict[LeaseKey, tuple[float, MemberId]] = {}
        """Holds deadline and router of each lease."""
        self.renewals: dict[LeaseKey, int] = {}
        self.num_leased = 0
        self.told: set[MmHash] = set()
        self.last_seq = 0

    def leased(self) -> set[UnitKey]:
        return {key.unit for key in self.leases}

    def lose(self, keys: list[LeaseKey]) -> None:
        """Ends leases in the model: a unit that loses its last lease becomes the most recently used of the cached
        ones."""
        for key in keys:
            del self.leases[key]
            if key.unit not in self.leased():
                self.ready[key.unit] = self.ready.pop(key.unit)

    def place(self, slot: SourceSlot) -> tuple[int, int]:
        """Returns start and end of a slot and its header in the arena, in units of 64 bytes."""
        start = (slot.buffer.ctypes.data - self.base) // UNIT_BYTES - 1
        return start, start + num_units(slot.nbytes)

    def runs_without(self, slots: list[SourceSlot]) -> list[int]:
        """Returns the sizes of the gaps that these slots leave in the arena."""
        end, sizes = 0, []
        for start, after in [*sorted(self.place(slot) for slot in slots), (ARENA_BYTES // UNIT_BYTES, 0)]:
            sizes.append(start - end)
            end = after
        return sizes

    @rule(unit=units, nbytes=st.integers(1, 900), made_for=st.none() | workers)
    def reserve(self, unit: UnitKey, nbytes: int, made_for: MemberId | None) -> None:
        if unit in self.encoding or unit in self.ready:
            return
        held = [*self.encoding.values(), *(self.ready[one] for one in self.leased())]
        is_free = max(self.runs_without([*self.encoding.values(), *self.ready.values()])) >= num_units(nbytes)
        can_be_had = max(self.runs_without(held)) >= num_units(nbytes)
        slot = self.table.reserve(unit, nbytes, NUM_UNITS, made_for)
        gone = {one: self.ready[one] for one in self.ready if not self.table.is_ready(one)}
        assert not gone.keys() & self.leased(), "a leased feature was evicted"
        assert (slot is not None) == can_be_had, "what is cached and free in one piece is enough, or it is not"
        assert bool(gone) == (can_be_had and not is_free), "nothing is evicted that is not needed or does not help"
        for one in gone:
            del self.ready[one]
        if slot is None:
            return
        self.check_evicted([self.place(one) for one in gone.values()], self.place(slot))
        assert slot.nbytes == nbytes
        slot.buffer[:] = nbytes % 251
        self.encoding[unit] = slot

    def check_evicted(self, gone: list[tuple[int, int]], made: tuple[int, int]) -> None:
        """Checks that the evicted slots are neighbours of the new one and that, without the largest of them, they are
        together smaller than it."""
        if not gone:
            return
        sizes = [end - start for start, end in gone]
        assert sum(sizes) - max(sizes) < made[1] - made[0]
        start, end = min([*gone, made])[0], max(after for _, after in [*gone, made])
        left = [self.place(slot) for slot in (*self.ready.values(), *self.encoding.values())]
        assert not any(start < after and first < end for first, after in left), "room was made in several places"

    @rule(unit=units)
    def reserve_too_much(self, unit: UnitKey) -> None:
        if unit in self.encoding or unit in self.ready:
            return
        ready = dict(self.ready)
        try:
            self.table.reserve(unit, ARENA_BYTES + 1, NUM_UNITS)
        except UnitTooLarge:
            assert all(self.table.is_ready(one) for one in ready)
        else:
            raise AssertionError("a unit larger than the arena was taken")

    @precondition(lambda self: self.encoding)
    @rule(data=st.data(), does_fail=st.booleans())
    def end_forward(self, data: st.DataObject, does_fail: bool) -> None:
        unit = data.draw(st.sampled_from(sorted(self.encoding)))
        slot = self.encoding.pop(unit)
        if does_fail:
            self.table.fail(unit)
        else:
            self.table.complete(unit)
            self.ready[unit] = slot

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), worker=workers, attempt=attempts, router=routers)
    def lease(self, data: st.DataObject, worker: MemberId, attempt: AttemptId, router: MemberId) -> None:
        unit = data.draw(st.sampled_from(sorted(self.ready)))
        key = LeaseKey(worker, attempt, unit)
        assert self.table.lease(key, router) == self.ready[unit]
        self.leases[key] = (self.clock.now() + LEASE_S, router)
        self.renewals[key] = self.num_leased = self.num_leased + 1

    @rule(unit=units, worker=workers, attempt=attempts, is_older=st.booleans())
    def release(self, unit: UnitKey, worker: MemberId, attempt: AttemptId, is_older: bool) -> None:
        key = LeaseKey(worker, attempt, unit)
        generation = self.ready[unit].generation if unit in self.ready else 0
        released = self.table.release(key, generation - 1 if is_older else generation)
        assert released == (key in self.leases and not is_older)
        if released:
            self.lose([key])

    @rule(seconds=st.sampled_from([1.0, 4.0, LEASE_S]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        over = [key for key, (deadline_s, _) in self.leases.items() if deadline_s <= self.clock.now()]
        assert self.table.expire() == len(over)
        self.lose(sorted(over, key=lambda key: self.renewals[key]))

    @rule(worker=workers)
    def worker_leaves(self, worker: MemberId) -> None:
        over = [key for key in self.leases if key.worker_id == worker]
        assert self.table.end_worker(worker) == len(over)
        self.lose(over)

    @rule(attempt=attempts)
    def attempt_ends(self, attempt: AttemptId) -> None:
        over = [key for key in self.leases if key.attempt_id == attempt]
        assert self.table.end_attempt(attempt) == len(over)
        self.lose(over)

    @rule(router=routers)
    def router_leaves(self, router: MemberId) -> None:
        over = [key for key, (_, owner) in self.leases.items() if owner == router]
        assert self.table.end_router(router) == len(over)
        self.lose(over)

    @invariant()
    def it_is_what_the_model_says(self) -> None:
        self.table.check_invariants()
        usage, leased = self.table.usage(), self.leased()
        used_bytes = sum(slot.nbytes for slot in self.encoding.values())
        used_bytes += sum(slot.nbytes for unit, slot in self.ready.items() if unit in leased)
        cached_bytes = sum(slot.nbytes for unit, slot in self.ready.items() if unit not in leased)
        assert (usage.used_bytes, usage.cached_bytes) == (used_bytes, cached_bytes)
        assert usage.num_leases == len(self.leases)
        assert usage.num_encoding == len(self.encoding)
        assert self.source.usage().num_slots == len(self.encoding) + len(self.ready)
        for unit, slot in self.ready.items():
            assert self.table.is_ready(unit)
            assert (slot.buffer == slot.nbytes % 251).all(), "another feature was written over this one"

    @invariant()
    def routers_are_told_what_is_whole(self) -> None:
        for message in self.log.drain():
            assert message.first_seq == self.last_seq + 1
            self.last_seq += len(message.stored) + len(message.removed)
            self.told |= set(message.stored)
            self.told -= set(message.removed)
        whole = {unit.mm_hash for unit in self.ready if UnitKey(unit.mm_hash, 0) in self.ready}
        whole &= {unit.mm_hash for unit in self.ready if UnitKey(unit.mm_hash, 1) in self.ready}
        assert self.told == whole == set(self.log.snapshot().stored)
        assert self.log.snapshot().first_seq == self.last_seq

    def teardown(self) -> None:
        """Checks that, when every forward pass and lease has ended, nothing is in use and all the memory is
        available."""
        for unit in self.encoding:
            self.table.complete(unit)
        self.clock.advance(LEASE_S)
        self.table.expire()
        assert self.table.usage().used_bytes == 0
        assert self.table.reserve(UnitKey(MmHash("last"), 0), ARENA_BYTES - 128, 1) is not None
        self.source.close()


TestFeatureTable = FeatureTableMachine.TestCase
TestFeatureTable.settings = settings(deadline=None, max_examples=120, stateful_step_count=40)


def packed_table(
    num_slots: int, slot_bytes: int, lease_s: float = LEASE_S, clock: ManualClock | None = None
) -> tuple[FeatureTable, list[UnitKey]]:
    """Returns a table whose arena is full of equal cached units, the first of which is the least recently used."""
    source = LocalFeatureSource(LocalChannelHub(), "encoder-1", num_slots * slot_bytes)
    table = FeatureTable(source, clock or ManualClock(), lease_s, FeatureLog(MemberId("encoder-1"), 1))
    stored = [UnitKey(MmHash(f"{number:05}"), 0) for number in range(num_slots)]
    for unit in stored:
        assert table.reserve(unit, slot_bytes - UNIT_BYTES, 1) is not None
        table.complete(unit)
    return table, stored


def lease_of(unit: UnitKey) -> LeaseKey:
    return LeaseKey(MemberId("worker-1"), AttemptId(RequestId("req"), 0), unit)


def test_transfers_are_summed_from_lease_to_release() -> None:
    """The sums cover leases that their worker released; a lease that expired says nothing about the link."""
    clock = ManualClock()
    table, stored = packed_table(4, 1024, clock=clock)
    clock.advance(100.0)
    generations = [table.lease(lease_of(unit), MemberId("router-1")).generation for unit in stored[:3]]
    for unit, generation, seconds in zip(stored[:2], generations, (2.0, 3.0), strict=False):
        clock.advance(seconds)
        assert table.release(lease_of(unit), generation)
        assert not table.release(lease_of(unit), generation), "it is released once"
    assert (table.usage().num_transfers, table.usage().transfer_s) == (2, 2.0 + 5.0)
    clock.advance(LEASE_S)
    assert table.expire() == 1
    assert (table.usage().num_transfers, table.usage().transfer_s) == (2, 7.0)


def test_one_slot_in_eight_leased_costs_a_large_request_no_cached_feature() -> None:
    """Among 512 slots there are no eight neighbours without a lease, so a request for eight is refused and evicts
    nothing. Once one lease ends, the request gets its room, and only as much as it needs is evicted for it."""
    table, stored = packed_table(512, 1024)
    for unit in stored[::8]:
        table.lease(lease_of(unit), MemberId("router-1"))
    wanted = UnitKey(MmHash("large"), 0)
    assert table.reserve(wanted, 8 * 1024 - UNIT_BYTES, 1) is None
    assert table.usage().num_evictions == 0
    assert table.reserve(UnitKey(MmHash("fits"), 0), 7 * 1024 - UNIT_BYTES, 1) is not None
    assert table.usage().evicted_bytes == 7 * (1024 - UNIT_BYTES)
    assert table.reserve(wanted, 8 * 1024 - UNIT_BYTES, 1) is None
    assert table.usage().num_evictions == 7
    table.end_worker(MemberId("worker-1"))
    assert table.reserve(wanted, 8 * 1024 - UNIT_BYTES, 1) is not None
    assert table.usage().num_evictions == 7 + 8
    table.check_invariants()


def test_of_equal_features_the_least_recently_used_goes_first() -> None:
    table, stored = packed_table(16, 1024)
    for unit in stored[:4]:
        table.lease(lease_of(unit), MemberId("router-1"))
        assert table.end_attempt(AttemptId(RequestId("req"), 0)) == 1
    for number, oldest in enumerate([*stored[4:], *stored[:4]]):
        assert table.is_ready(oldest)
        assert table.reserve(UnitKey(MmHash(f"new-{number}"), 0), 1024 - UNIT_BYTES, 1) is not None
        assert not table.is_ready(oldest)
    assert table.usage().num_evictions == 16


def test_a_large_feature_among_small_ones_evicts_what_it_takes() -> None:
    """A picture takes a sixteenth of an arena that is full of sounds: it evicts neighbours, and the oldest unit of all
    is among them."""
    table, stored = packed_table(1024, 256)
    assert table.reserve(UnitKey(MmHash("picture"), 0), 64 * 256 - UNIT_BYTES, 1) is not None
    assert table.usage().num_evictions == 64
    assert not table.is_ready(stored[0])
    table.check_invariants()


def test_what_is_due_claims_a_range_that_its_leases_leave_and_nobody_takes() -> None:
    """Cached units in the claimed range are evicted. A leased unit in it can no longer be found and is freed with its
    last lease. Other requests still find room outside the range, and a unit that was set aside gets a new place once it
    is made again."""
    table, stored = packed_table(16, 1024)
    attempts = [AttemptId(RequestId(f"req-{number}"), 0) for number in range(2)]
    for number, unit in enumerate(stored):
        if number % 4 == 0:
            table.lease(LeaseKey(MemberId("worker-1"), attempts[0], unit), MemberId("router-1"))
    wanted, nbytes = UnitKey(MmHash("wanted"), 0), 8 * 1024 - UNIT_BYTES
    assert table.reserve(wanted, nbytes, 1) is None
    assert table.usage().num_evictions == 0, "nothing is claimed before it is due"
    assert table.reserve(wanted, nbytes, 1, is_due=True) is None
    table.check_invariants()
    aside = [unit for number, unit in enumerate(stored) if number % 4 == 0 and not table.is_ready(unit)]
    assert len(aside) == 2
    assert table.usage().num_evictions == 6
    assert table.usage().num_leases == 4
    other = UnitKey(MmHash("other"), 0)
    assert table.reserve(other, nbytes, 1, is_due=True) is None, "one range is claimed at a time"
    assert table.reserve(other, 3 * 1024 - UNIT_BYTES, 1) is not None, "there is room beside it"
    table.complete(other)
    again = aside[0]
    old = LeaseKey(MemberId("worker-1"), attempts[0], again)
    assert table.reserve(again, 1024 - UNIT_BYTES, 1) is not None
    table.complete(again)
    table.lease(LeaseKey(MemberId("worker-2"), attempts[1], again), MemberId("router-1"))
    slot = table.lease(old, MemberId("router-1"))
    table.check_invariants()
    assert table.usage().num_leases == 5, "a lease is on one of the two, the newer"
    assert table.release(old, slot.generation)
    assert table.is_ready(again)
    assert table.reserve(wanted, nbytes, 1, is_due=True) is None
    table.end_attempt(attempts[0])
    assert table.reserve(wanted, nbytes, 1, is_due=True) is not None
    table.check_invariants()
    assert table.usage().num_leases == 1
    assert table.reserve(UnitKey(MmHash("next"), 0), 1024 - UNIT_BYTES, 1) is not None


def test_a_claim_that_is_given_up_leaves_its_range_to_others() -> None:
    table, stored = packed_table(4, 1024)
    for unit in stored[::2]:
        table.lease(lease_of(unit), MemberId("router-1"))
    wanted = UnitKey(MmHash("wanted"), 0)
    assert table.reserve(wanted, 3 * 1024 - UNIT_BYTES, 1, is_due=True) is None
    assert table.reserve(UnitKey(MmHash("large"), 0), 2 * 1024 - UNIT_BYTES, 1, is_due=True) is None
    table.end_attempt(AttemptId(RequestId("req"), 0))
    table.end_claim()
    table.check_invariants()
    assert table.reserve(UnitKey(MmHash("whole"), 0), 4 * 1024 - UNIT_BYTES, 1) is not None
