"""Simulates one encoder on a clock of plain numbers, with the real `EncodeJobs` and batcher: decoding takes no time,
and a forward pass takes as long as its cost says. A `PredictedLine` also predicts the wait of each arrival, as a router
does."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from encoder_pool.planning import CostEstimate, EncodeJobs, EncodeWaiter, ForwardCosts, choose_batch, waiter_of
from fabric.contracts import (
    NUM_BINS,
    CallTurn,
    Destination,
    EncodeRequest,
    MediaItem,
    MemberId,
    MmHash,
    QueueState,
    RequestId,
    UnitKey,
    add_work,
    key_of,
    wait_s,
)
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

    def _started(self, keys: Sequence[UnitKey], seconds: float) -> None:
        """Is called when a forward pass over these units has begun."""

    def _forward(self) -> None:
        estimate = CostEstimate(SECONDS_PER_COST, self.overhead_s)
        batch = choose_batch(self._jobs.queued_units(), self.max_batch_cost, lambda _: estimate)
        seconds = self.overhead_s + sum(unit.cost for unit in batch) * SECONDS_PER_COST
        keys = [unit.key for unit in batch]
        for key in keys:
            self._jobs.forward_started(key)
        self.forwards.append((self.now_s, self.now_s + seconds, keys))
        self._started(keys, seconds)
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


@dataclass
class PredictedLine(Line):
    """Predicts each arrival's wait from the report at the start of the running pass, and from the arrivals since."""

    name_to_wait_s: dict[str, float] = field(default_factory=dict)
    name_to_fifo_s: dict[str, float] = field(default_factory=dict)
    """Holds what the wait would be if the encoder served its calls in the order of their arrival."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._costs = ForwardCosts()
        for cost in (1, 101):
            self._costs.observe("image", cost, self.overhead_s + cost * SECONDS_PER_COST)
        self._report: QueueState | None = None

    @property
    def name_to_actual_s(self) -> dict[str, float]:
        """Maps each arrival to the time until its first unit was in a forward pass."""
        name_to_start_s: dict[str, float] = {}
        for start_s, _, units in self.forwards:
            for unit in units:
                name_to_start_s.setdefault(unit.mm_hash, start_s)
        return {arrival.name: name_to_start_s[arrival.name] - arrival.at_s for arrival in self.arrivals}

    def _passes_s(self, modality: str, cost: int, num_units: int) -> float:
        return self._costs.passes_s("image", cost, num_units, self.max_batch_cost)

    def _started(self, keys: Sequence[UnitKey], seconds: float) -> None:
        self._report = self._jobs.queue_state(keys, self._passes_s, self.now_s)
        self._profile = list(self._report.profile)

    def _arrive(self, arrival: Arrival) -> None:
        start_s, end_s = self.forwards[-1][:2] if self.forwards else (0.0, 0.0)
        self.name_to_wait_s[arrival.name] = self.name_to_fifo_s[arrival.name] = 0.0
        if self._report is not None and arrival.at_s < end_s:
            age_s, left_s = arrival.at_s - start_s, end_s - start_s
            key = key_of(arrival.own_s, PATIENCE, age_s)
            wait = wait_s(self._profile, left_s, key, age_s, self._report.unit_s)
            self.name_to_wait_s[arrival.name] = wait
            self.name_to_fifo_s[arrival.name] = sum(self._profile[:NUM_BINS]) + left_s - age_s
            add_work(self._profile, arrival.own_s, key)
        super()._arrive(arrival)
