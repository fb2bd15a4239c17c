"""Keeps what the planner reads of all members as columns of numbers, so that a plan costs a few vector operations
instead of a view object for each member. `WorkerColumns` and `EncoderColumns` have one column for each slot, and a slot
is the member's row in `Learning`. Reports, dispatches and learned costs change them in place.

The columns hold only what was said: what a member reported last, what this router has dispatched since, and what its
work is believed to cost. `predictions` and `landings` make times of that. A silent member is one without a report, or
one whose reports stopped. Its last report stays in force, because its queue may have become shorter only as fast as it
could work, and all that this router has open on it counts in addition.

Times on the router's clock end in `at_s`. The module has no clock, so callers pass the time in. It knows nothing of the
choice between members.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from inspect import get_annotations
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fabric.c_structures import structure_of
from fabric.contracts import (
    NUM_BINS,
    PROFILE_LENGTH,
    EncoderReport,
    Member,
    MemberId,
    WorkerReport,
    add_work,
    decode_waits_s,
)
from router.planning.link_classes import LinkPlace, LinkRules

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Column = Floats
"""A `Column` is a row of the table of `SlotColumns`. Has shape `(capacity,)`."""

UNLIMITED = 1e12
"""Stands for a limit that is not known."""
MAX_AWAITED = 16
"""The columns tell this many moments apart at which features should land on one worker."""
SAME_MOMENT_S = 0.01
"""Two moments of a member may be the same one if they differ by less than this."""
SPARE_KV_S = 0.3
"""The planner takes as many blocks of a worker for taken as its sequences give back within this time. Where all blocks
are taken, a few requests more than expected delay all that follow, and sequences preempt each other (ADR 72)."""
MAX_SPARE_KV = 0.1
"""Limits these blocks, as a share of those in use."""
MAX_SILENCE_S = 1.0
"""The planner takes a silent member for busy for as long as it has been silent, but at most for this time: the member
is uncertain and not idle, and if all members are silent, this is the same for all."""


class SlotColumns:
    """Holds the members of one kind by slot, and the columns that both kinds have. An attribute that a class annotates
    as a `Column` is one; subclasses add theirs. The C search reads a column that `predictions.h` names as well."""

    C_NAME = ""
    """Is the name of the structure in `predictions.h` that has the columns of the class."""
    num_open: Column
    """Counts this router's attempts that have not ended on the member."""
    open_units: Column
    """Sums the work of these attempts: weighted tokens on a worker, seconds of forward passes on an encoder."""
    num_pending: Column
    """Counts the attempts that no report contains yet; `pending_units` sums what of their work is not in the queue that
    the columns describe."""
    pending_units: Column
    report_at_s: Column
    """Holds the time at which the last report came; it is 0 for a member without a report."""
    state_at_s: Column
    """Holds the moment that the columns of the queue describe: that of the last report, which was made before it came,
    or a later one of which this router knows more (`InFlight`)."""
    is_reported: Column
    """Is 1.0 for a member that has reported, and 0.0 for any other slot."""
    barred_until_s: Column
    """Plans do not use the member before this time. It is infinite for a slot without a member."""

    def __init__(self) -> None:
        self.capacity = 0
        self.members: list[Member | None] = []
        self.member_to_slot: dict[MemberId, int] = {}
        self._described: Any = None
        self._table: Floats = np.zeros((len(self.names()), 0))
        self._grow(8)

    def __len__(self) -> int:
        """Returns the number of slots up to the last one that was ever in use."""
        return len(self.members)

    def add(self, member: Member, slot: int) -> None:
        """Takes a new member into a free slot, and clears its columns. If the slot is beyond the capacity, all columns
        move to larger arrays."""
        while slot >= self.capacity:
            self._grow(2 * self.capacity)
        self.members += [None] * (slot + 1 - len(self.members))
        self.members[slot] = member
        self.member_to_slot[member.member_id] = slot
        self._table[:, slot] = 0.0
        self.barred_until_s[slot] = -np.inf
        self._clear(slot)

    def remove(self, member_id: MemberId) -> None:
        """Frees the slot of a member that has left. Raises KeyError for a member without a slot."""
        slot = self.member_to_slot.pop(member_id)
        self.members[slot] = None
        self._table[:, slot] = 0.0
        self.barred_until_s[slot] = np.inf
        self._clear(slot)

    def usable(self, excluded: Sequence[MemberId] | frozenset[MemberId], now: float) -> Flags:
        """Returns which members a plan may use. Has shape `(slots,)`."""
        found: Flags = self.barred_until_s[: len(self)] <= now
        for member_id in excluded:
            if (slot := self.member_to_slot.get(member_id)) is not None:
                found[slot] = False
        return found

    def is_newer(self, state_at_s: float, slot: int) -> bool:
        """Returns whether a report that describes a member at a moment says more of its queue than is known. It does so
        as well if it is a little older than what is known, because both may be of the same moment, and a report is the
        better source."""
        return not self.is_reported[slot] or bool(state_at_s >= self.state_at_s[slot] - SAME_MOMENT_S)

    def silence_s(self, now: float, stale_after_s: float) -> Floats | None:
        """Returns how long each member has been silent, up to `MAX_SILENCE_S`, or None if no member is silent. Has
        shape `(slots,)`."""
        num = len(self)
        silent_s = now - stale_after_s - self.report_at_s[:num]
        silent_s[self.is_reported[:num] == 0.0] = MAX_SILENCE_S
        if not (silent_s > 0.0).any():
            return None
        found: Floats = np.clip(silent_s, 0.0, MAX_SILENCE_S)
        return found

    @classmethod
    def names(cls) -> list[str]:
        """Returns the names of all columns, those of both kinds first."""
        return [name for each in reversed(cls.__mro__) for name, of in get_annotations(each).items() if of == "Column"]

    def described(self, library: ctypes.CDLL) -> Any:
        """Returns the structure `C_NAME` of a C library, which points to the columns that the library names. The
        structure is kept until the columns move. Raises AttributeError and ValueError as `structure_of` does."""
        if self._described is None:
            self._described = structure_of(library, self.C_NAME, self, num=0, stride=self.capacity, **self._bounds())
        self._described.num = len(self)
        return self._described

    def _bounds(self) -> Mapping[str, int]:
        """Returns the constants that the structure in C has besides the numbers of slots."""
        return {}

    def _grow(self, capacity: int) -> None:
        self._described = None
        wider = np.zeros((len(self._table), capacity))
        wider[:, : self.capacity] = self._table
        self._table, self.capacity = wider, capacity
        for name, row in zip(self.names(), wider, strict=True):
            setattr(self, name, row)
        self.barred_until_s[len(self.members) :] = np.inf

    def _clear(self, slot: int) -> None:
        """Forgets what a subclass keeps of a slot besides its columns."""


