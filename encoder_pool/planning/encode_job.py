"""Defines the values that the modules of `planning/` work on: jobs and the requests that wait for them, the forward
pass as an interface, and the shape of features.

A *job* (`EncodeJob`) is one medium on its way through the encoder, and its *waiters* (`EncodeWaiter`) are the items of
encode calls that wait for its units. A `WaitingCall` is a call with its rank and with what it waits for; the rule of
the rank is a contract, because routers predict by it (`fabric.contracts.encoder_queue`). `EncodeJobTotals` sums over
all jobs, and `DecodeRoom` limits what may lie decoded. `Forward` is the interface between the planning and the thread
that owns the model: tests drive the pipeline through it, one forward pass at a time, and a `FeatureSpec` gives the
shape of what it makes. The definitions stand together because every other module of the folder needs several of them,
and because none of them acts by itself: `EncodeJobs` moves jobs from phase to phase.

The module has no clock, so callers pass the time in. It knows nothing of torch, memory, leases or messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from fabric.contracts import (
    AttemptId,
    CallTurn,
    Destination,
    EncodeRequest,
    MediaItem,
    MemberId,
    QueuedCalls,
    Rank,
    WeftError,
    feature_nbytes,
)
from fabric.transport import SlotView
from modalities.family import EncoderInput, Waveform

# ------------------------------------------------------------ jobs


class Phase(Enum):
    """Lists the phases of a job: WAITING -> DECODING (-> DECODED) -> ENCODING. A job never goes back; units that
    it missed belong to a new job. While an item is being decoded, its first units may already be encoded. DECODED is
    the phase of a sound from which the device has yet to make units."""

    WAITING = "waiting"
    DECODING = "decoding"
    DECODED = "decoded"
    ENCODING = "encoding"


class JobStage(NamedTuple):
    """A `JobStage` names what a job waits for; jobs of one stage are ranked together."""

    name: str
    modality: str = ""
    """This is set for units, which share a forward pass only with units of the same modality."""
    is_long: bool = False
    """This is set for items that wait to be decoded."""


SHORT_DECODING, LONG_DECODING = JobStage("decoding"), JobStage("decoding", is_long=True)
SOUND = JobStage("sound")


class StageWaits(NamedTuple):
    """Holds the seconds for which an item waited; the three kinds overlap."""

    decode_s: float = 0.0
    """Sums the time until its decoding began."""
    device_s: float = 0.0
    """Sums the time in which a part of it lay decoded and none was on the device."""
    idle_s: float = 0.0
    """Sums the time in which it was neither being decoded nor on the device."""

    def after(self, other: StageWaits) -> StageWaits:
        """Returns these waits without those that were over at `other`, an earlier state."""
        return StageWaits(self.decode_s - other.decode_s, self.device_s - other.device_s, self.idle_s - other.idle_s)

    def plus(self, other: StageWaits) -> StageWaits:
        return StageWaits(self.decode_s + other.decode_s, self.device_s + other.device_s, self.idle_s + other.idle_s)


NO_WAITS = StageWaits()


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
    waits: StageWaits = NO_WAITS
    """Holds how long the job has waited until `waits_at_s`."""
    waits_at_s: float = 0.0

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
    def is_on_device(self) -> bool:
        """Returns whether the device works on the item: on units, or on the spectrogram of a sound."""
        return bool(self.forwarding) or (self.phase is Phase.DECODED and self.waveform is None)

    def note_waits(self, now_s: float) -> None:
        """Adds the time since the last call to the waits that the job is in. It must be called before each change."""
        passed_s, self.waits_at_s = now_s - self.waits_at_s, now_s
        if passed_s > 0.0:
            self.waits = StageWaits(
                self.waits.decode_s + passed_s * (self.phase is Phase.WAITING),
                self.waits.device_s + passed_s * (self.lies_decoded and not self.is_on_device),
                self.waits.idle_s + passed_s * (self.phase is not Phase.DECODING and not self.is_on_device),
            )

    @property
    def stage(self) -> JobStage | None:
        """Returns what the job waits for; returns None while it is being worked on and none of its units waits."""
        if self.phase is Phase.WAITING:
            return LONG_DECODING if self.is_long else SHORT_DECODING
        if self.waveform is not None:
            return SOUND
        return JobStage("unit", self.item.work) if self.unit_to_input else None

    def want(self, unit: int, cost: int) -> None:
        """Adds a unit that must be made. Does nothing if the unit is already wanted."""
        if unit not in self.unit_to_cost:
            self.unit_to_cost[unit] = cost
            self.remaining_cost += cost

    def drop(self, unit: int) -> None:
        """Removes a unit that was made, or that no waiter misses."""
        self.remaining_cost -= self.unit_to_cost.pop(unit)
        self.unit_to_input.pop(unit, None)


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
    device_prepare_s: float = 0.0
    device_prepare_cost: int = 0
    """Sums the cost of the sounds whose spectrograms the device made at the same time."""
    encode_s: float = 0.0
    """Sums the time of all forward passes that made units of the item."""
    num_passes: int = 0
    """Counts these passes."""
    batch_items: int = 0
    """Holds the number of units in the largest of these passes."""
    batch_cost: int = 0
    """Sums the cost of all these passes."""
    waits: StageWaits = NO_WAITS
    """Holds how long the item has waited since it came, in the jobs that it has left."""
    joined_at: StageWaits = NO_WAITS
    """Holds how long its present job had waited when the item joined it."""
    is_shared: bool = False
    """Says that the item joined a job that another request had begun."""

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
    modality_to_undecoded: dict[tuple[str, bool], tuple[int, int]] = field(default_factory=dict)
    """Maps a modality, and whether its items are long, to the number and the cost of the items that wait to be
    decoded."""

    def count(self, job: EncodeJob, sign: int) -> None:
        is_begun = job.phase is not Phase.WAITING
        num_queued = len(job.unit_to_cost) - len(job.forwarding)
        self.queued_cost += sign * job.remaining_cost
        self.num_units_queued += sign * num_queued
        self.num_items_queued += sign * (num_queued > 0)
        self.num_in_flight += sign * is_begun
        self.num_prepared += sign * job.is_prepared
        self.num_long_decoding += sign * (job.is_long and job.phase is Phase.DECODING)
        self.modality_to_cost[job.item.work] += sign * job.remaining_cost
        self.modality_to_decoded_cost[job.item.work] += sign * is_begun * job.remaining_cost
        if not is_begun and job.unit_to_cost:
            kind = (job.item.work, job.is_long)
            num_items, cost = self.modality_to_undecoded.pop(kind, (0, 0))
            if num_items + sign:
                self.modality_to_undecoded[kind] = (num_items + sign, cost + sign * job.item.cost)


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


# ------------------------------------------------------------ the calls that wait


UNRANKED = Rank(0, 0.0, (0.0, ""), 0)
"""A call has this rank until its first item has joined a job."""


@dataclass(slots=True, eq=False)
class WaitingCall:
    """A `WaitingCall` records what one call waits for on this encoder."""

    turn: CallTurn
    worker_id: MemberId
    rank: Rank = UNRANKED
    remaining_s: float = 0.0
    """Holds the encoding time of everything that the call waits for, by which it has its rank."""
    num_waiters: int = 0
    modality_to_cost: Counter[str] = field(default_factory=Counter)
    """Sums the cost of the jobs that the call's items follow, by modality."""
    modality_to_units: Counter[str] = field(default_factory=Counter)
    """Counts the units that these jobs have to make."""
    stage_to_jobs: dict[JobStage, dict[EncodeJob, EncodeWaiter]] = field(default_factory=dict)


