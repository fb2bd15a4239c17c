"""What is refused before any work is spent on it. Knows nothing of memory's state, processes or messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from encoder_pool.planning.batcher import split_cost
from encoder_pool.planning.features import FeatureSpec
from encoder_pool.planning.flights import Flights
from encoder_pool.planning.shares import is_within_share
from fabric.errors import Overloaded, ProtocolError, UnitTooLarge, UnsupportedModality, WeftError
from fabric.ids import MemberId, UnitKey
from fabric.messages import MediaItem


def refusal(item: MediaItem, modalities: Sequence[str], spec: FeatureSpec, arena_bytes: int) -> WeftError | None:
    """Why this encoder can never encode the item, or None."""
    if item.modality not in modalities:
        return UnsupportedModality(f"this encoder has not loaded {item.modality}")
    if not item.unit_tokens or min(item.unit_tokens) < 1 or item.cost < 1:
        return ProtocolError("an item was planned without tokens")
    nbytes = spec.nbytes(max(item.unit_tokens), item.num_levels)
    if nbytes > arena_bytes:
        return UnitTooLarge(f"a feature of {nbytes} bytes never fits the arena of {arena_bytes}")
    return None


def check_budget(
    items: Sequence[MediaItem],
    flights: Flights,
    is_ready: Callable[[UnitKey], bool],
    max_queue_cost: int,
    sharing_worker_id: MemberId | None = None,
) -> None:
    """Raises Overloaded if what is new in these items would pass the budget in patches, or the share of it of
    `sharing_worker_id`, a worker among several; what is cached or in flight costs nothing, and an empty queue takes
    anything. To be tried again when the queue has been encoded."""
    new = {item.mm_hash: item for item in items if flights.find(item.mm_hash) is None}
    new_cost = sum(
        cost
        for item in new.values()
        for unit, cost in zip(item.unit_keys(), split_cost(item.cost, item.unit_tokens), strict=True)
        if not is_ready(unit)
    )
    queued_cost = flights.totals.queued_cost
    is_full = queued_cost > 0 and queued_cost + new_cost > max_queue_cost
    if sharing_worker_id is not None and not is_full:
        held_cost = flights.queued_cost_of(sharing_worker_id)
        is_full = not is_within_share(held_cost, new_cost, max_queue_cost - queued_cost)
    if new_cost and is_full:
        raise Overloaded(
            f"{queued_cost} patches wait; {new_cost} more would pass the budget of {max_queue_cost}, or its worker's "
            "share of it",
            retry_after_s=max(0.1, flights.queued_s),
        )
