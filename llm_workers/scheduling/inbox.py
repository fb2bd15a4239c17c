"""Tracks which units of features are here, and which sequences still have to compute positions of them.

    EXPECTED --landed--> LANDED --in a step's plan--> MERGED --step ended, no sequence needs it--> DISCARDED
        ^                  |  ^                          |
        +------lost--------+  +--step ended, needed------+          lost while MERGED: back to EXPECTED

A unit is one transferable part of a medium's features, and it lands when its feature can be read. DISCARDED keeps no
memory: the entry is removed, and a unit that is needed again begins as EXPECTED. A unit that no sequence needs any more
waits in `idle` until it is drained; if a sequence claims it before that, it was never given away (so a unit that the
same pass claims again is not reported as freed). References are sets of sequence ids: dropping twice is harmless. This
module knows nothing of bytes, slots and tickets, which belong to the service.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from fabric.errors import FeatureMismatch
from fabric.ids import SequenceId, UnitKey


class UnitState(Enum):
    EXPECTED = "expected"
    LANDED = "landed"
    MERGED = "merged"
    DISCARDED = "discarded"


ALLOWED: Mapping[UnitState, frozenset[UnitState]] = {
    UnitState.EXPECTED: frozenset({UnitState.LANDED, UnitState.DISCARDED}),
    UnitState.LANDED: frozenset({UnitState.MERGED, UnitState.EXPECTED, UnitState.DISCARDED}),
    UnitState.MERGED: frozenset({UnitState.LANDED, UnitState.EXPECTED}),
    UnitState.DISCARDED: frozenset(),
}


@dataclass(slots=True)
class _Entry:
    num_tokens: int | None = None
    """Counts the rows that the claiming requests were promised; it is None while no request has claimed the unit."""
    state: UnitState = UnitState.EXPECTED
    wanted_by: set[SequenceId] = field(default_factory=set)

    @property
    def is_here(self) -> bool:
        return self.state in (UnitState.LANDED, UnitState.MERGED)


class Inbox:
    def __init__(self) -> None:
        self._entries: dict[UnitKey, _Entry] = {}
        self._missing: dict[SequenceId, set[UnitKey]] = {}
        """Holds, per sequence, the units that it wants and that are not here."""
        self._idle: dict[UnitKey, None] = {}
        self.num_here = 0
        """Counts the units that can be read."""

    # ------------------------------------------------------------ queries

    def state(self, unit: UnitKey) -> UnitState:
        entry = self._entries.get(unit)
        return entry.state if entry else UnitState.DISCARDED

    def is_here(self, unit: UnitKey) -> bool:
        entry = self._entries.get(unit)
        return entry is not None and entry.is_here

    def is_needed(self, unit: UnitKey) -> bool:
        """Returns whether a live sequence wants the unit, or the step that runs reads it."""
        entry = self._entries.get(unit)
        return entry is not None and (bool(entry.wanted_by) or entry.state is UnitState.MERGED)

    def is_complete(self, sequence_id: SequenceId) -> bool:
        """Returns whether every unit that the sequence still needs is here."""
        return not self._missing.get(sequence_id)

    def is_wanted_by(self, sequence_id: SequenceId, unit: UnitKey) -> bool:
        entry = self._entries.get(unit)
        return entry is not None and sequence_id in entry.wanted_by

    def check_counts(self, unit_to_tokens: Mapping[UnitKey, int]) -> None:
        """Raises FeatureMismatch if another request was promised another size for one of the units: only this request
        fails, and the earlier ones go on."""
        for unit, num_tokens in unit_to_tokens.items():
            entry = self._entries.get(unit)
            if entry and entry.num_tokens is not None and entry.num_tokens != num_tokens:
                raise FeatureMismatch(f"unit {unit.unit} has {entry.num_tokens} tokens, not {num_tokens}")

    # ------------------------------------------------------------ references

    def claim(self, sequence_id: SequenceId, units: Mapping[UnitKey, int]) -> list[UnitKey]:
        """Notes that the sequence needs these units; `units` maps each one to its number of rows. Returns those that
        the sequence had not claimed before and that are not here."""
        missing: list[UnitKey] = []
        for unit, num_tokens in units.items():
            entry = self._entries.setdefault(unit, _Entry())
            assert entry.num_tokens in (None, num_tokens), "check_counts comes first"
            if sequence_id in entry.wanted_by:
                continue
            entry.num_tokens = num_tokens
            entry.wanted_by.add(sequence_id)
            self._idle.pop(unit, None)
            if entry.state is UnitState.EXPECTED:
                self._missing.setdefault(sequence_id, set()).add(unit)
                missing.append(unit)
        return missing

    def drop(self, sequence_id: SequenceId, units: Iterable[UnitKey]) -> None:
        """Notes that the sequence has computed its last position of these units, or does not need them any more."""
        missing = self._missing.get(sequence_id, set())
        for unit in units:
            missing.discard(unit)
            entry = self._entries.get(unit)
            if entry is None or sequence_id not in entry.wanted_by:
                continue
            entry.wanted_by.discard(sequence_id)
            if not entry.wanted_by and entry.state is not UnitState.MERGED:
                self._idle[unit] = None
        if not missing:
            self._missing.pop(sequence_id, None)

    def drain_idle(self) -> list[UnitKey]:
        """Returns the units that no sequence needs any more, landed or not; the inbox forgets them, and the caller can
        free their memory."""
        idle = list(self._idle)
        self._idle.clear()
        for unit in idle:
            self._move(self._entries.pop(unit), UnitState.DISCARDED)
        return idle

    # ------------------------------------------------------------ life

    def land(self, unit: UnitKey) -> list[SequenceId]:
        """Makes the unit readable from now on; a second call is harmless. A unit that no sequence has claimed is kept
        until it is claimed or lost. Returns the sequences that waited for the unit."""
        entry = self._entries.setdefault(unit, _Entry())
        if entry.state is not UnitState.EXPECTED:
            return []
        self._move(entry, UnitState.LANDED)
        for sequence_id in entry.wanted_by:
            missing = self._missing[sequence_id]
            missing.discard(unit)
            if not missing:
                del self._missing[sequence_id]
        return sorted(entry.wanted_by)

    def lose(self, unit: UnitKey) -> list[SequenceId]:
        """Makes the unit unreadable. Returns the sequences that need it, which wait again."""
        entry = self._entries.get(unit)
        if entry is None:
            return []
        if entry.state is not UnitState.EXPECTED:
            self._move(entry, UnitState.EXPECTED)
        if not entry.wanted_by:
            self._idle.pop(unit, None)
            self._move(self._entries.pop(unit), UnitState.DISCARDED)
        for sequence_id in entry.wanted_by:
            self._missing.setdefault(sequence_id, set()).add(unit)
        return sorted(entry.wanted_by)

    def merge(self, unit: UnitKey) -> None:
        """Notes that a step's plan reads the unit: it can't be given away until the step has ended."""
        entry = self._entries[unit]
        if entry.state is not UnitState.MERGED:
            self._move(entry, UnitState.MERGED)

    def settle(self, units: Iterable[UnitKey]) -> None:
        """Notes that the step that read these units has ended, successfully or not."""
        for unit in units:
            entry = self._entries.get(unit)
            if entry is None or entry.state is not UnitState.MERGED:
                continue
            self._move(entry, UnitState.LANDED)
            if not entry.wanted_by:
                self._idle[unit] = None

    def _move(self, entry: _Entry, state: UnitState) -> None:
        assert state in ALLOWED[entry.state], f"{entry.state.name} -> {state.name}"
        was_here, entry.state = entry.is_here, state
        self.num_here += entry.is_here - was_here

    # ------------------------------------------------------------ checks

    def check_invariants(self, sequence_to_units: Mapping[SequenceId, set[UnitKey]]) -> None:
        """Asserts that the inbox is consistent. `sequence_to_units` holds what every live sequence needs: no other
        sequence may hold a reference."""
        expected: dict[UnitKey, set[SequenceId]] = {}
        for sequence_id, units in sequence_to_units.items():
            for unit in units:
                expected.setdefault(unit, set()).add(sequence_id)
            missing = {unit for unit in units if not self.is_here(unit)}
            assert self._missing.get(sequence_id, set()) == missing, f"{sequence_id}: missing units differ"
        assert self.num_here == sum(entry.is_here for entry in self._entries.values()), "units are counted wrong"
        wanted = {unit: entry.wanted_by for unit, entry in self._entries.items() if entry.wanted_by}
        assert wanted == expected, "references differ from what the sequences need"
        assert self._missing.keys() <= sequence_to_units.keys(), "a sequence that left still waits"
        for unit in self._idle:
            entry = self._entries[unit]
            assert not entry.wanted_by, f"{unit} is idle and wanted"
            assert entry.state in (UnitState.EXPECTED, UnitState.LANDED), f"{unit} is idle and {entry.state.name}"
        for unit, entry in self._entries.items():
            unclaimed = entry.state is UnitState.LANDED and entry.num_tokens is None
            is_held = entry.wanted_by or unit in self._idle or entry.state is UnitState.MERGED
            assert is_held or unclaimed, f"{unit} is kept for nobody"
