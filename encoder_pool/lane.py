"""The forward's lane: what goes into the next forward, with room in the arena reserved for it, and what came of it.

One forward at a time; nothing of it can be stopped. Lives in the pipeline's event loop. Knows nothing of calls: who
waited for a unit is told by the pipeline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from encoder_pool.planning.batcher import QueuedUnit, choose_batch
from encoder_pool.planning.cost import ForwardCosts
from encoder_pool.planning.features import FeatureSpec, FeatureTable
from encoder_pool.planning.flights import Flights
from encoder_pool.planning.forward_job import Forward, ForwardResult, ForwardUnit
from encoder_pool.planning.tally import BusyTime, Tally
from fabric.channel import SourceSlot
from fabric.clock import Clock
from fabric.errors import UnitTooLarge, WeftError
from fabric.ids import UnitKey


class Lane:
    """`spec` must be set before the first `start`. `unit_ended` is called with each unit that was made, or failed."""

    def __init__(
        self,
        max_batch_cost: int,
        flights: Flights,
        table: FeatureTable,
        forward: Forward,
        clock: Clock,
        tally: Tally,
        unit_ended: Callable[[UnitKey, WeftError | None], None],
    ) -> None:
        self._max_batch_cost = max_batch_cost
        self._flights = flights
        self._table = table
        self._forward = forward
        self._clock = clock
        self._tally = tally
        self._unit_ended = unit_ended
        self.spec: FeatureSpec | None = None
        self.batch: list[QueuedUnit] = []
        """What is in the forward now; empty when it is idle."""
        self.costs = ForwardCosts()
        self.busy = BusyTime()

    def start(self, done: Callable[[], None]) -> None:
        """Starts a forward if it is idle and something waits that has room; `done` is called after it ended and
        everybody was told.

        Room is reserved in order of rank. Who has none waits for leases to end, and nobody passes it, for else a large
        feature might wait for ever."""
        while not self.batch and (batch := self._choose()):
            if not self._take(batch, done):
                return

    def _choose(self) -> list[QueuedUnit]:
        queued = self._flights.queued_units(self.costs.work_s)
        return choose_batch(queued, self._max_batch_cost, self.costs.estimate)

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
            units.append(ForwardUnit(self._flights.forward_started(unit.key), unit.num_tokens, slot.buffer))
            taken.append(unit)
        if taken:
            self._submit(taken, units, done)
        return True

    def _submit(self, batch: list[QueuedUnit], units: list[ForwardUnit], done: Callable[[], None]) -> None:
        self.batch = batch
        self.busy.started(self._clock.now())
        loop = asyncio.get_running_loop()

        def hand_over(result: ForwardResult) -> None:
            loop.call_soon_threadsafe(self._ended, batch, result, done)

        self._forward.submit(units, hand_over)

    def _reserve(self, unit: QueuedUnit) -> SourceSlot | None:
        flight = self._flights.find(unit.key.mm_hash)
        assert self.spec is not None
        assert flight is not None
        return self._table.reserve(unit.key, self.spec.nbytes(unit.num_tokens), len(flight.item.unit_tokens))

    def _ended(self, batch: list[QueuedUnit], result: ForwardResult, done: Callable[[], None]) -> None:
        self.batch = []
        self.busy.ended(self._clock.now())
        cost = sum(unit.cost for unit in batch)
        self._tally.batch_ended(len(batch), cost, result.seconds)
        if not any(result.errors):
            self.costs.observe(batch[0].modality, cost, result.seconds)
        keys = [unit.key for unit in batch]
        self._flights.served(keys, result.seconds, self._clock.now(), self.costs.work_s)
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
