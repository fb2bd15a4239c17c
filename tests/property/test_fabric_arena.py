"""Checks the arena against a model, which is a set of intervals."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from fabric.contracts import ArenaFull, UnitTooLarge
from fabric.transport.arena import Arena, OrderedIntegers, Ranges, Slot

UNITS = 24


class ArenaModel(RuleBasedStateMachine):
    """Checks that slots never overlap or leak, neighbours join, generations grow, a second free does nothing,
    quarantine is kept, and idle slots are given up only where that makes room."""

    slots = Bundle("slots")
    """Holds every slot that was ever handed out, whether freed or not."""

    @initialize(alignment=st.sampled_from([1, 8, 64]), spare=st.integers(0, 7), first=st.integers(1, 2**62))
    def build(self, alignment: int, spare: int, first: int) -> None:
        self.alignment = alignment
        self.arena = Arena(UNITS * alignment + spare % alignment, alignment, first)
        self.used: dict[int, Slot] = {}
        self.quarantined: dict[int, Slot] = {}
        self.idle: dict[int, None] = {}
        """Holds the idle slots, the least recently used first."""
        self.claimed: int | None = None
        """Holds the number of units that a range is claimed for."""
        self.last_generation = first - 1
        self.ids: set[int] = set()

    def padded(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def gaps(self, given_up: Iterable[int] = ()) -> list[tuple[int, int]]:
        """Returns the free ranges `(size, offset)`, joined, according to the model's own account, after these slots are
        given up."""
        end, gaps = 0, []
        used = [slot for slot in self.used.values() if slot.slot_id not in given_up]
        held = [(slot.offset, self.padded(slot.nbytes)) for slot in (*used, *self.quarantined.values())]
        held += [self.claimed_place()] if self.claimed else []
        for offset, size in [*sorted(held), (UNITS * self.alignment, 0)]:
            if offset > end:
                gaps.append((offset - end, end))
            end = max(end, offset + size)
        return gaps

    def claimed_place(self) -> tuple[int, int]:
        """Returns the offset and size of the claimed range."""
        start, end = self.arena._claim
        assert end - start == self.claimed
        return start * self.alignment, (end - start) * self.alignment

    def in_claim(self, slot: Slot) -> bool:
        if not self.claimed:
            return False
        offset, size = self.claimed_place()
        return slot.offset < offset + size and offset < slot.offset + self.padded(slot.nbytes)

    @rule(target=slots, units=st.integers(1, UNITS // 2), short=st.integers(0, 63))
    def allocate(self, units: int, short: int) -> Slot | MultipleResults[Slot]:
        nbytes = units * self.alignment - short % self.alignment
        fitting = [gap for gap in self.gaps() if gap[0] >= self.padded(nbytes)]
        if not fitting:
            with pytest.raises(ArenaFull):
                self.arena.allocate(nbytes)
            return multiple()
        slot = self.arena.allocate(nbytes)
        assert slot.offset == min(fitting)[1], "best fit, lowest offset"
        assert slot.nbytes == nbytes
        assert slot.generation > self.last_generation
        assert slot.slot_id not in self.ids
        self.last_generation = slot.generation
        self.ids.add(slot.slot_id)
        self.used[slot.slot_id] = slot
        return slot

    @rule(slot=slots)
    def free(self, slot: Slot) -> None:
        self.idle.pop(slot.slot_id, None)
        assert self.arena.free(slot.slot_id) == (self.used.pop(slot.slot_id, None) is not None)

    @rule(slot=slots)
    def quarantine(self, slot: Slot) -> None:
        was_used = slot.slot_id in self.used
        self.idle.pop(slot.slot_id, None)
        assert self.arena.quarantine(slot.slot_id) == was_used
        if was_used:
            self.quarantined[slot.slot_id] = self.used.pop(slot.slot_id)

    @rule(slot=slots, is_idle=st.booleans())
    def use(self, slot: Slot, is_idle: bool) -> None:
        """Uses an idle slot once more or makes it busy, or makes a busy slot idle or keeps it busy."""
        if slot.slot_id not in self.used:
            return
        self.idle.pop(slot.slot_id, None)
        if is_idle:
            self.idle[slot.slot_id] = None
            self.arena.set_idle(slot.slot_id)
        else:
            self.arena.set_busy(slot.slot_id)

    @rule(units=st.integers(1, UNITS), does_free=st.booleans())
    def make_room(self, units: int, does_free: bool) -> None:
        nbytes = units * self.alignment
        victims = self.arena.victims(nbytes)
        given_up = {slot_id for slot_id in self.idle if not self.in_claim(self.used[slot_id])}
        can_be_had = any(size >= nbytes for size, _ in self.gaps(given_up))
        assert (victims is not None) == can_be_had, "an answer where and only where giving up helps"
        if victims is None:
            return
        assert set(victims) <= given_up
        assert len(set(victims)) == len(victims)
        assert bool(victims) == all(size < nbytes for size, _ in self.gaps()), "nothing goes that need not"
        assert any(size >= nbytes for size, _ in self.gaps(victims)), "what goes makes room"
        sizes = [self.padded(self.used[slot_id].nbytes) for slot_id in victims]
        assert not sizes or sum(sizes) - max(sizes) < nbytes
        assert len([1 for gap in self.gaps(victims) if gap not in self.gaps()]) <= 1, "room is made in one place"
        if does_free:
            for slot_id in victims:
                self.free(self.used[slot_id])

    @rule(units=st.integers(1, UNITS))
    def claim(self, units: int) -> None:
        """Claims a range for a request that finds no room; no other slot is placed in it. The arena names the slots
        that have to go."""
        if self.claimed or self.arena.victims(units * self.alignment) is not None:
            return
        found = self.arena.claim(units * self.alignment)
        if found is None:
            assert self.quarantined
            return
        self.claimed = units
        assert set(found) == {slot.slot_id for slot in self.used.values() if self.in_claim(slot)}
        assert found
        assert not any(self.in_claim(slot) for slot in self.quarantined.values())

    @rule()
    def unclaim(self) -> None:
        self.arena.unclaim()
        self.claimed = None

    @rule(target=slots)
    def take_claimed(self) -> Slot | MultipleResults[Slot]:
        held = (*self.used.values(), *self.quarantined.values())
        if not self.claimed or any(map(self.in_claim, held)):
            with pytest.raises(ArenaFull):
                self.arena.allocate(self.alignment, is_claimed=True)
            return multiple()
        offset, size = self.claimed_place()
        slot = self.arena.allocate(size, is_claimed=True)
        assert slot.offset == offset
        self.claimed, self.last_generation = None, slot.generation
        self.ids.add(slot.slot_id)
        self.used[slot.slot_id] = slot
        return slot

    @rule(slot=consumes(slots))
    def release_quarantine(self, slot: Slot) -> None:
        was_quarantined = self.quarantined.pop(slot.slot_id, None) is not None
        assert self.arena.release_quarantine(slot.slot_id) == was_quarantined

    @rule(extra=st.integers(1, 100))
    def refuse_what_never_fits(self, extra: int) -> None:
        with pytest.raises(UnitTooLarge):
            self.arena.allocate(UNITS * self.alignment + extra)

    @invariant()
    def accounts_agree(self) -> None:
        self.arena.check_invariants()
        assert self.arena.usage() == (
            sum(self.padded(slot.nbytes) for slot in self.used.values()),
            UNITS * self.alignment,
            len(self.used),
            sum(self.padded(slot.nbytes) for slot in self.quarantined.values()),
            len(self.quarantined),
        )
        held = sorted((*self.used.values(), *self.quarantined.values()), key=lambda slot: slot.offset)
        for left, right in itertools.pairwise(held):
            assert left.offset + self.padded(left.nbytes) <= right.offset
        assert all(slot.offset % self.alignment == 0 for slot in held)
        assert all(self.arena.is_idle(slot_id) == (slot_id in self.idle) for slot_id in self.used)

    def teardown(self) -> None:
        if not hasattr(self, "arena"):
            return
        self.arena.unclaim()
        for slot_id in list(self.used):
            assert self.arena.free(slot_id)
        for slot_id in list(self.quarantined):
            assert self.arena.release_quarantine(slot_id)
        assert self.arena.allocate(UNITS * self.alignment).offset == 0, "everything came back as one range"


TestArenaModel = ArenaModel.TestCase
TestArenaModel.settings = settings(deadline=None, max_examples=80, stateful_step_count=40)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_slot_has_at_least_a_byte(nbytes: int) -> None:
    with pytest.raises(ValueError, match="can't allocate"):
        Arena(128).allocate(nbytes)


def test_an_arena_has_at_least_one_unit() -> None:
    with pytest.raises(ValueError, match="can't hold"):
        Arena(63)


@settings(deadline=None, max_examples=200)
@given(
    largest=st.sampled_from([0, 1, 511, 512, 2**18, 2**54 - 1]),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 2**54)), max_size=40),
    asked=st.lists(st.integers(0, 2**54), min_size=1, max_size=10),
)
@example(largest=511, steps=[(True, 511)], asked=[0])
def test_the_nearest_integer_is_that_of_a_sorted_list(
    largest: int, steps: list[tuple[bool, int]], asked: list[int]
) -> None:
    found, model = OrderedIntegers(largest), set()
    for is_added, number in steps:
        member = number % (largest + 1)
        (found.add if is_added else found.discard)(member)
        (model.add if is_added else model.discard)(member)
    near = [number + step for number in model for step in (-1, 0, 1) if number + step >= 0]
    for number in [*(one % (largest + 1) for one in asked), *near]:
        assert found.at_least(number) == min((one for one in model if one >= number), default=None)
        assert found.at_most(number) == max((one for one in model if one <= number), default=None)


def test_the_nearest_integer_far_away_is_the_nearest_of_its_neighbours() -> None:
    found = OrderedIntegers(2**18)
    for number in (100_001, 100_000, 100_002):
        found.add(number)
    assert (found.at_least(7), found.at_most(2**18)) == (100_000, 100_002)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 39), st.integers(1, 8)), max_size=40), st.integers(1, 40))
def test_ranges_are_those_of_a_set_of_numbers(steps: list[tuple[int, int]], size: int) -> None:
    """Each step flips a range if all of it is in the set or none of it is."""
    ranges, model = Ranges(40), set()
    for start, length in steps:
        numbers = set(range(start, min(40, start + length)))
        if not numbers & model:
            ranges.add(start, start + len(numbers))
            model |= numbers
        elif numbers <= model:
            ranges.remove(start, start + len(numbers))
            model -= numbers
    expected: list[tuple[int, int]] = []
    for number in sorted(model):
        if expected and expected[-1][1] == number:
            expected[-1] = (expected[-1][0], number + 1)
        else:
            expected.append((number, number + 1))
    assert list(ranges) == expected
    assert all(ranges.around(number) in expected for number in model)
    assert all(ranges.starting_at(start) == end and ranges.ending_at(end) == start for start, end in expected)
    largest = ranges.largest()
    sizes = [end - start for start, end in expected]
    assert (largest is None) == (not expected)
    assert largest is None or (largest in expected and largest[1] - largest[0] == max(sizes))
    fitting = [(end - start, start, end) for start, end in expected if end - start >= size]
    assert ranges.best_fit(size) == (min(fitting)[1:] if fitting else None)


def test_the_oldest_slot_goes_with_as_many_neighbours_as_it_takes() -> None:
    """The neighbours never include a slot that is busy."""
    arena = Arena(64, alignment=1)
    slots = [arena.allocate(nbytes) for nbytes in (4, 32, 4, 24)]
    for slot in (slots[0], slots[2], slots[1], slots[3]):
        arena.set_idle(slot.slot_id)
    assert arena.victims(4) == [slots[0].slot_id]
    assert arena.victims(40) == [slots[0].slot_id, slots[1].slot_id, slots[2].slot_id]
    assert arena.victims(64) == [slots[0].slot_id, slots[1].slot_id, slots[2].slot_id, slots[3].slot_id]
    arena.set_busy(slots[2].slot_id)
    assert arena.victims(4) == [slots[0].slot_id]
    assert arena.victims(36) == [slots[0].slot_id, slots[1].slot_id]
    assert arena.victims(37) is None


def test_of_the_oldest_slots_the_one_in_the_smallest_range_goes() -> None:
    """This keeps large ranges for large requests. If there are few idle slots, only the oldest is considered."""
    arena = Arena(64, alignment=1)
    first, wall = arena.allocate(20), arena.allocate(1)
    small = [arena.allocate(1) for _ in range(7)]
    arena.allocate(36)
    assert arena.victims(1) is None
    for slot in (first, *small[:-1]):
        arena.set_idle(slot.slot_id)
    assert arena.victims(1) == [first.slot_id], "seven are idle"
    arena.set_idle(small[-1].slot_id)
    assert arena.victims(1) == [small[0].slot_id], "7 bytes between those that stay, where the oldest has 20"
    arena.set_busy(wall.slot_id)
    arena.set_idle(wall.slot_id)
    assert arena.victims(1) == [first.slot_id], "now they lie in one range"


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda arena: arena._free.remove(2, 3), "gap or overlap at 2..3"),
        (lambda arena: arena._free.remove(7, 8), "the tail from 7 is lost"),
        (lambda arena: arena._free.add(0, 0), "empty range at 0"),
        (lambda arena: arena._open.remove(6, 8), "open ranges are not what is free or idle"),
    ],
)
def test_a_check_names_what_is_wrong(damage: Callable[[Arena], None], named: str) -> None:
    """Units `[0, 2)` are busy, `[2, 4)` and `[6, 8)` are free, `[4, 6)` are idle; then the test corrupts one of the
    accounts."""
    arena = Arena(8 * 64)
    slots = [arena.allocate(num_units * 64) for num_units in (2, 2, 2)]
    arena.free(slots[1].slot_id)
    arena.set_idle(slots[2].slot_id)
    arena.check_invariants()
    damage(arena)
    with pytest.raises(AssertionError, match=named):
        arena.check_invariants()
