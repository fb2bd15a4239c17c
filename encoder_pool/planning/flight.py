"""One medium on its way through an encoder, and who waits for it: the state that `flights` keeps, and sums over it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from encoder_pool.planning.turns import Turn
from fabric.ids import AttemptId, MemberId
from fabric.messages import Destination, EncodeRequest, MediaItem
from modalities.family import EncoderInput
from modalities.waveform import Waveform


class Phase(Enum):
    """WAITING -> DECODING (-> DECODED) -> ENCODING; a flight never goes back (what it missed is a new flight's). While
    it is being decoded, its first units may be encoded already. DECODED: a sound of which the device is to make
    units."""

    WAITING = "waiting"
    DECODING = "decoding"
    DECODED = "decoded"
    ENCODING = "encoding"


@dataclass(slots=True, eq=False)
class Follower:
    """One item of one encode call. Mutable: `missing` shrinks as units are announced."""

    turn: Turn
    """Of the call; its items share it."""
    attempt_id: AttemptId
    router_id: MemberId
    destination: Destination
    item: MediaItem
    data: bytes
    received_s: float
    missing: set[int]
    """Units not announced yet."""
    num_retries_left: int = 1
    decode_s: float = 0.0
    preprocess_s: float = 0.0
    encode_s: float = 0.0
    """Of all forwards that made units of it."""
    batch_items: int = 0
    """Units in the largest of them."""
    batch_cost: int = 0
    """Of all of them."""

    @property
    def call(self) -> int:
        return self.turn.call


def follower_of(request: EncodeRequest, turn: Turn, item: MediaItem, data: bytes, now_s: float) -> Follower:
    """The wish of one item of a call that was received now."""
    return Follower(
        turn=turn,
        attempt_id=AttemptId(request.request_id, request.attempt),
        router_id=request.router_id,
        destination=request.destination,
        item=item,
        data=data,
        received_s=now_s,
        missing=set(range(len(item.unit_tokens))),
    )


class Stage(NamedTuple):
    """What a flight waits for; flights of one stage are ranked together."""

    name: str
    modality: str = ""
    """Of units, which share a forward with their like."""
    is_long: bool = False
    """Of decodings."""


@dataclass(slots=True, eq=False)
class Flight:
    item: MediaItem
    data: bytes
    phase: Phase = Phase.WAITING
    followers: dict[Follower, None] = field(default_factory=dict)
    """In the order they came."""
    unit_to_cost: dict[int, int] = field(default_factory=dict)
    """Units still to be made, those in the forward included."""
    remaining_cost: int = 0
    """Of these units."""
    unit_to_input: dict[int, EncoderInput] = field(default_factory=dict)
    """Decoded units that wait for their forward, in their order."""
    waveform: Waveform | None = None
    """Of a decoded sound, until the device takes it."""
    forwarding: set[int] = field(default_factory=set)
    is_broken: bool = False
    """It could not be decoded to its end."""
    num_decoded: int = 0
    """Units that were handed over by the decoder: those before it are not made again."""
    places: tuple[float, ...] = ()
    """Of each unit: the share of the item's rows that come before it."""

    @property
    def is_long(self) -> bool:
        """Of several units: what gives way to others while it is encoded must not hold up their decoding either."""
        return len(self.item.unit_tokens) > 1

    @property
    def is_prepared(self) -> bool:
        """Whether it is being decoded, or lies decoded, or has a unit that does."""
        is_begun = self.phase in (Phase.DECODING, Phase.DECODED) or bool(self.unit_to_input)
        return is_begun and bool(self.unit_to_cost)

    @property
    def lies_decoded(self) -> bool:
        """Whether something of it is decoded and waits."""
        return bool(self.unit_to_input) or self.waveform is not None

    @property
    def stage(self) -> Stage | None:
        """None while it is being worked on and none of its units waits."""
        if self.phase is Phase.WAITING:
            return Stage("decoding", is_long=self.is_long)
        if self.waveform is not None:
            return Stage("sound")
        return Stage("unit", self.item.modality) if self.unit_to_input else None

    def want(self, unit: int, cost: int) -> None:
        """The unit is to be made. Harmless if that is known."""
        if unit not in self.unit_to_cost:
            self.unit_to_cost[unit] = cost
            self.remaining_cost += cost

    def drop(self, unit: int) -> None:
        """The unit was made, or nobody waits for it."""
        self.remaining_cost -= self.unit_to_cost.pop(unit)
        self.unit_to_input.pop(unit, None)


@dataclass(slots=True)
class FlightTotals:
    """Sums over flights, kept up to date by `count` before and after each change of a flight."""

    queued_cost: int = 0
    """Patches accepted and not yet encoded."""
    num_units_queued: int = 0
    """Not in the forward."""
    num_items_queued: int = 0
    """With such a unit."""
    num_in_flight: int = 0
    """Items being decoded, decoded or in the forward."""
    num_prepared: int = 0
    """Items that are being decoded, or lie decoded, or have a unit that does."""
    num_long_decoding: int = 0
    modality_to_cost: Counter[str] = field(default_factory=Counter)
    """Of `queued_cost`."""
    modality_to_decoded_cost: Counter[str] = field(default_factory=Counter)
    """Of what lies decoded, or is being decoded."""

    def count(self, flight: Flight, sign: int) -> None:
        is_begun = flight.phase is not Phase.WAITING
        num_queued = len(flight.unit_to_cost) - len(flight.forwarding)
        self.queued_cost += sign * flight.remaining_cost
        self.num_units_queued += sign * num_queued
        self.num_items_queued += sign * (num_queued > 0)
        self.num_in_flight += sign * is_begun
        self.num_prepared += sign * flight.is_prepared
        self.num_long_decoding += sign * (flight.is_long and flight.phase is Phase.DECODING)
        self.modality_to_cost[flight.item.modality] += sign * flight.remaining_cost
        self.modality_to_decoded_cost[flight.item.modality] += sign * is_begun * flight.remaining_cost


class DecodeRoom(NamedTuple):
    """What may be decoded, or lie decoded, before the forward has room for it."""

    max_cost: int
    """Patches, or what takes their memory, all together; an item alone may have more."""
    max_items: int
    """Items; one whose last unit is in the forward counts no more."""
    max_long_cost: int
    """Patches of which the last to be added is a long item: the rest is kept for short ones."""
    max_long_items: int
    """Long items being decoded at once; at least one."""
    max_decode_bytes: int = 2**63
    """Of memory that items take while they are being decoded, by their headers; none takes more alone. The decoder
    keeps that budget itself: this keeps its processes from being held by items that wait for it."""
