"""The device's lane: what goes into the next forward, with room in the arena reserved for it, and what came of it.
Sounds of which the device makes the units stand in the same line.

One batch at a time; nothing of it can be stopped. Lives in the pipeline's event loop. Knows nothing of calls: who
waited for a unit, or a sound, is told by the pipeline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from encoder_pool.config import EncoderConfig
from encoder_pool.planning.batcher import QueuedSound, QueuedUnit, choose_batch, choose_sounds
from encoder_pool.planning.cost import ForwardCosts
from encoder_pool.planning.features import FeatureSpec, FeatureTable
from encoder_pool.planning.flight import Flight
from encoder_pool.planning.flights import Flights
from encoder_pool.planning.forward_job import Forward, ForwardResult, ForwardUnit, SoundJob, SoundResult
from encoder_pool.planning.tally import BusyTime, Tally
from fabric.channel import SourceSlot
from fabric.clock import Clock
from fabric.errors import UnitTooLarge, WeftError
from fabric.ids import UnitKey
from modalities.family import EncoderInput

UnitEnded = Callable[[UnitKey, WeftError | None], None]
SoundEnded = Callable[[Flight, list[EncoderInput] | WeftError, float], None]
"""The flight, its units or why there are none, and how long the batch took that it was in."""


class Lane:
    """`spec` must be set before the first `start`. `ended` is called with each unit that was made, or failed, and with
    each sound whose units were, or were not."""

    def __init__(
        self,
        config: EncoderConfig,
        flights: Flights,
        table: FeatureTable,
        forward: Forward,
        clock: Clock,
        tally: Tally,
        ended: tuple[UnitEnded, SoundEnded],
    ) -> None:
        self._max_batch_cost = config.max_batch_cost
        self._max_passed_s = config.lease_s
        self._flights = flights
        self._table = table
        self._forward = forward
        self._clock = clock
        self._tally = tally
        self._unit_ended, self._sound_ended = ended
        self._is_busy = False
        self._unit_to_refused_s: dict[UnitKey, float] = {}
        """Since when units wait for room; few, for few lie decoded."""
        self.spec: FeatureSpec | None = None
        self.batch: list[QueuedUnit] = []
        """What is in the forward now; empty when there is none."""
        self.costs = ForwardCosts()
        self.busy = BusyTime()

    def start(self, done: Callable[[], None]) -> None:
        """Starts a forward if the device is idle and something waits that has room, or the batch of sounds that is
        next in line; `done` is called after it ended and everybody was told.

        Room is reserved in order of rank. A unit beyond its worker's share waits for leases of its worker to end, and
        others pass it. One for which there is no room in one piece waits for leases to end, and is passed by smaller
        ones for as long as a lease takes: by then every lease that was in its way has ended. After that no unit behind
        it passes, for else it might wait for ever."""
        refused_bytes: float = inf
        while not self._is_busy:
            sounds = choose_sounds(self._flights.queued_sounds(), self._max_batch_cost)
            batch = self._choose(refused_bytes)
            is_sound_first = bool(sounds) and (not batch or sounds[0].rank < batch[0].rank)
            if batch and not is_sound_first:
                refused_bytes = self._take(batch, refused_bytes, done)
            elif sounds:
                self._hear(sounds, done)
            else:
                return

    def _hear(self, sounds: list[QueuedSound], done: Callable[[], None]) -> None:
        started = [self._flights.sound_started(sound.mm_hash) for sound in sounds]
        flights = [flight for flight, _ in started]
        self._begin()
        loop = asyncio.get_running_loop()

        def hand_over(result: SoundResult) -> None:
            loop.call_soon_threadsafe(self._heard, flights, result, done)

        self._forward.submit_sounds([SoundJob(waveform, flight.item) for flight, waveform in started], hand_over)

    def _heard(self, flights: list[Flight], result: SoundResult, done: Callable[[], None]) -> None:
        self._end()
        self._tally.preprocess_s += result.seconds
        for flight, outcome in zip(flights, result.outcomes, strict=True):
            self._sound_ended(flight, outcome, result.seconds)
        done()

    def _begin(self) -> None:
        self._is_busy = True
        self.busy.started(self._clock.now())

    def _end(self) -> None:
        self._is_busy = False
        self.busy.ended(self._clock.now())

    def _choose(self, refused_bytes: float) -> list[QueuedUnit]:
        """The next batch, of units smaller than what found no room."""
        units = self._flights.queued_units(lambda unit: self._nbytes(unit) < refused_bytes, self._is_within_share)
        return choose_batch(units, self._max_batch_cost, self.costs.estimate)

    def _take(self, batch: list[QueuedUnit], refused_bytes: float, done: Callable[[], None]) -> float:
        """Submits what has room, if anything has; returns the size from which on nothing has."""
        units: list[ForwardUnit] = []
        taken: list[QueuedUnit] = []
        for unit in batch:
            if not self._flights.is_queued(unit.key) or (taken and not self._is_within_share(unit)):
                continue  # it left with another of this batch, that can never be stored; or that took the share
            try:
                slot = self._reserve(unit)
            except UnitTooLarge as error:
                self._flights.forward_started(unit.key)
                self._unit_ended(unit.key, error)
                continue
            if slot is None:
                is_passed = self._is_passed(unit)
                refused_bytes = min(refused_bytes, self._nbytes(unit)) if is_passed else 0
                if not is_passed:
                    break
                continue
            self._unit_to_refused_s.pop(unit.key, None)
            num_levels = self._num_levels(unit)
            units.append(ForwardUnit(self._flights.forward_started(unit.key), unit.num_tokens, slot.buffer, num_levels))
            taken.append(unit)
        if taken:
            self._submit(taken, units, done)
        return refused_bytes

    def _is_passed(self, unit: QueuedUnit) -> bool:
        """Whether others may go before a unit that found no room."""
        now_s = self._clock.now()
        self._unit_to_refused_s = {
            key: at for key, at in self._unit_to_refused_s.items() if self._flights.is_queued(key)
        }
        return now_s - self._unit_to_refused_s.setdefault(unit.key, now_s) < self._max_passed_s

    def _is_within_share(self, unit: QueuedUnit) -> bool:
        return self._table.may_take(unit.worker_id, self._nbytes(unit))

    def _nbytes(self, unit: QueuedUnit) -> int:
        assert self.spec is not None
        return self.spec.nbytes(unit.num_tokens, self._num_levels(unit))

    def _submit(self, batch: list[QueuedUnit], units: list[ForwardUnit], done: Callable[[], None]) -> None:
        self.batch = batch
        self._begin()
        loop = asyncio.get_running_loop()

        def hand_over(result: ForwardResult) -> None:
            loop.call_soon_threadsafe(self._ended, batch, result, done)

        self._forward.submit(units, hand_over)

    def _reserve(self, unit: QueuedUnit) -> SourceSlot | None:
        flight = self._flights.find(unit.key.mm_hash)
        assert flight is not None
        return self._table.reserve(unit.key, self._nbytes(unit), len(flight.item.unit_tokens), unit.worker_id)

    def _num_levels(self, unit: QueuedUnit) -> int:
        """Of the feature, as in `MediaItem`; the unit has not been submitted yet."""
        flight = self._flights.find(unit.key.mm_hash)
        assert flight is not None
        return flight.item.num_levels

    def _ended(self, batch: list[QueuedUnit], result: ForwardResult, done: Callable[[], None]) -> None:
        self.batch = []
        self._end()
        cost = sum(unit.cost for unit in batch)
        self._tally.batch_ended(len(batch), cost, result.seconds)
        if not any(result.errors):
            self.costs.observe(batch[0].modality, cost, result.seconds, self._clock.now())
        keys = [unit.key for unit in batch]
        self._flights.served(keys, result.seconds, self._clock.now())
        for unit, error in zip(batch, result.errors, strict=True):
            if error is None:
                self._table.complete(unit.key)
            else:
                self._table.fail(unit.key)
            for follower in self._flights.followers_missing(unit.key):
                follower.encode_s += result.seconds
                follower.batch_items = max(follower.batch_items, len(batch))
                follower.batch_cost += cost
            self._unit_ended(unit.key, error)
        done()
