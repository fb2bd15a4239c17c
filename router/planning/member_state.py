"""Keeps what the router knows of each member besides its columns, and the work that it has on it. A `WorkerState` or an
`EncoderState` holds a member with its learned costs and the order of its reports. `InFlight` counts the work that this
router dispatched.

A report does not contain what was dispatched since. Without that work, all requests of a burst between two reports
would go to the one member that was idle in its last report. For the same reason `InFlight` knows which features and
which prompts are on their way: requests that share them should find them.

The module knows nothing of the choice between members, or of how costs are learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np

from fabric.contracts import (
    KV_HASH_BYTES,
    AttemptId,
    EncoderReport,
    KvScheme,
    Member,
    MemberId,
    MmHash,
    WorkerReport,
    weighted_tokens,
)
from router.planning.member_columns import MAX_AWAITED, EncoderColumns, Floats, WorkerColumns, arriving_tokens
from router.planning.member_costs import EncoderCost, LearnedLine
from router.planning.plan_types import Line, RoutePlan, RouteQuery

# ------------------------------------------------------------ one member


class WorkerState:
    """A `WorkerState` is a worker with the order of its reports and its learned costs."""

    def __init__(self, member: Member, prefill: LearnedLine, delivery: LearnedLine) -> None:
        self.member = member
        self.freshness = Freshness()
        self.prefill = prefill
        self.delivery = delivery
        """Costs the request's way to the worker together with the first token's way to the router."""

    def take(self, report: WorkerReport, now: float) -> None:
        """Learns from the costs that the worker reports."""
        self.prefill.anchor(Line(report.step_overhead_s, report.prefill_s_per_token), now)


class EncoderState:
    """An `EncoderState` is an encoder with the order of its reports and its learned costs."""

    def __init__(self, member: Member, cost: EncoderCost) -> None:
        self.member = member
        self.freshness = Freshness()
        self.cost = cost
        self.modalities = frozenset(member.modalities)

    def take(self, report: EncoderReport, now: float) -> None:
        """Learns from the costs that the encoder reports."""
        self.cost.anchor(report, now)


class Freshness:
    """Keeps the order of one member's reports."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None

    def accept(self, epoch: int, seq: int) -> bool:
        """Records a report. Returns False for a report that is not newer than the last one."""
        if self._last is not None and (epoch, seq) <= self._last:
            return False
        self._last = (epoch, seq)
        return True


# ------------------------------------------------------------ the work in flight


class WorkerShare(NamedTuple):
    """A `WorkerShare` is what an attempt puts on its worker."""

    weighted_tokens: float
    num_blocks: int
    scheme: KvScheme | None = None
    hashes: bytes = b""
    """Holds the hashes of the prompt's full blocks in the worker's scheme."""
    awaited: Sequence[tuple[float, float]] = ()
    """Holds the part of the weighted tokens that waits for features: when the features should have landed, on the
    router's clock, and how many tokens can be computed then that could not before, in order of time."""


class EncoderShare(NamedTuple):
    """An `EncoderShare` is what an attempt puts on one encoder."""

    seconds: float
    """Sums the predicted forward passes."""
    key: float
    """Places this work in the encoder's queue (`fabric.contracts.key_of`)."""
    decode_s: float
    hash_to_done_s: dict[MmHash, float]
    """Maps each feature that the encoder makes to the time on the router's clock at which it should be complete."""


