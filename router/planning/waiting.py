"""Predicts when a worker can begin with a request, and at what pace it continues. It models the worker's steps, as far
as the last report describes them.

An engine computes in steps. Each step has a cost of its own and a cost for every sequence that decodes, and it has room
for a limited number of prompt tokens. A request joins the first step that begins after its arrival and has room left
after the requests ahead of it. So it waits for the end of the running step and for full steps, and it shares its first
step with other requests:

    at the report      the queue ahead begins with a step that it fills
    since the report   as many steps have begun as fit in that time; tokens in them are no longer ahead
    dispatched since   is behind that queue, and joins when this request does

Scarce resources (places in a step, KV blocks) become free as sequences end; until then the requests ahead continue.
This module knows nothing of the request except its size.
"""

from __future__ import annotations

from typing import NamedTuple

from router.planning.views import Line, WorkerView

_UNLIMITED = 1e12
"""This stands for the number of tokens in a step when the limit is not known."""


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


def idle_pace(worker: WorkerView, need: PlacementNeed) -> Line:
    """Returns the pace of a request that is alone on the worker."""
    return _steps(worker, 0).pace(need)


def waiting(worker: WorkerView, need: PlacementNeed, block_size: int) -> Waiting:
    """Returns the wait of a request that arrives now."""
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
