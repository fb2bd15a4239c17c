"""Predicts the two times that decide how soon a worker has a request's first token: when the worker can begin with the
request and at what pace it continues (`waiting`), and when the features of the request's media reach it (`land_items`,
which also chooses the encoder for each item).

Both predictions are pure functions of the planner's views. They stand apart from the score, which combines them in
`route_plan`: `waiting` knows nothing of the request except its size, and `land_items` knows nothing of workers except
the links to one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fabric.contracts import MediaItem, MemberId, MmHash, key_of
from fabric.contracts import wait_s as reported_wait_s
from router.planning.views import EncoderView, ItemTerms, Line, WorkerView

# ------------------------------------------------------------ when a worker begins


class PlacementNeed(NamedTuple):
    """Holds what a request needs on one worker, without the prefix that is cached there."""

    num_tokens: int
    weighted_tokens: float
    num_blocks: int
    """Counts the KV blocks that the request takes."""


class Waiting(NamedTuple):
    queue_s: float
    """This is the time until the first step that computes a part of the request begins."""
    shared_s: float
    """This is the time that this first step spends on the requests ahead, plus one step more if that step has no room
    for the whole request because of them."""
    pace: Line
    """This is the pace of the request's own weighted tokens. `base_s` is the cost of its last step. `per_unit_s`
    contains the cost of the steps before that, as many as the request takes alone."""


def waiting(worker: WorkerView, need: PlacementNeed, block_size: int) -> Waiting:
    """Returns the wait of a request that arrives now. It models the worker's steps, as far as the last report describes
    them.

    An engine computes in steps. Each step has a cost of its own and a cost for every sequence that decodes, and it has
    room for a limited number of prompt tokens. A request joins the first step that begins after its arrival and has
    room left after the requests ahead of it. So it waits for the end of the running step and for full steps, and it
    shares its first step with other requests:

        at the report      the queue ahead begins with a step that it fills
        since the report   as many steps have begun as fit in that time; tokens in them are no longer ahead
        dispatched since   is behind that queue, and joins when this request does

    Scarce resources (places in a step, KV blocks) become free as sequences end; until then the requests ahead
    continue."""
    steps = _steps(worker, worker.num_decoding)
    remaining_s, in_front = _running_step(worker, steps)
    num_full = in_front // steps.room
    begin_s = remaining_s + num_full * steps.full_s
    num_shared = in_front - num_full * steps.room
    free_s = worker.place_wait_s
    if worker.kv_blocks_free is not None and (num_lacking := need.num_blocks - worker.kv_blocks_free) > 0:
        if worker.kv_blocks_per_s > 0.0:
            free_s = max(free_s, num_lacking / worker.kv_blocks_per_s)
        else:  # The worker makes room by giving up blocks that it must compute again.
            begin_s += steps.seconds(num_lacking * block_size)
    num_more = steps.num_before_last(num_shared + need.num_tokens) - steps.num_before_last(need.num_tokens)
    shared_s = steps.s_per_token * num_shared + steps.step_s * num_more
    queue_s = max(begin_s, free_s)
    # If the request waits for another resource, the worker computes the work ahead meanwhile.
    return Waiting(queue_s, max(0.0, begin_s + shared_s - queue_s), steps.pace(need))


def idle_pace(worker: WorkerView, need: PlacementNeed) -> Line:
    """Returns the pace of a request that is alone on the worker."""
    return _steps(worker, 0).pace(need)


_UNLIMITED = 1e12
"""This stands for the number of tokens in a step when the limit is not known."""


class _Steps(NamedTuple):
    """Describes the steps of one worker, as they are now."""

    step_s: float
    """This is the time of one step without its prompt tokens."""
    s_per_token: float
    room: float
    """Counts the prompt tokens that fit in one step."""

    @property
    def full_s(self) -> float:
        return self.step_s + self.s_per_token * self.room

    def num_before_last(self, num_tokens: float) -> float:
        """Returns how many steps this many tokens fill before their last one."""
        return (num_tokens - 1.0) // self.room

    def pace(self, need: PlacementNeed) -> Line:
        """Returns the pace of a request that shares the steps with the decoding sequences."""
        before_s = self.num_before_last(need.num_tokens) * self.step_s
        return Line(self.step_s, self.s_per_token + before_s / max(need.weighted_tokens, 1.0))

    def seconds(self, num_tokens: float) -> float:
        """Returns the time to compute this many tokens."""
        num_full = num_tokens // self.room
        rest = num_tokens - num_full * self.room
        return num_full * self.full_s + (self.step_s + self.s_per_token * rest if rest else 0.0)


def _steps(worker: WorkerView, num_decoding: int) -> _Steps:
    base_s, per_token_s = worker.prefill
    decode_s = worker.decode_s or per_token_s
    most = worker.max_step_tokens or _UNLIMITED
    return _Steps(base_s + decode_s * num_decoding, per_token_s, max(1.0, most - num_decoding))


def _running_step(worker: WorkerView, steps: _Steps) -> tuple[float, float]:
    """Returns the seconds until the running step has ended, and the weighted tokens that are ahead of the request at
    that time."""
    queued, pending, age_s = worker.queued_tokens, worker.pending_tokens, worker.report_age_s
    if queued and age_s < (work_s := steps.seconds(queued)):
        num_begun = age_s // steps.full_s + 1.0
        is_last = num_begun * steps.room >= queued
        end_s = work_s if is_last else num_begun * steps.full_s
        return end_s - age_s, pending + (0.0 if is_last else queued - num_begun * steps.room)
    if worker.num_decoding:
        return 0.5 * steps.step_s, pending
    if pending:
        # An idle engine began with the first pending attempt at once; how long ago that was is not known.
        first = min(pending / max(worker.num_pending, 1), steps.room)
        return 0.5 * (steps.step_s + steps.s_per_token * first), pending - first
    return 0.0, 0.0


# ------------------------------------------------------------ when features land


@dataclass(frozen=True, slots=True)
class Landings:
    """Holds the predictions for all items that one worker lacks."""

    items: tuple[ItemTerms, ...]
    unit_to_landing_s: Mapping[tuple[int, int], float]
    """Maps (item, unit) to seconds from now."""


def land_items(
    items: Sequence[MediaItem],
    options: Mapping[int, Sequence[EncoderView]],
    encoder_to_link: Mapping[MemberId, Line],
    row_bytes: int,
) -> Landings:
    """Assigns each item to the one of `options[item.index]` (which is not empty) from which it lands earliest; between
    equal options it takes the first. `encoder_to_link` holds the links to the one worker in question, and `row_bytes`
    is the size of a row of features on one level. The choice is greedy in order of index: each item takes account of
    the items before it.

        land(unit, w) = max(wait(e), decode_queue(e) + decode) + device_prepare
                        + encode_e(units of this request on e, up to and including this one)
                        + alpha(e,w) + beta(e,w) * bytes

    Here `alpha + beta * bytes` is the cost of the link between encoder `e` and worker `w`. A feature that an encoder
    has cached costs only its transfer. Costs are those of the item's modality; units of different modalities never
    share a forward pass. The router fetches media before it plans, so the formula contains no fetch."""
    encoder_to_costs: dict[MemberId, dict[str, int]] = {}
    hash_to_terms: dict[MmHash, ItemTerms] = {}
    chosen: list[ItemTerms] = []
    landings: dict[tuple[int, int], float] = {}
    for item in items:
        item_row_bytes = row_bytes * max(item.num_levels, 1)
        units = range(len(item.unit_tokens))
        twin = hash_to_terms.get(item.mm_hash)
        if twin is not None:
            chosen.append(_twin_terms(item, twin))
            landings.update({(item.index, unit): landings[twin.item_index, unit] for unit in units})
            continue
        last_rows = item.unit_tokens[-1] if item.unit_tokens else 0
        best, best_s = None, float("inf")
        for encoder in options[item.index]:
            encoder_id = encoder.encoder_id
            offer = _offer(item, encoder, encoder_to_link[encoder_id], encoder_to_costs.get(encoder_id, {}))
            landing_s = offer.landing_s(item, item.num_tokens, last_rows, item_row_bytes)
            if landing_s < best_s:
                best, best_s = offer, landing_s
        assert best is not None, "the caller checked that every item has an encoder"
        num_rows = 0
        for unit in units:
            num_rows += item.unit_tokens[unit]
            landings[item.index, unit] = best.landing_s(item, num_rows, item.unit_tokens[unit], item_row_bytes)
        terms = _item_terms(item, best, best_s, item_row_bytes)
        if terms.load:
            costs = encoder_to_costs.setdefault(terms.encoder_id, {})
            costs[item.modality] = costs.get(item.modality, 0) + terms.load
        hash_to_terms[item.mm_hash] = terms
        chosen.append(terms)
    return Landings(tuple(chosen), landings)


class _Offer(NamedTuple):
    """An `_Offer` is what one encoder could do for one item."""

    encoder: EncoderView
    link: Line
    is_cached: bool
    ready_s: float
    """This is the number of seconds until the item's forward pass can begin."""
    modality_to_cost_before: Mapping[str, int]
    """Counts, by modality, the patches of this request that the encoder encodes before this item."""

    def landing_s(self, item: MediaItem, num_rows: int, last_rows: int, row_bytes: int) -> float:
        """Returns the seconds until the item's first `num_rows` rows have landed, of which the last `last_rows` are one
        unit. Encoded units leave one after another, each when its share of the patches is done. Cached units all leave
        at once and share the link."""
        if self.is_cached:
            return self.link.at(num_rows * row_bytes)
        encode_s = self.encode_s(item, item.cost * (num_rows / max(item.num_tokens, 1)))
        return self.ready_s + encode_s + self.link.at(last_rows * row_bytes)

    def encode_s(self, item: MediaItem, cost: float) -> float:
        """Returns the seconds from the start of this request's first forward pass until `cost` patches of the item are
        encoded."""
        before = self.modality_to_cost_before
        others_s = sum(
            self.encoder.costs_of(name).encode.at(cost_before)
            for name, cost_before in before.items()
            if name != item.modality
        )
        return others_s + self.encoder.costs_of(item.modality).encode.at(before.get(item.modality, 0) + cost)


