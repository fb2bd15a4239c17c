"""Keeps the device busy: chooses the next forward pass, reserves room for it in the arena, and records its outcome.
Sounds from which the device makes units share the same queue.

The device runs one batch at a time, and a running batch can't be stopped. A *job* is one medium on its way through
the encoder; its units wait here after they are decoded. The device queue lives in the pipeline's event loop.
`BusyTime` measures how much of the time the device is busy. The module knows nothing of calls: the pipeline informs the
calls that wait for a unit or a sound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import chain
from math import inf

from encoder_pool.encoder_config import EncoderConfig
from encoder_pool.planning import (
    EncodeJob,
    EncodeJobs,
    FeatureSpec,
    FeatureTable,
    FirstRefused,
    Forward,
    ForwardCosts,
    ForwardResult,
    ForwardUnit,
    QueuedSound,
    QueuedUnit,
    SoundJob,
    SoundResult,
    StageCosts,
    choose_batch,
    choose_sounds,
)
from fabric.contracts import Clock, DeviceStats, MemberId, QueueState, UnitKey, UnitTooLarge, WeftError
from fabric.transport import SourceSlot
from modalities.family import EncoderInput

UnitEnded = Callable[[UnitKey, WeftError | None], None]
SoundEnded = Callable[[EncodeJob, list[EncoderInput] | WeftError, float, int], None]
"""Takes the job, its units or the error that prevented them, and the seconds and the cost of its batch."""


class DeviceQueue:
    """A `DeviceQueue` is the queue in front of one device. `spec` must be set before the first `start`. The device
    queue calls the two functions in `ended` with each unit that was made or failed, and with each sound whose units
    were made or failed."""

    def __init__(
        self,
        config: EncoderConfig,
        jobs: EncodeJobs,
        table: FeatureTable,
        forward: Forward,
        clock: Clock,
        ended: tuple[UnitEnded, SoundEnded],
    ) -> None:
        self._max_batch_cost = config.max_batch_cost
        self._refused: FirstRefused[QueuedUnit] = FirstRefused(config.passed_s)
        self._jobs = jobs
        self._table = table
        self._forward = forward
        self._clock = clock
        self._unit_ended, self._sound_ended = ended
        self._is_busy = False
        self._predicted_s = 0.0
        """Holds the predicted time of the batch on the device."""
        self.spec: FeatureSpec | None = None
        self.batch: list[QueuedUnit] = []
        """Holds the units that are in the forward pass now; it is empty when there is none."""
        self.batch_began_s = 0.0
        """Holds when the latest batch began, of units or of sounds."""
        self.costs = ForwardCosts()
        self.prepare_costs = StageCosts()
        """Holds the measured costs of making units of sounds on the device."""
        self.busy = BusyTime()
        self.stats = DeviceStats()
        self.preprocess_s = 0.0
        """Sums the time in which the device made units of sounds."""

    @property
    def forward_s(self) -> float:
        """Returns for how long the present batch has been on the device; returns 0 if there is none."""
        return self.busy.current_s(self._clock.now())

    @property
    def forward_left_s(self) -> float:
        """Returns the predicted time until the present batch ends; returns 0 if there is none or it is overdue."""
        return max(0.0, self._predicted_s - self.forward_s) if self._is_busy else 0.0

    def queue_state(self) -> QueueState:
        """Returns the queue behind the present batch, for the predictions of routers."""
        return self._jobs.queue_state((unit.key for unit in self.batch), self._passes_s, self._clock.now())

    def _passes_s(self, modality: str, cost: int, num_units: int) -> float:
        """Returns the predicted time of the device for units of one call, whether they are decoded or not."""
        prepare_s = self.prepare_costs.estimate(modality).seconds_per_cost * cost
        return prepare_s + self.costs.passes_s(modality, cost, num_units, self._max_batch_cost)

    def start(self, done: Callable[[], None]) -> None:
        """Starts a forward pass if the device is idle and a waiting unit has room, or starts the batch of sounds if
        that is next in order. Calls `done` after the batch has ended and all calls that waited for it were informed.

        Room is reserved in order of rank. A unit that would exceed its worker's share of the arena waits for leases of
        its worker to end, and others pass it. A unit for which there is no room in one piece waits for leases to end,
        and smaller units pass it. When it was passed for a while it claims a range, and later units must fit outside
        of that range.
        """
        refused_bytes: float = inf
        self._forget_gone()
        while not self._is_busy:
            sounds = choose_sounds(self._jobs.queued_sounds(), self._max_batch_cost)
            batch = self._choose(refused_bytes)
            is_sound_first = bool(sounds) and (not batch or sounds[0].rank < batch[0].rank)
            if batch and not is_sound_first:
                refused_bytes = self._take(batch, refused_bytes, done)
            elif sounds:
                self._submit_sounds(sounds, done)
            else:
                return

    def _submit_sounds(self, sounds: list[QueuedSound], done: Callable[[], None]) -> None:
        started = [self._jobs.sound_started(sound.mm_hash) for sound in sounds]
        jobs = [job for job, _ in started]
        self._begin(self.prepare_costs.seconds(jobs[0].item.modality, sum(sound.cost for sound in sounds)))
        loop = asyncio.get_running_loop()

        def hand_over(result: SoundResult) -> None:
            loop.call_soon_threadsafe(self._sound_batch_ended, jobs, result, done)

        self._forward.submit_sounds([SoundJob(waveform, job.item) for job, waveform in started], hand_over)

    def _sound_batch_ended(self, jobs: list[EncodeJob], result: SoundResult, done: Callable[[], None]) -> None:
        self._end()
        self.preprocess_s += result.seconds
        cost = sum(job.item.cost for job in jobs)
        self.prepare_costs.observe(jobs[0].item.modality, cost, result.seconds, self._clock.now())
        for job, outcome in zip(jobs, result.outcomes, strict=True):
            self._sound_ended(job, outcome, result.seconds, cost)
        done()

    def _begin(self, predicted_s: float) -> None:
        self._is_busy, self._predicted_s = True, predicted_s
        self.batch_began_s = self._clock.now()
        self.busy.started(self.batch_began_s)

    def _end(self) -> None:
        self._is_busy = False
        self.busy.ended(self._clock.now())

    def _choose(self, refused_bytes: float) -> list[QueuedUnit]:
        """Returns the next batch, from units smaller than `refused_bytes`, the size that found no room. The unit that
        room is kept for goes first."""
        units = self._jobs.queued_units(lambda unit: self._nbytes(unit) < refused_bytes, self._is_within_share)
        first = self._refused.thing
        if first is not None and self._nbytes(first) < refused_bytes:
            units = chain([first], (unit for unit in units if unit.key != first.key))
        return choose_batch(units, self._max_batch_cost, self.costs.estimate)

    def _take(self, batch: list[QueuedUnit], refused_bytes: float, done: Callable[[], None]) -> float:
        """Submits the units that have room, if any; returns the size in bytes from which on a unit has no room."""
        units: list[ForwardUnit] = []
        taken: list[QueuedUnit] = []
        for unit in batch:
            if not self._jobs.is_queued(unit.key) or (taken and not self._is_within_share(unit)):
                # The unit left the queue with another unit of this batch that can never be stored, or units of this
                # batch took the worker's share.
                continue
            try:
                slot = self._reserve(unit)
            except UnitTooLarge as error:
                self._jobs.forward_started(unit.key)
                self._unit_ended(unit.key, error)
                continue
            if slot is None:
                refused_bytes = min(refused_bytes, self._nbytes(unit))
                self._refused.refuse(unit, self._clock.now())
                if not taken:
                    # The batch was chosen around this unit, so the next batch is chosen without it.
                    break
                continue
            if self._is_first_refused(unit):
                self._refused.forget()
            num_levels = self._num_levels(unit)
            units.append(ForwardUnit(self._jobs.forward_started(unit.key), unit.num_tokens, slot.view, num_levels))
            taken.append(unit)
        if taken:
            self._submit(taken, units, done)
        return refused_bytes

    def _forget_gone(self) -> None:
        """Ends the claim of a unit that no request waits for any more."""
        if self._refused.thing is not None and not self._jobs.is_queued(self._refused.thing.key):
            self._table.end_claim()
            self._refused.forget()

    def _is_first_refused(self, unit: QueuedUnit) -> bool:
        return self._refused.thing is not None and self._refused.thing.key == unit.key

    def is_blocked(self, worker_id: MemberId) -> bool:
        """Returns whether decoded units wait because their worker's share of the arena is used up."""
        if self._refused.thing is not None and self._refused.thing.worker_id == worker_id:
            return False  # its unit waits for room, not for leases of its worker
        return any(not self._is_within_share(unit) for unit in self._jobs.first_unit(worker_id))

    def _is_within_share(self, unit: QueuedUnit) -> bool:
        return self._is_first_refused(unit) or self._table.may_take(unit.worker_id, self._nbytes(unit))

    def _nbytes(self, unit: QueuedUnit) -> int:
        assert self.spec is not None
        return self.spec.nbytes(unit.num_tokens, self._num_levels(unit))

    def _submit(self, batch: list[QueuedUnit], units: list[ForwardUnit], done: Callable[[], None]) -> None:
        self.batch = batch
        self._begin(self.costs.pass_s(batch[0].modality, sum(unit.cost for unit in batch)))
        loop = asyncio.get_running_loop()
        has_pass = units[0].input.features is None

        def hand_over(result: ForwardResult) -> None:
            loop.call_soon_threadsafe(self._ended, batch, result, has_pass, done)

        self._forward.submit(units, hand_over)

    def _reserve(self, unit: QueuedUnit) -> SourceSlot | None:
        job = self._jobs.find(unit.key.mm_hash)
        assert job is not None
        is_due = self._is_first_refused(unit) and self._refused.is_due(self._clock.now())
        num_units = len(job.item.unit_tokens)
        return self._table.reserve(unit.key, self._nbytes(unit), num_units, unit.worker_id, is_due=is_due)

    def _num_levels(self, unit: QueuedUnit) -> int:
        """Returns the number of levels of the feature, as in `MediaItem`, for a unit that has not been submitted
        yet."""
        job = self._jobs.find(unit.key.mm_hash)
        assert job is not None
        return job.item.num_levels

    def _ended(self, batch: list[QueuedUnit], result: ForwardResult, has_pass: bool, done: Callable[[], None]) -> None:
        """Handles the end of a batch. `has_pass` is False for features that clients have sent: storing these says
        nothing about forward passes."""
        self.batch = []
        self._end()
        cost = sum(unit.cost for unit in batch)
        self.stats.batch_ended(len(batch), cost, result.seconds)
        if has_pass and not any(result.errors):
            self.costs.observe(batch[0].modality, cost, result.seconds, self._clock.now())
        keys = [unit.key for unit in batch]
        self._jobs.served(keys, result.seconds, self._clock.now())
        for waiter in {waiter: None for key in keys for waiter in self._jobs.waiters_missing(key)}:
            waiter.encode_s += result.seconds
            waiter.num_passes += 1
            waiter.batch_items = max(waiter.batch_items, len(batch))
            waiter.batch_cost += cost
        for unit, error in zip(batch, result.errors, strict=True):
            if error is None:
                self._table.complete(unit.key)
            else:
                self._table.fail(unit.key)
            self._unit_ended(unit.key, error)
        done()


