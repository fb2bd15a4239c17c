"""Keeps the engine's side of features: the references that the engine holds, which sequences still need which unit, and
where each unit is read next. A unit is one separately encoded part of a media item.

The feature store (`llm_workers/features`) lives in the event loop and owns the bytes. It hands a `FeatureReference` to
the engine each time it offers a feature. A unit is readable while the engine holds a reference to it. The engine gives
back exactly the references that it was handed, and the store frees the bytes when every reference has come back. So
nothing is counted on both sides: a reference that comes back twice, or late, changes nothing.

References by sequence work in the same way. They are sets of sequence ids, so that dropping one twice is harmless. A
unit that no sequence needs is released by `take_unneeded`, unless a sequence claims it before. This module belongs to
the engine's thread and knows nothing of slots, tickets and announcements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fabric.contracts import AttemptId, FeatureMismatch, SequenceId, UnitKey
from fabric.transport import LandedFeature
from llm_workers.scheduling.scheduler_events import NextRead

Reads = Mapping[UnitKey, Mapping[AttemptId, NextRead | None]]
"""Maps each unit to its attempts, and each attempt to the place where its first choice that needs the unit needs it
next. None means that the attempt does not need the unit any more."""


@dataclass(frozen=True, slots=True)
class FeatureReference:
    """A `FeatureReference` is the right to read a feature until the reference is given back. The store never gives two
    references the same number, so an old reference has no effect on a newer landing of the same unit."""

    unit: UnitKey
    number: int
    feature: LandedFeature = field(compare=False, repr=False)


class ReleasedFeature(NamedTuple):
    """A `ReleasedFeature` says that the engine does not read this unit any more, and gives back its references.
    `missed_by` lists the attempts that need the unit again, because it was evicted."""

    unit: UnitKey
    references: tuple[FeatureReference, ...]
    missed_by: tuple[AttemptId, ...] = ()


@dataclass(slots=True)
class _UnitReferences:
    num_tokens: int | None = None
    """Counts the rows that the claiming requests were promised; it is None while no request has claimed the unit."""
    references: dict[FeatureReference, None] = field(default_factory=dict)
    """Holds the references of the engine, in the order in which they arrived."""
    needed_by: set[SequenceId] = field(default_factory=set)
    is_in_step: bool = False
    """Says whether the step in flight reads the unit."""

    @property
    def is_needed(self) -> bool:
        return bool(self.needed_by) or self.is_in_step


class FeatureReferences:
    """Holds the engine's references to features, and the sequences' claims on them. It belongs to the engine's
    thread."""

    def __init__(self) -> None:
        self._entries: dict[UnitKey, _UnitReferences] = {}
        self._missing: dict[SequenceId, set[UnitKey]] = {}
        """Holds, per sequence, the units that it needs and that are not readable."""
        self._maybe_unneeded: dict[UnitKey, None] = {}
        """Holds the units that may have become unneeded since the last call of `take_unneeded`."""
        self.num_readable = 0
        """Counts the units that can be read."""

    # ------------------------------------------------------------ queries

    def is_readable(self, unit: UnitKey) -> bool:
        entry = self._entries.get(unit)
        return entry is not None and bool(entry.references)

    def feature(self, unit: UnitKey) -> LandedFeature:
        """Returns the feature of a readable unit."""
        return next(iter(self._entries[unit].references)).feature

    def readable_units(self) -> list[UnitKey]:
        return [unit for unit, entry in self._entries.items() if entry.references]

    def is_needed(self, unit: UnitKey) -> bool:
        """Returns whether a live sequence needs the unit, or the step in flight reads it."""
        entry = self._entries.get(unit)
        return entry is not None and entry.is_needed

    def is_complete(self, sequence_id: SequenceId) -> bool:
        """Returns whether every unit that the sequence still needs is readable."""
        return not self._missing.get(sequence_id)

    def is_needed_by(self, sequence_id: SequenceId, unit: UnitKey) -> bool:
        entry = self._entries.get(unit)
        return entry is not None and sequence_id in entry.needed_by

    def needing(self, unit: UnitKey) -> list[SequenceId]:
        """Returns the sequences that need the unit, in order."""
        entry = self._entries.get(unit)
        return [] if entry is None else sorted(entry.needed_by)

    def check_counts(self, unit_to_tokens: Mapping[UnitKey, int]) -> None:
        """Raises FeatureMismatch if another request was promised another size for one of the units: only this request
        fails, and the earlier ones go on."""
        for unit, num_tokens in unit_to_tokens.items():
            entry = self._entries.get(unit)
            if entry and entry.num_tokens is not None and entry.num_tokens != num_tokens:
                raise FeatureMismatch(
                    f"unit {unit.unit} has {num_tokens} tokens in this request, but {entry.num_tokens} in another"
                )

    # ------------------------------------------------------------ claims of sequences

    def claim(self, sequence_id: SequenceId, units: Mapping[UnitKey, int]) -> list[UnitKey]:
        """Notes that the sequence needs these units; `units` maps each one to its number of rows. Returns those that
        the sequence had not claimed before and that are not readable."""
        missing: list[UnitKey] = []
        for unit, num_tokens in units.items():
            entry = self._entries.setdefault(unit, _UnitReferences())
            assert entry.num_tokens in (None, num_tokens), "the caller must call check_counts first"
            if sequence_id in entry.needed_by:
                continue
            entry.num_tokens = num_tokens
            entry.needed_by.add(sequence_id)
            if not entry.references:
                self._missing.setdefault(sequence_id, set()).add(unit)
                missing.append(unit)
        return missing

    def drop(self, sequence_id: SequenceId, units: Iterable[UnitKey]) -> None:
        """Notes that the sequence has computed its last position of these units, or does not need them any more."""
        missing = self._missing.get(sequence_id, set())
        for unit in units:
            missing.discard(unit)
            entry = self._entries.get(unit)
            if entry is not None and sequence_id in entry.needed_by:
                entry.needed_by.discard(sequence_id)
                self._note_unneeded(unit, entry)
        if not missing:
            self._missing.pop(sequence_id, None)

    def begin_read(self, unit: UnitKey) -> None:
        """Notes that a step's plan reads the unit: it can't be released before the step has ended."""
        self._entries[unit].is_in_step = True

    def end_reads(self, units: Iterable[UnitKey]) -> None:
        """Notes that the step that read these units has ended, successfully or not."""
        for unit in units:
            entry = self._entries.get(unit)
            if entry is not None and entry.is_in_step:
                entry.is_in_step = False
                self._note_unneeded(unit, entry)

    # ------------------------------------------------------------ references to features

    def hold(self, reference: FeatureReference) -> list[SequenceId]:
        """Takes a reference, which makes its unit readable. Returns the sequences that waited for the unit."""
        entry = self._entries.setdefault(reference.unit, _UnitReferences())
        is_first = not entry.references
        entry.references[reference] = None
        self._note_unneeded(reference.unit, entry)
        if not is_first:
            return []
        self.num_readable += 1
        for sequence_id in entry.needed_by:
            missing = self._missing[sequence_id]
            missing.discard(reference.unit)
            if not missing:
                del self._missing[sequence_id]
        return sorted(entry.needed_by)

    def give_up(self, unit: UnitKey) -> tuple[tuple[FeatureReference, ...], list[SequenceId]]:
        """Gives up all references to the unit, which is not readable any more. Returns them, and the sequences that
        need the unit, which wait again. Both are empty if the unit was not readable."""
        entry = self._entries.get(unit)
        if entry is None or not entry.references:
            return (), []
        references = tuple(entry.references)
        entry.references.clear()
        entry.is_in_step = False
        self.num_readable -= 1
        if not entry.needed_by:
            del self._entries[unit]
        for sequence_id in entry.needed_by:
            self._missing.setdefault(sequence_id, set()).add(unit)
        return references, sorted(entry.needed_by)

    def take_unneeded(self) -> list[ReleasedFeature]:
        """Forgets the units that no sequence needs, and gives up the references to those that are readable. The cost
        depends on the number of units that may have become unneeded since the last call."""
        marked, self._maybe_unneeded = self._maybe_unneeded, {}
        released: list[ReleasedFeature] = []
        for unit in marked:
            entry = self._entries.get(unit)
            if entry is None or entry.is_needed:
                continue
            del self._entries[unit]
            if entry.references:
                self.num_readable -= 1
                released.append(ReleasedFeature(unit, tuple(entry.references)))
        return released

    def _note_unneeded(self, unit: UnitKey, entry: _UnitReferences) -> None:
        if not entry.is_needed:
            self._maybe_unneeded[unit] = None

    # ------------------------------------------------------------ checks

    def check_invariants(self, sequence_to_units: Mapping[SequenceId, set[UnitKey]]) -> None:
        """Asserts that the references are consistent. `sequence_to_units` holds what every live sequence needs: no
        other sequence may claim a unit."""
        expected: dict[UnitKey, set[SequenceId]] = {}
        for sequence_id, units in sequence_to_units.items():
            for unit in units:
                expected.setdefault(unit, set()).add(sequence_id)
            missing = {unit for unit in units if not self.is_readable(unit)}
            assert self._missing.get(sequence_id, set()) == missing, f"{sequence_id}: missing units differ"
        assert self.num_readable == len(self.readable_units()), "units are counted wrong"
        needed = {unit: entry.needed_by for unit, entry in self._entries.items() if entry.needed_by}
        assert needed == expected, "claims differ from what the sequences need"
        assert self._missing.keys() <= sequence_to_units.keys(), "a sequence that has left still waits"
        for unit, entry in self._entries.items():
            assert entry.is_needed or unit in self._maybe_unneeded, f"{unit} is held, but no sequence needs it"
            assert entry.references or not entry.is_in_step, f"{unit} is read without a reference"
            assert all(one.unit == unit for one in entry.references), f"{unit} has references to another unit"


class ReadLog:
    """Collects the units whose next read may have changed since the last `drain`. The cost of `drain` depends on what
    changed and not on what waits."""

    def __init__(self) -> None:
        self._noted: dict[tuple[UnitKey, AttemptId], None] = {}

    def note(self, sequence_id: SequenceId, units: Iterable[UnitKey]) -> None:
        """Notes that this sequence's next reads of these units may have changed."""
        for unit in units:
            self._noted[unit, sequence_id.attempt_id] = None

    def drain(self, next_read: Callable[[UnitKey, AttemptId], NextRead | None]) -> Reads:
        """Returns the reads that were noted, with the values that `next_read` gives now."""
        noted, self._noted = self._noted, {}
        reads: dict[UnitKey, dict[AttemptId, NextRead | None]] = {}
        for unit, attempt_id in noted:
            reads.setdefault(unit, {})[attempt_id] = next_read(unit, attempt_id)
        return reads
