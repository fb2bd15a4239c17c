"""Defines the state that `encode_jobs` keeps: one medium on its way through an encoder, the requests that wait for it,
and sums over such media.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from encoder_pool.planning.turns import CallTurn
from fabric.ids import AttemptId, MemberId
from fabric.messages import Destination, EncodeRequest, MediaItem
from modalities.family import EncoderInput
from modalities.waveform import Waveform


class Phase(Enum):
    """Lists the phases of a job: WAITING -> DECODING (-> DECODED) -> ENCODING. A job never goes back; units that
    it missed belong to a new job. While an item is being decoded, its first units may already be encoded. DECODED is
    the phase of a sound from which the device has yet to make units."""

    WAITING = "waiting"
    DECODING = "decoding"
    DECODED = "decoded"
    ENCODING = "encoding"


@dataclass(slots=True, eq=False)
class EncodeWaiter:
    """An `EncodeWaiter` is one item of one encode call that waits for its units. It is mutable: `missing`
    shrinks as units are announced."""

    turn: CallTurn
    """Holds the turn of the call; all items of the call share it."""
    attempt_id: AttemptId
    router_id: MemberId
    destination: Destination
    item: MediaItem
    data: bytes
    received_s: float
    missing: set[int]
    """Holds the units that are not announced yet."""
    num_retries_left: int = 1
    decode_s: float = 0.0
    preprocess_s: float = 0.0
    encode_s: float = 0.0
    """Sums the time of all forward passes that made units of the item."""
    batch_items: int = 0
    """Holds the number of units in the largest of these passes."""
    batch_cost: int = 0
    """Sums the cost of all these passes."""

    @property
    def call(self) -> int:
        return self.turn.call


def waiter_of(request: EncodeRequest, turn: CallTurn, item: MediaItem, data: bytes, now_s: float) -> EncodeWaiter:
    """Makes the waiter for one item of a call that arrived at `now_s`."""
    return EncodeWaiter(
        turn=turn,
        attempt_id=AttemptId(request.request_id, request.attempt),
        router_id=request.router_id,
        destination=request.destination,
        item=item,
        data=data,
        received_s=now_s,
        missing=set(range(len(item.unit_tokens))),
    )


class JobStage(NamedTuple):
    """A `JobStage` names what a job waits for; jobs of one stage are ranked together."""

    name: str
    modality: str = ""
    """This is set for units, which share a forward pass only with units of the same modality."""
    is_long: bool = False
    """This is set for items that wait to be decoded."""


@dataclass(slots=True, eq=False)
class EncodeJob:
    """An `EncodeJob` makes the units of one item that its waiters miss."""

    item: MediaItem
    data: bytes
    phase: Phase = Phase.WAITING
    waiters: dict[EncodeWaiter, None] = field(default_factory=dict)
    """Holds the waiters in order of arrival."""
    unit_to_cost: dict[int, int] = field(default_factory=dict)
    """Holds the units still to be made, including those in the forward pass."""
    remaining_cost: int = 0
    """Sums the cost of these units."""
    unit_to_input: dict[int, EncoderInput] = field(default_factory=dict)
    """Holds the decoded units that wait for their forward pass, in order."""
    waveform: Waveform | None = None
    """Holds a decoded sound until the device takes it."""
    forwarding: set[int] = field(default_factory=set)
    is_broken: bool = False
    """This is True if the item could not be decoded completely."""
    num_decoded: int = 0
    """Counts the units that the decoder has delivered; earlier units are not made again."""
    places: tuple[float, ...] = ()
    """Holds, for each unit, the share of the item's rows that precede it."""

    @property
    def is_long(self) -> bool:
        """Returns whether the item has several units. A long item gives way to others while it is encoded, so it must
        not delay their decoding either."""
        return len(self.item.unit_tokens) > 1

    @property
    def is_prepared(self) -> bool:
        """Returns whether the item is being decoded, is decoded, or has a decoded unit, and still has units to make."""
        is_begun = self.phase in (Phase.DECODING, Phase.DECODED) or bool(self.unit_to_input)
        return is_begun and bool(self.unit_to_cost)

    @property
    def lies_decoded(self) -> bool:
        """Returns whether a decoded part of the item waits."""
        return bool(self.unit_to_input) or self.waveform is not None

    @property
    def stage(self) -> JobStage | None:
        """Returns what the job waits for; returns None while it is being worked on and none of its units waits."""
        if self.phase is Phase.WAITING:
            return JobStage("decoding", is_long=self.is_long)
        if self.waveform is not None:
            return JobStage("sound")
        return JobStage("unit", self.item.modality) if self.unit_to_input else None

    def want(self, unit: int, cost: int) -> None:
        """Adds a unit that must be made. Does nothing if the unit is already wanted."""
        if unit not in self.unit_to_cost:
            self.unit_to_cost[unit] = cost
            self.remaining_cost += cost

    def drop(self, unit: int) -> None:
        """Removes a unit that was made, or that no waiter misses."""
        self.remaining_cost -= self.unit_to_cost.pop(unit)
        self.unit_to_input.pop(unit, None)


@dataclass(slots=True)
class EncodeJobTotals:
    """Keeps sums over jobs. Callers update them with `count` before and after each change of a job."""

    queued_cost: int = 0
    """Sums the patches that are accepted and not yet encoded."""
    num_units_queued: int = 0
    """Counts the units to be made that are not in the forward pass."""
    num_items_queued: int = 0
    """Counts the items with such a unit."""
    num_in_flight: int = 0
    """Counts the items that are being decoded, are decoded, or are in the forward pass."""
    num_prepared: int = 0
    """Counts the items that are being decoded, are decoded, or have a decoded unit."""
    num_long_decoding: int = 0
    modality_to_cost: Counter[str] = field(default_factory=Counter)
    """Splits `queued_cost` by modality."""
    modality_to_decoded_cost: Counter[str] = field(default_factory=Counter)
    """Sums the cost of items that are decoded or are being decoded, by modality."""

    def count(self, job: EncodeJob, sign: int) -> None:
        is_begun = job.phase is not Phase.WAITING
        num_queued = len(job.unit_to_cost) - len(job.forwarding)
        self.queued_cost += sign * job.remaining_cost
        self.num_units_queued += sign * num_queued
        self.num_items_queued += sign * (num_queued > 0)
        self.num_in_flight += sign * is_begun
        self.num_prepared += sign * job.is_prepared
        self.num_long_decoding += sign * (job.is_long and job.phase is Phase.DECODING)
        self.modality_to_cost[job.item.modality] += sign * job.remaining_cost
        self.modality_to_decoded_cost[job.item.modality] += sign * is_begun * job.remaining_cost


class DecodeRoom(NamedTuple):
    """A `DecodeRoom` limits what may be decoded, or be kept decoded, before the forward pass has room for it."""

    max_cost: int
    """Limits the sum of patches, or of what takes their memory; a single item alone may have more."""
    max_items: int
    """Limits the number of items; an item whose last unit is in the forward pass no longer counts."""
    max_long_cost: int
    """Limits the sum of patches when a long item is added; the rest of `max_cost` is kept for short items."""
    max_long_items: int
    """Limits the long items that are decoded at once; at least one always may be."""
    max_decode_bytes: int = 2**63
    """Limits the memory that items take while they are being decoded, as estimated from their headers; no item alone
    exceeds it. The decoder enforces that budget itself. This limit prevents items that wait for the budget from
    occupying decode processes."""