def awaited_tokens(query: RouteQuery, plan: RoutePlan, scale_tokens: float, now: float) -> list[tuple[float, float]]:
    """Returns the `WorkerShare.awaited` of a plan that is carried out now. The units of an item land one after the
    other while it is encoded, and tokens wait for the features of all runs before them too."""
    winner = plan.explanation.winner
    index_to_terms = {terms.item_index: terms for terms in winner.items}
    index_to_num = {item.index: item.num_tokens for item in query.media}
    runs = [run for run in query.placeholders if run.item in index_to_terms and run.end > winner.covered_tokens]
    found: list[tuple[float, float]] = []
    due_s, num_landed = now, dict.fromkeys(index_to_terms, 0)
    for run, following in zip(runs, [*(each.offset for each in runs[1:]), query.token_count], strict=False):
        terms = index_to_terms[run.item]
        num_landed[run.item] += run.length
        left_s = terms.encode_s * max(1.0 - num_landed[run.item] / max(index_to_num[run.item], 1), 0.0)
        due_s = max(due_s, now + terms.landing_s - left_s)
        begin = max(run.offset, winner.covered_tokens)
        num_tokens = weighted_tokens(following - begin, begin, scale_tokens)
        if found and found[-1][0] == due_s:
            num_tokens += found.pop()[1]
        found.append((due_s, num_tokens))
    return found


