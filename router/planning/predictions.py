"""Predicts when each worker can begin with a request, and at what pace it continues, for all workers at once; and when
each encoder's device can begin with new work.

An engine computes in steps. Each step has a cost of its own and a cost for every sequence that decodes, and it has room
for a limited number of prompt tokens. A request joins the first step that begins after its arrival and has room left
after the requests ahead of it. So it waits for the end of the running step and for full steps, and it shares its first
step with other requests:

    at the report      the queue ahead begins with a step that it fills
    since the report   as many steps have begun as fit in that time; tokens in them are no longer ahead
    dispatched since   is behind that queue, and joins when this request does
    awaits features    joins when its features land, as far as this router knows when that is

A worker reports when its running step should end, if that step computes prompt tokens. Tokens of this request that wait
for features meet the same steps when their features land: they wait for the end of the step that runs then, and share
the next step with the tokens of other requests.

Scarce resources (places in a step, KV blocks) become free as sequences end; until then the requests ahead continue. A
silent worker (`member_columns`) has done what it could do since its last report, counts all that this router has open
on it as not done, and counts as busy for some time more, because nothing is known of what others sent there.

An encoder serves its queue by the rule of `fabric.contracts.encoder_queue`, and the waits here are those of that
module, for all encoders and for all sizes of new work.

The functions change no column. They compute with numpy; a plan takes the same from `predictions.h` where there is a
compiler, and a test holds the two equal. Times that end in `_s` are seconds from now, and `now` is on the router's
clock. The module knows nothing of media, of links, or of a request except its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fabric.contracts import NUM_BINS
from router.planning.member_columns import MAX_AWAITED, EncoderColumns, Floats, WorkerColumns

# ------------------------------------------------------------ what is asked and answered


class RequestSize(NamedTuple):
    """Holds what the predictions know of a request, and of its prompt at each worker."""

    num_tokens: int
    scale_tokens: float
    """This is the context at which a token's attention costs as much as the rest of the token."""
    depths: npt.NDArray[np.int32]
    """Counts the leading blocks of the prompt that each worker's KV holds. Has shape `(slots,)`."""
    promised_tokens: Floats | None = None
    """Counts the leading tokens of the prompt that each worker has or computes for another request; None if no request
    in flight begins like this one. Has shape `(slots,)`."""
    num_text_first: float = np.inf
    """Counts the tokens ahead of the first medium."""


class WorkerTimes(NamedTuple):
    """Says when each worker begins with the request, and how it continues. All arrays have shape `(slots,)`."""

    held: Floats
    """Counts the leading tokens of the prompt whose KV the worker has. A worker whose reports stopped counts as having
    none."""
    covered: Floats
    """Counts the leading tokens that need no computing. It includes those that the worker computes for a request ahead,
    except in the step that both requests may share: what that step computes is cached too late."""
    weighted: Floats
    """Counts the weighted tokens to compute."""
    own_s: Floats
    """Holds the time that these weighted tokens take (`weighted * s_per_token`)."""
    queue_s: Floats
    """This is the time until the first step that computes a part of the request begins."""
    shared_s: Floats
    """This is the time that this first step spends on the requests ahead, plus one step more if that step has no room
    for the whole request because of them."""
    s_per_token: Floats
    """This is the pace of the request's own weighted tokens. It contains the cost of its steps before the last, as many
    as it takes alone."""
    last_s: Floats
    """This is the cost of the last step, without its prompt tokens."""
    start_s: Floats
    """This is `queue_s` + `shared_s`."""
    free_s: Floats
    """This is the time until the running step ends, or 0."""
    ahead: Floats
    """Counts the weighted tokens that are ahead of the request at that time."""
    room: Floats
    """Counts the prompt tokens that fit in one step."""
    decode_s: Floats
    """This is the time of a step that only decodes; 0 where no sequence decodes."""


class DeviceWaits(NamedTuple):
    """Says when encoders begin with new work, by the size of that work."""

    waits_s: Floats
    """Holds the wait behind the first `k` bins of a queue. Has shape `(NUM_BINS + 1, capacity)`."""
    sizes_s: Floats
    """New work of at least `sizes_s[k]` seconds is behind bin `k`. Has shape `(NUM_BINS, capacity)`."""