class KnownQueue(NamedTuple):
    """A `KnownQueue` is the queue of a worker at one moment."""

    at_s: float
    queued_tokens: float
    num_queued: float = 0.0
    step_left_s: float = 0.0


class WorkerColumns(SlotColumns):
    C_NAME = "Workers"
    queued_tokens: Column
    """Counts the weighted tokens that were queued at the report: those that could be computed then, without those of
    the step that was running, and the part of the others whose features arrive before the next step, as far as this
    router does not know when they land (`arriving_tokens`)."""
    num_queued: Column
    """Counts the tokens that could be computed at the report, without weights."""
    num_decoding: Column
    """Counts the sequences that decoded at the report."""
    max_step_tokens: Column
    """Limits the tokens of one step; it is `UNLIMITED` if the limit is not known."""
    num_there: Column
    """Counts the sequences that run or wait."""
    max_sequences: Column
    """Limits the sequences of one step; it is 0 if the limit is not known."""
    residence_s: Column
    """Holds the mean time from a sequence's first step to its end; it is 0 until a sequence has ended."""
    kv_blocks_total: Column
    """Counts the blocks of the KV pool; it is 0 if the size is not known."""
    kv_blocks_used: Column
    """Counts the blocks that sequences had at the report, and `kv_blocks_coming` those that they are about to take
    (`blocks_coming`)."""
    kv_blocks_coming: Column
    inbox_bytes: Column
    """Holds the size of the inbox in bytes."""
    reported_base_s: Column
    """Holds the overhead of a step that the worker measured."""
    reported_decode_s: Column
    """Holds the time that the worker measured for each decoding sequence, together with `reported_base_s`."""
    step_left_s: Column
    """Holds the rest of the step that was running at the report, if it computes prompt tokens."""
    pending_blocks: Column
    """Counts the KV blocks that attempts have taken since the moment of the last report, less those that ended ones
    have given back (`block_ledger`)."""
    num_awaited: Column
    """Counts the entries of `awaited` that are in use."""
    block_size: Column
    """Counts the tokens of one KV block."""
    base_s: Column
    """Holds the believed overhead of a step; `per_token_s` is that of a weighted token."""
    per_token_s: Column
    delivery_s: Column
    """Holds the believed time of a request's way to the worker together with its first token's way back."""

    def __init__(self) -> None:
        self.awaited: Floats = np.zeros((2 * MAX_AWAITED, 0))
        """Holds the prompt tokens that wait for features on each worker: `MAX_AWAITED` times at which features should
        land, in order, and then as many numbers of weighted tokens. Has shape `(2 * MAX_AWAITED, capacity)`."""
        super().__init__()

    def take(self, slot: int, report: WorkerReport, now: float, state_at_s: float | None = None) -> None:
        """Takes in a report that came at `now` and describes the worker at `state_at_s`. Keeps the queue that is known
        if it is that of a later moment."""
        engine = report.engine
        state_at_s = now if state_at_s is None else state_at_s
        known = None if self.is_newer(state_at_s, slot) else self.queue(slot)
        queued_tokens = engine.queued_weighted_tokens or engine.queued_tokens
        self.queued_tokens[slot] = max(queued_tokens - report.step_weighted_tokens, 0.0)
        self.num_queued[slot] = engine.queued_tokens
        self.num_decoding[slot] = engine.num_decoding
        self.max_step_tokens[slot] = report.max_step_tokens or UNLIMITED
        self.num_there[slot] = engine.num_running + engine.num_waiting
        self.max_sequences[slot] = report.max_sequences
        self.residence_s[slot] = report.residence_s
        self.kv_blocks_total[slot] = engine.kv_blocks_total
        self.kv_blocks_used[slot] = engine.kv_blocks_used
        self.kv_blocks_coming[slot] = blocks_coming(report, float(self.block_size[slot]))
        self.inbox_bytes[slot] = report.features.inbox_bytes_total
        self.reported_base_s[slot] = report.step_overhead_s
        self.reported_decode_s[slot] = report.decode_s_per_sequence
        self.step_left_s[slot] = report.step_left_s + report.engine_age_s if report.step_left_s else 0.0
        self.report_at_s[slot], self.is_reported[slot] = now, 1.0
        self.set_queue(slot, known or self.queue(slot)._replace(at_s=state_at_s))

    def step_s(self, slot: int) -> float:
        """Returns the time of a step without prompt tokens."""
        base_s, measured_s = float(self.base_s[slot]), float(self.reported_base_s[slot])
        decode_s = float(self.reported_decode_s[slot]) * (base_s / measured_s if measured_s > 0.0 else 1.0)
        return base_s + (decode_s or float(self.per_token_s[slot])) * float(self.num_decoding[slot])

    def is_done(self, slot: int, now: float) -> bool:
        """Returns whether a worker has had the time to compute the queue that is known."""
        since_s = now - float(self.state_at_s[slot] + self.step_left_s[slot])
        if not self.is_reported[slot] or since_s < 0.0:
            return False
        num = float(self.queued_tokens[slot])
        num_steps = np.ceil(num / max(float(self.max_step_tokens[slot] - self.num_decoding[slot]), 1.0))
        return bool(since_s >= num * self.per_token_s[slot] + num_steps * self.step_s(slot))

    def queue(self, slot: int) -> KnownQueue:
        """Returns what the columns say of the queue at a worker."""
        found = (each[slot] for each in (self.state_at_s, self.queued_tokens, self.num_queued, self.step_left_s))
        return KnownQueue(*map(float, found))

    def set_queue(self, slot: int, queue: KnownQueue) -> None:
        self.state_at_s[slot], self.queued_tokens[slot], self.num_queued[slot], self.step_left_s[slot] = queue

    def list_awaited(self, slot: int, awaited: Sequence[tuple[float, float]]) -> None:
        """Replaces the tokens that wait for features on a worker: pairs of the time at which they become computable and
        their number, in order of time. Where there are too many pairs, neighbours become one of the later time."""
        width = -(-len(awaited) // MAX_AWAITED) or 1
        groups = [awaited[at : at + width] for at in range(0, len(awaited), width)]
        self.num_awaited[slot] = len(groups)
        self.awaited[: len(groups), slot] = [group[-1][0] for group in groups]
        self.awaited[MAX_AWAITED : MAX_AWAITED + len(groups), slot] = [sum(num for _, num in group) for group in groups]

    def decode_s(self) -> Floats:
        """Returns the time that each decoding sequence adds to a step. The worker measured it together with the step's
        overhead, so the believed overhead scales it. Has shape `(slots,)`."""
        num = len(self)
        base_s, measured_s = self.base_s[:num], self.reported_base_s[:num]
        scale = np.where(measured_s > 0.0, base_s / np.maximum(measured_s, 1e-12), 1.0)
        own_s = self.reported_decode_s[:num]
        found: Floats = np.where(own_s > 0.0, own_s * scale, self.per_token_s[:num])
        return found

    def believe(self, workers: Floats) -> None:
        """Takes the believed costs, with shape `(stages, 2, slots)`: prefill, then delivery."""
        num = min(workers.shape[2], self.capacity)
        self.base_s[:num], self.per_token_s[:num] = np.nan_to_num(workers[0, :, :num])
        self.delivery_s[:num] = np.nan_to_num(workers[1, 0, :num])

    def _grow(self, capacity: int) -> None:
        self.awaited = np.pad(self.awaited, ((0, 0), (0, capacity - self.capacity)))
        super()._grow(capacity)

    def _bounds(self) -> Mapping[str, int]:
        return {"max_awaited": MAX_AWAITED}

    def _clear(self, slot: int) -> None:
        self.max_step_tokens[slot] = UNLIMITED


def blocks_coming(report: WorkerReport, block_size: float) -> float:
    """Returns how many KV blocks the sequences of a worker are about to take: those for the rest of their prompts
    behind the step that was running, one for each sequence that decodes, and a margin. The margin is as many as
    sequences give back within `SPARE_KV_S`, but no more than `MAX_SPARE_KV` of those in use."""
    engine = report.engine
    in_step = report.step_weighted_tokens / max(engine.queued_weighted_tokens or engine.queued_tokens, 1e-9)
    num_uncomputed = engine.queued_tokens * max(1.0 - in_step, 0.0) + engine.behind_tokens
    spare = min(SPARE_KV_S / report.residence_s, MAX_SPARE_KV) if report.residence_s else 0.0
    return num_uncomputed / max(block_size, 1.0) + engine.num_decoding + spare * engine.kv_blocks_used


def arriving_tokens(report: WorkerReport, num_behind: float) -> float:
    """Returns how many of `num_behind` weighted tokens behind missing features join the next step of a worker, which
    takes the tokens that are queued already. The features are assumed to arrive evenly within the time for which
    sequences lately waited for features. So all of these tokens join if that time is shorter than a step, and otherwise
    as large a part of them as the step is of that time. Without these tokens, a worker whose features arrive just after
    its report would look idle, although its next step is its longest."""
    engine = report.engine
    step_s = report.step_overhead_s + report.decode_s_per_sequence * engine.num_decoding
    step_s += report.prefill_s_per_token * engine.queued_weighted_tokens
    return num_behind * (1.0 if report.held_s <= step_s else step_s / report.held_s)


class EncoderColumns(SlotColumns):
    C_NAME = "Encoders"
    forward_left_s: Column
    """Holds the rest of the running forward pass at the report, and `unit_s` the mean duration of a pass."""
    unit_s: Column
    patience: Column
    """Holds the patience of the encoder's queue (`fabric.contracts.key_of`)."""
    decode_left_s: Column
    """Holds the time until a decode process was free at the report, `decode_queue_s` the decoding time of all items
    that waited, and `decode_short_s` that of the items of one unit among them."""
    decode_queue_s: Column
    decode_short_s: Column
    num_decoders: Column
    """Counts the decode processes."""
    pending_decode_s: Column
    """Holds the decoding time of the items that were dispatched and are in no report yet."""

    def __init__(self) -> None:
        self.profiles: Floats = np.zeros((PROFILE_LENGTH, 0))
        """Holds the reported queues (`fabric.contracts.encoder_queue`). Has shape `(PROFILE_LENGTH, capacity)`."""
        self.pending_profiles: Floats = np.zeros((PROFILE_LENGTH, 0))
        """Holds what was dispatched and is in no report yet, in the same form."""
        self.rates: Floats = np.zeros((0, 6, 0))
        """Holds the believed costs by modality row: base and slope of decoding, of preparing on the device and of
        encoding. Has shape `(modalities, 6, capacity)`."""
        self.is_able: Bytes = np.zeros((0, 0), np.uint8)
        """Says which encoders have loaded a modality. Has shape `(modalities, capacity)`."""
        super().__init__()

    def take(self, slot: int, report: EncoderReport, now: float, state_at_s: float | None = None) -> None:
        """Takes in a report that came at `now` and describes the encoder at `state_at_s`. Keeps the queue that is known
        if it is that of a later moment."""
        state_at_s = now if state_at_s is None else state_at_s
        self.report_at_s[slot], self.is_reported[slot] = now, 1.0
        self.patience[slot], self.num_decoders[slot] = report.patience, report.num_decode_processes
        if not self.is_newer(state_at_s, slot):
            return
        self.state_at_s[slot] = state_at_s
        self.forward_left_s[slot], self.unit_s[slot] = report.forward_left_s, report.unit_s
        self.decode_left_s[slot] = report.decode_left_s
        self.decode_queue_s[slot], self.decode_short_s[slot] = report.decode_queue_s, report.decode_short_s
        self.profiles[:, slot] = report.queue_profile

    def left_s(self, slot: int, now: float) -> float:
        """Returns how long the work that is known keeps an encoder busy."""
        work_s = self.profiles[:NUM_BINS, slot].sum() + self.pending_profiles[:NUM_BINS, slot].sum()
        return max(float(self.forward_left_s[slot] + work_s) - max(now - float(self.state_at_s[slot]), 0.0), 0.0)

    def is_done(self, slot: int, now: float) -> bool:
        """Returns whether an encoder has had the time for the work that it reported."""
        work_s = float(self.profiles[:NUM_BINS, slot].sum() + self.forward_left_s[slot])
        return bool(self.is_reported[slot]) and now - float(self.state_at_s[slot]) >= work_s

    def empty(self, slot: int, at_s: float) -> None:
        """Records that an encoder has no work at a moment but what is pending."""
        self.state_at_s[slot], self.profiles[:, slot] = at_s, 0.0
        for column in (self.forward_left_s, self.decode_left_s, self.decode_queue_s, self.decode_short_s):
            column[slot] = 0.0

    def add_pending(self, slot: int, seconds: float, key: float, decode_s: float) -> None:
        """Adds dispatched work that no report contains yet, or removes it if the seconds are negative."""
        add_work(self.pending_profiles[:, slot], seconds, key)
        self.pending_decode_s[slot] += decode_s
        if not self.num_pending[slot]:  # Sums of floats leave remainders.
            self.pending_profiles[:, slot] = self.pending_decode_s[slot] = 0.0

    def serve(self, slot: int, modality_rows: Sequence[int]) -> None:
        """Records which modalities the encoder of a slot has loaded."""
        self._widen(max(modality_rows, default=-1) + 1)
        self.is_able[:, slot] = 0
        self.is_able[list(modality_rows), slot] = 1

    def believe(self, encoders: Floats) -> None:
        """Takes the believed costs, with shape `(modalities, 6, slots)`."""
        self._widen(len(encoders))
        num = min(encoders.shape[2], self.capacity)
        self.rates[: len(encoders), :, :num] = np.nan_to_num(encoders[:, :, :num])

    def _grow(self, capacity: int) -> None:
        more = capacity - self.capacity
        self.profiles = np.pad(self.profiles, ((0, 0), (0, more)))
        self.pending_profiles = np.pad(self.pending_profiles, ((0, 0), (0, more)))
        self.rates = np.pad(self.rates, ((0, 0), (0, 0), (0, more)))
        self.is_able = np.pad(self.is_able, ((0, 0), (0, more)))
        super()._grow(capacity)

    def _bounds(self) -> Mapping[str, int]:
        return {"num_bins": NUM_BINS}

    def _widen(self, num_modalities: int) -> None:
        more = num_modalities - len(self.rates)
        if more > 0:
            self._described = None
            self.rates = np.pad(self.rates, ((0, more), (0, 0), (0, 0)))
            self.is_able = np.pad(self.is_able, ((0, more), (0, 0)))

    def _clear(self, slot: int) -> None:
        self.patience[slot] = 4.0
        self.profiles[:, slot] = 0.0
        self.pending_profiles[:, slot] = 0.0
        self.is_able[:, slot] = 0


def decoder_waits_s(encoders: EncoderColumns, now: float, *, is_long: bool) -> Floats:
    """Returns when a decode process of each encoder takes a new item. `is_long` says that the item has several units;
    such items leave a process to the others. Has shape `(capacity,)`."""
    waiting_s = encoders.decode_queue_s if is_long else encoders.decode_short_s
    ages_s = np.where(encoders.is_reported > 0.0, now - encoders.state_at_s, 0.0)
    return decode_waits_s(encoders.decode_left_s, waiting_s + encoders.pending_decode_s, encoders.num_decoders, ages_s)


def idle_pace(workers: WorkerColumns, slot: int, num_tokens: int, weighted_tokens: float) -> tuple[float, float]:
    """Returns the seconds per weighted token of a request that is alone on a worker, and the cost of its last step."""
    base_s, per_token_s = float(workers.base_s[slot]), float(workers.per_token_s[slot])
    num_before_last = (num_tokens - 1) // max(1.0, float(workers.max_step_tokens[slot]))
    return per_token_s + num_before_last * base_s / max(weighted_tokens, 1.0), base_s


class LinkPatterns:
    """Groups workers by the classes of their links to all encoders. Most workers have an encoder on none of their
    links that is closer than the network, so the patterns are few."""

    def __init__(self) -> None:
        self.pattern_of_worker: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """Holds the pattern of each worker's slot."""
        self.classes: Bytes = np.zeros((0, 0), np.uint8)
        """Holds the number of the link class to each encoder. Has shape `(patterns, encoder capacity)`."""
        self.is_stale = True

    def forget(self) -> None:
        """Records that members came or went; the patterns must be refreshed before the next plan."""
        self.is_stale = True

    def refresh(
        self, rules: LinkRules, workers: Sequence[LinkPlace], encoders: Sequence[LinkPlace], capacity: int
    ) -> None:
        """Computes the patterns. The places are by slot, any place for a free one; `capacity` is that of the encoders'
        columns."""
        table = np.zeros((len(workers), capacity), np.uint8)
        table[:, : len(encoders)] = rules.table(encoders, workers)
        row_to_pattern: dict[bytes, int] = {}
        patterns = [row_to_pattern.setdefault(row.tobytes(), len(row_to_pattern)) for row in table]
        self.classes = np.frombuffer(b"".join(row_to_pattern), np.uint8).reshape(-1, capacity).copy()
        self.pattern_of_worker = np.array(patterns, np.int64)
        self.is_stale = False


class ClusterColumns(NamedTuple):
    """Holds everything that plans read of the members."""

    workers: WorkerColumns
    encoders: EncoderColumns
    patterns: LinkPatterns
    links: Floats
    """Holds alpha and beta of each link class, with shape `(link classes, 2)`."""
    modality_to_row: Mapping[str, int]
    """Maps a modality to its row in `EncoderColumns.rates`, from 1. No encoder is able to take what has row 0."""
    context_scale_tokens: float