class InFlight:
    """Counts the work that this router dispatched, by attempt and member, and keeps the sums in the members' columns.

    Each dispatched attempt puts load on a member. The load is *pending* until a report acknowledges it, and *open*
    until the attempt ends on that member. When reports stop, only the open load is left to balance by. To end or
    acknowledge a share twice does nothing the second time."""

    def __init__(self, workers: WorkerColumns, encoders: EncoderColumns) -> None:
        self._workers, self._encoders = workers, encoders
        self._attempt_to_shares: dict[AttemptId, dict[MemberId, _Share]] = {}
        self._hash_to_flights: dict[MmHash, dict[MemberId, _Flight]] = {}
        self._slot_to_awaited: dict[int, dict[AttemptId, Sequence[tuple[float, float]]]] = {}
        """Holds what each worker's slot awaits for attempts whose prompts are not computed."""
        self._prompts: dict[KvScheme, _Prompts] = {}
        self._worker_to_prompts: dict[MemberId, set[_Share]] = {}
        """Holds the shares of each worker whose prompts are known."""

    def add_worker(self, attempt_id: AttemptId, worker_id: MemberId, load: WorkerShare) -> None:
        """Adds the attempt's load on its worker; ignores a worker that has left."""
        slot = self._workers.member_to_slot.get(worker_id)
        if slot is None:
            return
        share = self._share(attempt_id, worker_id, self._workers, slot)
        num_barred = sum(num for _, num in load.awaited)
        self._change(share, load.weighted_tokens, load.weighted_tokens - num_barred)
        share.num_blocks += load.num_blocks
        self._workers.pending_blocks[slot] += load.num_blocks
        if load.awaited:
            self._slot_to_awaited.setdefault(slot, {})[attempt_id] = load.awaited
            self._list_awaited(slot)
        if load.scheme is not None and load.hashes:
            prompts = self._prompts.setdefault(load.scheme, _Prompts())
            share.prompt = prompts.add(load.hashes, slot)
            share.prompts = prompts
            share.hashes = load.hashes
            self._worker_to_prompts.setdefault(worker_id, set()).add(share)

    def add_encoder(self, attempt_id: AttemptId, encoder_id: MemberId, load: EncoderShare) -> None:
        """Adds load on an encoder to the attempt; ignores an encoder that has left."""
        slot = self._encoders.member_to_slot.get(encoder_id)
        if slot is None:
            return
        share = self._share(attempt_id, encoder_id, self._encoders, slot)
        self._change(share, load.seconds, load.seconds)
        share.encodings.append(load)
        self._encoders.add_pending(slot, load.seconds, load.key, load.decode_s)
        for mm_hash, done_s in load.hash_to_done_s.items():
            flights = self._hash_to_flights.setdefault(mm_hash, {})
            flight = flights.setdefault(encoder_id, _Flight(slot, done_s))
            flight.users.append(attempt_id)
            share.flights.append(mm_hash)

    def features(self, mm_hash: MmHash, now: float, attempt_id: AttemptId) -> list[tuple[int, float]]:
        """Returns the encoder slots that make the feature for another attempt than this one, with the seconds until it
        is complete. A feature that is late is taken to need as long again as it is late, because something that the
        prediction did not know holds it up."""
        flights = self._hash_to_flights.get(mm_hash)
        if not flights:
            return []
        others = [each for each in flights.values() if any(user != attempt_id for user in each.users)]
        return [(each.slot, abs(each.done_s - now)) for each in others]

    def promised_blocks(self, scheme: KvScheme, hashes: bytes) -> Floats | None:
        """Returns the leading blocks that each worker computes, or has computed, for an attempt that has not ended,
        with shape `(worker slots,)`. Returns None if there are no such blocks."""
        prompts = self._prompts.get(scheme)
        return None if prompts is None else prompts.depths(hashes, len(self._workers))

    def chain_to(self, worker_id: MemberId, block: bytes) -> bytes:
        """Returns the hashes of the blocks from the root to `block`, if an open attempt on the worker has a prompt with
        this block, and nothing otherwise."""
        for share in self._worker_to_prompts.get(worker_id, ()):
            at = share.hashes.find(block)
            while at >= 0 and at % KV_HASH_BYTES:
                at = share.hashes.find(block, at + 1)
            if at >= 0:
                return share.hashes[: at + KV_HASH_BYTES]
        return b""

    def acknowledge(self, member_id: MemberId, attempt_ids: Iterable[AttemptId]) -> None:
        """Records that the member's report contains these attempts."""
        for attempt_id in attempt_ids:
            share = self._attempt_to_shares.get(attempt_id, {}).get(member_id)
            if share is not None:
                self._settle(share)

    def note_behind(self, report: WorkerReport, now: float) -> None:
        """Takes from a worker's report how many weighted tokens wait for features there; the columns have taken the
        rest of the report. Awaited tokens that the report no longer counts were computed or queued; they are assumed to
        be those whose features should have landed first. If the first features that an attempt still lacks are late,
        all its features are late by as much, because they are made one after the other. Tokens that other routers'
        requests await join the queue as `arriving_tokens` says."""
        slot, num_tokens = self._workers.member_to_slot[report.worker_id], report.engine.behind_weighted_tokens
        awaited = self._slot_to_awaited.get(slot)
        if not awaited:
            self._workers.queued_tokens[slot] += arriving_tokens(report, num_tokens)
            return
        worker_id = report.worker_id
        shares = {attempt_id: self._attempt_to_shares[attempt_id][worker_id] for attempt_id in awaited}
        known = sorted((*each, at) for at, own in awaited.items() if not shares[at].is_pending for each in own)
        num_landed = sum(num for _, num, _ in known) - num_tokens
        self._workers.queued_tokens[slot] += arriving_tokens(report, max(-num_landed, 0.0))
        left: dict[AttemptId, list[tuple[float, float]]] = {at: [] for at in awaited if not shares[at].is_pending}
        for due_s, num, attempt_id in known:
            num_gone = min(max(num_landed, 0.0), num)
            num_landed, num = num_landed - num_gone, num - num_gone
            if num > 1e-6:
                left[attempt_id].append((due_s, num))
        for own in left.values():
            late_s = max(now - own[0][0], 0.0) if own else 0.0
            own[:] = [(due_s + late_s, num) for due_s, num in own]
        awaited.update(left)
        self._list_awaited(slot)

    def computed(self, attempt_id: AttemptId) -> None:
        """Records that the attempt's prompt is computed, so its tokens wait for no feature."""
        for share in self._attempt_to_shares.get(attempt_id, {}).values():
            self._forget_awaited(attempt_id, share)

    def end(self, attempt_id: AttemptId) -> Iterable[MemberId]:
        """Ends the attempt on all members, and returns them."""
        shares = self._attempt_to_shares.pop(attempt_id, {})
        for member_id, share in shares.items():
            self._drop(attempt_id, member_id, share)
        return shares

    def end_at(self, attempt_id: AttemptId, member_id: MemberId) -> None:
        """Ends the attempt on one member, as when an encoder has delivered."""
        shares = self._attempt_to_shares.get(attempt_id, {})
        share = shares.pop(member_id, None)
        if share is not None:
            self._drop(attempt_id, member_id, share)
        if not shares:
            self._attempt_to_shares.pop(attempt_id, None)

    def forget_member(self, member_id: MemberId) -> None:
        """Drops all load of a member that leaves; it must be called while the member still has its slot."""
        for attempt_id in [attempt for attempt, shares in self._attempt_to_shares.items() if member_id in shares]:
            self.end_at(attempt_id, member_id)

    def check_invariants(self) -> None:
        """Raises AssertionError unless the columns equal the sums of the shares."""
        for columns in (self._workers, self._encoders):
            shares = [s for each in self._attempt_to_shares.values() for s in each.values() if s.columns is columns]
            for slot in range(len(columns)):
                own = [share for share in shares if share.slot == slot]
                pending = [share for share in own if share.is_pending]
                found = [columns.num_open[slot], columns.num_pending[slot]]
                assert found == [len(own), len(pending)], (slot, found, len(own), len(pending))
                sums = [sum(share.units for share in own), sum(share.pending_units for share in pending)]
                assert np.allclose([columns.open_units[slot], columns.pending_units[slot]], sums), (slot, sums)
        for slot in range(len(self._workers)):
            listed = self._workers.awaited[MAX_AWAITED : MAX_AWAITED + int(self._workers.num_awaited[slot]), slot]
            awaited = self._slot_to_awaited.get(slot, {})
            assert np.isclose(listed.sum(), sum(num for each in awaited.values() for _, num in each)), slot
            assert awaited.keys() <= self._attempt_to_shares.keys(), "what an attempt awaits ends with it"
        assert all(self._attempt_to_shares.values()), "an attempt without shares is dropped"
        prompts = {s for each in self._attempt_to_shares.values() for s in each.values() if s.hashes}
        assert prompts == {share for each in self._worker_to_prompts.values() for share in each}, "prompts are kept"
        used = {mm_hash for each in self._attempt_to_shares.values() for s in each.values() for mm_hash in s.flights}
        assert used == set(self._hash_to_flights), "a flight lives as long as an attempt uses it"

    # ------------------------------------------------------------ inside

    def _share(
        self, attempt_id: AttemptId, member_id: MemberId, columns: WorkerColumns | EncoderColumns, slot: int
    ) -> _Share:
        """Returns the attempt's share on a member. If more of an attempt goes to the same member, the share grows, and
        the new part is pending."""
        shares = self._attempt_to_shares.setdefault(attempt_id, {})
        share = shares.get(member_id)
        if share is None:
            share = shares[member_id] = _Share(columns, slot)
            columns.num_open[slot] += 1
        if not share.is_pending:
            share.is_pending = True
            columns.num_pending[slot] += 1
        return share

    def _change(self, share: _Share, units: float, pending_units: float) -> None:
        share.units += units
        share.pending_units += pending_units
        share.columns.open_units[share.slot] += units
        share.columns.pending_units[share.slot] += pending_units

    def _forget_awaited(self, attempt_id: AttemptId, share: _Share) -> None:
        awaited = self._slot_to_awaited.get(share.slot, {}) if isinstance(share.columns, WorkerColumns) else {}
        if awaited.pop(attempt_id, None) is not None:
            self._list_awaited(share.slot)

    def _list_awaited(self, slot: int) -> None:
        awaited = self._slot_to_awaited[slot]
        self._workers.list_awaited(slot, sorted(chain.from_iterable(awaited.values())))
        if not awaited:
            del self._slot_to_awaited[slot]

    def _settle(self, share: _Share) -> None:
        """Ends the pending part of a share."""
        if not share.is_pending:
            return
        columns, slot = share.columns, share.slot
        share.is_pending = False
        columns.num_pending[slot] -= 1
        columns.pending_units[slot] -= share.pending_units
        if not columns.num_pending[slot]:  # Sums of floats leave remainders.
            columns.pending_units[slot] = 0.0
        share.pending_units = 0.0
        if isinstance(columns, WorkerColumns):
            columns.pending_blocks[slot] -= share.num_blocks
        else:
            for load in share.encodings:
                columns.add_pending(slot, -load.seconds, load.key, -load.decode_s)
        share.num_blocks = 0
        share.encodings.clear()

    def _drop(self, attempt_id: AttemptId, member_id: MemberId, share: _Share) -> None:
        self._settle(share)
        self._forget_awaited(attempt_id, share)
        columns, slot = share.columns, share.slot
        columns.num_open[slot] -= 1
        columns.open_units[slot] -= share.units
        if not columns.num_open[slot]:
            columns.open_units[slot] = 0.0
        for mm_hash in share.flights:
            flights = self._hash_to_flights[mm_hash]
            flights[member_id].users.remove(attempt_id)
            if not flights[member_id].users:
                del flights[member_id]
            if not flights:
                del self._hash_to_flights[mm_hash]
        if share.prompts is not None:
            share.prompts.remove(share.prompt, slot)
            prompts = self._worker_to_prompts[member_id]
            prompts.discard(share)
            if not prompts:
                del self._worker_to_prompts[member_id]


