"""Knows, for the engine thread of a vLLM worker, which features have landed, which lie in vLLM's encoder cache, and
which sequence waits for which unit. A unit is one separately encoded part of a media item.

A feature goes through two places. It lands in the inboxes of the ranks, where `FeatureReferences` knows which sequences
still need it. When vLLM has made room for the item in its encoder cache, a step loads the item's landed units into it,
and the inbox gets its room back. vLLM may evict an item from its cache; a sequence that needs the item again waits at
its doorstep, the first placeholder whose feature is not there, and the board asks for the item's units again.

This module decides nothing about steps: vLLM's scheduler asks it how far a sequence may compute (`limit`). It knows
nothing of vLLM's classes, of slots and of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from fabric.contracts import AttemptId, GenerateRequest, MmHash, SequenceId, UnitKey
from fabric.transport import LandedFeature
from llm_workers.scheduling import (
    NOT_COVERED,
    PREEMPTED,
    FeatureReference,
    FeatureReferences,
    NeededUnit,
    NextRead,
    ReadLog,
    ReleasedFeature,
    Sequence,
)


class FeatureLoad(NamedTuple):
    """Says that a step copies the feature of a unit from the inbox into rows `[row, row + num_rows)` of an item's entry
    in the encoder cache, which has `total_rows` rows."""

    unit: UnitKey
    feature: LandedFeature
    row: int
    num_rows: int
    total_rows: int


@dataclass(slots=True)
class CachedItem:
    """A `CachedItem` is a media item for which vLLM's encoder cache has room."""

    unit_tokens: tuple[int, ...]
    """Holds the number of rows of each unit."""
    loaded: set[int] = field(default_factory=set)
    """Holds the units whose rows are in the cache, or will be once the step in flight has ended."""


@dataclass(slots=True)
class Claimant:
    """A `Claimant` is a sequence that was handed to vLLM."""

    sequence: Sequence
    hash_to_unit_tokens: dict[MmHash, tuple[int, ...]]
    num_done: int
    """Counts the tokens that are computed, or that were found in the prefix cache when this was last looked at: the
    sequence claims units behind them."""


