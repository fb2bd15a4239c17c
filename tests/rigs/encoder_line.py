"""Simulates one encoder on a clock of plain numbers, with the real `EncodeJobs` and batcher: decoding takes no time,
and a forward pass takes as long as its cost says."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from encoder_pool.planning import CallTurn, CostEstimate, EncodeJobs, EncodeWaiter, choose_batch, waiter_of
from fabric.contracts import Destination, EncodeRequest, MediaItem, MemberId, MmHash, RequestId, UnitKey
from modalities.family import EncoderInput

PATIENCE = 4.0
SECONDS_PER_COST = 0.001
PIXELS = np.zeros((1, 1), np.float32)


@dataclass
class Arrival:
    """An `Arrival` is one request with one item; `unit_costs` are in patches."""

    name: str
    at_s: float
    modality: str
    unit_costs: Sequence[int]

    @property
    def own_s(self) -> float:
        return sum(self.unit_costs) * SECONDS_PER_COST


@dataclass
class Line:
    """Runs the arrivals and records when each request was done, and every forward pass."""

    arrivals: Sequence[Arrival]
    max_batch_cost: int = 1
    overhead_s: float = 0.0
    now_s: float = 0.0
    name_to_done_s: dict[str, float] = field(default_factory=dict)
    forwards: list[tuple[float, float, list[UnitKey]]] = field(default_factory=list)
    """Holds `(start, end, units)` of each forward pass."""

    def __post_init__(self) -> None:
        self._jobs = EncodeJobs(PATIENCE, self._work_s)
        self._name_to_waiter: dict[str, EncodeWaiter] = {}

    def run(self) -> Line:
        """Runs until everything that arrives is done; the encoder is never idle while something waits."""
        coming = [(arrival.at_s, number) for number, arrival in enumerate(self.arrivals)]
        heapq.heapify(coming)
        while coming or self._name_to_waiter:
            if not self._name_to_waiter:
                self.now_s = max(self.now_s, coming[0][0])
            while coming and coming[0][0] <= self.now_s:
                self._arrive(self.arrivals[heapq.heappop(coming)[1]])
            self._forward()
        return self

    def _work_s(self, modality: str, cost: int) -> float:
        return cost * SECONDS_PER_COST

    def _arrive(self, arrival: Arrival) -> None:
        units = tuple(arrival.unit_costs)
        age = (arrival.at_s, arrival.name)
        item = MediaItem(0, arrival.modality, MmHash(arrival.name), (1, 1, 1), units, sum(units), "part")
        destination = Destination(MemberId("worker"), "local://worker")
        request = EncodeRequest(RequestId(arrival.name), 0, MemberId("router"), (item,), destination, age)
        turn = CallTurn(len(self._name_to_waiter), age, arrival.at_s)
        turn.call = hash(arrival.name)
        waiter = waiter_of(request, turn, item, b"file", arrival.at_s)
        job = self._jobs.join(waiter)
        self._jobs.decode_started(job)
        self._jobs.decoded(job, [EncoderInput(arrival.modality, PIXELS, (1, 1, 1))] * len(units))
        self._name_to_waiter[arrival.name] = waiter

    def _forward(self) -> None:
        estimate = CostEstimate(SECONDS_PER_COST, self.overhead_s)
        batch = choose_batch(self._jobs.queued_units(), self.max_batch_cost, lambda _: estimate)
        seconds = self.overhead_s + sum(unit.cost for unit in batch) * SECONDS_PER_COST
        keys = [unit.key for unit in batch]
        for key in keys:
            self._jobs.forward_started(key)
        self.forwards.append((self.now_s, self.now_s + seconds, keys))
        self.now_s += seconds
        self._jobs.served(keys, seconds, self.now_s)
        for key in keys:
            for waiter in self._jobs.waiters_missing(key):
                waiter.missing.discard(key.unit)
                if not waiter.missing:
                    self.name_to_done_s[waiter.item.mm_hash] = self.now_s
                    self._jobs.leave(waiter)
                    del self._name_to_waiter[waiter.item.mm_hash]
            self._jobs.forward_ended(key)
