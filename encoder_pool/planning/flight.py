"""One medium on its way through an encoder, and who waits for it: the state that `flights` keeps."""

from __future__ import annotations

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
    def remaining_cost(self) -> int:
        return sum(self.unit_to_cost.values())

    @property
    def is_long(self) -> bool:
        """Of several units: what gives way to others while it is encoded must not hold up their decoding either."""
        return len(self.item.unit_tokens) > 1


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
