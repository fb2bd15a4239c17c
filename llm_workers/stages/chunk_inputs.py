"""Keeps the chunks that arrive at a stage: which are expected, which are here, and which requests wait for one.

Chunks of a request may arrive in any order, several at a time, twice, before the request itself, or after its end. Each
is delivered once, in ascending order without gaps. A chunk of an ended request is dropped. One that comes before its
request is kept for `early_s`, because the calls of the stages and the chunks take different ways. A key that is opened
again begins at chunk 0; chunks of its former request are told by their age and dropped.

The stall clock of a request runs while it waits for a chunk. It ends the request when no chunk comes for `stall_s`, or
for `first_stall_s` before the first one, which waits for all that is ahead of the request in the stage before.

This module is bookkeeping only: it takes the time as an argument, and knows nothing of connectors and threads.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from fabric.contracts import StageKey, StageStalled, WeftError
from llm_workers.stages.chunk_payload import ReceivedChunk
from llm_workers.stages.stage_model import StageChunk

MAX_ENDED = 8192
"""Limits how many ended requests are remembered, so that their late chunks are dropped at once."""
MAX_EARLY = 8192
"""Limits how many chunks wait for requests that are not open yet."""


@dataclass(frozen=True, slots=True)
class ChunkPatience:
    """Holds how long a stage waits, in seconds."""

    stall_s: float = 30.0
    first_stall_s: float = 600.0
    early_s: float = 30.0


class Disposition(enum.Enum):
    """Says what to do with a chunk that was announced."""

    READ = enum.auto()
    KEEP = enum.auto()
    """Its request is not open yet."""
    DROP = enum.auto()


class LoadedChunks(NamedTuple):
    """Holds what a request gets that has waited for a chunk: the next chunks, or the error that ends it."""

    chunks: tuple[StageChunk, ...]
    error: WeftError | None = None


Entry = TypeVar("Entry", bound=Hashable)


@dataclass(slots=True)
class _Early(Generic[Entry]):
    entries: dict[Entry, None]
    since_s: float


@dataclass(slots=True)
class ChunkInput:
    """A `ChunkInput` is what the bookkeeping holds of one open request."""

    age: tuple[float, str]
    num_taken: int = 0
    """Counts the chunks that were delivered; it is the number of the next one."""
    held: dict[int, StageChunk] = field(default_factory=dict)
    waiting_since_s: float | None = None
    """Is the time at which the request began to wait for its next chunk."""
    has_last: bool = False
    """Says whether the last chunk was delivered."""
    error: WeftError | None = None

    @property
    def is_loaded(self) -> bool:
        return self.error is not None or self.num_taken in self.held


class ChunkInputs(Generic[Entry]):
    """Keeps the inputs of all requests of a stage. An `Entry` says where a chunk lies that was not read yet. It is not
    thread-safe."""

    def __init__(self, patience: ChunkPatience) -> None:
        self._patience = patience
        self._open: dict[StageKey, ChunkInput] = {}
        self._ended: OrderedDict[StageKey, None] = OrderedDict()
        self._early: OrderedDict[StageKey, _Early[Entry]] = OrderedDict()
        """Holds the chunks of requests that are not open yet, the oldest request first."""
        self._num_early = 0
        self._loaded: dict[StageKey, None] = {}
        """Holds the waiting requests that have a chunk or an error, and were not returned yet."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_held(self) -> int:
        """Counts the chunks that are kept, read or not."""
        return self._num_early + sum(len(each.held) for each in self._open.values())

    # ------------------------------------------------------------ requests

    def open(self, key: StageKey, age: tuple[float, str]) -> list[Entry]:
        """Begins a request. Returns the chunks that have come before it, which are to be read now."""
        assert key not in self._open, f"the input of {key} is already open"
        self._ended.pop(key, None)
        self._open[key] = ChunkInput(age)
        early = self._early.pop(key, None)
        if early is None:
            return []
        self._num_early -= len(early.entries)
        return list(early.entries)

    def wait(self, key: StageKey, now_s: float) -> None:
        """Records that the request waits for its next chunk; its stall clock starts, unless it runs already."""
        found = self._open[key]
        assert not found.has_last, f"{key} waits for a chunk after its last one"
        if found.waiting_since_s is None:
            found.waiting_since_s = now_s
            self._note_loaded(key, found)

    def loaded(self) -> list[StageKey]:
        """Returns the waiting requests that have a chunk or an error now, each once for each wait."""
        loaded, self._loaded = list(self._loaded), {}
        return loaded

    def take(self, key: StageKey) -> LoadedChunks:
        """Ends the wait of a request. Returns all chunks that follow each other without a gap."""
        found = self._open[key]
        found.waiting_since_s = None
        self._loaded.pop(key, None)
        if found.error is not None:
            return LoadedChunks((), found.error)
        chunks: list[StageChunk] = []
        while (chunk := found.held.pop(found.num_taken, None)) is not None:
            chunks.append(chunk)
            found.num_taken += 1
            found.has_last = chunk.is_last
        if found.has_last:
            found.held.clear()
        return LoadedChunks(tuple(chunks))

    def close(self, key: StageKey) -> None:
        """Ends a request, if it is open: what has come of it is dropped, and so is what comes later."""
        if self._open.pop(key, None) is not None:
            self._loaded.pop(key, None)
            self._ended[key] = None
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    # ------------------------------------------------------------ chunks

    def announce(self, key: StageKey, entry: Entry, now_s: float) -> Disposition:
        """Returns what to do with a chunk that has arrived and was not read yet."""
        if key in self._open:
            return Disposition.READ
        if key in self._ended or self._num_early >= MAX_EARLY:
            return Disposition.DROP
        early = self._early.setdefault(key, _Early({}, now_s))
        self._num_early += entry not in early.entries
        early.entries[entry] = None
        return Disposition.KEEP

    def deliver(self, received: ReceivedChunk) -> bool:
        """Takes a chunk that was read. Returns whether a waiting request can go on now. A chunk that has come already,
        or that belongs to an earlier request of the same key, is dropped."""
        chunk = received.chunk
        found = self._open.get(chunk.key)
        if found is None or found.age != received.age or found.has_last:
            return False
        if received.error is not None:
            found.error = found.error or received.error.to_error()
        elif chunk.number >= found.num_taken:
            found.held.setdefault(chunk.number, chunk)
        return self._note_loaded(chunk.key, found)

    def fail(self, key: StageKey, error: WeftError) -> bool:
        """Ends a request's input with an error, because one of its chunks can't be read. Returns whether a waiting
        request gets it now."""
        found = self._open.get(key)
        if found is None or found.has_last:
            return False
        found.error = found.error or error
        return self._note_loaded(key, found)

    def _note_loaded(self, key: StageKey, found: ChunkInput) -> bool:
        if found.waiting_since_s is None or not found.is_loaded or key in self._loaded:
            return False
        self._loaded[key] = None
        return True

    # ------------------------------------------------------------ time

    def expire(self, now_s: float) -> tuple[list[StageKey], list[Entry]]:
        """Ends the waits that have stalled, which `loaded` returns with the others. Returns their requests, and the
        early chunks whose request has not come, which are to be dropped."""
        stalled: list[StageKey] = []
        for key, found in self._open.items():
            if not found.is_loaded and self._stalls_at_s(found) <= now_s:
                waited_s = now_s - (found.waiting_since_s or now_s)
                found.error = StageStalled(
                    f"chunk {found.num_taken} from the stage before did not come in {waited_s:.1f} s"
                )
                self._note_loaded(key, found)
                stalled.append(key)
        dropped: list[Entry] = []
        while self._early and (oldest := next(iter(self._early.values()))).since_s + self._patience.early_s <= now_s:
            self._early.popitem(last=False)
            self._num_early -= len(oldest.entries)
            dropped += oldest.entries
        return stalled, dropped

    def next_stall_s(self) -> float:
        """Returns the time at which `expire` next finds a stalled wait, or infinity."""
        waits = (self._stalls_at_s(found) for found in self._open.values() if not found.is_loaded)
        return min(waits, default=math.inf)

    def _stalls_at_s(self, found: ChunkInput) -> float:
        if found.waiting_since_s is None:
            return math.inf
        return found.waiting_since_s + self._limit_s(found)

    def _limit_s(self, found: ChunkInput) -> float:
        return self._patience.stall_s if found.num_taken else self._patience.first_stall_s

    def check_invariants(self) -> None:
        assert self._num_early == sum(len(each.entries) for each in self._early.values())
        assert not self._ended.keys() & self._open.keys()
        assert not self._early.keys() & (self._open.keys() | self._ended.keys())
        for key, found in self._open.items():
            assert all(number >= found.num_taken for number in found.held)
            assert key not in self._loaded or (found.is_loaded and found.waiting_since_s is not None)
            assert not (found.has_last and found.held)
