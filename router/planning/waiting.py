"""When a worker can begin with a request, and at what pace it goes on: its steps, as far as its last report tells.

An engine computes in steps. Each costs something by itself and for every sequence that decodes, and has room for so
many prompt tokens; a request joins the first step that begins after its arrival and has room left behind those in
front. So it waits for the end of the running step and for full steps, and shares its first step with others:

    at the report      the queue in front begins with a step that fills up with it
    since the report   as many steps have begun as fit in that time; tokens in them are no longer in front
    dispatched since   is behind, and joins when this request does

What is short (places in a step, KV blocks) comes free as sequences end; until then those in front go on. Knows nothing
of the request but its size.
"""

from __future__ import annotations

from typing import NamedTuple

from router.planning.views import Line, WorkerView

_UNLIMITED = 1e12
"""Tokens of a step whose limit is not known."""


class Need(NamedTuple):
    """Of a request on one worker, behind the prefix that is cached there."""

    num_tokens: int
    flat_tokens: float
    num_blocks: int
    """KV blocks that it takes."""


class Waiting(NamedTuple):
    queue_s: float
    """Until the first step that computes something of the request begins."""
    shared_s: float
    """What that step computes for those in front, and one step more if not all of the request fits beside them."""
    pace: Line
    """Of the request's own flat tokens: `base_s` is the price of its last step, `per_unit_s` contains that of the steps
    before it, as many as it takes alone."""


class _Steps(NamedTuple):
    """Steps of one worker, as they are now."""

    step_s: float
    """One step, whatever its prompt tokens."""
    s_per_token: float
    room: float
    """Prompt tokens in one step."""

    @property
    def full_s(self) -> float:
        return self.step_s + self.s_per_token * self.room

    def num_before_last(self, num_tokens: float) -> float:
        """Steps that so many tokens fill before their last one."""
        return (num_tokens - 1.0) // self.room

    def pace(self, need: Need) -> Line:
        """Of a request beside those that decode."""
        before_s = self.num_before_last(need.num_tokens) * self.step_s
        return Line(self.step_s, self.s_per_token + before_s / max(need.flat_tokens, 1.0))

    def seconds(self, num_tokens: float) -> float:
        """To compute so many tokens."""
        num_full = num_tokens // self.room
        rest = num_tokens - num_full * self.room
        return num_full * self.full_s + (self.step_s + self.s_per_token * rest if rest else 0.0)


def idle_pace(worker: WorkerView, need: Need) -> Line:
    """Of a request that is alone there."""
    return _steps(worker, 0).pace(need)


def waiting(worker: WorkerView, need: Need, block_size: int) -> Waiting:
    """Of a request that comes now."""
    steps = _steps(worker, worker.num_decoding)
    remaining_s, in_front = _running_step(worker, steps)
    num_full = in_front // steps.room
    begin_s = remaining_s + num_full * steps.full_s
    num_shared = in_front - num_full * steps.room
    free_s = worker.place_wait_s
    if worker.kv_blocks_free is not None and (num_lacking := need.num_blocks - worker.kv_blocks_free) > 0:
        if worker.kv_blocks_per_s > 0.0:
            free_s = max(free_s, num_lacking / worker.kv_blocks_per_s)
        else:  # room is made by what must be computed again
            begin_s += steps.seconds(num_lacking * block_size)
    num_more = steps.num_before_last(num_shared + need.num_tokens) - steps.num_before_last(need.num_tokens)
    shared_s = steps.s_per_token * num_shared + steps.step_s * num_more
    queue_s = max(begin_s, free_s)
    # What is in front is computed meanwhile, if the request waits for something else.
    return Waiting(queue_s, max(0.0, begin_s + shared_s - queue_s), steps.pace(need))


def _steps(worker: WorkerView, num_decoding: int) -> _Steps:
    base_s, per_token_s = worker.prefill
    decode_s = worker.decode_s or per_token_s
    most = worker.max_step_tokens or _UNLIMITED
    return _Steps(base_s + decode_s * num_decoding, per_token_s, max(1.0, most - num_decoding))


def _running_step(worker: WorkerView, steps: _Steps) -> tuple[float, float]:
    """Seconds until the step that runs now has ended, and flat tokens that will be in front then."""
    queued, pending, age_s = worker.queued_tokens, worker.pending_tokens, worker.report_age_s
    if queued and age_s < (work_s := steps.seconds(queued)):
        num_begun = age_s // steps.full_s + 1.0
        is_last = num_begun * steps.room >= queued
        end_s = work_s if is_last else num_begun * steps.full_s
        return end_s - age_s, pending + (0.0 if is_last else queued - num_begun * steps.room)
    if worker.num_decoding:
        return 0.5 * steps.step_s, pending
    if pending:
        # An idle engine began with the first at once; how long ago is not known.
        first = min(pending / max(worker.num_pending, 1), steps.room)
        return 0.5 * (steps.step_s + steps.s_per_token * first), pending - first
    return 0.0, 0.0
