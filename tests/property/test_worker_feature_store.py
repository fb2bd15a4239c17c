"""Checks the feature store against a simple model, with an engine that gives references back late, twice, in parts, or
long after the feature landed again."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from worker_world import unit_of

from fabric.contracts import AttemptId, FeatureLog, FeatureTicket, ManualClock, MemberId, RequestId, UnitKey, UnitReady
from fabric.transport import LandedFeature
from llm_workers.features import FeatureStore
from llm_workers.features.feature_entries import UnitState
from llm_workers.scheduling import FeatureReference, ReleasedFeature
from llm_workers.worker_config import WorkerConfig

NUM_BYTES, NUM_KEPT = 8, 2
UNITS = [unit_of(name) for name in "abcd"]
SHAPE = (1, 2, 1)
numbers = st.integers(0, 99)


@dataclass
class Wanting:
    """A `Wanting` is an open attempt in the model."""

    units: list[UnitKey]
    is_admitted: bool = False
    missing: set[UnitKey] = field(default_factory=set)

    def wants(self, unit: UnitKey) -> bool:
        return unit in (self.missing if self.is_admitted else self.units)


@dataclass
class Memory:
    """A `Memory` is a feature in memory in the model."""

    feature: LandedFeature
    is_lent: bool
    references: set[FeatureReference] = field(default_factory=set)
    is_evicting: bool = False
    is_distrusted: bool = False


class Store(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        config = WorkerConfig(keep_features="always", kept_bytes=NUM_KEPT * NUM_BYTES, unclaimed_unit_ttl_s=5.0)
        self.log = FeatureLog(MemberId("worker"), 1)
        self.store = FeatureStore(config, self.clock, self.log)
        self.attempts: dict[AttemptId, Wanting] = {}
        self.num_attempts = self.num_slots = 0
        self.announced: list[UnitReady] = []
        self.pulling: list[UnitKey] = []
        self.memory: dict[UnitKey, Memory] = {}
        self.kept: list[UnitKey] = []
        """Holds the kept units, the least recently used first."""
        self.references: list[FeatureReference] = []
        """Holds every reference that was ever handed out."""
        self.freed: list[int] = []

    # ------------------------------------------------------------ attempts

    @rule(indices=st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True), priority=st.integers(0, 1))
    def expect(self, indices: list[int], priority: int) -> None:
        attempt = AttemptId(RequestId(f"r{self.num_attempts}"), 0)
        rank = (priority, float(self.num_attempts), attempt.request_id)
        self.num_attempts += 1
        units = [UNITS[index] for index in indices]
        self.store.expect(attempt, rank, dict.fromkeys(units, SHAPE), units[:1])
        self.attempts[attempt] = Wanting(units)
        assert all(self.store.planned_shape(attempt, unit) == SHAPE for unit in units)

    @precondition(lambda self: self.attempts)
    @rule(number=numbers, mask=st.integers(0, 7))
    def admit(self, number: int, mask: int) -> None:
        attempt, known = self._attempt(number)
        if known.is_admitted:
            return
        missing = [unit for place, unit in enumerate(known.units) if mask >> place & 1]
        known.is_admitted = True
        references = self.store.admit(attempt, missing)
        assert [one.unit for one in references] == [unit for unit in missing if self._want(known, unit)]
        self._hold(references)

    @precondition(lambda self: self.attempts)
    @rule(number=numbers, place=numbers)
    def need(self, number: int, place: int) -> None:
        """The engine needs a unit again, because its blocks were evicted."""
        attempt, known = self._attempt(number)
        unit = known.units[place % len(known.units)]
        if known.is_admitted:
            reference = self.store.need(attempt, unit, "preempted")
            assert (reference is not None) == self._want(known, unit)
            self._hold([reference] if reference else [])

    @precondition(lambda self: self.attempts)
    @rule(number=numbers)
    def end(self, number: int) -> None:
        attempt, _ = self._attempt(number)
        self.store.end(attempt)
        self.store.end(attempt)
        del self.attempts[attempt]

    # ------------------------------------------------------------ announcements and pulls

    @rule(index=st.integers(0, 3), number=numbers)
    def announce(self, index: int, number: int) -> None:
        """An encoder announces a unit for an attempt that is open, has ended, or has not arrived."""
        ticket = FeatureTicket("e", b"", 0, 0, NUM_BYTES, len(self.announced), SHAPE, "float32", 60.0)
        request_id = RequestId(f"r{number % (self.num_attempts + 2)}")
        ready = UnitReady(MemberId("e"), "local://e", request_id, 0, UNITS[index], ticket)
        self.announced.append(ready)
        self.store.announce(ready)

    @rule()
    def pull(self) -> None:
        ready = self.store.next_pull()
        wanted = {one.unit for one in self.announced if self._is_wanted(one.unit)}
        assert (ready is not None) == bool(wanted - self.memory.keys() - set(self.pulling) - set(self.kept))
        if ready is not None:
            assert ready.unit in wanted
            self.store.begin_pull(ready.unit)
            self._drop_announcement(ready)
            self.pulling.append(ready.unit)

    @precondition(lambda self: self.pulling)
    @rule(number=numbers)
    def land(self, number: int) -> None:
        unit = self.pulling.pop(number % len(self.pulling))
        self.num_slots += 1
        ticket = FeatureTicket("e", b"", 0, 0, NUM_BYTES, 1, SHAPE, "float32", 60.0)
        feature = LandedFeature(self.num_slots, np.zeros(NUM_BYTES, np.uint8), ticket, 0.0)
        reference = self.store.land(unit, feature)
        self._land(unit, feature, reference, is_lent=False)

    @precondition(lambda self: self.attempts)
    @rule(number=numbers, place=numbers)
    def bring(self, number: int, place: int) -> None:
        """An admitted attempt needs a unit, which is announced and pulled at once, and lands unless other units come
        first. Without this rule, references are rare."""
        attempt, known = self._attempt(number)
        self.admit(number, 7)
        self.need(number, place)
        self.announce(UNITS.index(known.units[place % len(known.units)]), int(attempt.request_id[1:]))
        self.free()
        self.lend()
        self.pull()
        if self.pulling:
            self.land(len(self.pulling) - 1)

    @precondition(lambda self: self.pulling)
    @rule(number=numbers)
    def fail(self, number: int) -> None:
        unit = self.pulling.pop(number % len(self.pulling))
        self.store.fail_pull(unit, "lease_lost")

    @rule()
    def drop_source(self) -> None:
        self.store.drop_source("e")
        self.announced.clear()

    # ------------------------------------------------------------ the engine

    @precondition(lambda self: self.references)
    @rule(number=numbers, count=st.integers(1, 3))
    def give_back(self, number: int, count: int) -> None:
        """The engine gives back some references to one unit, held or given back long ago, or of an older landing."""
        unit = self.references[number % len(self.references)].unit
        every = [one for one in self.references if one.unit == unit]
        first = number % len(every)
        self._release(unit, every[first : first + count], ())

    @precondition(lambda self: self.memory)
    @rule(number=numbers)
    def release(self, number: int) -> None:
        """The engine gives back every reference to a unit, twice."""
        unit = sorted(self.memory)[number % len(self.memory)]
        held = list(self.memory[unit].references)
        self._release(unit, held, ())
        self._release(unit, held, ())

    @precondition(lambda self: self.memory)
    @rule(number=numbers)
    def evict(self, number: int) -> None:
        """A unit is evicted, and the admitted attempts that contain it miss it."""
        unit = sorted(self.memory)[number % len(self.memory)]
        memory = self.memory[unit]
        assert self.store.begin_eviction(unit) == bool(memory.references)
        memory.is_evicting = True
        missed_by = tuple(key for key, known in self.attempts.items() if known.is_admitted and unit in known.units)
        if memory.references:
            self._release(unit, list(memory.references), missed_by)

    @rule(number=numbers)
    def make_room(self, number: int) -> None:
        """The store's own choice of a victim is read later than the unit that it makes room for."""
        unit = UNITS[number % len(UNITS)]
        victim = self.store.victim(unit)
        if victim is not None:
            assert victim != unit
            assert unit not in self.memory
            assert not any(memory.is_evicting for memory in self.memory.values())
            assert not self.memory[victim].is_lent
            self.store.begin_eviction(victim)
            self.memory[victim].is_evicting = True

    @rule(index=st.integers(0, 3))
    def distrust(self, index: int) -> None:
        unit = UNITS[index]
        memory = self.memory.get(unit)
        assert self.store.distrust([unit]) == ([unit] if memory is not None and memory.references else [])
        self.kept = [one for one in self.kept if one != unit]
        if memory is not None:
            memory.is_evicting = memory.is_distrusted = True

    # ------------------------------------------------------------ decisions

    @rule()
    def free(self) -> None:
        expected = [unit for unit, memory in self.memory.items() if self._is_freeable(unit, memory)]
        slots = {memory.feature.slot_id: unit for unit in expected if not (memory := self.memory[unit]).is_lent}
        freed = [feature.slot_id for feature in self.store.take_unneeded()]
        assert sorted(freed) == sorted(slots)
        assert not set(freed) & set(self.freed), "a slot is freed twice"
        self.freed += freed
        # The store frees units in the order in which it marked them, which decides what the cache drops.
        is_order_open = len(expected) > 1
        for unit in expected:
            memory = self.memory.pop(unit)
            if memory.is_distrusted:
                continue
            num_lent = sum(one.is_lent for one in self.memory.values())
            if memory.is_lent or num_lent < NUM_KEPT:
                self.kept.append(unit)
                self.kept = self.kept[max(0, len(self.kept) + num_lent - NUM_KEPT) :]
        if is_order_open:
            candidates = [*self.kept, *(unit for unit in UNITS if unit not in self.kept)]
            self.kept = [unit for unit in candidates if self.store.state(unit) is UnitState.KEPT]
            self.kept.sort(key=list(self.store.host_cache._features).index)

    @rule()
    def lend(self) -> None:
        lendable = self.store.take_lendable()
        assert set(lendable) == {unit for unit in self.kept if self._is_wanted(unit)}
        for unit in lendable:
            self.kept.remove(unit)
            reference = self.store.lend(unit)
            feature = self.store.feature(unit)
            assert feature is not None
            self._land(unit, feature, reference, is_lent=True)

    @rule(seconds=st.sampled_from([0.0, 4.0, 6.0]))
    def give_announcements_back(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for ready in self.store.take_releasable():
            known = self.attempts.get(AttemptId(ready.request_id, ready.attempt))
            assert known is None or not known.wants(ready.unit), "an open attempt wants it"
            self._drop_announcement(ready)
        for ready in self.announced:
            known = self.attempts.get(AttemptId(ready.request_id, ready.attempt))
            # An announcement of a unit that its request does not contain is given back at admission.
            is_open = known is not None and known.is_admitted
            assert not is_open or known.wants(ready.unit), "it is of no use"

    @rule()
    def ask(self) -> None:
        announced = {ready.unit for ready in self.announced}
        for attempt, unit, _ in self.store.take_needed():
            assert unit in self.attempts[attempt].missing
            assert unit not in announced | set(self.pulling)

    # ------------------------------------------------------------ checks

    @invariant()
    def agrees(self) -> None:
        self.store.check_invariants()
        announced = {ready.unit for ready in self.announced}
        for unit in UNITS:
            state, memory = self.store.state(unit), self.memory.get(unit)
            if memory is not None:
                assert state is (UnitState.READ if memory.references else UnitState.LANDED)
                assert self.store.feature(unit) is memory.feature
                assert all(reference.feature is memory.feature for reference in memory.references)
            elif unit in self.pulling:
                assert state is UnitState.PULLING
            elif unit in self.kept:
                assert state is UnitState.KEPT
            elif unit in announced:
                assert state is UnitState.ANNOUNCED
            else:
                is_expected = any(unit in known.units for known in self.attempts.values())
                assert state is (UnitState.EXPECTED if is_expected else UnitState.GONE)
        assert self.store.num_held == len(self.announced) + len(self.pulling) + len(self.memory)
        assert self.store.num_attempts == len(self.attempts)
        lent = [unit for unit, memory in self.memory.items() if memory.is_lent]
        assert set(self.log.snapshot().stored) == {unit.mm_hash for unit in (*self.kept, *lent)}

    def teardown(self) -> None:
        """Ends everything: every slot is freed once, and nothing is left but what is kept."""
        for attempt in list(self.attempts):
            self.store.end(attempt)
        for unit in list(self.pulling):
            self.store.fail_pull(unit, "transfer_failed")
        self.store.drop_source("e")
        for reference in reversed(self.references):
            self.store.release(ReleasedFeature(reference.unit, (reference,)))
        self.freed += [feature.slot_id for feature in self.store.take_unneeded()]
        assert sorted(self.freed) == list(range(1, self.num_slots + 1))
        self.store.check_at_rest()
        self.store.check_invariants()
        assert self.store.num_held == 0
        assert self.store.clear() == []
        assert all(self.store.state(unit) is UnitState.GONE for unit in UNITS)

    # ------------------------------------------------------------ the model

    def _attempt(self, number: int) -> tuple[AttemptId, Wanting]:
        return list(self.attempts.items())[number % len(self.attempts)]

    def _is_wanted(self, unit: UnitKey) -> bool:
        return any(known.wants(unit) for known in self.attempts.values())

    def _is_freeable(self, unit: UnitKey, memory: Memory) -> bool:
        is_expected = any(unit in known.units and not known.is_admitted for known in self.attempts.values())
        return not memory.references and (memory.is_evicting or not is_expected)

    def _want(self, known: Wanting, unit: UnitKey) -> bool:
        """Returns whether the attempt gets a reference; otherwise it misses the unit from now on."""
        memory = self.memory.get(unit)
        if memory is not None and not memory.is_evicting:
            return True
        known.missing.add(unit)
        return False

    def _hold(self, references: list[FeatureReference]) -> None:
        for reference in references:
            assert all(reference.number != one.number for one in self.references), "a number is used twice"
            self.references.append(reference)
            self.memory[reference.unit].references.add(reference)

    def _land(self, unit: UnitKey, feature: LandedFeature, reference: FeatureReference | None, is_lent: bool) -> None:
        missing_it = [known for known in self.attempts.values() if unit in known.missing]
        assert (reference is not None) == bool(missing_it)
        for known in missing_it:
            known.missing.discard(unit)
        self.memory[unit] = Memory(feature, is_lent)
        self._hold([reference] if reference else [])

    def _release(self, unit: UnitKey, given: list[FeatureReference], missed_by: tuple[AttemptId, ...]) -> None:
        references = self.store.release(ReleasedFeature(unit, tuple(given), missed_by))
        if unit in self.memory:
            self.memory[unit].references.difference_update(given)
        again = [attempt for attempt in missed_by if self._want(self.attempts[attempt], unit)]
        assert len(references) == len(again)
        self._hold(references)

    def _drop_announcement(self, ready: UnitReady) -> None:
        self.announced = [one for one in self.announced if one is not ready]


Store.TestCase.settings = settings(deadline=None, max_examples=100, stateful_step_count=50)
TestFeatureStore = Store.TestCase


def test_a_transition_that_is_not_allowed_is_refused() -> None:
    store = FeatureStore(WorkerConfig(), ManualClock(), FeatureLog(MemberId("worker"), 1))
    store.expect(AttemptId(RequestId("r"), 0), (0, 0.0, "r"), {UNITS[0]: SHAPE}, [])
    with pytest.raises(AssertionError, match="EXPECTED -> PULLING"):
        store.begin_pull(UNITS[0])