class MediaRuns(NamedTuple):
    """Holds the runs of placeholders of some media. All arrays have shape `(runs,)`."""

    unit: npt.NDArray[np.int64]
    """Holds the number of each run's unit: a column of the landings."""
    end: Floats
    """Holds the position in the prompt at which each run ends."""
    behind: Floats
    """Counts the weighted tokens from the run's start to the end of the prompt."""


# ------------------------------------------------------------ the predictions


def worker_times(workers: WorkerColumns, size: RequestSize, now: float, stale_after_s: float) -> WorkerTimes:
    """Predicts the times of a request that arrives at `now`. A worker is silent if its last report is older than
    `stale_after_s`."""
    num, num_tokens = len(workers), float(size.num_tokens)
    queues = _worker_queues(workers, now, stale_after_s)
    block_size = np.maximum(workers.block_size[:num], 1.0)
    num_blocks = np.minimum(size.depths[:num], np.floor((num_tokens - 1.0) / block_size))
    is_known = np.ones(num, bool)
    if queues.silence_s is not None:  # The cache of a worker has changed since its last report.
        is_known = (queues.silence_s == 0.0) | (workers.is_reported[:num] == 0.0)
        num_blocks = num_blocks * is_known
    covered = held = num_blocks * block_size
    if size.promised_tokens is not None:
        promised = np.minimum(size.promised_tokens[:num], max(num_tokens - 1.0, 0.0)) - np.ceil(queues.num_shared)
        covered = np.maximum(held, np.floor(promised / block_size) * block_size * is_known)
    missing = num_tokens - covered
    weighted = missing * (1.0 + (covered + 0.5 * missing) / size.scale_tokens)
    num_first = np.maximum(min(size.num_text_first, num_tokens) - covered, 0.0)
    need_blocks = np.ceil(num_tokens / block_size)
    if size.promised_tokens is not None:
        need_blocks = need_blocks - np.floor(np.minimum(size.promised_tokens[:num], num_tokens) / block_size)
    need = _Need(missing, weighted, need_blocks, num_first, now)
    queue_s, shared_s, s_per_token = _starts(workers, queues, need)
    own_s = s_per_token * weighted
    start_s = queue_s + shared_s
    free_s = queues.free_s if queues.silence_s is None else queues.free_s + queues.silence_s
    decode_s = queues.step_s * (queues.num_decoding > 0.0)
    shares = (held, covered, weighted, own_s, queue_s, shared_s, s_per_token)
    return WorkerTimes(*shares, queues.step_s, start_s, free_s, queues.ahead, queues.room, decode_s)


def await_landings(
    workers: WorkerColumns,
    times: WorkerTimes,
    now: float,
    landings_s: Floats,
    row_of_worker: npt.NDArray[np.int64],
    runs: MediaRuns,
    end_s: Floats,
    slots: range | None = None,
) -> None:
    """Raises `end_s`, the end of each worker's prefill, where the landings permit no earlier end. `landings_s` has
    shape `(rows, units)`; the row of each worker's slot is in `row_of_worker`. A negative landing says that the worker
    has the unit. The ends of workers outside `slots` stay as they are; without `slots`, all workers are considered."""
    due_s, tokens = _awaited(workers, now)
    behind = np.minimum(runs.behind, times.weighted[:, None])
    own_s, is_missing = times.s_per_token[:, None] * behind, runs.end > times.covered[:, None]
    for slot in range(len(end_s)) if slots is None else slots:
        row = landings_s[row_of_worker[slot]]
        schedule = WorkerSchedule.of(
            float(times.free_s[slot]),
            float(times.ahead[slot]),
            (float(times.last_s[slot]), float(workers.per_token_s[slot]), float(times.room[slot])),
            float(times.decode_s[slot]),
            [(float(at_s), float(num)) for at_s, num in zip(due_s[:, slot], tokens[:, slot], strict=True) if num],
        )
        for number in np.flatnonzero(is_missing[slot] & (row[runs.unit] >= 0.0)):
            joined_s = schedule.joined_s(float(row[runs.unit[number]]), float(behind[slot, number]))
            end_s[slot] = max(end_s[slot], joined_s + own_s[slot, number])