# ------------------------------------------------------------ the busy time


class BusyTime:
    """Measures how much of the time the forward pass keeps the device busy. Callers pass the time in."""

    def __init__(self, window_s: float = 1.0) -> None:
        self._window_s = window_s
        self._done_s = 0.0
        self._since_s: float | None = None
        self._window: tuple[float, float] | None = None
        """Holds the time when the window began, and how long the device had been busy by then."""
        self.fraction = 0.0
        """Holds the busy share of the last complete window."""

    def started(self, now_s: float) -> None:
        self._since_s = now_s

    def ended(self, now_s: float) -> None:
        assert self._since_s is not None
        self._done_s += now_s - self._since_s
        self._since_s = None

    def current_s(self, now_s: float) -> float:
        """Returns for how long the present forward pass has run; returns 0 if there is none."""
        return 0.0 if self._since_s is None else now_s - self._since_s

    def roll(self, now_s: float) -> None:
        """Begins a new window if the last one is over. Callers must call it often."""
        busy_s = self._done_s + (now_s - self._since_s if self._since_s is not None else 0.0)
        if self._window is None:
            self._window = (now_s, busy_s)
        elif now_s - self._window[0] >= self._window_s:
            self.fraction = (busy_s - self._window[1]) / (now_s - self._window[0])
            self._window = (now_s, busy_s)
