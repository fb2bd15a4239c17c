"""Decides what each step of a stage computes. `StageScheduler` holds what all stages share, and `ArStageScheduler` is
for autoregressive stages (a talker); the one for other stages (code2wav) is in `generation_scheduler`.

Two hooks stand around the choice of a step, so that no request that waits for a chunk takes part in it, or holds a
place in a batch:

    process_pending_chunks   before it: a request with nothing to compute leaves the queues, in the state
                             WAITING_FOR_CHUNK, and its next chunk is asked for
    restore_queues           after it: a request whose chunk is here comes back, with the chunk attached

The engine also calls the hooks before `schedule` (`take_chunks`), so a chunk that is here already costs no step. One
rule covers everything that is computed: the computed units of a request catch up with those that are ready. This module
knows nothing of tensors, of threads, or of what a chunk contains.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from fabric.contracts import (
    ConfigError,
    ContextLengthExceeded,
    ProtocolError,
    SequenceId,
    StageKey,
    StageRequest,
    WeftError,
)
from llm_workers.scheduling import BlockPool
from llm_workers.stages.chunk_inputs import LoadedChunks
from llm_workers.stages.stage_model import StageSpan


class StageStatus(enum.Enum):
    WAITING = enum.auto()
    """It has units to compute and was not in the latest step."""
    RUNNING = enum.auto()
    """It was in the latest step and has units to compute."""
    WAITING_FOR_CHUNK = enum.auto()


class RestoredRequest(NamedTuple):
    """A `RestoredRequest` has come back from its wait, with the next chunks or with the error that ends it."""

    key: StageKey
    loaded: LoadedChunks


class StageStep(NamedTuple):
    """A `StageStep` says what one step computes, and what has become of other requests."""

    spans: tuple[StageSpan, ...]
    restored: tuple[RestoredRequest, ...] = ()
    refused: tuple[tuple[StageKey, WeftError], ...] = ()
    """Holds the requests that can never be computed to their end; the caller removes them."""
    idle: tuple[StageKey, ...] = ()
    """Holds the requests that have got their last chunk and have nothing to compute: the model must say that they are
    complete, or they never end."""
    preempted: tuple[StageKey, ...] = ()


@dataclass(slots=True, eq=False)
class StageSequence:
    """A `StageSequence` is one open request as the scheduler sees it."""

    request: StageRequest
    has_last_chunk: bool
    state: StageStatus = StageStatus.WAITING
    num_computed: int = 0
    """Counts the units that are computed."""
    block_ids: list[int] = field(default_factory=list)
    is_asking: bool = False
    """Says whether its next chunk was asked for and is not here yet."""
    has_begun: bool = False
    """Says whether the model may hold a state for it (a generation stage)."""
    due_s: float | None = None
    """Says when its listener has heard everything that was made, or, before the first sound, since when there is
    something to compute (a generation stage)."""

    @property
    def key(self) -> StageKey:
        return self.request.key

    @property
    def age(self) -> tuple[float, str]:
        return self.request.age

    @property
    def sequence_id(self) -> SequenceId:
        return SequenceId(self.request.request_id, self.request.attempt, 0)


class ChunkSource(Protocol):
    """A `ChunkSource` is the side of the transfer adapter that a scheduler sees. No call blocks."""

    def load_async(self, key: StageKey) -> None: ...

    def get_finished_requests(self) -> list[StageKey]: ...

    def take(self, key: StageKey) -> LoadedChunks: ...


class StageScheduler(ABC):
    """Holds the queues of a stage and the hooks around `schedule`. `num_units_ready` asks the model how many units of a
    request could have been computed by now. The engine's thread makes every call."""

    def __init__(self, source: ChunkSource, num_units_ready: Callable[[StageKey], int], max_num_seqs: int) -> None:
        if max_num_seqs < 1:
            raise ConfigError(f"stage: max_num_seqs must be at least 1, not {max_num_seqs}")
        self._source, self._num_units_ready, self.max_num_seqs = source, num_units_ready, max_num_seqs
        self._sequences: dict[StageKey, StageSequence] = {}

    # ------------------------------------------------------------ queries

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, key: object) -> bool:
        return key in self._sequences

    def keys(self, status: StageStatus) -> list[StageKey]:
        """Returns the requests in a state."""
        return [key for key, each in self._sequences.items() if each.state is status]

    def count(self, state: StageStatus) -> int:
        """Returns how many requests are in a state."""
        return sum(each.state is state for each in self._sequences.values())

    @property
    @abstractmethod
    def pool_used(self) -> int:
        """Counts the blocks or states that requests hold."""

    @property
    @abstractmethod
    def pool_size(self) -> int: ...

    # ------------------------------------------------------------ requests

    def add(self, request: StageRequest) -> None:
        """Takes a request in. The first stage of a pipeline gets no chunks. Raises ProtocolError if the request is
        already here."""
        if request.key in self._sequences:
            raise ProtocolError(f"attempt {request.attempt} of {request.request_id} is already open at this stage")
        self._sequences[request.key] = StageSequence(request, has_last_chunk=request.stage_id == 0)

    def remove(self, key: StageKey) -> None:
        """Removes a request that has ended, and frees what it holds. Unknown requests are ignored."""
        found = self._sequences.pop(key, None)
        if found is not None:
            self._free(found)

    # ------------------------------------------------------------ a step

    def schedule(self) -> StageStep:
        """Returns what the next step computes. The chunks of `restored` belong to the step after it."""
        idle = self.process_pending_chunks()
        plan = self._choose(sorted(self._schedulable(), key=lambda each: each.age))
        chosen = {span.key for span in plan.spans}
        for found in self._schedulable():
            found.state = StageStatus.RUNNING if found.key in chosen else StageStatus.WAITING
        return plan._replace(idle=idle, restored=self.restore_queues())

    def take_chunks(self) -> tuple[RestoredRequest, ...]:
        """Runs both hooks without a step between them."""
        self.process_pending_chunks()
        return self.restore_queues()

    def process_pending_chunks(self) -> tuple[StageKey, ...]:
        """Takes requests that have nothing to compute out of the queues and asks for their next chunk. Returns those
        that have got their last chunk already."""
        idle: list[StageKey] = []
        for found in self._schedulable():
            has_units = self._num_units_ready(found.key) > found.num_computed
            if has_units and not self._asks_early(found):
                continue
            if found.has_last_chunk:
                if not has_units:
                    idle.append(found.key)
                continue
            if not has_units:
                found.state = StageStatus.WAITING_FOR_CHUNK
            if not found.is_asking:
                found.is_asking = True
                self._source.load_async(found.key)
        return tuple(idle)

    def restore_queues(self) -> tuple[RestoredRequest, ...]:
        """Brings the requests whose chunk is here back into the queues, and returns them with their chunks."""
        restored: list[RestoredRequest] = []
        for key in self._source.get_finished_requests():
            found = self._sequences.get(key)
            if found is None or not found.is_asking:
                continue
            loaded = self._source.take(key)
            found.is_asking = False
            if found.state is StageStatus.WAITING_FOR_CHUNK:
                found.state = StageStatus.WAITING
            found.has_last_chunk = any(chunk.is_last for chunk in loaded.chunks)
            restored.append(RestoredRequest(key, loaded))
        return tuple(restored)

    def commit(self, spans: Iterable[StageSpan]) -> None:
        """Records that spans of the latest plan were computed. Spans that failed are left out: they are planned again,
        unless the caller removes their request."""
        for span in spans:
            found = self._sequences.get(span.key)
            if found is not None:
                assert found.num_computed == span.start, f"{span.key} has computed {found.num_computed}, not {span}"
                found.num_computed += span.num_units
                self._computed(found, span.num_units)

    def next_step_s(self) -> float | None:
        """Returns when a step computes something without news from outside, on the scheduler's clock; None if no such
        time is known."""
        return None

    @abstractmethod
    def _choose(self, candidates: Sequence[StageSequence]) -> StageStep:
        """Returns the spans of a step. The candidates have units to compute, unless they are idle; the oldest come
        first."""

    @abstractmethod
    def _free(self, found: StageSequence) -> None: ...

    def _asks_early(self, found: StageSequence) -> bool:
        """Says whether the next chunk of a request is asked for although it has units to compute."""
        return False

    def _computed(self, found: StageSequence, num_units: int) -> None:
        """Notes that units of a request were computed."""
        return

    def _num_ready(self, found: StageSequence) -> int:
        """Counts the units of a request that can be computed now."""
        return self._num_units_ready(found.key) - found.num_computed

    def _schedulable(self) -> Iterator[StageSequence]:
        return (each for each in self._sequences.values() if each.state is not StageStatus.WAITING_FOR_CHUNK)

    def check_invariants(self) -> None:
        for key, found in self._sequences.items():
            assert found.key == key
            assert found.num_computed >= 0
            assert found.is_asking or found.state is not StageStatus.WAITING_FOR_CHUNK
        assert self.count(StageStatus.RUNNING) <= self.max_num_seqs
        assert 0 <= self.pool_used <= self.pool_size


