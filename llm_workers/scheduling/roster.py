"""Who is alive: sequences by id, by attempt and by age, and which wait for a sibling.

Choices of one request share their prompt: the others wait until one has computed it, and take over its blocks.
Knows nothing of blocks or units.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as SequenceOf

from fabric.ids import AttemptId, SequenceId
from llm_workers.scheduling.sequence import Sequence


class Roster:
    def __init__(self) -> None:
        self._sequences: dict[SequenceId, Sequence] = {}
        self._attempts: dict[AttemptId, list[Sequence]] = {}
        self._by_age: list[Sequence] = []
        self._led: dict[AttemptId, list[Sequence]] = {}
        """Attempts of several choices whose prompt nobody has computed yet; the first is the leader."""
        self._unclaimed: dict[SequenceId, Sequence] = {}
        """Siblings that were held and have not claimed anything: no unit is kept in the inbox for them."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, attempt_id: AttemptId) -> bool:
        return attempt_id in self._attempts

    @property
    def by_age(self) -> SequenceOf[Sequence]:
        """The oldest first."""
        return self._by_age

    def get(self, sequence_id: SequenceId) -> Sequence | None:
        return self._sequences.get(sequence_id)

    def of_attempt(self, attempt_id: AttemptId) -> list[Sequence]:
        """Its live sequences, by choice; empty for an unknown attempt."""
        return list(self._attempts.get(attempt_id, ()))

    def held(self) -> frozenset[SequenceId]:
        """Sequences that wait for their leader to compute the prompt."""
        return frozenset(one.sequence_id for siblings in self._led.values() for one in siblings[1:])

    def add(self, attempt_id: AttemptId, sequences: SequenceOf[Sequence]) -> None:
        """All choices of an attempt. Only the first one begins before the prompt is computed."""
        if not sequences:
            return
        self._attempts[attempt_id] = list(sequences)
        if len(sequences) > 1:
            self._led[attempt_id] = list(sequences)
            self._unclaimed.update((one.sequence_id, one) for one in sequences[1:])
        for sequence in sequences:
            self._sequences[sequence.sequence_id] = sequence
            insort(self._by_age, sequence, key=lambda one: one.age)

    def has_claimed(self, sequence: Sequence) -> bool:
        return sequence.sequence_id not in self._unclaimed

    def take_released(self) -> list[Sequence]:
        """Siblings that lead now because the former leader has left, each once: they are to claim what they need."""
        held = self.held()
        released = [one for one in self._unclaimed.values() if one.sequence_id not in held]
        for sequence in released:
            del self._unclaimed[sequence.sequence_id]
        return released

    def prompt_computed(self, attempt_id: AttemptId) -> list[Sequence]:
        """The siblings that may begin and are to take over their leader's blocks; none at later calls."""
        siblings = self._led.pop(attempt_id, [])[1:]
        for sibling in siblings:
            del self._unclaimed[sibling.sequence_id]
        return siblings

    def remove(self, sequence: Sequence) -> None:
        """If it led its siblings, the next one does."""
        attempt_id = sequence.sequence_id.attempt_id
        del self._sequences[sequence.sequence_id]
        self._by_age.remove(sequence)
        self._unclaimed.pop(sequence.sequence_id, None)
        for groups in (self._attempts, self._led):
            if attempt_id in groups:
                groups[attempt_id].remove(sequence)
                if not groups[attempt_id]:
                    del groups[attempt_id]