def _offer(item: MediaItem, encoder: EncoderView, link: Line, before: Mapping[str, int]) -> _Offer:
    if item.mm_hash in encoder.cached:
        return _Offer(encoder, link, True, 0.0, before)
    ready_s = max(wait_s(encoder, item), prepare_s(encoder, item)) + device_prepare_s(encoder, item)
    return _Offer(encoder, link, False, ready_s, before)


def wait_s(encoder: EncoderView, item: MediaItem) -> float:
    """Returns the seconds until the forward pass over the item can begin. The encoder's queue counts by the encoder's
    own order, and work that was dispatched since its report counts as ahead."""
    if encoder.queue is None:
        return encoder.costs.encode.at(encoder.queued_cost) if encoder.queued_cost else 0.0
    report, age_s, pending_cost = encoder.queue
    key = key_of(encoder.costs_of(item.modality).encode.per_unit_s * item.cost, report.patience, age_s)
    reported_s = reported_wait_s(report.queue_profile, report.forward_left_s, key, age_s, report.unit_s)
    return reported_s + encoder.costs.encode.per_unit_s * pending_cost


def prepare_s(encoder: EncoderView, item: MediaItem) -> float:
    """Returns the seconds for the decode queue, and for decoding and preprocessing the item."""
    queue_s = encoder.costs.decode.per_unit_s * encoder.queued_cost
    if encoder.queue is not None:
        report, age_s, _ = encoder.queue
        waiting_s = report.decode_short_s if len(item.unit_tokens) == 1 else report.decode_queue_s
        queue_s = max(0.0, report.decode_left_s + waiting_s / max(report.num_decode_processes, 1) - age_s)
    return queue_s + encoder.costs_of(item.modality).decode.at(item.cost)