@dataclass(slots=True, eq=False)
class _Share:
    """A `_Share` is the load of one attempt on one member."""

    columns: WorkerColumns | EncoderColumns
    slot: int
    units: float = 0.0
    pending_units: float = 0.0
    num_blocks: int = 0
    is_pending: bool = False
    encodings: list[EncoderShare] = field(default_factory=list)
    """Holds the pending work on an encoder."""
    flights: list[MmHash] = field(default_factory=list)
    prompts: _Prompts | None = None
    prompt: Sequence[bytes] = ()
    hashes: bytes = b""
    """Holds the hashes of all full blocks of the prompt."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A `_Flight` is a feature that an encoder makes for open attempts."""

    slot: int
    done_s: float
    users: list[AttemptId] = field(default_factory=list)
    """Holds an open attempt once for each of its encodings."""


_STRIDE = 8
"""Prompts in flight are known at each block whose number is a multiple of this, so that a dispatch costs little."""
_MARK_BYTES = _STRIDE * KV_HASH_BYTES


class _Prompts:
    """Keeps the prompts of one scheme that workers compute for open attempts, by the hash of every eighth block."""

    def __init__(self) -> None:
        self._hash_to_slots: dict[bytes, dict[int, int]] = {}
        """Maps a block's hash to the worker slots that compute it, each with the number of attempts."""

    def add(self, hashes: bytes, slot: int) -> Sequence[bytes]:
        """Adds a prompt and returns the hashes by which `remove` removes it."""
        marks = self._marks(hashes)
        for mark in marks:
            slots = self._hash_to_slots.setdefault(mark, {})
            slots[slot] = slots.get(slot, 0) + 1
        return marks

    def remove(self, marks: Sequence[bytes], slot: int) -> None:
        for mark in marks:
            slots = self._hash_to_slots[mark]
            slots[slot] -= 1
            if not slots[slot]:
                del slots[slot]
            if not slots:
                del self._hash_to_slots[mark]

    def depths(self, hashes: bytes, num_workers: int) -> Floats | None:
        """Returns how many leading blocks of a prompt each worker computes, or None if none does."""
        depths: Floats | None = None
        for end in range(_MARK_BYTES, len(hashes) + 1, _MARK_BYTES):
            slots = self._hash_to_slots.get(hashes[end - KV_HASH_BYTES : end])
            if slots is None:
                break  # A block's hash contains those before it, so no later block is known either.
            if depths is None:
                depths = np.zeros(num_workers)
            for slot in slots:
                depths[slot] = end // KV_HASH_BYTES
        return depths

    @staticmethod
    def _marks(hashes: bytes) -> list[bytes]:
        return [hashes[end - KV_HASH_BYTES : end] for end in range(_MARK_BYTES, len(hashes) + 1, _MARK_BYTES)]