class FeatureBoard:
    """Belongs to the engine thread. Sequences are named by their `SequenceId`."""

    def __init__(self, *, is_overlap_enabled: bool = True) -> None:
        """Without overlap, a sequence waits until every unit that it needs is here, wherever that stands in its
        prompt."""
        self._is_overlap_enabled = is_overlap_enabled
        self._references = FeatureReferences()
        self._reads = ReadLog()
        self._claimants: dict[SequenceId, Claimant] = {}
        self._attempt_to_sequences: dict[AttemptId, dict[SequenceId, None]] = {}
        self._cached: dict[MmHash, CachedItem] = {}
        self._loading: dict[UnitKey, int] = {}
        """Counts the steps in flight that load a unit."""
        self._evicted_later: dict[UnitKey, None] = {}
        """Holds the units that are to be given up as soon as no step in flight loads them."""
        self._needed: list[NeededUnit] = []
        self.waiting: dict[SequenceId, None] = {}
        """Holds the sequences that the last plan of a step has found at their doorstep."""

    # ------------------------------------------------------------ sequences

    def add(self, request: GenerateRequest, sequence: Sequence) -> list[UnitKey]:
        """Takes a sequence whose first `num_covered` tokens were found in the prefix cache. Returns the units that it
        needs and that are not here. Raises FeatureMismatch if a unit was promised to others with another size."""
        self._references.check_counts(sequence.layout.unit_to_tokens)
        name = sequence.sequence_id
        media = {item.mm_hash: item.unit_tokens for item in request.media}
        self._claimants[name] = claimant = Claimant(sequence, media, sequence.num_covered)
        self._attempt_to_sequences.setdefault(name.attempt_id, {})[name] = None
        return self._claim(claimant)

    def remove(self, name: SequenceId) -> None:
        """Forgets a sequence that has ended."""
        sequence = self._claimants[name].sequence
        self._drop(name, sequence.layout.units_after(0))
        del self._claimants[name]
        self.waiting.pop(name, None)
        siblings = self._attempt_to_sequences[name.attempt_id]
        del siblings[name]
        if not siblings:
            del self._attempt_to_sequences[name.attempt_id]

    def advance(self, name: SequenceId, num_done: int) -> None:
        """Notes that the first `num_done` tokens of a sequence are computed."""
        claimant = self._claimants[name]
        completed = claimant.sequence.layout.units_completed(claimant.num_done, num_done)
        claimant.num_done = num_done
        if completed:
            self._drop(name, completed)

    def restart(self, name: SequenceId) -> None:
        """Notes that a sequence was preempted: it begins again, and finds out at its doorstep what it lacks."""
        claimant = self._claimants[name]
        self._drop(name, claimant.sequence.layout.units_after(0))
        claimant.num_done = 0

    def _claim(self, claimant: Claimant) -> list[UnitKey]:
        """Claims the units that the sequence still needs, except for those in the encoder cache. Returns those that it
        had not claimed before and that have not landed."""
        layout, name = claimant.sequence.layout, claimant.sequence.sequence_id
        after = [unit for unit in layout.units_after(claimant.num_done) if not self._is_loaded(unit)]
        self._reads.note(name, after)
        return self._references.claim(name, {unit: layout.unit_to_tokens[unit] for unit in after})

    def _drop(self, name: SequenceId, units: Iterable[UnitKey]) -> None:
        units = list(units)
        self._references.drop(name, units)
        self._reads.note(name, units)

    # ------------------------------------------------------------ how far a sequence may compute

    def limit(self, name: SequenceId, start: int, end: int) -> int:
        """Returns how far the sequence, which has computed `start` tokens, may compute, at most to `end`. It ends right
        ahead of the first placeholder whose unit is not here."""
        layout = self._claimants[name].sequence.layout
        if not self._is_overlap_enabled and not all(self._is_here(unit) for unit in layout.units_after(start)):
            return start
        for run, unit in layout.runs_between(start, end):
            if not self._is_here(unit):
                return max(start, run.offset)
        return end

    def wait(self, name: SequenceId, position: int) -> None:
        """Notes that the sequence can't compute the token at `position` now. It asks for the units that the sequence
        turns out to need from there on: they were in the prefix cache or in the encoder cache when it last asked."""
        claimant = self._claimants[name]
        self.waiting[name] = None
        self._drop(name, claimant.sequence.layout.units_completed(0, position))
        claimant.num_done = position
        reason = PREEMPTED if claimant.sequence.is_started else NOT_COVERED
        self._needed += [NeededUnit(name, unit, reason) for unit in self._claim(claimant)]

    def has_landed(self, name: SequenceId, mm_hash: MmHash) -> bool:
        """Returns whether a unit of an item of the sequence is here."""
        num_units = len(self._claimants[name].hash_to_unit_tokens[mm_hash])
        return any(self._is_here(UnitKey(mm_hash, index)) for index in range(num_units))

    def begin_plan(self) -> None:
        """Notes that vLLM begins to plan a step, which finds out anew which sequences wait."""
        self.waiting = {}

    def _is_here(self, unit: UnitKey) -> bool:
        return self._is_loaded(unit) or self._references.is_readable(unit)

    def _is_loaded(self, unit: UnitKey) -> bool:
        item = self._cached.get(unit.mm_hash)
        return item is not None and unit.unit in item.loaded

    # ------------------------------------------------------------ the encoder cache

    def cache(self, name: SequenceId, mm_hash: MmHash) -> None:
        """Notes that vLLM has made room in its encoder cache for an item of the sequence."""
        self._cached.setdefault(mm_hash, CachedItem(self._claimants[name].hash_to_unit_tokens[mm_hash]))

    def uncache(self, mm_hash: MmHash) -> None:
        """Notes that vLLM has evicted an item from its encoder cache."""
        self._cached.pop(mm_hash, None)

    def take_loads(self) -> list[FeatureLoad]:
        """Returns the landed units of cached items that are not loaded, which the step that is being planned loads.
        `end_loads` must follow when the step has ended."""
        loads: list[FeatureLoad] = []
        for mm_hash, item in self._cached.items():
            if len(item.loaded) == len(item.unit_tokens):
                continue
            ends = list(accumulate(item.unit_tokens))
            for index, num_rows in enumerate(item.unit_tokens):
                unit = UnitKey(mm_hash, index)
                if index not in item.loaded and self._references.is_readable(unit):
                    item.loaded.add(index)
                    self._loading[unit] = self._loading.get(unit, 0) + 1
                    self._references.begin_read(unit)
                    row = ends[index] - num_rows
                    loads.append(FeatureLoad(unit, self._references.feature(unit), row, num_rows, ends[-1]))
        return loads

    def end_loads(self, units: Iterable[UnitKey]) -> list[ReleasedFeature]:
        """Notes that the step that loaded these units has ended: no sequence needs them in the inbox any more. Returns
        the features that were to be evicted meanwhile."""
        released = []
        for unit in units:
            self._loading[unit] -= 1
            if self._loading[unit]:
                continue
            del self._loading[unit]
            self._references.end_reads([unit])
            if unit in self._evicted_later:
                del self._evicted_later[unit]
                if (gone := self._give_up(unit)) is not None:
                    released.append(gone)
            if self._is_loaded(unit):
                for name in self._references.needing(unit):
                    self._drop(name, [unit])
        return released

    # ------------------------------------------------------------ the inbox

    def hold(self, reference: FeatureReference) -> None:
        """Takes a reference to a landed feature."""
        self._references.hold(reference)

    def evict(self, unit: UnitKey) -> ReleasedFeature | None:
        """Gives up the references to a unit although sequences may need it. Returns None if there is no reference, or
        if a step in flight loads the unit; `end_loads` then returns it."""
        if unit in self._loading:
            self._evicted_later[unit] = None
            return None
        return self._give_up(unit)

    def _give_up(self, unit: UnitKey) -> ReleasedFeature | None:
        references, missing_it = self._references.give_up(unit)
        missed_by = tuple(sorted({name.attempt_id for name in missing_it if not self._is_loaded(unit)}))
        return ReleasedFeature(unit, references, missed_by) if references else None

    # ------------------------------------------------------------ reports

    def take_unneeded(self) -> list[ReleasedFeature]:
        """Gives up the references to features that no sequence needs in the inbox."""
        return self._references.take_unneeded()

    def drain_needed(self) -> list[NeededUnit]:
        """Returns the units that live sequences have turned out to need since the last call."""
        needed, self._needed = self._needed, []
        return [each for each in needed if each.sequence_id in self._claimants]

    def drain_reads(self) -> dict[UnitKey, dict[AttemptId, NextRead | None]]:
        """Returns what may have changed since the last call: which attempts still need which unit, and where."""
        return {unit: dict(reads) for unit, reads in self._reads.drain(self._next_read).items()}

    def _next_read(self, unit: UnitKey, attempt: AttemptId) -> NextRead | None:
        for name in self._attempt_to_sequences.get(attempt, ()):
            if self._references.is_needed_by(name, unit):
                claimant = self._claimants[name]
                return NextRead(name.choice, claimant.sequence.layout.next_read(unit, claimant.num_done))
        return None

    @property
    def num_readable(self) -> int:
        """Counts the features in the inbox that can be read."""
        return self._references.num_readable

    # ------------------------------------------------------------ checks

    def check_at_rest(self) -> None:
        """Asserts, when no sequence is left and no step is in flight, that nothing is claimed."""
        assert not self._claimants, "a sequence has not left"
        assert not self._attempt_to_sequences, "an attempt has not left"
        assert not self._loading, "a load has not ended"
        self._references.check_invariants({})

    def check_invariants(self) -> None:
        """Asserts between calls that claims are consistent: what is claimed is needed, and what is needed, neither
        loaded nor claimed is only found out at the doorstep."""
        for unit in self._loading:
            assert self._references.is_readable(unit), f"{unit} is being loaded, but has no reference"
        for item in self._cached.values():
            assert item.loaded <= set(range(len(item.unit_tokens)))
        for name, claimant in self._claimants.items():
            for unit in claimant.sequence.layout.unit_to_tokens:
                if self._references.is_needed_by(name, unit):
                    assert unit in claimant.sequence.layout.units_after(claimant.num_done), (
                        f"{name} claims {unit}, which it has computed"
                    )
