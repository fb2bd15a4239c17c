"""Computes plans in the plainest way: one worker, one assignment, one span after the other. The planner's tests compare
the real planner with it, which computes all workers at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from planning_samples import BLOCK_SIZE, Cluster, EncoderSpec, WorkerSpec, encoder_member, worker_member

from fabric.contracts import MediaItem, weighted_tokens
from router.planning import RouteQuery
from router.planning.link_classes import LinkRules
from router.planning.plan_types import Line

# ------------------------------------------------------------ when a worker begins


class PlacementNeed(NamedTuple):
    """Holds what a request needs on one worker, without the prefix that is cached there."""

    num_tokens: int
    weighted_tokens: float
    num_blocks: int
    """Counts the KV blocks of the whole request: those that are cached there and in no use have to be taken too."""
    num_first: int
    """Counts the tokens ahead of the first medium."""


class Waiting(NamedTuple):
    queue_s: float
    """This is the time until the first step that computes a part of the request begins."""
    shared_s: float
    """This is the time that this first step spends on the requests ahead, plus one step more if that step has no room
    for the whole request because of them."""
    pace: Line
    """This is the pace of the request's own weighted tokens. `base_s` is the cost of its last step. `per_unit_s`
    contains the cost of the steps before that, as many as the request takes alone."""


def waiting(worker: WorkerSpec, need: PlacementNeed, block_size: int) -> Waiting:
    """Returns the wait of a request that arrives now. It models the worker's steps, as far as the last report describes
    them.

    An engine computes in steps. Each step has a cost of its own and a cost for every sequence that decodes, and it has
    room for a limited number of prompt tokens. A request joins the first step that begins after its arrival and has
    room left after the requests ahead of it. So it waits for the end of the running step and for full steps, and it
    shares its first step with other requests:

        at the report      the queue ahead begins with a step that it fills
        since the report   as many steps have begun as fit in that time; tokens in them are no longer ahead
        dispatched since   is behind that queue, and joins when this request does
        awaits features    joins when its features land, in the room that is left

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
    # The step with the last token ahead of the first medium takes others too, whose features have landed by then.
    num_first = num_shared + need.num_first
    num_before = max(steps.num_before_last(num_first), 0.0)
    last_begin_s = max(begin_s, free_s) + num_before * steps.full_s
    num_landed = sum(num for due_s, num in worker.awaited if due_s <= last_begin_s)
    num_beside = min(num_landed, steps.room - (num_first - num_before * steps.room))
    shared_s = steps.s_per_token * (num_shared + num_beside) + steps.step_s * num_more
    queue_s = max(begin_s, free_s)
    # If the request waits for another resource, the worker computes the work ahead meanwhile.
    return Waiting(queue_s, max(0.0, begin_s + shared_s - queue_s), steps.pace(need))


def joined_s(worker: WorkerSpec, at_s: float, num_tokens: float) -> float:
    """Returns when tokens that become computable at `at_s` are as good as begun: when the next step begins, and what it
    spends on other requests. It walks over the worker's steps, one by one."""
    steps = _steps(worker, worker.num_decoding)
    now_s, left = _running_step(worker, steps)
    due = list(worker.awaited)
    half_s = 0.5 * steps.step_s if worker.num_decoding else 0.0
    while True:
        while due and due[0][0] <= now_s:
            left += due.pop(0)[1]
        if left >= steps.room:
            now_s, left = now_s + steps.full_s, left - steps.room
        elif left > 0.0:
            if at_s <= now_s:
                num_more = steps.num_before_last(left + num_tokens) - steps.num_before_last(num_tokens)
                return now_s + steps.s_per_token * left + steps.step_s * num_more
            now_s, left = now_s + steps.step_s + steps.s_per_token * left, 0.0
        elif at_s <= now_s:
            return now_s
        elif not due or at_s <= due[0][0] + half_s:
            return at_s + half_s
        else:
            now_s = due[0][0] + half_s


def idle_pace(worker: WorkerSpec, need: PlacementNeed) -> Line:
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


def _steps(worker: WorkerSpec, num_decoding: int) -> _Steps:
    base_s, per_token_s = worker.prefill
    decode_s = worker.decode_s or per_token_s
    most = worker.max_step_tokens or _UNLIMITED
    return _Steps(base_s + decode_s * num_decoding, per_token_s, max(1.0, most - num_decoding))


def _running_step(worker: WorkerSpec, steps: _Steps) -> tuple[float, float]:
    """Returns the seconds until the running step has ended, and the weighted tokens that are ahead of the request at
    that time."""
    queued, pending, age_s = worker.queued_tokens, worker.pending_tokens, worker.report_age_s - worker.step_left_s
    if age_s < 0.0:  # The step that ran at the report has not ended.
        return -age_s, pending + queued
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