# ---------------------------------------------------------------- autoregressive stages


class ArStageScheduler(StageScheduler):
    """Schedules an autoregressive stage on a pool of KV blocks. A unit is a row of the sequence.

    A step computes at most `max_step_units` rows: one of each request in the batch, and the rest for the oldest ones
    that have more (chunked prefill). If the blocks do not suffice, the youngest request that holds some gives them up
    and is computed again from its first row later (preemption by recomputation). No request preempts an older one, and
    each one fits into the pool alone, so the oldest request that has rows to compute makes progress unless older ones
    wait for chunks."""

    def __init__(
        self,
        source: ChunkSource,
        num_units_ready: Callable[[StageKey], int],
        max_num_seqs: int,
        num_blocks: int,
        block_size: int,
        max_step_units: int,
        max_rows: int | None = None,
    ) -> None:
        """`max_rows` limits the rows of a request; without it, the pool does."""
        super().__init__(source, num_units_ready, max_num_seqs)
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size), ("max_step_units", max_step_units)):
            if value < 1:
                raise ConfigError(f"stage: {name} must be at least 1, not {value}")
        self._pool, self._block_size, self._max_step_units = BlockPool(num_blocks), block_size, max_step_units
        self.max_rows = min(max_rows or num_blocks * block_size, num_blocks * block_size)

    @property
    def pool_used(self) -> int:
        return self._pool.num_used

    @property
    def pool_size(self) -> int:
        return self._pool.num_blocks

    def _choose(self, candidates: Sequence[StageSequence]) -> StageStep:
        refused: list[tuple[StageKey, WeftError]] = []
        ready: list[StageSequence] = []
        for found in candidates:
            num_rows = self._num_units_ready(found.key)
            if num_rows > self.max_rows:
                what = f"the stage would need {num_rows} rows for this request, but it has {self.max_rows}"
                refused.append((found.key, ContextLengthExceeded(what)))
            elif num_rows > found.num_computed:
                ready.append(found)
        spans: list[StageSpan] = []
        preempted: list[StageKey] = []
        left = self._max_step_units
        num_seats = min(self.max_num_seqs, left)
        for place, found in enumerate(ready):
            if len(spans) == num_seats or found.key in preempted:
                continue
            # A row for each request that may still come into the batch stays reserved.
            num_others = min(num_seats - len(spans), len(ready) - place) - 1
            count = self._fit(found, min(self._num_ready(found), max(left - num_others, 1)), preempted)
            if count > 0:
                spans.append(self._span(found, count))
                left -= count
        return StageStep(tuple(spans), refused=tuple(refused), preempted=tuple(preempted))

    def _fit(self, found: StageSequence, count: int, preempted: list[StageKey]) -> int:
        """Makes room for the next rows of a request, and returns how many of them have room. A request that begins
        needs room for all rows that are ready, so that it is not preempted in the middle of them."""
        is_beginning = found.num_computed == 0
        num_rows = self._num_units_ready(found.key) if is_beginning else found.num_computed + count
        needed = self._blocks_of(num_rows) - len(found.block_ids)
        younger = [each for each in self._sequences.values() if each.block_ids and each.age > found.age]
        younger.sort(key=lambda each: each.age)
        if is_beginning and needed > self._pool.num_free + sum(len(each.block_ids) for each in younger):
            return 0
        while self._pool.num_free < needed and younger:
            victim = younger.pop()
            self._free(victim)
            victim.num_computed = 0
            preempted.append(victim.key)
        needed = min(self._blocks_of(found.num_computed + count) - len(found.block_ids), self._pool.num_free)
        if needed > 0:
            found.block_ids += self._pool.allocate(found.sequence_id, needed)
        return min(count, len(found.block_ids) * self._block_size - found.num_computed)

    def _span(self, found: StageSequence, count: int) -> StageSpan:
        num_blocks = self._blocks_of(found.num_computed + count)
        block_ids = np.array(found.block_ids[:num_blocks], dtype=np.int64)
        return StageSpan(found.key, found.num_computed, count, block_ids)

    def _blocks_of(self, num_rows: int) -> int:
        return -(-num_rows // self._block_size)

    def _free(self, found: StageSequence) -> None:
        self._pool.free(found.sequence_id, found.block_ids)
        found.block_ids = []

    def check_invariants(self) -> None:
        super().check_invariants()
        held = [block for each in self._sequences.values() for block in each.block_ids]
        assert len(set(held)) == len(held) == self._pool.num_used
        for each in self._sequences.values():
            assert each.num_computed <= len(each.block_ids) * self._block_size