def device_prepare_s(encoder: EncoderView, item: MediaItem) -> float:
    """Returns the seconds for which the device prepares the item before its forward pass."""
    return encoder.costs_of(item.modality).device_prepare.at(item.cost)


def _item_terms(item: MediaItem, offer: _Offer, landing_s: float, row_bytes: int) -> ItemTerms:
    encoder, num_bytes = offer.encoder, item.num_tokens * row_bytes
    if offer.is_cached:
        transfer_s = offer.link.at(num_bytes)
        return ItemTerms(
            item.index,
            item.mm_hash,
            encoder.encoder_id,
            True,
            0.0,
            0.0,
            0.0,
            transfer_s,
            landing_s,
            item.cost,
            num_bytes,
            item.modality,
        )
    encode_s = offer.encode_s(item, item.cost)
    return ItemTerms(
        item_index=item.index,
        mm_hash=item.mm_hash,
        encoder_id=encoder.encoder_id,
        is_cached=False,
        wait_s=wait_s(encoder, item),
        prepare_s=prepare_s(encoder, item),
        encode_s=encode_s,
        transfer_s=landing_s - offer.ready_s - encode_s,
        landing_s=landing_s,
        cost=item.cost,
        num_bytes=num_bytes,
        modality=item.modality,
        device_prepare_s=device_prepare_s(encoder, item),
    )


def _twin_terms(item: MediaItem, twin: ItemTerms) -> ItemTerms:
    """Returns the terms of a medium that occurs a second time: it is encoded once, and its features land once."""
    return ItemTerms(
        item.index, item.mm_hash, twin.encoder_id, True, 0.0, 0.0, 0.0, 0.0, twin.landing_s, item.cost, 0, item.modality
    )
