"""Keeps the events of one source in order: epochs, sequence numbers, gaps, and the wait for a snapshot.

Events of a source (a worker's KV events, an encoder's feature events) are numbered without holes inside an epoch. After
a gap, or from an epoch not seen before, no event can be applied until a snapshot says where to start; the feed keeps
the events that arrive meanwhile and applies them on top of the snapshot. This module knows nothing of what an event
means, and it has no clock: the caller decides when to ask for the snapshot again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

EventT = TypeVar("EventT")


class ApplyResult(Enum):
    """An `ApplyResult` says what happened to a message of events."""

    OK = "ok"
    """The message was applied, or contained in what was applied before."""
    GAP = "gap"
    """The source is not in step, so its snapshot is needed. The events are kept, to be applied after it."""
    STALE = "stale"
    """The message belongs to an older epoch, or is a snapshot older than the known state; it was dropped."""


class _Batch(NamedTuple):
    first_seq: int
    events: Sequence[object]


class EventFeed(Generic[EventT]):
    """Returns the events of one source in order, each once.

    `max_buffered` limits the events that are kept while a snapshot is awaited. Beyond it the oldest are dropped, which
    costs at worst another snapshot.
    """

    def __init__(self, max_buffered: int) -> None:
        self.epoch = -1
        self.is_in_step = False
        self._next_seq = 0
        self._buffer: deque[_Batch] = deque()
        self._num_buffered = 0
        self._max_buffered = max_buffered

    @property
    def num_buffered(self) -> int:
        return self._num_buffered

    def is_newer(self, epoch: int) -> bool:
        """Returns whether the epoch makes everything known of the source void."""
        return epoch > self.epoch

    def offer(self, epoch: int, first_seq: int, events: Sequence[EventT]) -> tuple[ApplyResult, list[EventT]]:
        """Takes in a message. Returns the result, and the events that may be applied now, in order."""
        if epoch < self.epoch:
            return ApplyResult.STALE, []
        if epoch > self.epoch:
            self._enter(epoch)
        if self.is_in_step and first_seq <= self._next_seq:
            fresh = list(events[self._next_seq - first_seq :])
            self._next_seq += len(fresh)
            return ApplyResult.OK, fresh
        self.is_in_step = False
        self._keep(_Batch(first_seq, events))
        return ApplyResult.GAP, []

    def restart(self, epoch: int, last_seq: int) -> ApplyResult:
        """Records that a snapshot as of event `last_seq` has come. It returns STALE if the caller must drop the
        snapshot, and OK if the caller must load it and then apply `resume()`."""
        if epoch < self.epoch or (epoch == self.epoch and self.is_in_step and last_seq < self._next_seq - 1):
            return ApplyResult.STALE
        if epoch > self.epoch:
            self._enter(epoch)
        self._next_seq = last_seq + 1
        self.is_in_step = True
        return ApplyResult.OK

    def resume(self) -> Iterator[EventT]:
        """Yields the kept events that follow the snapshot. At a hole among them it ends early, keeps the events after
        the hole, and the feed is out of step."""
        for batch in sorted(self._drain(), key=lambda batch: batch.first_seq):
            if batch.first_seq > self._next_seq:
                self.is_in_step = False
            if not self.is_in_step:
                self._keep(batch)
                continue
            fresh = batch.events[self._next_seq - batch.first_seq :]
            self._next_seq += len(fresh)
            yield from fresh  # type: ignore[misc]

    def _enter(self, epoch: int) -> None:
        self.epoch = epoch
        self.is_in_step = False
        self._drain()

    def _drain(self) -> list[_Batch]:
        batches = list(self._buffer)
        self._buffer.clear()
        self._num_buffered = 0
        return batches

    def _keep(self, batch: _Batch) -> None:
        self._buffer.append(batch)
        self._num_buffered += len(batch.events)
        while self._num_buffered > self._max_buffered and self._buffer:
            self._num_buffered -= len(self._buffer.popleft().events)