class KnownStep(NamedTuple):
    """A `KnownStep` is a step of a worker that has room left. It has no tokens if full steps end where it begins, and
    nothing follows them."""

    busy_s: float
    """Holds when the full steps ahead of this step begin, or `begin_s` if there are none."""
    begin_s: float
    end_s: float
    num_tokens: float
    """Counts the weighted tokens of other requests in the step."""


class WorkerSchedule(NamedTuple):
    """A `WorkerSchedule` is what a worker does for other requests, as far as it is known. The worker is idle from the
    end of a step until the full steps ahead of the next one begin."""

    free_s: float
    """Holds when the running step ends."""
    step_s: float
    """Holds the duration of a step without its prompt tokens."""
    s_per_token: float
    room: float
    """Counts the prompt tokens that fit in one step."""
    decode_s: float
    """Holds the duration of a step that only decodes; it is 0 where no sequence decodes."""
    steps: list[KnownStep]
    """Holds the known steps with room, in order of time."""

    @classmethod
    def of(
        cls,
        free_s: float,
        ahead: float,
        pace: tuple[float, float, float],
        decode_s: float,
        awaited: Sequence[tuple[float, float]],
    ) -> WorkerSchedule:
        """Returns the schedule of a worker that is free at `free_s` and then has `ahead` tokens to compute. `pace`
        holds the time of a step without tokens, that of a token, and the tokens that fit in a step; `awaited` holds
        when more tokens become computable, and how many."""
        step_s, s_per_token, room = pace
        at_s, busy_s, left, next_one = free_s, free_s, ahead, 0
        steps: list[KnownStep] = []
        while True:
            while next_one < len(awaited) and awaited[next_one][0] <= at_s:
                left += awaited[next_one][1]
                next_one += 1
            if left >= room:
                num_full = left // room
                at_s += num_full * max(step_s + s_per_token * room, 1e-12)
                left -= num_full * room
            elif left > 0.0 or at_s > busy_s:
                end_s = at_s + (step_s + s_per_token * left) if left > 0.0 else at_s
                steps.append(KnownStep(busy_s, at_s, end_s, left))
                at_s, busy_s, left = end_s, end_s, 0.0
            elif next_one < len(awaited):
                at_s = busy_s = awaited[next_one][0] + 0.5 * decode_s
            else:
                return cls(free_s, step_s, s_per_token, room, decode_s, steps)

    def joined_s(self, at_s: float, num_tokens: float) -> float:
        """Returns when tokens that become computable at `at_s` are as good as begun: when their step begins, and what
        it spends on other requests."""
        free_s = self.free_s
        for step in self.steps:
            if at_s <= step.begin_s:
                if at_s <= step.busy_s and step.busy_s > free_s:
                    break  # The worker is idle before the steps that end here.
                num_more = (step.num_tokens + num_tokens - 1.0) // self.room - (num_tokens - 1.0) // self.room
                return step.begin_s + self.s_per_token * step.num_tokens + self.step_s * num_more
            free_s = step.end_s
        return at_s + 0.5 * self.decode_s if at_s > free_s else free_s


def _awaited(workers: WorkerColumns, now: float) -> tuple[Floats, Floats]:
    """Returns when, from now, tokens of other requests become computable, and how many these are. Both have shape
    `(MAX_AWAITED, slots)`."""
    num = len(workers)
    due_s = np.maximum(workers.awaited[:MAX_AWAITED, :num] - now, 0.0)
    is_used = np.arange(MAX_AWAITED)[:, None] < workers.num_awaited[:num]
    return due_s, workers.awaited[MAX_AWAITED:, :num] * is_used


