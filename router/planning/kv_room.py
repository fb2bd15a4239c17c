"""Says whether the workers have room for a request: now, later or never. `kv_room` compares the blocks that the request
takes with the blocks that each worker has, for all workers at once, over arrays of plain numbers.

The rule is the worker's own. A worker refuses a prompt that is larger than its whole KV pool
(`llm_workers/scheduling/sequence.py`). It begins a sequence when all tokens that are there, the prompt and what earlier
attempts have generated, find blocks, and each sequence of the step could still take one more block
(`llm_workers/scheduling/step_planner.py`). It reserves nothing else for an answer: an answer that outgrows the pool
takes the blocks of sequences that rank behind it. So a request needs the blocks of its tokens and one for each further
choice, and every sequence that decodes counts one block that is not free.

`RoomColumns` keeps the numbers of all workers, which reports and dispatches update in place. The module knows nothing
of messages (`ClusterState` calls it), or of the requests that wait (`capacity_queue`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fabric.contracts import KvScheme, MemberId, WorkerReport

Verdict = Literal["now", "later", "never"]
BATCH_HEADROOM = 0.125
"""A request of the class `batch` leaves this fraction of a worker's blocks free, so that it uses spare capacity only,
and no interactive request has to preempt it at once."""


class RoomNeed(NamedTuple):
    """A `RoomNeed` is what a request takes at a worker until its answer has begun."""

    num_prompt_tokens: int
    num_generated_tokens: int = 0
    """Counts the tokens that earlier attempts generated, in the longest choice."""
    num_choices: int = 1
    scheme_to_hashes: Mapping[KvScheme, bytes] = MappingProxyType({})
    """Maps each scheme of the workers to the hashes of the prompt's full blocks (`RouteQuery`); blocks that a worker
    has cached, and that sequences use, need not be taken."""
    max_unit_bytes: int = 0
    """This is the size of the request's largest feature in an inbox, with its header and padding."""
    headroom: float = 0.0
    """This fraction of a worker's blocks must stay free."""

    def num_blocks(self, block_sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns `(num_workers,)` counts of the blocks that the request takes at each worker."""
        return -(-(self.num_prompt_tokens + self.num_generated_tokens) // block_sizes) + self.num_choices - 1


class WorkerStocks(NamedTuple):
    """Holds what the workers have, one row per worker. All arrays have shape `(num_workers,)`."""

    worker_ids: Sequence[MemberId]
    block_sizes: npt.NDArray[np.int64]
    total_blocks: npt.NDArray[np.int64]
    """Holds 0 where the number is unknown."""
    free_blocks: npt.NDArray[np.int64]
    """Counts the blocks that a new request could take: free ones, and ones that are only cached, less what was
    dispatched and is not reported yet, and less one block for each sequence that decodes. It is negative where more was
    promised than there is."""
    shared_blocks: npt.NDArray[np.int64]
    """Counts the leading blocks of the request that the worker has cached and that its sequences use. Cached blocks
    that no sequence uses are among the free ones, and the request takes them from there."""
    blocks_per_s: npt.NDArray[np.float64]
    """Holds the rate at which sequences return blocks as they end; it is 0 where it is unknown."""
    inbox_bytes: npt.NDArray[np.int64]
    """Holds 0 where the number is unknown."""
    is_usable: npt.NDArray[np.bool_]
    """Holds False for a worker that the request may not use at this time."""


class KvRoom(NamedTuple):
    """A `KvRoom` is the answer of `kv_room`."""

    verdict: Verdict
    too_small: frozenset[MemberId] = frozenset()
    """Holds the workers that could never serve the request. No plan may choose them."""
    nearest: MemberId | None = None
    """Names the worker that lacks the fewest blocks."""
    wait_s: float | None = None
    """This is the predicted time until a worker has room; None if it is unknown, and 0 if there is room now."""
    tokens_per_s: float = 0.0
    """This is the rate at which all workers that may be used return blocks, in tokens, because the blocks of pools may
    have different sizes."""
    max_tokens: int = 0
    """Counts the tokens that the largest KV pool holds."""
    max_unit_bytes: int = 0
    """This is the size of the largest inbox."""


ROOM_NOW = KvRoom("now", wait_s=0.0)


def kv_room(need: RoomNeed, stocks: WorkerStocks) -> KvRoom:
    """Returns whether a worker has room for `need`. It has room `now` if the blocks that it lacks are free there, or if
    its size is unknown; `later` if they may become free, at this worker or at one that can't be used now; and `never`
    if every worker's pool or inbox is too small for it. Without workers the verdict is `now`, because the plan itself
    reports that they are missing."""
    if not len(stocks.worker_ids):
        return ROOM_NOW
    total = stocks.total_blocks
    is_sized = total > 0
    prompt_blocks = -(-need.num_prompt_tokens // stocks.block_sizes)
    is_too_small = (is_sized & (prompt_blocks > total)) | (
        (stocks.inbox_bytes > 0) & (need.max_unit_bytes > stocks.inbox_bytes)
    )
    max_tokens = int((total * stocks.block_sizes).max())
    max_unit_bytes = int(stocks.inbox_bytes.max())
    too_small = frozenset(stocks.worker_ids[int(at)] for at in np.flatnonzero(is_too_small))
    if is_too_small.all():
        return KvRoom("never", too_small, max_tokens=max_tokens, max_unit_bytes=max_unit_bytes)
    headroom = np.ceil(need.headroom * total).astype(np.int64)
    taken = np.maximum(0, need.num_blocks(stocks.block_sizes) - stocks.shared_blocks) + headroom
    # An empty worker takes any request that is not too large for it.
    lacking = np.where(is_sized, np.maximum(0, np.minimum(taken, total) - stocks.free_blocks), 0)
    candidates = np.flatnonzero(~is_too_small & stocks.is_usable)
    if not len(candidates):
        return KvRoom("later", too_small, max_tokens=max_tokens, max_unit_bytes=max_unit_bytes)
    lacking, rates = lacking[candidates], stocks.blocks_per_s[candidates]
    nearest = stocks.worker_ids[int(candidates[np.argmin(lacking)])]
    is_known = rates > 0
    if (lacking == 0).any():
        wait_s: float | None = 0.0
    else:
        wait_s = float((lacking[is_known] / rates[is_known]).min()) if is_known.any() else None
    verdict: Verdict = "now" if wait_s == 0.0 else "later"
    tokens_per_s = float(rates @ stocks.block_sizes[candidates])
    return KvRoom(verdict, too_small, nearest, wait_s, tokens_per_s, max_tokens, max_unit_bytes)


# ------------------------------------------------------------ the columns

FIRST_ROWS = 16


class _RoomBounds(NamedTuple):
    """Holds bounds by which most requests are decided without a look at single workers."""

    block_size: int
    """This is 0 if workers differ in it."""
    min_total: int
    """This is the size of the smallest pool that is known, in blocks."""
    max_free: float
    min_inbox: float
    tokens_per_s: float
    """This is the rate at which all workers return blocks, in tokens."""
    free: npt.NDArray[np.float64]
    """Holds the free blocks of each worker; they are infinitely many where the size is unknown."""
    block_seconds: npt.NDArray[np.float64]
    """Holds the time in which a worker gives back a block; it is infinite where the rate is unknown."""

    def taken(self, need: RoomNeed) -> int:
        """Returns the blocks that the request takes at every worker, all of which are large enough for it, or 0 if
        workers differ in that."""
        if not self.block_size or need.headroom or need.max_unit_bytes > self.min_inbox:
            return 0
        num_blocks = -(-(need.num_prompt_tokens + need.num_generated_tokens) // self.block_size)
        return num_blocks + need.num_choices - 1 if num_blocks + need.num_choices - 1 <= self.min_total else 0


class RoomColumns:
    """Keeps what `kv_room` needs of each worker, one row per worker. A worker without a report has room for
    everything. One whose reports stopped has what it had then, and what it can have given back since."""

    def __init__(self, stale_after_s: float) -> None:
        self._stale_after_s = stale_after_s
        self._ids: list[MemberId] = []
        self._id_to_row: dict[MemberId, int] = {}
        self._ints = np.zeros((FIRST_ROWS, 5), dtype=np.int64)
        """Holds the block size, the blocks in all, the free blocks by the last report, those that were promised since
        less those that were given back, and the bytes of the inbox."""
        self._floats = np.zeros((FIRST_ROWS, 2), dtype=np.float64)
        """Holds the blocks that come back per second, and the time of the last report."""
        self._bounds: _RoomBounds | None = None
        self._oldest_s = 0.0

    def add(self, worker_id: MemberId, block_size: int) -> None:
        """Adds a worker that has not reported yet."""
        self.remove(worker_id)
        row = len(self._ids)
        if row == len(self._ints):
            self._ints = np.concatenate([self._ints, np.zeros_like(self._ints)])
            self._floats = np.concatenate([self._floats, np.zeros_like(self._floats)])
        self._ids.append(worker_id)
        self._id_to_row[worker_id] = row
        self._ints[row] = (block_size, 0, 0, 0, 0)
        self._floats[row] = (0.0, np.inf)
        self._bounds = None

    def remove(self, worker_id: MemberId) -> None:
        """Removes a worker, if it is here. The last row takes its place."""
        row = self._id_to_row.pop(worker_id, None)
        if row is None:
            return
        last_id = self._ids.pop()
        if last_id != worker_id:
            self._ints[row], self._floats[row] = self._ints[len(self._ids)], self._floats[len(self._ids)]
            self._ids[row], self._id_to_row[last_id] = last_id, row
        self._bounds = None

    def report(self, report: WorkerReport, now: float) -> None:
        """Takes a report. The blocks that the worker's requests will take count as taken, for tokens behind missing
        media too, and so does one block for each sequence that decodes."""
        row = self._id_to_row[report.worker_id]
        engine, block_size = report.engine, int(self._ints[row, 0])
        coming_blocks = -(-(engine.queued_tokens + engine.behind_tokens) // block_size)
        free = engine.kv_blocks_total - engine.kv_blocks_used - coming_blocks - engine.num_decoding
        self._ints[row, 1], self._ints[row, 2] = engine.kv_blocks_total, free
        self._ints[row, 4] = report.features.inbox_bytes_total
        rate = engine.kv_blocks_used / report.residence_s if report.residence_s else 0.0
        self._floats[row] = (rate, now)
        self._bounds = None

    def promise(self, worker_id: MemberId, num_tokens: int, num_sequences: int) -> None:
        """Notes what was dispatched to a worker and is not in its last report: this many tokens of prompts, less those
        whose blocks were given back since, and sequences, of which each may take one block more."""
        row = self._id_to_row.get(worker_id)
        if row is not None:
            self._ints[row, 3] = -(-num_tokens // int(self._ints[row, 0])) + num_sequences
            self._bounds = None

    def room_at_once(self, need: RoomNeed, now: float) -> KvRoom | None:
        """Returns the answer about a request for which there is room if nothing of it is cached and every worker may be
        used. It looks at bounds only; None says that it takes a closer look (`room`)."""
        if not self._ids:
            return ROOM_NOW
        bounds = self._bounds_at(now)
        taken = bounds.taken(need)
        return ROOM_NOW._replace(tokens_per_s=bounds.tokens_per_s) if 0 < taken <= bounds.max_free else None

    def room(
        self, need: RoomNeed, worker_to_shared: Mapping[MemberId, int], barred: Collection[MemberId], now: float
    ) -> KvRoom:
        """Returns whether a worker has room for a request (`kv_room`). `worker_to_shared` maps workers to the leading
        tokens of the prompt whose blocks their sequences use, and those in `barred` may not be used now."""
        if not self._ids:
            return ROOM_NOW
        row_to_shared = {
            row: num_tokens // int(self._ints[row, 0])
            for worker_id, num_tokens in worker_to_shared.items()
            if (row := self._id_to_row.get(worker_id)) is not None
        }
        barred_rows = [self._id_to_row[each] for each in barred if each in self._id_to_row]
        bounds = self._bounds_at(now)
        if taken := bounds.taken(need):
            return self._room_among_equals(bounds, taken, row_to_shared, barred_rows)
        rows = len(self._ids)
        block_sizes, total, _, _, inbox = self._ints[:rows].T
        shared = np.zeros(rows, dtype=np.int64)
        shared[list(row_to_shared)] = list(row_to_shared.values())
        is_usable = np.ones(rows, dtype=np.bool_)
        is_usable[barred_rows] = False
        free, rates = self._free_at(now), self._floats[:rows, 0]
        return kv_room(need, WorkerStocks(self._ids, block_sizes, total, free, shared, rates, inbox, is_usable))

    def _room_among_equals(
        self, bounds: _RoomBounds, taken: int, row_to_shared: Mapping[int, int], barred_rows: Sequence[int]
    ) -> KvRoom:
        """Returns what `kv_room` does, for a request that takes `taken` blocks at every worker and fits into each."""
        lacking = taken - bounds.free
        for row, num_blocks in row_to_shared.items():
            lacking[row] -= min(num_blocks, taken)
        lacking[barred_rows] = np.inf
        nearest = int(lacking.argmin())
        least, tokens_per_s = float(lacking[nearest]), bounds.tokens_per_s
        if least == np.inf:
            return KvRoom("later")
        if barred_rows:
            tokens_per_s -= float(self._floats[barred_rows, 0].sum()) * bounds.block_size
        if least <= 0:
            return KvRoom("now", frozenset(), self._ids[nearest], 0.0, tokens_per_s)
        wait_s = float((lacking * bounds.block_seconds).min())
        return KvRoom("later", frozenset(), self._ids[nearest], wait_s if wait_s < np.inf else None, tokens_per_s)

    def _free_at(self, now: float) -> npt.NDArray[np.int64]:
        rows = len(self._ids)
        ints, floats = self._ints[:rows], self._floats[:rows]
        silent_s = now - floats[:, 1]
        is_silent = silent_s > self._stale_after_s
        given_back = np.where(is_silent, floats[:, 0] * np.maximum(silent_s, 0.0), 0.0)
        # The rate of a silent worker stands for the ends that were seen too.
        promised = np.where(is_silent, np.maximum(ints[:, 3], 0), ints[:, 3])
        free: npt.NDArray[np.int64] = np.minimum(ints[:, 2] - promised + given_back.astype(np.int64), ints[:, 1])
        return free

    def _bounds_at(self, now: float) -> _RoomBounds:
        """Returns the bounds as of the last change. They are made again when a worker may have become silent; as its
        free blocks only become more by that, old bounds refuse nothing for good."""
        if self._bounds is not None and now - self._oldest_s <= self._stale_after_s:
            return self._bounds
        rows = len(self._ids)
        ints, floats = self._ints[:rows], self._floats[:rows]
        is_sized, inboxes, rates = ints[:, 1] > 0, ints[:, 4], floats[:, 0]
        block_size = int(ints[0, 0]) if (ints[:, 0] == ints[0, 0]).all() else 0
        free = np.where(is_sized, self._free_at(now), np.inf)
        totals = np.where(is_sized, ints[:, 1], np.iinfo(np.int64).max)
        self._oldest_s = float(floats[:, 1].min())
        self._bounds = _RoomBounds(
            block_size,
            int(totals.min()),
            float(free.max()),
            float(np.where(inboxes > 0, inboxes, np.inf).min()),
            float(rates @ ints[:, 0]),
            free,
            np.divide(1.0, rates, out=np.full(rows, np.inf), where=rates > 0),
        )
        return self._bounds