@dataclass(slots=True)
class HeldForWorker:
    """A `HeldForWorker` sums what is decoded for one worker, or waits to be made for it. An item that several calls of
    the worker want counts once for each call."""

    num_decoded: int = 0
    modality_to_decoded_cost: Counter[str] = field(default_factory=Counter)
    queued_cost: int = 0


def queued_calls(
    calls: Mapping[int, WaitingCall],
    call_to_running: Mapping[int, Counter[str]],
    passes_s: Callable[[str, int, int], float],
) -> QueuedCalls:
    """Returns the calls in columns. `call_to_running` holds the cost of each call's units in the forward pass by
    modality, and their number under the empty name. `passes_s` returns the seconds of the forward passes over units of
    one modality, given their cost and their number."""
    rows = list[tuple[float, ...]]()
    for call, waiting in calls.items():
        running = call_to_running.get(call)
        num_running = running[""] if running else 0
        num_all, seconds = 0, 0.0
        for modality, cost in waiting.modality_to_cost.items():
            num_units = waiting.modality_to_units[modality]
            num_all += num_units
            left = cost - running[modality] if running else cost
            if left > 0:
                seconds += passes_s(modality, left, max(1, num_units - num_running))
        turn = waiting.turn
        num_left = max(0, num_all - num_running)
        rows.append(
            (turn.waiting_since_s, waiting.remaining_s, turn.done_s, turn.priority, num_left, num_running, seconds)
        )
    return QueuedCalls(*np.array(rows, np.float64).reshape(-1, len(QueuedCalls._fields)).T)


# ------------------------------------------------------------ the forward pass


class Forward(Protocol):
    """A `Forward` computes one batch at a time on the device; `ForwardThread` implements it."""

    def submit(self, units: Sequence[ForwardUnit], done: Callable[[ForwardResult], None]) -> None:
        """Encodes a batch of one modality into the units' buffers. Calls `done` once, in any thread."""
        ...

    def submit_sounds(self, sounds: Sequence[SoundJob], done: Callable[[SoundResult], None]) -> None:
        """Resamples sounds and makes units of their spectrograms, all in one batch. Calls `done` once, in any thread.
        It is only used where sounds arrive as waveforms."""
        ...


class ForwardUnit(NamedTuple):
    input: EncoderInput
    num_tokens: int
    """Counts the planned rows of the feature."""
    buffer: SlotView
    """Views the bytes of the unit's slot in the arena, with shape `(nbytes,)`; they lie on the host or on a device."""
    num_levels: int = 0
    """Has the meaning of `MediaItem.num_levels`."""


class ForwardResult(NamedTuple):
    errors: list[WeftError | None]
    """Holds one entry per unit, in order. None means that the unit's bytes are complete in its slot."""
    seconds: float


class SoundJob(NamedTuple):
    waveform: Waveform
    item: MediaItem


class SoundResult(NamedTuple):
    outcomes: list[list[EncoderInput] | WeftError]
    """Holds the planned units of each sound, in order, or the error that prevented them."""
    seconds: float


class FeatureSpec(NamedTuple):
    """A `FeatureSpec` describes every feature of one model: it is C-contiguous, with shape `(num_levels, num_tokens,
    hidden_size)`, of `dtype`. An item may have fewer levels than the model; the argument `num_levels` of the methods is
    `MediaItem.num_levels`, and 0 stands for the levels of the model."""

    num_levels: int
    hidden_size: int
    dtype: str

    def shape(self, num_tokens: int, num_levels: int = 0) -> tuple[int, int, int]:
        return (num_levels or self.num_levels, num_tokens, self.hidden_size)

    def nbytes(self, num_tokens: int, num_levels: int = 0) -> int:
        return feature_nbytes(self.shape(num_tokens, num_levels), self.dtype)
