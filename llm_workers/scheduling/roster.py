"""Records which sequences are alive, by id and by attempt, and which of them wait for a sibling.

Choices of one request share their prompt: one of them, the leader, computes it, and the others wait until then and take
over its blocks. This module knows nothing of blocks or units.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from fabric.ids import AttemptId, SequenceId
from llm_workers.scheduling.sequence import Sequence


class Roster:
    def __init__(self) -> None:
        self._sequences: dict[SequenceId, Sequence] = {}
        self._attempts: dict[AttemptId, list[Sequence]] = {}
        self._led: dict[AttemptId, list[Sequence]] = {}
        """Holds the attempts of several choices whose prompt no choice has computed yet; the first sequence is the
        leader."""
        self._held: set[SequenceId] = set()
        self._released: list[Sequence] = []
        """Holds the sequences that waited and lead now."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, attempt_id: AttemptId) -> bool:
        return attempt_id in self._attempts

    @property
    def sequences(self) -> Collection[Sequence]:
        """Returns all live sequences, in no particular order."""
        return self._sequences.values()

    def get(self, sequence_id: SequenceId) -> Sequence | None:
        return self._sequences.get(sequence_id)

    def of_attempt(self, attempt_id: AttemptId) -> list[Sequence]:
        """Returns the attempt's live sequences, by choice; the list is empty for an unknown attempt."""
        return list(self._attempts.get(attempt_id, ()))

    def is_held(self, sequence: Sequence) -> bool:
        """Returns whether the sequence waits for a sibling to compute the prompt and has claimed no unit. The answer
        stays True after its leader has left until `take_released` is called."""
        return sequence.sequence_id in self._held

    def add(self, attempt_id: AttemptId, sequences: SequenceOf[Sequence]) -> None:
        """Adds all choices of an attempt. Only the first one begins before the prompt is computed."""
        if not sequences:
            return
        self._attempts[attempt_id] = list(sequences)
        if len(sequences) > 1:
            self._led[attempt_id] = list(sequences)
            self._held.update(one.sequence_id for one in sequences[1:])
        for sequence in sequences:
            self._sequences[sequence.sequence_id] = sequence

    def take_released(self) -> list[Sequence]:
        """Returns, each once, the siblings that lead now because the former leader has left: they have to claim what
        they need."""
        released, self._released = self._released, []
        live = [one for one in released if self._sequences.get(one.sequence_id) is one]
        self._held.difference_update(one.sequence_id for one in live)
        return live

    def prompt_computed(self, attempt_id: AttemptId) -> list[Sequence]:
        """Returns the siblings that may begin and that have to take over their leader's blocks; later calls return
        none."""
        siblings = self._led.pop(attempt_id, [])[1:]
        self._held.difference_update(one.sequence_id for one in siblings)
        return siblings

    def remove(self, sequence: Sequence) -> None:
        """Removes the sequence. If it led its siblings, the next one becomes the leader."""
        attempt_id = sequence.sequence_id.attempt_id
        del self._sequences[sequence.sequence_id]
        self._held.discard(sequence.sequence_id)
        was_leading = attempt_id in self._led and self._led[attempt_id][0] is sequence
        for groups in (self._attempts, self._led):
            if attempt_id in groups:
                groups[attempt_id].remove(sequence)
                if not groups[attempt_id]:
                    del groups[attempt_id]
        if was_leading and attempt_id in self._led:
            self._released.append(self._led[attempt_id][0])
