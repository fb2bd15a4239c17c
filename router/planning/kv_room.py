"""Says whether the workers have room for a request: now, later or never. `kv_room` compares the blocks that the request
takes with the blocks that each worker has, for all workers at once, over arrays of plain numbers.

The rule is the worker's own. A worker refuses a prompt that is larger than its whole KV pool
(`llm_workers/scheduling/sequence.py`). It begins a sequence when all tokens that are there, the prompt and what earlier
attempts have generated, find blocks, and each sequence of the step could still take one more block
(`llm_workers/scheduling/step_planner.py`). It reserves nothing else for an answer: an answer that outgrows the pool
takes the blocks of sequences that rank behind it. So a request needs the blocks of its tokens and one for each further
choice, and every sequence that decodes counts one block that is not free.

The module knows nothing of where the numbers come from (`ClusterState.room`), or of who waits (`capacity_queue`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fabric.contracts import KvScheme, MemberId

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
    has cached need not be taken."""
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
    """Is 0 where it is unknown."""
    free_blocks: npt.NDArray[np.int64]
    """Counts the blocks that a new request could take: free ones, and ones that are only cached, less what was
    dispatched and is not reported yet, and less one block for each sequence that decodes. It is negative where more was
    promised than there is."""
    covered_blocks: npt.NDArray[np.int64]
    """Counts the leading blocks of the request that the worker has cached."""
    blocks_per_s: npt.NDArray[np.float64]
    """Holds the rate at which sequences return blocks as they end; it is 0 where it is unknown."""
    inbox_bytes: npt.NDArray[np.int64]
    """Is 0 where it is unknown."""
    is_usable: npt.NDArray[np.bool_]
    """Is False for a worker that the request may not use at this time."""


class KvRoom(NamedTuple):
    """A `KvRoom` is the answer of `kv_room`."""

    verdict: Verdict
    too_small: frozenset[MemberId] = frozenset()
    """Holds the workers that could never serve the request. No plan may choose them."""
    nearest: MemberId | None = None
    """Names the worker that lacks the fewest blocks."""
    wait_s: float | None = None
    """This is the predicted time until a worker has room; None if it is unknown, and 0 if there is room now."""
    blocks_per_s: float = 0.0
    """This is the rate at which all workers that may be used return blocks."""
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
    taken = np.maximum(0, need.num_blocks(stocks.block_sizes) - stocks.covered_blocks) + headroom
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
    return KvRoom(verdict, too_small, nearest, wait_s, float(rates.sum()), max_tokens, max_unit_bytes)
