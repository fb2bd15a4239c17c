"""The arena against a model: a set of intervals."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from fabric.arena import Arena, Slot
from fabric.errors import ArenaFull, UnitTooLarge

UNITS = 24


class ArenaModel(RuleBasedStateMachine):
    """No overlap, no leak, neighbours join, generations grow, freeing twice does nothing, quarantine is kept."""

    slots = Bundle("slots")
    """Every slot ever handed out, freed or not."""

    @initialize(alignment=st.sampled_from([1, 8, 64]), spare=st.integers(0, 7), first=st.integers(1, 2**62))
    def build(self, alignment: int, spare: int, first: int) -> None:
        self.alignment = alignment
        self.arena = Arena(UNITS * alignment + spare % alignment, alignment, first)
        self.used: dict[int, Slot] = {}
        self.quarantined: dict[int, Slot] = {}
        self.last_generation = first - 1
        self.ids: set[int] = set()

    def padded(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def gaps(self) -> list[tuple[int, int]]:
        """Free ranges (size, offset), joined, by the model's own account."""
        end, gaps = 0, []
        held = sorted((*self.used.values(), *self.quarantined.values()), key=lambda slot: slot.offset)
        for offset, size in [(slot.offset, self.padded(slot.nbytes)) for slot in held] + [(UNITS * self.alignment, 0)]:
            if offset > end:
                gaps.append((offset - end, end))
            end = offset + size
        return gaps

    @rule(target=slots, units=st.integers(1, UNITS // 2), short=st.integers(0, 63))
    def allocate(self, units: int, short: int):
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
        assert self.arena.free(slot.slot_id) == (self.used.pop(slot.slot_id, None) is not None)

    @rule(slot=slots)
    def quarantine(self, slot: Slot) -> None:
        was_used = slot.slot_id in self.used
        assert self.arena.quarantine(slot.slot_id) == was_used
        if was_used:
            self.quarantined[slot.slot_id] = self.used.pop(slot.slot_id)

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

    def teardown(self) -> None:
        if not hasattr(self, "arena"):
            return
        for slot_id in list(self.used):
            assert self.arena.free(slot_id)
        for slot_id in list(self.quarantined):
            assert self.arena.release_quarantine(slot_id)
        assert self.arena.allocate(UNITS * self.alignment).offset == 0, "everything came back as one range"


TestArenaModel = ArenaModel.TestCase
TestArenaModel.settings = settings(deadline=None, max_examples=80, stateful_step_count=40)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_slot_has_at_least_a_byte(nbytes):
    with pytest.raises(ValueError, match="can't allocate"):
        Arena(128).allocate(nbytes)


def test_an_arena_has_at_least_one_unit():
    with pytest.raises(ValueError, match="can't hold"):
        Arena(63)
