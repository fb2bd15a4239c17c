"""Single flight: a medium that several requests want is decoded and encoded once, for as long as anybody wants it.

A *follower* is one request's wish for the units of one item; a *flight* makes the units that its followers miss. A
flight lives while it has followers, or units in the forward (which can't be stopped). Its units leave the queue with
the last follower. Knows nothing of memory, processes or messages; it counts, ranks and says who waits for what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from encoder_pool.planning.batcher import QueuedUnit, Rank, rank, split_cost
from fabric.ids import AttemptId, MemberId, MmHash, UnitKey
from fabric.messages import Destination, EncodeRequest, MediaItem
from modalities.family import EncoderInput


class Phase(Enum):
    """WAITING -> DECODING -> ENCODING; a flight never goes back (what it missed is a new flight's)."""

    WAITING = "waiting"
    DECODING = "decoding"
    ENCODING = "encoding"


@dataclass(slots=True, eq=False)
class Follower:
    """One item of one encode call. Mutable: `missing` shrinks as units are announced."""

    call: int
    """Number of the call; its items share one rank."""
    attempt_id: AttemptId
    router_id: MemberId
    destination: Destination
    age: tuple[float, str]
    item: MediaItem
    data: bytes
    received_s: float
    missing: set[int]
    """Units not announced yet."""
    num_retries_left: int = 1
    decode_s: float = 0.0
    encode_s: float = 0.0
    batch_items: int = 0
    batch_cost: int = 0


def follower_of(request: EncodeRequest, call: int, item: MediaItem, data: bytes, now_s: float) -> Follower:
    """The wish of one item of a call that was received now."""
    return Follower(
        call=call,
        attempt_id=AttemptId(request.request_id, request.attempt),
        router_id=request.router_id,
        destination=request.destination,
        age=request.age,
        item=item,
        data=data,
        received_s=now_s,
        missing=set(range(len(item.unit_tokens))),
    )


@dataclass(slots=True, eq=False)
class Flight:
    item: MediaItem
    data: bytes
    phase: Phase = Phase.WAITING
    followers: list[Follower] = field(default_factory=list)
    unit_to_cost: dict[int, int] = field(default_factory=dict)
    """Units still to be made, those in the forward included."""
    unit_to_input: dict[int, EncoderInput] = field(default_factory=dict)
    """Decoded units that wait for their forward."""
    forwarding: set[int] = field(default_factory=set)

    @property
    def is_second_try(self) -> bool:
        """Whether its decoding broke a process before: then it is decoded alone, where it can harm no other."""
        return any(follower.num_retries_left == 0 for follower in self.followers)

    @property
    def remaining_cost(self) -> int:
        return sum(self.unit_to_cost.values())


class Flights:
    """All flights of one encoder, at most one per `mm_hash`. Not thread-safe."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._hash_to_flight: dict[MmHash, Flight] = {}

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._hash_to_flight.values())

    def find(self, mm_hash: MmHash) -> Flight | None:
        return self._hash_to_flight.get(mm_hash)

    @property
    def queued_cost(self) -> int:
        """Patches accepted and not yet encoded."""
        return sum(flight.remaining_cost for flight in self)

    @property
    def decoded_cost(self) -> int:
        """Patches that lie decoded, or are being decoded."""
        return sum(flight.remaining_cost for flight in self if flight.phase is not Phase.WAITING)

    def join(self, follower: Follower) -> Flight:
        """Adds a follower to the item's flight, which starts now if there is none. A unit that the flight is past
        making stays in `follower.missing`: the follower joins again when this flight has ended."""
        item = follower.item
        flight = self._hash_to_flight.get(item.mm_hash)
        if flight is None:
            flight = self._hash_to_flight[item.mm_hash] = Flight(item, follower.data)
        flight.followers.append(follower)
        if flight.phase is not Phase.ENCODING:
            costs = split_cost(item.cost, item.unit_tokens)
            flight.unit_to_cost.update({unit: costs[unit] for unit in follower.missing})
        return flight

    def leave(self, follower: Follower) -> Flight | None:
        """Takes a follower away; harmless if it is gone. Units that nobody misses any more leave the queue at once,
        unless they are in the forward. Returns the flight if that ended it: its decoding can be cancelled, and
        followers it still has (they miss what it never made) must join anew."""
        flight = self._hash_to_flight.get(follower.item.mm_hash)
        if flight is None or follower not in flight.followers:
            return None
        flight.followers.remove(follower)
        wanted = flight.forwarding.union(*(one.missing for one in flight.followers))
        for unit in flight.unit_to_cost.keys() - wanted:
            del flight.unit_to_cost[unit]
            flight.unit_to_input.pop(unit, None)
        return flight if self._end_if_done(flight) else None

    def next_to_decode(self, max_decoded_cost: int, seconds_per_cost: float) -> Flight | None:
        """The first waiting flight by rank, if its pixels fit beside those that lie decoded (alone it always fits)."""
        waiting = [flight for flight in self if flight.phase is Phase.WAITING]
        if not waiting:
            return None
        flight_to_rank = self._ranks(seconds_per_cost)
        flight = min(waiting, key=lambda flight: flight_to_rank[flight.item.mm_hash])
        decoded_cost = self.decoded_cost
        if decoded_cost and decoded_cost + flight.remaining_cost > max_decoded_cost:
            return None
        return flight

    def decode_started(self, flight: Flight) -> None:
        assert flight.phase is Phase.WAITING
        flight.phase = Phase.DECODING

    def decoded(self, flight: Flight, inputs: list[EncoderInput]) -> None:
        """The item's units, all of them; only those still wanted are kept. The file's bytes are dropped."""
        assert flight.phase is Phase.DECODING
        assert self.is_live(flight)
        flight.phase = Phase.ENCODING
        flight.data = b""
        flight.unit_to_input = {unit: inputs[unit] for unit in flight.unit_to_cost}

    def queued_units(self, seconds_per_cost: float) -> list[QueuedUnit]:
        """Decoded units that wait for their forward, with their ranks."""
        flight_to_rank = self._ranks(seconds_per_cost)
        return [
            QueuedUnit(
                flight_to_rank[key], UnitKey(key, unit), flight.item.modality, cost, flight.item.unit_tokens[unit]
            )
            for key, flight in self._hash_to_flight.items()
            for unit, cost in flight.unit_to_cost.items()
            if unit in flight.unit_to_input
        ]

    def forward_started(self, unit: UnitKey) -> EncoderInput:
        """Takes a unit's pixels out of the queue for its forward."""
        flight = self._hash_to_flight[unit.mm_hash]
        flight.forwarding.add(unit.unit)
        return flight.unit_to_input.pop(unit.unit)

    def followers_missing(self, unit: UnitKey) -> list[Follower]:
        """Who waits for a unit, in the order they came."""
        return [one for one in self._hash_to_flight[unit.mm_hash].followers if unit.unit in one.missing]

    def forward_ended(self, unit: UnitKey) -> Flight | None:
        """The unit is made, or failed, and whoever missed it was told. Returns the flight if that ended it."""
        flight = self._hash_to_flight[unit.mm_hash]
        flight.forwarding.remove(unit.unit)
        del flight.unit_to_cost[unit.unit]
        return flight if self._end_if_done(flight) else None

    def end(self, flight: Flight) -> list[Follower]:
        """Ends a flight that failed before its forward; returns the followers it had."""
        assert not flight.forwarding
        del self._hash_to_flight[flight.item.mm_hash]
        followers, flight.followers = flight.followers, []
        return followers

    def is_live(self, flight: Flight) -> bool:
        return self._hash_to_flight.get(flight.item.mm_hash) is flight

    def check_invariants(self) -> None:
        for flight in self:
            assert flight.unit_to_cost, "a flight with nothing to make must end"
            assert flight.followers or flight.forwarding, "a flight lives by its followers"
            assert flight.forwarding <= flight.unit_to_cost.keys()
            assert not flight.forwarding & flight.unit_to_input.keys()
            if flight.phase is Phase.ENCODING:
                assert flight.forwarding | flight.unit_to_input.keys() == flight.unit_to_cost.keys()

    def _end_if_done(self, flight: Flight) -> bool:
        if flight.unit_to_cost:
            return False
        del self._hash_to_flight[flight.item.mm_hash]
        return True

    def _ranks(self, seconds_per_cost: float) -> dict[MmHash, Rank]:
        """Rank of each flight: that of its first follower. A call's rank counts all it waits for on this encoder."""
        call_to_cost: dict[int, int] = {}
        for flight in self:
            cost = flight.remaining_cost
            for follower in flight.followers:
                call_to_cost[follower.call] = call_to_cost.get(follower.call, 0) + cost
        return {
            key: min(
                rank(one.received_s, call_to_cost[one.call], seconds_per_cost, self._patience, one.age, one.item.index)
                for one in flight.followers
            )
            for key, flight in self._hash_to_flight.items()
            if flight.followers
        }
