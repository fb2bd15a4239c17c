"""Predicts what a request that waits at the router will be to the members, for decisions about the sizes of the pools.

The module knows nothing of which requests wait, or of what a decision makes of it.
"""

from __future__ import annotations

import numpy as np

from fabric.contracts import MemberId, WaitingWork, weighted_tokens
from router.planning.cost_learning import Learning
from router.planning.kv_room import RoomNeed
from router.planning.member_columns import WorkerColumns
from router.planning.plan_types import MediaOfPrompt


def predicted_work(
    need: RoomNeed,
    media: MediaOfPrompt,
    covered: int,
    barred: frozenset[MemberId],
    workers: WorkerColumns,
    learning: Learning,
    now: float,
) -> WaitingWork:
    """Returns what a request will be to the members, by their mean costs: what its prompt adds to a worker's steps and
    takes of a worker's KV blocks, and what its media add to an encoder's passes. Its first `covered` tokens, and media
    whose places are all among them, are left out. The workers in `barred` can't take the request, and neither can pools
    that have no other worker."""
    slots = np.flatnonzero(workers.usable(barred, now) & (workers.per_token_s[: len(workers)] > 0.0))
    if not len(slots):
        return WaitingWork()
    num_new = max(need.num_prompt_tokens + need.num_generated_tokens - covered, 0)
    num_weighted = weighted_tokens(num_new, covered, learning.context_scale_tokens)
    capacity = float((workers.kv_blocks_total[slots] * workers.block_size[slots]).mean())
    needed = {each.item for each in media.placeholders if each.end > covered}
    items = [item for item in media.media if item.index in needed and not item.is_given]
    return WaitingWork(
        float(workers.per_token_s[slots].mean()) * num_weighted,
        num_new / capacity if capacity else 0.0,
        sum(learning.mean_encode_s(item.modality, item.cost) for item in items),
        _barred_pools(barred, workers) if barred else (),
    )


def _barred_pools(barred: frozenset[MemberId], workers: WorkerColumns) -> tuple[str, ...]:
    present = [each for each in workers.members if each is not None]
    able = {each.pool for each in present if each.member_id not in barred}
    return tuple(sorted({each.pool for each in present} - able))
