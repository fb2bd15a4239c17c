"""Decides which items an encoder accepts, and in which order the accepted ones are decoded.

`refusal` and `check_budget` turn items away before any work is spent on them: items that this encoder can never encode,
and calls that would exceed the budget of the queue. `DecodeLine` orders what was accepted: which item is first, which
item fits next to the items that are already decoded, and which decoded item gives way. Both answer the same question,
whether there is room for an item, once for the whole queue and once for the items that lie decoded. A *job* is one item
on its way through the encoder.

A worker that takes no features cannot hold up other workers here. It has a limited share of the room. While its units
cannot be encoded, only one of its items is decoded ahead. An item that finds no room for long, and that is within the
share of its own worker, gets the room of items that are decoded for workers whose share of the arena is used up; those
are decoded again later.

The module is pure, and callers pass the time in. It knows nothing of processes, files, messages or the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import NamedTuple

from encoder_pool.planning.batcher import split_cost
from encoder_pool.planning.call_queue import FirstRefused, is_within_share
from encoder_pool.planning.encode_job import DecodeRoom, EncodeJob, FeatureSpec, Phase
from encoder_pool.planning.encode_jobs import EncodeJobs
from fabric.contracts import (
    InvalidMedia,
    MediaItem,
    MemberId,
    MmHash,
    Overloaded,
    ProtocolError,
    UnitKey,
    UnitTooLarge,
    UnsupportedModality,
    WeftError,
    WorkerBackedUp,
)

# ------------------------------------------------------------ before an item is accepted


def _never(worker_id: MemberId) -> bool:
    return False


def refusal(
    item: MediaItem, modalities: Sequence[str], spec: FeatureSpec, arena_bytes: int, max_decode_bytes: int
) -> WeftError | None:
    """Returns an error if this encoder can never encode the item, and None if it can. `max_decode_bytes` is the memory
    that all items together may take while they are decoded."""
    if item.modality not in modalities:
        known = ", ".join(modalities)
        return UnsupportedModality(f"this encoder does not encode {item.modality}; it encodes {known}")
    if not item.unit_tokens or min(item.unit_tokens) < 1 or item.cost < 1:
        return ProtocolError(f"every unit of item {item.index} must have tokens, and the item must have a cost")
    nbytes = spec.nbytes(max(item.unit_tokens), item.num_levels)
    if nbytes > arena_bytes:
        return UnitTooLarge(f"a feature takes {nbytes} bytes, but the encoder's arena has only {arena_bytes}")
    if item.decode_bytes > max_decode_bytes:
        message = f"decoding the medium takes {item.decode_bytes} bytes of memory, but all media together have only "
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
        message = (
            f"{queued_cost} patches wait at this encoder, and {new_cost} more exceed its limit of {max_queue_cost}"
        )
        raise Overloaded(message, retry_after_s=max(0.1, jobs.queued_s))
    held_cost = jobs.queued_cost_of(sharing_worker_id) if sharing_worker_id is not None else 0
    if not is_within_share(held_cost, new_cost, max_queue_cost - queued_cost):
        message = (
            f"{held_cost} patches of {sharing_worker_id} wait at this encoder, and {new_cost} more exceed its share"
        )
        raise WorkerBackedUp(message)


# ------------------------------------------------------------ accepted items

IsBlocked = Callable[[MemberId], bool]
"""Returns whether a worker's decoded units can't be encoded now because its share of the arena is used up."""


class _Taken(NamedTuple):
    """A `_Taken` sums what decoded items take, and what items that are being decoded take."""

    num_items: int
    cost: float
    nbytes: int


class DecodeLine:
    """A `DecodeLine` is the queue of items to decode; it belongs to one encoder's event loop."""

    def __init__(
        self,
        jobs: EncodeJobs,
        room: DecodeRoom,
        being_decoded: Collection[EncodeJob] = (),
        passed_s: float = 0.0,
        is_blocked: IsBlocked = lambda worker_id: False,
    ) -> None:
        """`being_decoded` is a live view of the jobs that the decoder works on; it includes jobs that have ended
        while their decoding goes on. `passed_s` is the number of seconds for which all others may pass an item without
        room."""
        self._jobs = jobs
        self._room = room
        self._being_decoded = being_decoded
        self._is_blocked = is_blocked
        self._refused: FirstRefused[tuple[EncodeJob, MemberId]] = FirstRefused(passed_s)
        self._blocked: FirstRefused[MemberId] = FirstRefused(passed_s)
        """Holds the worker of the refused item while that worker is blocked."""
        self._passed: set[EncodeJob] = set()
        """Holds the jobs whose decoding began since the refused item was due."""
        self._gave_way: set[MmHash] = set()
        """Holds the items that were put back to make room for the refused item; they do not begin again before it."""

    def next(self, now_s: float, *, has_shares: bool = False) -> EncodeJob | None:
        """Returns the first job in order that has room, for the caller to begin. Long items leave one decoder, and
        some of the room, to short ones. With `has_shares`, each worker has a limited share."""
        self._forget_gone(now_s, has_shares=has_shares)
        taken = self._taken()
        if self._first is not None and taken.num_items >= self._room.max_items:
            return None  # This is the usual case while forward passes are the bottleneck.
        is_due = self._refused.is_due(now_s)
        may_be_long = self._jobs.totals.num_long_decoding < max(1, self._room.max_long_items)
        is_blocked = cache(self._is_blocked) if has_shares else _never

        def may_have(worker_id: MemberId, job: EncodeJob) -> bool:
            return not has_shares or self._is_within_share(worker_id, job, is_blocked(worker_id))

        first, can_go_on = self._first, self._blocked.thing is None
        if first and can_go_on and (may_be_long or not first.is_long) and self._has_room(taken, first):
            self._forget_first()
            return first
        for worker_id, job in self._jobs.to_decode(may_have, may_be_long=may_be_long):
            if job is first or job.item.mm_hash in self._gave_way:
                continue
            if not self._has_room(taken, job):
                if not is_blocked(worker_id):
                    self._refused.refuse((job, worker_id), now_s)
                if taken.num_items >= self._room.max_items:
                    return None
            elif not is_due or self._leaves_room(job):
                if is_due:
                    self._passed = {one for one in self._passed if self._counts(one)} | {job}
                return job
        return None

    def in_the_way(self, now_s: float) -> EncodeJob | None:
        """Returns a job that the caller is to put back into the queue to make room for the item that is due. Returns
        None if no item is due, or if putting jobs back would not make enough room."""
        if not self._refused.is_due(now_s):
            return None
        self._forget_gone(now_s, has_shares=True)
        first = self._first
        if first is None or self._blocked.thing is not None:
            return None
        ending_bytes = sum(one.item.decode_bytes for one in self._being_decoded if not self._jobs.is_live(one))
        taken = self._taken()
        taken = taken._replace(nbytes=taken.nbytes - ending_bytes)
        if self._has_room(taken, first):
            return None
        # Only a job that is being decoded can give memory back.
        has_memory = taken.nbytes + first.item.decode_bytes <= self._room.max_decode_bytes
        blocked = self._jobs.blocked(self._is_blocked)
        helpful = [job for job in blocked if has_memory or job in self._being_decoded]
        for job in blocked:
            nbytes = job.item.decode_bytes if job in self._being_decoded else 0
            cost = max(0.0, taken.cost - self._jobs.in_patches(job))
            taken = _Taken(taken.num_items - 1, cost, taken.nbytes - nbytes)
        if not helpful or not self._has_room(taken, first):
            return None
        self._gave_way.add(helpful[0].item.mm_hash)
        return helpful[0]

    @property
    def _first(self) -> EncodeJob | None:
        """Returns the job that room is kept for, if any."""
        return self._refused.thing[0] if self._refused.thing is not None else None

    def _forget_gone(self, now_s: float, *, has_shares: bool) -> None:
        """Stops keeping room for a job that no longer waits, or that could not be encoded anyway because its worker
        stays blocked. A worker of a busy encoder is often blocked for a moment, so a short block does not count."""
        if self._refused.thing is None:
            return
        first, worker_id = self._refused.thing
        if has_shares and self._is_blocked(worker_id):
            self._blocked.refuse(worker_id, now_s)
        else:
            self._blocked.forget()
        if first.phase is not Phase.WAITING or self._blocked.is_due(now_s):
            self._forget_first()

    def _forget_first(self) -> None:
        self._refused.forget()
        self._blocked.forget()
        self._passed.clear()
        self._gave_way.clear()

    def _is_within_share(self, worker_id: MemberId, job: EncodeJob, is_blocked: bool) -> bool:
        """Returns whether a worker may have one more item decoded."""
        num_held, held_cost = self._jobs.held_by(worker_id)
        if is_blocked:
            return num_held == 0
        free_items = self._room.max_items - self._jobs.totals.num_prepared
        free_cost = self._room.max_cost - self._jobs.decoded_cost
        is_cost_shared = is_within_share(held_cost, self._jobs.in_patches(job), free_cost)
        return is_cost_shared and is_within_share(num_held, 1, free_items)

    def _taken(self) -> _Taken:
        nbytes = sum(job.item.decode_bytes for job in self._being_decoded)
        return _Taken(self._jobs.totals.num_prepared, self._jobs.decoded_cost, nbytes)

    def _leaves_room(self, job: EncodeJob) -> bool:
        """Returns whether the job that is due will still fit next to `job`, and next to those that passed it
        before, once everything older has gone."""
        first = self._first
        assert first is not None
        passed = [one for one in self._passed if self._lies_here(one)] + [job]
        cost = sum(map(self._jobs.in_patches, passed))
        nbytes = sum(one.item.decode_bytes for one in self._passed if one in self._being_decoded)
        return self._has_room(_Taken(len(passed), cost, nbytes + job.item.decode_bytes), first)

    def _lies_here(self, job: EncodeJob) -> bool:
        return job.is_prepared and self._jobs.is_live(job)

    def _counts(self, job: EncodeJob) -> bool:
        """Returns whether a job that has begun still takes room."""
        return job in self._being_decoded or self._lies_here(job)

    def _has_room(self, taken: _Taken, job: EncodeJob) -> bool:
        """Returns whether a job can be decoded next to what others take. A job alone always fits, because
        `refusal` turns away items that do not."""
        room = self._room
        max_cost = room.max_long_cost if job.is_long else room.max_cost
        return (
            taken.num_items < room.max_items
            and (not taken.cost or taken.cost + self._jobs.in_patches(job) <= max_cost)
            and taken.nbytes + job.item.decode_bytes <= room.max_decode_bytes
        )
