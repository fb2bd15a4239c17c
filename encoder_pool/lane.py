"""The device's lane: what goes into the next forward, with room in the arena reserved for it, and what came of it.
Sounds of which the device makes the units stand in the same line.

One batch at a time; nothing of it can be stopped. Lives in the pipeline's event loop. Knows nothing of calls: who
waited for a unit, or a sound, is told by the pipeline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

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
        max_batch_cost: int,
        flights: Flights,
        table: FeatureTable,
        forward: Forward,
        clock: Clock,
        tally: Tally,
        ended: tuple[UnitEnded, SoundEnded],
    ) -> None:
        self._max_batch_cost = max_batch_cost
        self._flights = flights
        self._table = table
        self._forward = forward
        self._clock = clock
        self._tally = tally
        self._unit_ended, self._sound_ended = ended
        self._is_busy = False
        self.spec: FeatureSpec | None = None
        self.batch: list[QueuedUnit] = []
        """What is in the forward now; empty when there is none."""
        self.costs = ForwardCosts()
        self.busy = BusyTime()

    def start(self, done: Callable[[], None]) -> None:
        """Starts a forward if the device is idle and something waits that has room, or the batch of sounds that is
        next in line; `done` is called after it ended and everybody was told.

        Room is reserved in order of rank. Who has none waits for leases to end, and no unit passes it, for else a
        large feature might wait for ever."""
        while not self._is_busy:
            sounds = choose_sounds(self._flights.queued_sounds(), self._max_batch_cost)
            batch = self._choose()
            is_sound_first = bool(sounds) and (not batch or sounds[0].rank < batch[0].rank)
            if not is_sound_first and batch and self._take(batch, done):
                continue
            if not sounds:
                return
            self._hear(sounds, done)

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

    def _choose(self) -> list[QueuedUnit]:
        return choose_batch(self._flights.queued_units(), self._max_batch_cost, self.costs.estimate)

    def _take(self, batch: list[QueuedUnit], done: Callable[[], None]) -> bool:
        """Submits what has room. False if the first in line waits for it."""
        units: list[ForwardUnit] = []
        taken: list[QueuedUnit] = []
        for unit in batch:
            if not self._flights.is_queued(unit.key):
                continue  # it left with another of this batch, that can never be stored
            try:
                slot = self._reserve(unit)
            except UnitTooLarge as error:
                self._flights.forward_started(unit.key)
                self._unit_ended(unit.key, error)
                continue
            if slot is None:
                if not taken:
                    return False
                break
            num_levels = self._num_levels(unit)
            units.append(ForwardUnit(self._flights.forward_started(unit.key), unit.num_tokens, slot.buffer, num_levels))
            taken.append(unit)
        if taken:
            self._submit(taken, units, done)
        return True

    def _submit(self, batch: list[QueuedUnit], units: list[ForwardUnit], done: Callable[[], None]) -> None:
        self.batch = batch
        self._begin()
        loop = asyncio.get_running_loop()

        def hand_over(result: ForwardResult) -> None:
            loop.call_soon_threadsafe(self._ended, batch, result, done)

        self._forward.submit(units, hand_over)

    def _reserve(self, unit: QueuedUnit) -> SourceSlot | None:
        flight = self._flights.find(unit.key.mm_hash)
        assert self.spec is not None
        assert flight is not None
        nbytes = self.spec.nbytes(unit.num_tokens, flight.item.num_levels)
        return self._table.reserve(unit.key, nbytes, len(flight.item.unit_tokens))

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