def landings(
    request: RouteQuery,
    items: Sequence[MediaItem],
    encoders: Sequence[EncoderSpec],
    links: Sequence[Line],
    link_names: Sequence[object],
) -> dict[tuple[int, int], float]:
    """Returns when each (item, unit) lands, if the items go to these encoders over links of these names and costs."""
    complete: list[tuple[float, int, int, int]] = []
    for encoder in {each.encoder_id: each for each in encoders}.values():
        own = [(number, item) for number, item in enumerate(items) if encoders[number].encoder_id == encoder.encoder_id]
        queue_s = encoder.costs.decode.per_unit_s * encoder.queued_cost
        free_s = [queue_s / encoder.num_decoders] * encoder.num_decoders
        wait_s = encoder.costs.encode.at(encoder.queued_cost) if encoder.queued_cost else 0.0
        device_s, met = 0.0, set[str]()
        for number, item in own:
            if item.mm_hash in encoder.cached:
                complete += [(0.0, number, unit, 0) for unit in range(len(item.unit_tokens))]
                continue
            costs = encoder.costs_of(item.modality)
            begin_s = min(free_s)
            decode_s, prepare_s = costs.decode.at(item.cost), costs.device_prepare.at(item.cost)
            free_s[free_s.index(begin_s)] = begin_s + decode_s
            device_s = max(device_s, wait_s)
            if prepare_s > 0.0:
                device_s = max(device_s, begin_s + decode_s) + prepare_s
            rows = 0
            for unit, num_rows in enumerate(item.unit_tokens):
                rows += num_rows
                device_s = max(device_s, begin_s + decode_s * rows / item.num_tokens)
                device_s += costs.encode.base_s if item.modality not in met else 0.0
                met.add(item.modality)
                device_s += costs.encode.per_unit_s * item.cost * num_rows / item.num_tokens
                complete.append((device_s, number, unit, 0))
    found: dict[tuple[int, int], float] = {}
    name_to_free_s = dict.fromkeys(link_names, 0.0)
    for done_s, number, unit, _ in sorted(complete):
        item, link, name = items[number], links[number], link_names[number]
        nbytes = item.unit_tokens[unit] * request.feature_row_bytes * max(item.num_levels, 1)
        name_to_free_s[name] = max(done_s, name_to_free_s[name]) + link.per_unit_s * nbytes
        found[number, unit] = name_to_free_s[name] + link.base_s
    return found


# ------------------------------------------------------------ the score


class Score(NamedTuple):
    ttft_s: float
    worker: WorkerSpec
    encoders: tuple[EncoderSpec, ...]


def covered_tokens(worker: WorkerSpec, num_tokens: int) -> int:
    return min(worker.covered_blocks, max(num_tokens - 1, 0) // BLOCK_SIZE) * BLOCK_SIZE


def lacking(request: RouteQuery, worker: WorkerSpec) -> list[MediaItem]:
    """Returns the different media of which the worker's KV does not hold all placeholders, and which it does not
    keep."""
    covered = covered_tokens(worker, request.token_count)
    index_to_end = {run.item: run.end for run in request.placeholders}
    hash_to_item: dict[str, MediaItem] = {}
    for item in request.media:
        if index_to_end.get(item.index, 0) > covered and item.mm_hash not in worker.kept:
            hash_to_item.setdefault(item.mm_hash, item)
    return list(hash_to_item.values())


def score(request: RouteQuery, cluster: Cluster, worker: WorkerSpec, encoders: Sequence[EncoderSpec]) -> Score:
    """Walks over the prompt on one worker, whose lacking items go to these encoders."""
    covered, scale = covered_tokens(worker, request.token_count), cluster.context_scale_tokens
    num_tokens = request.token_count - covered
    num_blocks = -(-request.token_count // BLOCK_SIZE)
    num_first = max(next((run.offset for run in request.placeholders), request.token_count) - covered, 0)
    need = PlacementNeed(num_tokens, weighted_tokens(num_tokens, covered, scale), num_blocks, num_first)
    ahead = waiting(worker, need, BLOCK_SIZE)
    items, rules = lacking(request, worker), LinkRules()
    place = rules.place(worker_member(worker.worker_id, worker.host))
    names = [rules.link_class(rules.place(encoder_member(each.encoder_id, each.host)), place) for each in encoders]
    unit_to_landing_s = landings(request, items, encoders, [cluster.links[name] for name in names], names)
    hash_to_number = {item.mm_hash: number for number, item in enumerate(items)}
    now_s = ahead.queue_s + ahead.shared_s
    for start, end, item, unit in spans(request):
        if end <= covered:
            continue
        if item is not None and item.mm_hash in hash_to_number:
            begin = max(start, covered)
            behind = weighted_tokens(request.token_count - begin, begin, scale)
            landing_s = unit_to_landing_s[hash_to_number[item.mm_hash], unit]
            now_s = max(now_s, joined_s(worker, landing_s, behind))
        begin = max(start, covered)
        now_s += ahead.pace.per_unit_s * weighted_tokens(end - begin, begin, scale)
    return Score(now_s + ahead.pace.base_s, worker, tuple(encoders))


def spans(request: RouteQuery) -> Iterator[tuple[int, int, MediaItem | None, int]]:
    """Yields (start, end, item, unit) of each run of placeholders, and of the text between them."""
    at = 0
    for run in request.placeholders:
        if run.offset > at:
            yield at, run.offset, None, 0
        yield run.offset, run.end, request.media[run.item], run.unit
        at = run.end
    if at < request.token_count:
        yield at, request.token_count, None, 0


def assignments(items: Sequence[MediaItem], cluster: Cluster) -> Iterator[tuple[EncoderSpec, ...]]:
    """Yields every way to give the items to encoders that are able to take them."""
    yield from itertools.product(*[[each for each in cluster.encoders if i.modality in each.modalities] for i in items])


def all_scores(request: RouteQuery, cluster: Cluster) -> Iterator[Score]:
    """Yields the scores of every worker with every assignment."""
    for worker in cluster.workers:
        for encoders in assignments(lacking(request, worker), cluster):
            yield score(request, cluster, worker, encoders)
