"""Single flight: a medium that several requests want is decoded and encoded once, for as long as anybody wants it.

A *follower* is one request's wish for the units of one item; a *flight* makes the units that its followers miss. A
flight lives while it has followers, or units in the forward (which can't be stopped). Its units leave the queue with
the last follower. Knows nothing of memory, processes or messages; it counts, ranks and says who waits for what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from encoder_pool.planning.batcher import QueuedSound, QueuedUnit, split_cost
from encoder_pool.planning.flight import DecodeRoom, Flight, Follower, Phase
from encoder_pool.planning.sizes import InputSizes
from encoder_pool.planning.turns import Rank, Turn
from fabric.ids import MmHash, UnitKey
from modalities.family import EncoderInput
from modalities.waveform import Waveform

ToSeconds = Callable[[str, int], float]
"""(modality, cost) -> what that adds to a forward."""


class Flights:
    """All flights of one encoder, at most one per `mm_hash`. Not thread-safe."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._hash_to_flight: dict[MmHash, Flight] = {}
        self._sizes = InputSizes()

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._hash_to_flight.values())

    def find(self, mm_hash: MmHash) -> Flight | None:
        return self._hash_to_flight.get(mm_hash)

    @property
    def queued_cost(self) -> int:
        """Patches accepted and not yet encoded."""
        return sum(flight.remaining_cost for flight in self)

    @property
    def decoded_cost(self) -> float:
        """Of what lies decoded, or is being decoded: as many patches as take that memory."""
        return sum(self._decoded_cost(flight) for flight in self if flight.phase is not Phase.WAITING)

    @property
    def num_in_flight(self) -> int:
        """Items being decoded, decoded or in the forward."""
        return sum(flight.phase is not Phase.WAITING for flight in self)

    @property
    def num_prepared(self) -> int:
        """Items that are being decoded, or lie decoded, or have a unit that does."""
        return sum(flight.phase in (Phase.DECODING, Phase.DECODED) or bool(flight.unit_to_input) for flight in self)

    def queued_s(self, to_seconds: ToSeconds) -> float:
        """What is accepted and not yet encoded adds to forwards."""
        return sum(to_seconds(flight.item.modality, flight.remaining_cost) for flight in self)

    def join(self, follower: Follower) -> Flight:
        """Adds a follower to the item's flight, which starts now if there is none. A unit that the flight is past
        making stays in `follower.missing`: the follower joins again when this flight has ended."""
        item = follower.item
        flight = self._hash_to_flight.get(item.mm_hash)
        if flight is None:
            places = tuple(rows / item.num_tokens for rows in accumulate(item.unit_tokens, initial=0))
            flight = self._hash_to_flight[item.mm_hash] = Flight(item, follower.data, places=places)
        flight.followers.append(follower)
        if flight.phase is not Phase.ENCODING:
            costs = split_cost(item.cost, item.unit_tokens)
            to_come = (unit for unit in follower.missing if unit >= flight.num_decoded)
            flight.unit_to_cost.update({unit: costs[unit] for unit in to_come})
        return flight

    def leave(self, follower: Follower) -> Flight | None:
        """Takes a follower away; harmless if it is gone. Units that nobody misses any more leave the queue at once,
        unless they are in the forward. Returns the flight if that ended it: its decoding can be cancelled, and
        followers it still has (they miss what it never made) must join anew."""
        flight = self._hash_to_flight.get(follower.item.mm_hash)
        if flight is None or follower not in flight.followers:
            return None
        flight.followers.remove(follower)
        if not flight.followers:
            flight.phase = Phase.ENCODING  # whoever comes now starts another
        wanted = flight.forwarding.union(*(one.missing for one in flight.followers))
        for unit in flight.unit_to_cost.keys() - wanted:
            del flight.unit_to_cost[unit]
            flight.unit_to_input.pop(unit, None)
        return flight if self._end_if_done(flight) else None

    def next_to_decode(self, room: DecodeRoom, to_seconds: ToSeconds) -> Flight | None:
        """The first waiting flight by rank, if there is room for its pixels beside those that lie decoded. Nobody
        passes it but short items, when it is a long one and enough of those are being decoded."""
        decoding_long = sum(flight.is_long for flight in self if flight.phase is Phase.DECODING)
        may_be_long = decoding_long < max(1, room.max_long_items)
        waiting = [flight for flight in self if flight.phase is Phase.WAITING and (may_be_long or not flight.is_long)]
        if not waiting or self.num_prepared >= room.max_items:
            return None
        flight_to_rank = self._ranks(to_seconds)
        flight = min(waiting, key=lambda flight: flight_to_rank[flight.item.mm_hash])
        decoded_cost = self.decoded_cost
        max_cost = room.max_long_cost if flight.is_long else room.max_cost
        if decoded_cost and decoded_cost + self._decoded_cost(flight) > max_cost:
            return None
        return flight

    def decode_started(self, flight: Flight) -> None:
        assert flight.phase is Phase.WAITING
        flight.phase = Phase.DECODING

    def decoded_part(self, flight: Flight, inputs: list[EncoderInput]) -> bool:
        """Its next units; only those still wanted are kept. False if nobody waits for them: the flight is past that."""
        if flight.phase not in (Phase.DECODING, Phase.DECODED) or not self.is_live(flight):
            return False
        for unit, one in enumerate(inputs, flight.num_decoded):
            if flight.phase is Phase.DECODING:  # a waveform is larger than the units that are made of it
                self._sizes.observe(one.modality, one.num_patches, one.pixels.nbytes)
            if unit in flight.unit_to_cost:
                flight.unit_to_input[unit] = one
        flight.num_decoded += len(inputs)
        return True

    def decoded(self, flight: Flight, inputs: list[EncoderInput]) -> None:
        """The item's last units. The file's bytes are dropped."""
        assert flight.phase in (Phase.DECODING, Phase.DECODED)
        assert self.is_live(flight)
        self.decoded_part(flight, inputs)
        flight.phase = Phase.ENCODING
        flight.data = b""

    def decoded_sound(self, flight: Flight, waveform: Waveform) -> None:
        """A sound of which the device is to make units. The file's bytes are dropped."""
        assert flight.phase is Phase.DECODING
        assert self.is_live(flight)
        self._sizes.observe(flight.item.modality, flight.item.cost, waveform.samples.nbytes)
        flight.phase, flight.waveform, flight.data = Phase.DECODED, waveform, b""

    def queued_sounds(self, to_seconds: ToSeconds) -> list[QueuedSound]:
        """Decoded sounds that wait for the device to make units of them, with their ranks."""
        waiting = [flight.item for flight in self if flight.waveform is not None]
        if not waiting:
            return []
        flight_to_rank = self._ranks(to_seconds)
        return [QueuedSound(flight_to_rank[item.mm_hash], item.mm_hash, item.cost) for item in waiting]

    def sound_started(self, mm_hash: MmHash) -> tuple[Flight, Waveform]:
        """Takes a sound out of the queue. Its flight is told of the units by `decoded`, if it lives until then."""
        flight = self._hash_to_flight[mm_hash]
        waveform, flight.waveform = flight.waveform, None
        assert waveform is not None
        return flight, waveform

    def queued_units(self, to_seconds: ToSeconds) -> list[QueuedUnit]:
        """Decoded units that wait for their forward, with their ranks."""
        flight_to_rank = self._ranks(to_seconds)
        return [
            QueuedUnit(
                flight_to_rank[key],
                UnitKey(key, unit),
                flight.item.modality,
                flight.unit_to_cost[unit],
                flight.item.unit_tokens[unit],
                (flight.places[unit], flight.item.index),
            )
            for key, flight in self._hash_to_flight.items()
            for unit in flight.unit_to_input
        ]

    def served(self, units: Iterable[UnitKey], seconds: float, now_s: float, to_seconds: ToSeconds) -> None:
        """A forward over `units` ended: who waited for one of them has had a turn. To be told before its units."""
        turn_to_worth_s: dict[Turn, float] = {}
        for unit in units:
            flight = self._hash_to_flight[unit.mm_hash]
            worth_s = to_seconds(flight.item.modality, flight.unit_to_cost[unit.unit])
            for turn in {one.turn for one in self.followers_missing(unit)}:
                turn_to_worth_s[turn] = turn_to_worth_s.get(turn, 0.0) + worth_s
        for turn, worth_s in turn_to_worth_s.items():
            turn.served(seconds, worth_s, now_s, self._patience)

    def is_queued(self, unit: UnitKey) -> bool:
        """Whether the unit is decoded and waits for its forward."""
        flight = self._hash_to_flight.get(unit.mm_hash)
        return flight is not None and unit.unit in flight.unit_to_input

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
        """Ends a flight that could not be decoded, but for its units in the forward; returns the followers it had."""
        followers, flight.followers = flight.followers, []
        flight.phase, flight.is_broken = Phase.ENCODING, True
        flight.waveform = None
        flight.unit_to_input.clear()
        for unit in flight.unit_to_cost.keys() - flight.forwarding:
            del flight.unit_to_cost[unit]
        self._end_if_done(flight)
        return followers

    def is_live(self, flight: Flight) -> bool:
        return self._hash_to_flight.get(flight.item.mm_hash) is flight

    def check_invariants(self) -> None:
        for flight in self:
            assert flight.unit_to_cost, "a flight with nothing to make must end"
            assert flight.followers or flight.forwarding, "a flight lives by its followers"
            assert flight.forwarding <= flight.unit_to_cost.keys()
            assert not flight.forwarding & flight.unit_to_input.keys()
            assert flight.unit_to_input.keys() <= flight.unit_to_cost.keys()
            assert flight.waveform is None or flight.phase is Phase.DECODED
            if flight.phase is Phase.ENCODING:
                assert flight.forwarding | flight.unit_to_input.keys() == flight.unit_to_cost.keys()

    def _decoded_cost(self, flight: Flight) -> float:
        return self._sizes.in_patches(flight.item.modality, flight.remaining_cost)

    def _end_if_done(self, flight: Flight) -> bool:
        if flight.unit_to_cost:
            return False
        del self._hash_to_flight[flight.item.mm_hash]
        return True

    def _ranks(self, to_seconds: ToSeconds) -> dict[MmHash, Rank]:
        """Rank of each flight: that of its first follower. A call's rank counts all it waits for on this encoder. A
        sound track stands where its video does, so that their units take turns."""
        call_to_s: dict[int, float] = {}
        for flight in self:
            remaining_s = to_seconds(flight.item.modality, flight.remaining_cost)
            for one in flight.followers:
                call_to_s[one.call] = call_to_s.get(one.call, 0.0) + remaining_s
        return {
            key: min(
                one.turn.rank(
                    call_to_s[one.call],
                    self._patience,
                    one.item.index if one.item.anchor < 0 else one.item.anchor,
                )
                for one in flight.followers
            )
            for key, flight in self._hash_to_flight.items()
            if flight.followers
        }
