"""Decides which items are refused before any work is spent on them. It knows nothing of the state of memory, processes
or messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from encoder_pool.planning.batcher import split_cost
from encoder_pool.planning.encode_jobs import EncodeJobs
from encoder_pool.planning.features import FeatureSpec
from encoder_pool.planning.shares import is_within_share
from fabric.errors import (
    InvalidMedia,
    Overloaded,
    ProtocolError,
    UnitTooLarge,
    UnsupportedModality,
    WeftError,
    WorkerBackedUp,
)
from fabric.ids import MemberId, UnitKey
from fabric.messages import MediaItem


def refusal(
    item: MediaItem, modalities: Sequence[str], spec: FeatureSpec, arena_bytes: int, max_decode_bytes: int
) -> WeftError | None:
    """Returns an error if this encoder can never encode the item, and None if it can. `max_decode_bytes` is the memory
    that all items together may take while they are decoded."""
    if item.modality not in modalities:
        return UnsupportedModality(f"this encoder has not loaded {item.modality}")
    if not item.unit_tokens or min(item.unit_tokens) < 1 or item.cost < 1:
        return ProtocolError("an item was planned without tokens")
    nbytes = spec.nbytes(max(item.unit_tokens), item.num_levels)
    if nbytes > arena_bytes:
        return UnitTooLarge(f"a feature of {nbytes} bytes never fits the arena of {arena_bytes}")
    if item.decode_bytes > max_decode_bytes:
        message = f"decoding it takes {item.decode_bytes} bytes of memory, and all items together have "
        return InvalidMedia(f"{message}{max_decode_bytes}", param=item.part)
    return None


def check_budget(
    items: Sequence[MediaItem],
    jobs: EncodeJobs,
    is_ready: Callable[[UnitKey], bool],
    max_queue_cost: int,
    sharing_worker_id: MemberId | None = None,
) -> None:
    """Raises Overloaded if the new work in these items would exceed the budget in patches; the error asks for a retry
    when the queue has been encoded. Raises WorkerBackedUp if the work only exceeds the share of `sharing_worker_id`,
    which is one worker among several. Items that are cached or in flight cost nothing, and an empty queue accepts work
    of any size."""
    new = {item.mm_hash: item for item in items if jobs.find(item.mm_hash) is None}
    new_cost = sum(
        cost
        for item in new.values()
        for unit, cost in zip(item.unit_keys(), split_cost(item.cost, item.unit_tokens), strict=True)
        if not is_ready(unit)
    )
    queued_cost = jobs.totals.queued_cost
    if not new_cost:
        return
    if queued_cost and queued_cost + new_cost > max_queue_cost:
        message = f"{queued_cost} patches wait; {new_cost} more would pass the budget of {max_queue_cost}"
        raise Overloaded(message, retry_after_s=max(0.1, jobs.queued_s))
    held_cost = jobs.queued_cost_of(sharing_worker_id) if sharing_worker_id is not None else 0
    if not is_within_share(held_cost, new_cost, max_queue_cost - queued_cost):
        message = f"{held_cost} patches wait for {sharing_worker_id}; {new_cost} more would pass its share"
        raise WorkerBackedUp(message)
