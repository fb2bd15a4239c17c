"""The feature table against a model, over a tiny real arena: leases protect, memory never leaks or overflows."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from encoder_pool.planning.feature_log import FeatureLog
from encoder_pool.planning.features import FeatureTable, LeaseKey
from fabric.channel import SourceSlot
from fabric.channel_local import LocalChannelHub, LocalFeatureSource
from fabric.clock import ManualClock
from fabric.errors import UnitTooLarge
from fabric.ids import AttemptId, MemberId, MmHash, RequestId, UnitKey

NUM_UNITS = 2
"""Of every item."""
LEASE_S = 10.0
ARENA_BYTES = 1024

units = st.builds(UnitKey, st.sampled_from([MmHash(name) for name in "abcd"]), st.integers(0, NUM_UNITS - 1))
workers = st.sampled_from([MemberId("worker-1"), MemberId("worker-2")])
routers = st.sampled_from([MemberId("router-1"), MemberId("router-2")])
attempts = st.builds(AttemptId, st.sampled_from([RequestId("req-1"), RequestId("req-2")]), st.integers(0, 1))


class FeatureTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.source = LocalFeatureSource(LocalChannelHub(), "encoder-1", ARENA_BYTES)
        self.log = FeatureLog(MemberId("encoder-1"), 1)
        self.table = FeatureTable(self.source, self.clock, LEASE_S, self.log)
        self.encoding: dict[UnitKey, SourceSlot] = {}
        self.ready: dict[UnitKey, SourceSlot] = {}
        """Least recently used first, as far as unleased units go."""
        self.leases: dict[LeaseKey, tuple[float, MemberId]] = {}
        """Deadline and router."""
        self.renewals: dict[LeaseKey, int] = {}
        self.num_leased = 0
        self.told: set[MmHash] = set()
        self.last_seq = 0

    def leased(self) -> set[UnitKey]:
        return {key.unit for key in self.leases}

    def lose(self, keys: list[LeaseKey]) -> None:
        """The model's end of leases: a unit that loses its last becomes the most recently used of the cached."""
        for key in keys:
            del self.leases[key]
            if key.unit not in self.leased():
                self.ready[key.unit] = self.ready.pop(key.unit)

    @rule(unit=units, nbytes=st.integers(1, 600))
    def reserve(self, unit: UnitKey, nbytes: int) -> None:
        if unit in self.encoding or unit in self.ready:
            return
        slot = self.table.reserve(unit, nbytes, NUM_UNITS)
        gone = [one for one in self.ready if not self.table.is_ready(one)]
        assert not set(gone) & self.leased(), "a leased feature was evicted"
        cached = [one for one in self.ready if one not in self.leased()]
        assert gone == cached[: len(gone)], "the least recently used goes first"
        for one in gone:
            del self.ready[one]
        if slot is not None:
            assert slot.nbytes == nbytes
            slot.buffer[:] = nbytes % 251
            self.encoding[unit] = slot
            return
        cached_left = len(cached) - len(gone)
        held_bytes = sum(one.nbytes for one in self.encoding.values())
        held_bytes += sum(slot.nbytes for one, slot in self.ready.items() if one in self.leased())
        assert cached_left == 0 or (held_bytes + nbytes > ARENA_BYTES and not gone), "room was there to be made"
        assert self.encoding or self.leased(), "an arena that nobody uses must take anything that fits it"

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
        """When every forward and lease has ended, nothing is in use, and all the memory can be had."""
        for unit in self.encoding:
            self.table.complete(unit)
        self.clock.advance(LEASE_S)
        self.table.expire()
        assert self.table.usage().used_bytes == 0
        assert self.table.reserve(UnitKey(MmHash("last"), 0), ARENA_BYTES - 128, 1) is not None
        self.source.close()


TestFeatureTable = FeatureTableMachine.TestCase
TestFeatureTable.settings = settings(deadline=None, max_examples=120, stateful_step_count=40)