def device_waits(encoders: EncoderColumns, now: float, stale_after_s: float, priority: int) -> DeviceWaits:
    """Returns the waits at all encoders for new work of this priority that arrives at `now`. The waits equal those of
    `fabric.contracts.wait_s` for one encoder and one size of work; what this router has open on a silent encoder, and
    the silence itself, count in addition."""
    silence_s = encoders.silence_s(now, stale_after_s)
    profiles = encoders.profiles + encoders.pending_profiles
    seconds, moments = profiles[:NUM_BINS], profiles[NUM_BINS:]
    num = len(encoders)
    ages_s = np.where(encoders.is_reported > 0.0, now - encoders.state_at_s, 0.0)
    sizes_s = (moments / np.maximum(seconds, 1e-12) - ages_s) / np.maximum(encoders.patience, 1e-9)
    sizes_s = np.where(seconds > 0.0, sizes_s * (1.0 - 1e-9), -np.inf)
    if priority:
        sizes_s[1:] = -np.inf if priority > 0 else np.inf
    waits_s = np.zeros((NUM_BINS + 1, encoders.capacity))
    np.cumsum(seconds, axis=0, out=waits_s[1:])
    since_s = ages_s - encoders.forward_left_s
    in_the_way_s = np.minimum(0.5 * encoders.unit_s, waits_s[-1] - since_s) * (since_s > 0.0)
    waits_s -= since_s
    np.maximum(waits_s, np.maximum(in_the_way_s, 0.0), out=waits_s)
    if silence_s is not None:
        # What this router has open on a silent encoder may all be ahead of the new work.
        extra_s = silence_s + np.where(silence_s > 0.0, encoders.open_units[:num] - encoders.pending_units[:num], 0.0)
        waits_s[:, :num] += extra_s
    return DeviceWaits(waits_s, sizes_s)


class _Queues(NamedTuple):
    """Describes the steps of all workers and what is ahead of a request that arrives now. All arrays have shape
    `(slots,)`."""

    step_s: Floats
    """Holds the time of one step without its prompt tokens."""
    s_per_token: Floats
    room: Floats
    """Counts the prompt tokens that fit in one step."""
    full_s: Floats
    """Holds the time of a full step."""
    begin_s: Floats
    """Holds the time until the first step begins that has room for a part of the request."""
    num_shared: Floats
    """Counts the weighted tokens of other requests in that step."""
    free_s: Floats
    ahead: Floats
    num_decoding: Floats
    silence_s: Floats | None
    """Holds the time for which a silent worker counts as busy; None if no worker is silent."""

    def num_before_last(self, num_tokens: Floats) -> Floats:
        """Returns how many steps this many tokens fill before their last one."""
        found: Floats = np.floor((num_tokens - 1.0) / self.room)
        return found

    def seconds(self, num_tokens: Floats) -> Floats:
        """Returns the time to compute this many tokens from a new step on."""
        num_full = np.floor(num_tokens / self.room)
        rest = num_tokens - num_full * self.room
        found: Floats = num_full * self.full_s + (rest > 0.0) * (self.step_s + self.s_per_token * rest)
        return found


class _Need(NamedTuple):
    """Holds what a request needs on each worker, without the prefix that is cached there."""

    num_tokens: Floats
    weighted_tokens: Floats
    num_blocks: Floats
    """Counts the KV blocks that the request takes: all but those that open requests with the same prefix use. Cached
    blocks that no request uses are among a worker's free ones, so the request takes them from there."""
    num_first: Floats
    """Counts the tokens ahead of the first medium."""
    now: float


def _worker_queues(workers: WorkerColumns, now: float, stale_after_s: float) -> _Queues:
    """Returns what is ahead of a request that arrives now."""
    num = len(workers)
    silence_s = workers.silence_s(now, stale_after_s)
    queued = workers.queued_tokens[:num]
    age_s = np.maximum(now - workers.state_at_s[:num], 0.0) - workers.step_left_s[:num]
    num_decoding = workers.num_decoding[:num]
    pending, num_pending = workers.pending_units[:num], workers.num_pending[:num]
    if silence_s is not None:
        is_silent = silence_s > 0.0
        num_decoding = np.where(is_silent, np.maximum(num_decoding, workers.num_open[:num]), num_decoding)
        pending = np.where(is_silent, workers.open_units[:num], pending)
        num_pending = np.where(is_silent, workers.num_open[:num], num_pending)
    s_per_token = workers.per_token_s[:num]
    step_s = workers.base_s[:num] + workers.decode_s() * num_decoding
    room = np.maximum(1.0, workers.max_step_tokens[:num] - num_decoding)
    full_s = np.maximum(step_s + s_per_token * room, 1e-12)
    # The queue of the report, as far as the steps since have not taken it.
    num_full = np.floor(queued / room)
    rest = queued - num_full * room
    work_s = num_full * full_s + (rest > 0.0) * (step_s + s_per_token * rest)
    num_begun = np.floor(age_s / full_s) + 1.0
    num_left = np.maximum(queued - num_begun * room, 0.0)
    is_in_step = age_s < 0.0  # The step that ran at the report has not ended.
    is_working = (queued > 0.0) & (age_s < work_s) | is_in_step
    # An idle engine began with the first pending attempt at once; how long ago that was is not known.
    first = np.minimum(pending / np.maximum(num_pending, 1.0), room) * ~(is_working | (num_decoding > 0.0))
    guess_s = 0.5 * (step_s * ((num_decoding > 0.0) | (first > 0.0)) + s_per_token * first)
    num_left = np.where(is_in_step, queued, num_left)
    end_s = np.where(is_in_step, 0.0, np.where(num_left > 0.0, num_begun * full_s, work_s)) - age_s
    remaining_s = np.where(is_working, end_s, guess_s)
    ahead = pending - first + num_left * is_working
    num_full = np.floor(ahead / room)
    begin_s, num_shared = remaining_s + num_full * full_s, ahead - num_full * room
    return _Queues(step_s, s_per_token, room, full_s, begin_s, num_shared, remaining_s, ahead, num_decoding, silence_s)


