"""Counts the KV blocks that have changed hands at each worker since its last report: those that dispatched attempts
take, less those that ended attempts have given back. A `BlockLedger` keeps the sums in the workers' columns.

A report says how many blocks were in use at one moment, which may be a second ago. What was dispatched before that
moment is in it, and what has ended since is still in it. So each attempt counts by two moments, that of its dispatch
and that of its end. An attempt of this router is in a report once a report has acknowledged it, because the attempt may
have been on its way at that moment; what another router dispatched is acknowledged to that router alone.

The module knows nothing of queues: blocks stay taken long after a prompt was computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from fabric.contracts import AttemptId
from router.planning.member_columns import WorkerColumns

MAX_ENDED_S = 30.0
"""An attempt that ended longer ago is forgotten, although no report of a later moment has come."""


class BlockLedger:
    """A `BlockLedger` keeps the column `pending_blocks`, which is negative where more was given back than taken."""

    def __init__(self, workers: WorkerColumns) -> None:
        self._workers = workers
        self._slot_to_book: dict[int, _Book] = {}

    def take(self, slot: int, attempt_id: AttemptId, num_blocks: int, at_s: float, *, is_own: bool) -> None:
        """Records an attempt that was dispatched at `at_s`, and takes blocks at the worker of a slot. If the attempt is
        there already, it takes so many more."""
        book = self._slot_to_book.setdefault(slot, _Book())
        entry = book.reported.pop(attempt_id, None) or book.unreported.get(attempt_id) or _Entry(is_own)
        entry.dispatched_s, entry.num_blocks, entry.is_acknowledged = at_s, entry.num_blocks + num_blocks, False
        book.unreported[attempt_id] = entry
        self._count(slot, entry, book.state_at_s)

    def acknowledge(self, slot: int, attempt_ids: Iterable[AttemptId]) -> None:
        """Records that a report contains these attempts of this router; `report` must follow."""
        if (book := self._slot_to_book.get(slot)) is not None:
            for attempt_id in attempt_ids:
                entry = book.unreported.get(attempt_id) or book.ended.get(attempt_id)
                if entry is not None and entry.is_own:
                    entry.is_acknowledged = True

    def report(self, slot: int, state_at_s: float) -> None:
        """Takes in that the columns hold the blocks that were in use at a worker at `state_at_s`."""
        book = self._slot_to_book.setdefault(slot, _Book())
        book.state_at_s = state_at_s
        for attempt_id, entry in list(book.unreported.items()):
            self._count(slot, entry, state_at_s)
            if not entry.counted:
                book.reported[attempt_id] = book.unreported.pop(attempt_id)
        for attempt_id, entry in list(book.ended.items()):
            self._count(slot, entry, state_at_s)
            if entry.ended_s is not None and entry.ended_s <= state_at_s:
                del book.ended[attempt_id]

    def end(self, slot: int, attempt_id: AttemptId, at_s: float) -> None:
        """Records that an attempt ended at `at_s`, and gave its blocks back. A second call does nothing."""
        if (book := self._slot_to_book.get(slot)) is None:
            return
        entry = book.reported.pop(attempt_id, None) or book.unreported.pop(attempt_id, None)
        if entry is None:
            return
        book.ended[attempt_id], entry.ended_s = entry, at_s
        self._count(slot, entry, book.state_at_s)
        # Each end looks at the two oldest ones, so that fewer come than can go.
        for old_id, old in list(islice(book.ended.items(), 2)):
            if old.ended_s is not None and old.ended_s < at_s - MAX_ENDED_S:
                self._workers.pending_blocks[slot] -= old.counted
                del book.ended[old_id]

    def forget_open(self, slot: int, attempt_id: AttemptId) -> None:
        """Forgets an attempt, unless it has ended."""
        book = self._slot_to_book.get(slot)
        if book is None or book.reported.pop(attempt_id, None) is not None:
            return
        if (entry := book.unreported.pop(attempt_id, None)) is not None:
            self._workers.pending_blocks[slot] -= entry.counted

    def forget_worker(self, slot: int) -> None:
        """Forgets a worker that leaves."""
        self._slot_to_book.pop(slot, None)
        self._workers.pending_blocks[slot] = 0.0

    def check_invariants(self) -> None:
        """Raises AssertionError unless the column equals the sums of the attempts."""
        for slot in range(len(self._workers)):
            book = self._slot_to_book.get(slot, _Book())
            counted = [entry.counted for entry in (*book.unreported.values(), *book.ended.values())]
            assert self._workers.pending_blocks[slot] == sum(counted), slot
            assert all(entry.ended_s is not None for entry in book.ended.values()), slot
            open_ones = (*book.unreported.values(), *book.reported.values())
            assert all(entry.ended_s is None for entry in open_ones), slot
            assert not any(entry.counted for entry in book.reported.values()), slot

    def _count(self, slot: int, entry: _Entry, state_at_s: float | None) -> None:
        counted = entry.num_since(state_at_s)
        self._workers.pending_blocks[slot] += counted - entry.counted
        entry.counted = counted


@dataclass(slots=True)
class _Book:
    """A `_Book` holds the attempts at one worker."""

    unreported: dict[AttemptId, _Entry] = field(default_factory=dict)
    """Holds the open ones that the last report does not contain."""
    reported: dict[AttemptId, _Entry] = field(default_factory=dict)
    """Holds the other open ones."""
    ended: dict[AttemptId, _Entry] = field(default_factory=dict)
    """Holds those whose end no report contains yet, in the order of their ends."""
    state_at_s: float | None = None
    """Holds the moment that the last report describes."""


@dataclass(slots=True)
class _Entry:
    """An `_Entry` is an attempt at a worker."""

    is_own: bool
    dispatched_s: float = 0.0
    num_blocks: int = 0
    is_acknowledged: bool = False
    ended_s: float | None = None
    counted: int = 0
    """Counts the blocks that the column holds for the attempt."""

    def num_since(self, state_at_s: float | None) -> int:
        """Returns how many blocks the attempt has taken since a moment, or given back if the number is negative."""
        was_sent = state_at_s is not None and self.dispatched_s <= state_at_s
        was_there = self.is_acknowledged if self.is_own else was_sent
        if self.ended_s is None:
            return 0 if was_there else self.num_blocks
        is_known = state_at_s is not None and self.ended_s <= state_at_s
        return -self.num_blocks if was_there and not is_known else 0
