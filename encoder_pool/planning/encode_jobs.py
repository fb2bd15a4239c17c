"""Merges requests for the same medium, so that it is decoded and encoded once while any of them wants it.

A *waiter* is one request's wish for the units of one item, and a *job* makes the units that its waiters miss. A
job lives while it has waiters, or units in the forward pass (which can't be stopped). When the last waiter
leaves, its units leave the queue. The module counts, ranks and says which requests wait for which units; it knows
nothing of memory, processes or messages.

The order of service is an order of calls. Each worker and each stage has a queue of ranked calls, and a change of a
call corrects its rank in these queues. So the time of an event does not depend on how many calls wait.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, islice, takewhile

from encoder_pool.planning.batcher import InputSizes, QueuedSound, QueuedUnit, place_in_line, split_cost
from encoder_pool.planning.call_queue import CallQueue
from encoder_pool.planning.encode_job import (
    LONG_DECODING,
    SHORT_DECODING,
    SOUND,
    EncodeJob,
    EncodeJobTotals,
    EncodeWaiter,
    HeldForWorker,
    JobStage,
    Phase,
    WaitingCall,
    queued_calls,
)
from fabric.contracts import CallTurn, MemberId, MmHash, QueueState, Rank, UnitKey, queue_profile
from modalities.family import EncoderInput, Waveform

ToSeconds = Callable[[str, int], float]
"""Maps (modality, cost) to the seconds that this adds to a forward pass, in proportion to the cost."""
PassesS = Callable[[str, int, int], float]
"""Maps (modality, cost, number of units) to the seconds of the forward passes over these units."""
IsFreeToGo = Callable[[QueuedUnit], bool]
MayHave = Callable[[MemberId, EncodeJob], bool]
"""Returns whether a worker may have a job decoded."""
LOOK_AHEAD = 4
"""For each worker the scheduler examines this many long and this many short items that wait to be decoded, and takes
one that has room."""
PRICED_COST = 2**20
"""The price of one unit of cost is the predicted time of this cost, divided by it."""
PRICE_TOLERANCE = 0.1
"""Ranks are computed from new prices when a price has changed by more than this share."""
MAX_REPRICED = 8
"""For each forward pass since the last repricing, this many calls may be ranked with new prices; this spreads the cost
of repricing."""


class EncodeJobs:
    """Holds all jobs of one encoder, at most one per `mm_hash`. It is not thread-safe."""

    def __init__(self, patience: float, to_seconds: ToSeconds, now: Callable[[], float] = lambda: 0.0) -> None:
        """`now` returns the time, by which the waits of jobs are measured."""
        self._patience = patience
        self._now = now
        self._to_seconds = to_seconds
        self._hash_to_job: dict[MmHash, EncodeJob] = {}
        self._call_to_waiting: dict[int, WaitingCall] = {}
        self._stage_to_queues: dict[JobStage, dict[MemberId, CallQueue]] = {}
        """Holds the queues of calls of each stage, by the worker that receives their features."""
        self._modality_to_price: dict[str, float] = {}
        """Holds the seconds per unit of cost that the present ranks use."""
        self._num_forwards = 0
        """Counts the forward passes since all ranks were last computed from new prices."""
        self._sizes = InputSizes()
        self._prepared: dict[EncodeJob, None] = {}
        self._worker_to_held: defaultdict[MemberId, HeldForWorker] = defaultdict(HeldForWorker)
        self.totals = EncodeJobTotals()

    def __iter__(self) -> Iterator[EncodeJob]:
        return iter(self._hash_to_job.values())

    def find(self, mm_hash: MmHash) -> EncodeJob | None:
        return self._hash_to_job.get(mm_hash)

    @property
    def decoded_cost(self) -> float:
        """Returns the memory of items that are decoded or are being decoded, as a number of patches that take the same
        memory."""
        return sum(self._sizes.in_patches(*one) for one in self.totals.modality_to_decoded_cost.items())

    @property
    def queued_s(self) -> float:
        """Returns the seconds that all accepted and not yet encoded work adds to forward passes."""
        return sum(self._to_seconds(modality, cost) for modality, cost in self.totals.modality_to_cost.items())

    def queue_state(self, running: Iterable[UnitKey], passes_s: PassesS, now_s: float) -> QueueState:
        """Returns the queue in front of the device for the predictions of routers; `running` lists the units in the
        forward pass. It walks all calls."""
        calls = self._call_to_waiting
        call_to_running: dict[int, Counter[str]] = {}
        for unit in running:
            job = self._hash_to_job[unit.mm_hash]
            for waiter in self.waiters_missing(unit):
                of_call = call_to_running.setdefault(waiter.call, Counter())
                of_call[job.item.work] += job.unit_to_cost[unit.unit]
                of_call[""] += 1
        columns = queued_calls(calls, call_to_running, passes_s)
        # Work that several calls wait for is done once, so it counts in parts with each of them.
        counted = sum(sum(waiting.modality_to_cost.values()) for waiting in calls.values())
        share = min(1.0, self.totals.queued_cost / counted) if counted else 1.0
        return queue_profile(columns._replace(seconds=columns.seconds * share), now_s, self._patience)

    def join(self, waiter: EncodeWaiter) -> EncodeJob:
        """Adds a waiter to the item's job, and starts a job if there is none. A unit that the job can no
        longer make stays in `waiter.missing`; the waiter joins again when this job has ended."""
        item = waiter.item
        job = self._hash_to_job.get(item.mm_hash)
        is_new = job is None
        if job is None:
            places = tuple(rows / item.num_tokens for rows in accumulate(item.unit_tokens, initial=0))
            job = self._hash_to_job[item.mm_hash] = EncodeJob(item, waiter.data, places=places)
            job.waits_at_s = self._now()
            self._want_missing(job, waiter)
            self.totals.count(job, 1)
        elif job.phase is not Phase.ENCODING:
            with self._changing(job):
                self._want_missing(job, waiter)
        # The units are wanted before, so that the waiter's call is counted and ranked once.
        self._add_waiter(job, waiter, is_new=is_new)
        return job

    def _want_missing(self, job: EncodeJob, waiter: EncodeWaiter) -> None:
        """Adds the units that a waiter misses and that are still to be decoded."""
        costs = split_cost(waiter.item.cost, waiter.item.unit_tokens)
        for unit in waiter.missing:
            if unit >= job.num_decoded:
                job.want(unit, costs[unit])

    def has_joined(self, waiter: EncodeWaiter) -> bool:
        """Returns whether the waiter has joined a job and is still one of its waiters."""
        job = self._hash_to_job.get(waiter.item.mm_hash)
        return job is not None and waiter in job.waiters

    def note_waits(self, waiter: EncodeWaiter) -> None:
        """Brings `waiter.waits` up to date."""
        if (job := self._hash_to_job.get(waiter.item.mm_hash)) is not None and waiter in job.waiters:
            self._note_waits(job, waiter)

    def leave(self, waiter: EncodeWaiter) -> EncodeJob | None:
        """Removes a waiter; does nothing if it has left already. Units that no other waiter misses leave the queue
        at once, unless they are in the forward pass. Returns the job if that ended it. The caller can then cancel
        its decoding, and waiters that it still has (they miss units that it never made) must join again."""
        job = self._hash_to_job.get(waiter.item.mm_hash)
        if job is None or waiter not in job.waiters:
            return None
        self._take_waiter(job, waiter)
        with self._changing(job):
            if not job.waiters:
                job.phase = Phase.ENCODING  # a waiter that joins now starts another job
            for unit in waiter.missing & job.unit_to_cost.keys() - job.forwarding:
                if not any(unit in one.missing for one in job.waiters):
                    job.drop(unit)
            has_ended = self._end_if_done(job)
        return job if has_ended else None

    def take_waiters(self, job: EncodeJob) -> list[EncodeWaiter]:
        """Removes and returns the waiters of a job that has ended."""
        waiters = list(job.waiters)
        for waiter in waiters:
            self._take_waiter(job, waiter)
        return waiters

    # ------------------------------------------------------------ decoding

    def to_decode(self, may_have: MayHave, *, may_be_long: bool) -> Iterator[tuple[MemberId, EncodeJob]]:
        """Yields jobs that wait to be decoded, in order, each with the worker whose call gives it its place. If a
        worker may not have a job, that worker's later jobs of the same kind (long or short) wait too, and other
        workers' jobs do not. Each worker contributes only a few jobs. The caller must finish the iteration before
        the jobs change."""
        stages = (SHORT_DECODING, LONG_DECODING) if may_be_long else (SHORT_DECODING,)
        lines = [
            islice(self._waiting_for(stage, worker_id), LOOK_AHEAD)
            for stage in stages
            for worker_id in self._stage_to_queues.get(stage, ())
        ]
        seen: set[EncodeJob] = set()
        held_up: set[tuple[MemberId, bool]] = set()
        for _, worker_id, job in heapq.merge(*lines, key=lambda one: one[0]):
            if job in seen or (worker_id, job.is_long) in held_up:
                continue
            if may_have(worker_id, job):
                seen.add(job)
                yield worker_id, job
            else:
                held_up.add((worker_id, job.is_long))

    def _waiting_for(self, stage: JobStage, worker_id: MemberId) -> Iterator[tuple[Rank, MemberId, EncodeJob]]:
        return ((rank, worker_id, job) for rank, job in self._jobs_of(stage, worker_id))

    def in_patches(self, job: EncodeJob) -> float:
        """Returns the memory that a job takes, or will take, while it is decoded, as a number of patches that take
        the same memory."""
        return self._sizes.in_patches(job.item.work, job.remaining_cost)

    def held_by(self, worker_id: MemberId) -> tuple[int, float]:
        """Returns the number of items that are decoded for a worker, and their memory as a number of patches."""
        held = self._worker_to_held.get(worker_id)
        if held is None:
            return 0, 0.0
        return held.num_decoded, sum(self._sizes.in_patches(*one) for one in held.modality_to_decoded_cost.items())

    def queued_cost_of(self, worker_id: MemberId) -> int:
        """Returns the patches that are accepted for a worker and not yet encoded; an item that several of its calls
        want counts once for each."""
        held = self._worker_to_held.get(worker_id)
        return held.queued_cost if held else 0

    def decode_started(self, job: EncodeJob) -> None:
        assert job.phase is Phase.WAITING
        with self._changing(job):
            job.phase = Phase.DECODING

    def decoded_part(self, job: EncodeJob, inputs: list[EncoderInput]) -> bool:
        """Stores the next decoded units of a job that are still wanted. Returns False if no request waits for them,
        because the job has ended or its decoding was given up."""
        if job.phase not in (Phase.DECODING, Phase.DECODED) or not self.is_live(job):
            return False
        with self._changing(job):
            self._take_inputs(job, inputs)
        return True

    def decoded(self, job: EncodeJob, inputs: list[EncoderInput]) -> None:
        """Stores the item's last decoded units and drops the bytes of its file."""
        assert job.phase in (Phase.DECODING, Phase.DECODED)
        assert self.is_live(job)
        with self._changing(job):
            self._take_inputs(job, inputs)
            job.phase = Phase.ENCODING
            job.data = b""

    def decoded_sound(self, job: EncodeJob, waveform: Waveform) -> None:
        """Stores a decoded sound from which the device has yet to make units, and drops the bytes of its file."""
        assert job.phase is Phase.DECODING
        assert self.is_live(job)
        self._sizes.observe(job.item.work, job.item.cost, waveform.samples.nbytes)
        with self._changing(job):
            job.phase, job.waveform, job.data = Phase.DECODED, waveform, b""

    def queued_sounds(self) -> Iterator[QueuedSound]:
        """Yields decoded sounds that wait for the device to make units of them, in order of rank. The caller must
        finish the iteration before the jobs change."""
        for rank, job in self._in_line(SOUND):
            yield QueuedSound(rank, job.item.mm_hash, job.item.cost)

    def sound_started(self, mm_hash: MmHash) -> tuple[EncodeJob, Waveform]:
        """Takes a sound out of the queue. The caller passes its units to `decoded` if the job is still live then."""
        job = self._hash_to_job[mm_hash]
        with self._changing(job):
            waveform, job.waveform = job.waveform, None
        assert waveform is not None
        return job, waveform

    def blocked(self, is_blocked: Callable[[MemberId], bool]) -> list[EncodeJob]:
        """Returns jobs that are prepared and wanted only by calls of blocked workers, so that none of their units
        can go on. The job with the worst rank comes first. Jobs with a unit in the forward pass are left out."""
        found = [
            job
            for job in self._prepared
            if job.waiters and not job.forwarding and all(map(is_blocked, self._workers_of(job)))
        ]
        return sorted(found, key=self._rank_of_job, reverse=True)

    def _workers_of(self, job: EncodeJob) -> set[MemberId]:
        return {waiter.destination.worker_id for waiter in job.waiters}

    def _rank_of_job(self, job: EncodeJob) -> Rank:
        return min(self._call_to_waiting[waiter.call].rank for waiter in job.waiters)

    # ------------------------------------------------------------ forwards

    def queued_units(
        self, has_room: IsFreeToGo = lambda unit: True, is_within_share: IsFreeToGo = lambda unit: True
    ) -> Iterator[QueuedUnit]:
        """Yields decoded units that wait for their forward pass, in order: the first of all, then others of its
        modality. A unit without room is left out. A unit beyond its worker's share makes that worker's later units wait
        too, and other workers' units do not. The caller must finish the iteration before the jobs change."""
        modality_to_first: dict[str, QueuedUnit] = {}
        for stage in self._stage_to_queues:
            if stage.name == "unit" and (first := next(self._units_in_line(stage, has_room, is_within_share), None)):
                modality_to_first[stage.modality] = first
        if modality_to_first:
            modality = min(modality_to_first, key=lambda one: place_in_line(modality_to_first[one]))
            yield from self._units_in_line(JobStage("unit", modality), has_room, is_within_share)

    def first_unit(self, worker_id: MemberId) -> Iterator[QueuedUnit]:
        """Yields the next decoded unit that waits for a worker, for each modality that has one."""
        for stage, queues in self._stage_to_queues.items():
            if stage.name == "unit" and worker_id in queues:
                yield from islice(self._units_of(stage, worker_id), 1)

    def served(self, units: Iterable[UnitKey], seconds: float, now_s: float) -> None:
        """Records that a forward pass over `units` ended, which counts as service for every call that waits for one of
        them. The caller must call it before `forward_ended` of these units."""
        turn_to_worth_s: dict[CallTurn, float] = {}
        for unit in units:
            job = self._hash_to_job[unit.mm_hash]
            worth_s = self._to_seconds(job.item.work, job.unit_to_cost[unit.unit])
            for turn in {one.turn for one in self.waiters_missing(unit)}:
                turn_to_worth_s[turn] = turn_to_worth_s.get(turn, 0.0) + worth_s
        for turn, worth_s in turn_to_worth_s.items():
            turn.served(seconds, worth_s, now_s, self._patience)
            self._rank(self._call_to_waiting[turn.call])
        self._num_forwards += 1
        self._reprice()

    def is_queued(self, unit: UnitKey) -> bool:
        """Returns whether the unit is decoded and waits for its forward pass."""
        job = self._hash_to_job.get(unit.mm_hash)
        return job is not None and unit.unit in job.unit_to_input

    def forward_started(self, unit: UnitKey) -> EncoderInput:
        """Takes a unit's input out of the queue for its forward pass."""
        job = self._hash_to_job[unit.mm_hash]
        with self._changing(job):
            job.forwarding.add(unit.unit)
            return job.unit_to_input.pop(unit.unit)

    def waiters_missing(self, unit: UnitKey) -> list[EncodeWaiter]:
        """Returns the waiters that wait for a unit, in order of arrival."""
        return [one for one in self._hash_to_job[unit.mm_hash].waiters if unit.unit in one.missing]

    def forward_ended(self, unit: UnitKey) -> EncodeJob | None:
        """Records that the unit was made or failed, after the caller has informed the waiters that missed it. Returns
        the job if that ended it."""
        job = self._hash_to_job[unit.mm_hash]
        with self._changing(job):
            job.forwarding.remove(unit.unit)
            job.drop(unit.unit)
            has_ended = self._end_if_done(job)
        return job if has_ended else None

    def end(self, job: EncodeJob) -> list[EncodeWaiter]:
        """Ends a job that could not be decoded, except for its units in the forward pass; returns the waiters it
        had."""
        waiters = self.take_waiters(job)
        with self._changing(job):
            job.phase, job.is_broken = Phase.ENCODING, True
            job.waveform = None
            for unit in job.unit_to_cost.keys() - job.forwarding:
                job.drop(unit)
            self._end_if_done(job)
        return waiters

    def is_live(self, job: EncodeJob) -> bool:
        return self._hash_to_job.get(job.item.mm_hash) is job

    def check_invariants(self) -> None:
        """Asserts that jobs, sums, ranks and queues are consistent. Walks everything."""
        totals, call_to_cost, call_to_units = EncodeJobTotals(), dict[int, Counter[str]](), dict[int, Counter[str]]()
        worker_to_held: defaultdict[MemberId, HeldForWorker] = defaultdict(HeldForWorker)
        queued: set[tuple[JobStage, int]] = set()
        for job in self:
            assert job.unit_to_cost, "a job without units to make must end"
            assert job.waiters or job.forwarding, "a job must have waiters, or units in a forward pass"
            assert job.forwarding <= job.unit_to_cost.keys()
            assert not job.forwarding & job.unit_to_input.keys()
            assert job.unit_to_input.keys() <= job.unit_to_cost.keys()
            assert list(job.unit_to_input) == sorted(job.unit_to_input)
            assert job.remaining_cost == sum(job.unit_to_cost.values())
            assert job.waveform is None or job.phase is Phase.DECODED
            if job.phase is Phase.ENCODING:
                assert job.forwarding | job.unit_to_input.keys() == job.unit_to_cost.keys()
            totals.count(job, 1)
            for one in job.waiters:
                call_to_cost.setdefault(one.call, Counter())[job.item.work] += job.remaining_cost
                call_to_units.setdefault(one.call, Counter())[job.item.work] += len(job.unit_to_cost)
                held = worker_to_held[one.destination.worker_id]
                held.queued_cost += job.remaining_cost
                if job.lies_decoded:
                    held.num_decoded += 1
                    held.modality_to_decoded_cost[job.item.work] += job.remaining_cost
                if stage := job.stage:
                    assert self._call_to_waiting[one.call].stage_to_jobs[stage][job] is one
                    queued.add((stage, one.call))
        assert totals == self.totals
        assert self._prepared.keys() == {job for job in self if job.is_prepared}
        assert worker_to_held == self._worker_to_held
        assert call_to_cost.keys() == self._call_to_waiting.keys()
        for call, waiting in self._call_to_waiting.items():
            assert (waiting.modality_to_cost, waiting.modality_to_units) == (call_to_cost[call], call_to_units[call])
            assert waiting.rank == self._rank_of(waiting)
        for stage, queues in self._stage_to_queues.items():
            for worker_id, queue in queues.items():
                ranks = [self._call_to_waiting[call].rank for call in queue.in_order()]
                assert ranks == sorted(ranks)
                for call in queue.in_order():
                    assert self._call_to_waiting[call].worker_id == worker_id
                    queued.remove((stage, call))
        assert not queued, f"these calls are in no queue: {queued}"

    # ------------------------------------------------------------ ranks

    @contextmanager
    def _changing(self, job: EncodeJob) -> Iterator[None]:
        """Surrounds every change of a job and updates the sums, and what the calls of its waiters wait for."""
        job.note_waits(self._now())
        stage, cost, was_decoded = job.stage, job.remaining_cost, job.lies_decoded
        num_units = len(job.unit_to_cost)
        self.totals.count(job, -1)
        yield
        self._prepared.pop(job, None)
        if self.is_live(job):
            self.totals.count(job, 1)
            if job.is_prepared:
                self._prepared[job] = None
        new_stage, more_cost, more_units = job.stage, job.remaining_cost - cost, len(job.unit_to_cost) - num_units
        if new_stage == stage and not more_units:
            return
        for waiter in job.waiters:
            waiting = self._call_to_waiting[waiter.call]
            self._hold(waiting.worker_id, job, cost, -1, is_decoded=was_decoded)
            self._hold(waiting.worker_id, job, job.remaining_cost, 1, is_decoded=job.lies_decoded)
            if more_units:
                waiting.modality_to_cost[job.item.work] += more_cost
                waiting.modality_to_units[job.item.work] += more_units
                self._rank(waiting)
            if new_stage != stage:
                self._leave_stage(waiting, job, stage)
                self._enter_stage(waiting, job, waiter, new_stage)

    def _add_waiter(self, job: EncodeJob, waiter: EncodeWaiter, *, is_new: bool) -> None:
        job.note_waits(self._now())
        waiter.joined_at = job.waits
        waiter.is_shared = waiter.is_shared or not is_new
        job.waiters[waiter] = None
        waiting = self._call_to_waiting.get(waiter.call)
        if waiting is None:
            waiting = self._call_to_waiting[waiter.call] = WaitingCall(waiter.turn, waiter.destination.worker_id)
        waiting.num_waiters += 1
        waiting.modality_to_cost[job.item.work] += job.remaining_cost
        waiting.modality_to_units[job.item.work] += len(job.unit_to_cost)
        self._hold(waiting.worker_id, job, job.remaining_cost, 1, is_decoded=job.lies_decoded)
        self._rank(waiting)
        self._enter_stage(waiting, job, waiter, job.stage)

    def _take_waiter(self, job: EncodeJob, waiter: EncodeWaiter) -> None:
        self._note_waits(job, waiter)
        del job.waiters[waiter]
        waiting = self._call_to_waiting[waiter.call]
        self._leave_stage(waiting, job, job.stage)
        self._hold(waiting.worker_id, job, job.remaining_cost, -1, is_decoded=job.lies_decoded)
        waiting.num_waiters -= 1
        waiting.modality_to_cost[job.item.work] -= job.remaining_cost
        waiting.modality_to_units[job.item.work] -= len(job.unit_to_cost)
        if waiting.num_waiters:
            self._rank(waiting)
        else:
            del self._call_to_waiting[waiter.call]

    def _note_waits(self, job: EncodeJob, waiter: EncodeWaiter) -> None:
        job.note_waits(self._now())
        waiter.waits = waiter.waits.plus(job.waits.after(waiter.joined_at))
        waiter.joined_at = job.waits

    def _hold(self, worker_id: MemberId, job: EncodeJob, cost: int, sign: int, *, is_decoded: bool) -> None:
        """Adds (`sign` 1) or removes (`sign` -1) a job of that cost that a call of a worker waits for."""
        held = self._worker_to_held[worker_id]
        held.queued_cost += sign * cost
        if is_decoded:
            held.num_decoded += sign
            held.modality_to_decoded_cost[job.item.work] += sign * cost
        if not held.queued_cost:
            del self._worker_to_held[worker_id]

    def _enter_stage(self, waiting: WaitingCall, job: EncodeJob, waiter: EncodeWaiter, stage: JobStage | None) -> None:
        if stage is not None:
            waiting.stage_to_jobs.setdefault(stage, {})[job] = waiter
            queues = self._stage_to_queues.setdefault(stage, {})
            queues.setdefault(waiting.worker_id, CallQueue()).put(waiting.turn.call, waiting.rank)

    def _leave_stage(self, waiting: WaitingCall, job: EncodeJob, stage: JobStage | None) -> None:
        if stage is None:
            return
        jobs = waiting.stage_to_jobs[stage]
        del jobs[job]
        if jobs:
            return
        del waiting.stage_to_jobs[stage]
        queues = self._stage_to_queues[stage]
        queues[waiting.worker_id].drop(waiting.turn.call)
        if not queues[waiting.worker_id]:
            del queues[waiting.worker_id]

    def _rank(self, waiting: WaitingCall) -> None:
        """Ranks a call again, because what it waits for, the price of that, or the service that it has received has
        changed."""
        waiting.rank = self._rank_of(waiting)
        for stage in waiting.stage_to_jobs:
            self._stage_to_queues[stage][waiting.worker_id].put(waiting.turn.call, waiting.rank)

    def _rank_of(self, waiting: WaitingCall) -> Rank:
        """Returns the rank of a call; it counts all that the call waits for on this encoder."""
        waiting.remaining_s = sum(self._price(modality) * cost for modality, cost in waiting.modality_to_cost.items())
        return waiting.turn.rank(waiting.remaining_s, self._patience, 0)

    def _price(self, modality: str) -> float:
        if modality not in self._modality_to_price:
            self._modality_to_price[modality] = self._to_seconds(modality, PRICED_COST) / PRICED_COST
        return self._modality_to_price[modality]

    def _reprice(self) -> None:
        """Ranks every call again if a price has changed by more than the tolerance, but only as often as `MAX_REPRICED`
        allows."""
        if self._num_forwards * MAX_REPRICED < len(self._call_to_waiting):
            return
        for modality, price in self._modality_to_price.items():
            new_price = self._to_seconds(modality, PRICED_COST) / PRICED_COST
            if abs(new_price - price) > PRICE_TOLERANCE * max(new_price, price):
                break
        else:
            return
        self._num_forwards = 0
        self._modality_to_price.clear()
        for waiting in self._call_to_waiting.values():
            self._rank(waiting)

    # ------------------------------------------------------------ lines

    def _in_line(self, stage: JobStage) -> Iterator[tuple[Rank, EncodeJob]]:
        """Yields the jobs of a stage with their ranks; a job has the rank of the first of its waiters. A sound
        track has the rank of its video, so that their units take turns."""
        lines = [self._jobs_of(stage, worker_id) for worker_id in self._stage_to_queues.get(stage, ())]
        seen: set[EncodeJob] = set()
        for rank, job in heapq.merge(*lines, key=lambda one: one[0]):
            if job not in seen:
                seen.add(job)
                yield rank, job

    def _jobs_of(self, stage: JobStage, worker_id: MemberId) -> Iterator[tuple[Rank, EncodeJob]]:
        for call in self._stage_to_queues[stage][worker_id].in_order():
            waiting = self._call_to_waiting[call]
            ranked = [
                (_rank_of_item(waiting.rank, waiter), job) for job, waiter in waiting.stage_to_jobs[stage].items()
            ]
            yield from sorted(ranked, key=lambda one: one[0])

    def _units_in_line(
        self, stage: JobStage, has_room: IsFreeToGo, is_within_share: IsFreeToGo
    ) -> Iterator[QueuedUnit]:
        lines = [
            takewhile(is_within_share, filter(has_room, self._units_of(stage, worker_id)))
            for worker_id in self._stage_to_queues[stage]
        ]
        seen: set[UnitKey] = set()
        for unit in heapq.merge(*lines, key=place_in_line):
            if unit.key not in seen:
                seen.add(unit.key)
                yield unit

    def _units_of(self, stage: JobStage, worker_id: MemberId) -> Iterator[QueuedUnit]:
        for call in self._stage_to_queues[stage][worker_id].in_order():
            waiting = self._call_to_waiting[call]
            lines = [
                _units_of_job(job, _rank_of_item(waiting.rank, waiter), worker_id)
                for job, waiter in waiting.stage_to_jobs[stage].items()
            ]
            yield from heapq.merge(*lines, key=place_in_line)

    def _take_inputs(self, job: EncodeJob, inputs: list[EncoderInput]) -> None:
        for unit, one in enumerate(inputs, job.num_decoded):
            # In phase DECODED the size of the waveform stands, because it is larger than the units made from it.
            # Given features are no decoded inputs: they lie in memory from their arrival on.
            if job.phase is Phase.DECODING and one.features is None:
                self._sizes.observe(one.modality, one.num_patches, one.pixels.nbytes)
            if unit in job.unit_to_cost:
                job.unit_to_input[unit] = one
        job.num_decoded += len(inputs)

    def _end_if_done(self, job: EncodeJob) -> bool:
        if job.unit_to_cost:
            return False
        del self._hash_to_job[job.item.mm_hash]
        return True


def _rank_of_item(rank: Rank, waiter: EncodeWaiter) -> Rank:
    item = waiter.item
    return rank._replace(item_index=item.index if item.anchor < 0 else item.anchor)


def _units_of_job(job: EncodeJob, rank: Rank, worker_id: MemberId) -> Iterator[QueuedUnit]:
    item = job.item
    for unit in job.unit_to_input:
        place = (job.places[unit], item.index)
        cost, num_tokens = job.unit_to_cost[unit], item.unit_tokens[unit]
        yield QueuedUnit(rank, UnitKey(item.mm_hash, unit), item.work, cost, num_tokens, place, worker_id)