def _starts(workers: WorkerColumns, queues: _Queues, need: _Need) -> tuple[Floats, Floats, Floats]:
    """Returns `queue_s`, `shared_s` and `s_per_token` of a request of this size."""
    num = len(workers)
    begin_s, free_s = queues.begin_s, _place_waits_s(workers)
    is_sized = workers.kv_blocks_total[:num] > 0.0
    used = workers.kv_blocks_used[:num] + workers.kv_blocks_coming[:num] + workers.pending_blocks[:num]
    lacking = np.maximum(need.num_blocks + used - workers.kv_blocks_total[:num], 0.0) * is_sized
    if lacking.any():
        residence_s = workers.residence_s[:num]
        blocks_per_s = workers.kv_blocks_used[:num] / np.maximum(residence_s, 1e-12) * (residence_s > 0.0)
        is_freed = blocks_per_s > 0.0
        free_s = np.maximum(free_s, lacking / np.where(is_freed, blocks_per_s, 1.0) * is_freed)
        # A worker without a rate makes room by giving up blocks that it must compute again.
        num_given_up = np.minimum(lacking, need.num_blocks) * workers.block_size[:num]
        begin_s = begin_s + queues.seconds(num_given_up) * ~is_freed
    # What has landed for others by then fills the step that computes the last token ahead of the first medium.
    num_first = need.num_first + queues.num_shared
    num_before = np.maximum(queues.num_before_last(num_first), 0.0)
    due_s, tokens = _awaited(workers, need.now)
    num_landed = (tokens * (due_s <= np.maximum(begin_s, free_s) + num_before * queues.full_s)).sum(axis=0)
    if queues.silence_s is not None:
        num_landed = num_landed * (queues.silence_s == 0.0)
    num_beside = np.minimum(num_landed, queues.room - (num_first - num_before * queues.room))
    own_steps = queues.num_before_last(need.num_tokens)
    num_more = queues.num_before_last(queues.num_shared + need.num_tokens) - own_steps
    shared_s = queues.s_per_token * (queues.num_shared + num_beside) + queues.step_s * num_more
    queue_s = np.maximum(begin_s, free_s)
    # If the request waits for another resource, the worker computes the work ahead meanwhile.
    shared_s = np.maximum(begin_s + shared_s - queue_s, 0.0)
    if queues.silence_s is not None:
        queue_s = queue_s + queues.silence_s
    s_per_token = queues.s_per_token + own_steps * queues.step_s / np.maximum(need.weighted_tokens, 1.0)
    return queue_s, shared_s, s_per_token


def _place_waits_s(workers: WorkerColumns) -> Floats:
    """Returns the seconds until a new sequence gets a place. When all places of a step are taken, they become free in
    order, at the pace at which sequences end."""
    num = len(workers)
    most = workers.max_sequences[:num]
    num_over = workers.num_there[:num] + workers.num_pending[:num] + 1.0 - most
    is_full = (most > 0.0) & (num_over > 0.0)
    found: Floats = workers.residence_s[:num] * num_over / np.maximum(most, 1.0) * is_full
    return found
