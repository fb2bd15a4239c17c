"""Keeps what the router knows of each member besides its columns, and the work that it has on it. A `WorkerState` or an
`EncoderState` holds a member with its learned costs and the order of its reports. `InFlight` counts the work that this
router dispatched, and what other routers have told of theirs.

A report does not contain what was dispatched since. Without that work, all requests of a burst between two reports
would go to the one member that was idle in its last report. For the same reason `InFlight` knows which features and
which prompts are on their way: requests that share them should find them.

The module knows nothing of the choice between members, or of how costs are learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

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
)
from router.planning.block_ledger import BlockLedger
from router.planning.member_columns import (
    MAX_AWAITED,
    SAME_MOMENT_S,
    EncoderColumns,
    Floats,
    KnownQueue,
    WorkerColumns,
    arriving_tokens,
)
from router.planning.member_costs import EncoderCost, LearnedLine
from router.planning.member_shares import EncoderShare, WorkerShare
from router.planning.plan_types import Line
from router.planning.promised_prompts import PromisedPrompts
from router.planning.report_age import Freshness, ReportAge

MAX_PEER_LOAD_S = 30.0
"""A report that is younger by this than a dispatch of another router ends its load, as the last news may be lost."""
OLD_QUEUE_S = 0.1
"""The report of an encoder says more than the work that is known to be open there, unless it is older than this or
lacks some of that work."""


# ------------------------------------------------------------ one member


class WorkerState:
    """A `WorkerState` is a worker with the order of its reports and its learned costs."""

    def __init__(self, member: Member, prefill: LearnedLine, delivery: LearnedLine) -> None:
        self.member = member
        self.freshness, self.age = Freshness(), ReportAge()
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
        self.freshness, self.age = Freshness(), ReportAge()
        self.cost = cost
        self.modalities = frozenset(member.modalities)

    def take(self, report: EncoderReport, now: float) -> None:
        """Learns from the costs that the encoder reports."""
        self.cost.anchor(report, now)


# ------------------------------------------------------------ the work in flight


class InFlight:
    """Counts the dispatched work by attempt and member, and keeps the sums in the members' columns.

    Each dispatched attempt puts load on a member. The load is *pending* until a report acknowledges it, and *open*
    until the attempt ends on that member. When reports stop, only the open load is left to balance by. To end or
    acknowledge a share twice does nothing the second time.

    A report may be old when it comes. A first token says more of its worker: a step has just ended, and the next one
    begins with the prompts that are not computed. So it replaces the queue of an older report (`_renew`), and so does a
    dispatch to a worker that is idle. At an encoder, the end of an encoding does the same."""

    def __init__(self, workers: WorkerColumns, encoders: EncoderColumns) -> None:
        self._workers, self._encoders = workers, encoders
        self._blocks = BlockLedger(workers)
        self._attempt_to_shares: dict[AttemptId, dict[MemberId, _Share]] = {}
        self._hash_to_flights: dict[MmHash, dict[MemberId, _Flight]] = {}
        self._slot_to_uncomputed: dict[int, dict[AttemptId, _Share]] = {}
        """Holds the shares of each worker's slot whose prompts are not computed, in the order of their dispatch."""
        self._slot_to_encodings: dict[int, dict[AttemptId, _Share]] = {}
        """Holds the shares of each encoder's slot."""
        self._renewed: set[int] = set()
        """Holds the slots of workers whose queue is not that of a report."""
        self._slot_to_awaited: dict[int, dict[AttemptId, Sequence[tuple[float, float]]]] = {}
        """Holds what each worker's slot awaits for attempts whose prompts are not computed."""
        self._prompts: dict[KvScheme, PromisedPrompts] = {}
        self._worker_to_prompts: dict[MemberId, set[_Share]] = {}
        """Holds the shares of each worker whose prompts are known."""

    def add_worker(
        self,
        attempt_id: AttemptId,
        worker_id: MemberId,
        load: WorkerShare,
        now: float = 0.0,
        router_id: MemberId | None = None,
    ) -> None:
        """Adds the load of an attempt that was dispatched at `now` on its worker; ignores a worker that has left.
        `router_id` names the other router whose attempt it is."""
        slot = self._workers.member_to_slot.get(worker_id)
        if slot is None:
            return
        share = self._share(attempt_id, worker_id, self._workers, slot)
        num_ready = load.weighted_tokens - sum(num for _, num in load.awaited)
        share.dispatched_s, share.router_id = now, router_id
        share.left_units += num_ready
        self._change(share, load.weighted_tokens, 0.0)
        if num_ready > 0.0 and self._is_idle(slot, now):
            step_left_s = 0.5 * self._workers.step_s(slot) if self._workers.num_decoding[slot] else 0.0
            self._workers.set_queue(slot, KnownQueue(now, share.left_units, 0.0, step_left_s))
            self._renewed.add(slot)
        else:
            self._pend(share, share.left_units)
        self._slot_to_uncomputed.setdefault(slot, {})[attempt_id] = share
        self._blocks.take(slot, attempt_id, load.num_blocks, now, is_own=router_id is None)
        if load.awaited:
            self._slot_to_awaited.setdefault(slot, {})[attempt_id] = load.awaited
            self._list_awaited(slot)
        if load.scheme is not None and load.marks:
            share.prompts = self._prompts.setdefault(load.scheme, PromisedPrompts())
            share.marks = load.marks
            share.prompts.add(load.marks, slot)
        if load.hashes:
            share.hashes = load.hashes
            self._worker_to_prompts.setdefault(worker_id, set()).add(share)

    def add_encoder(
        self,
        attempt_id: AttemptId,
        encoder_id: MemberId,
        load: EncoderShare,
        now: float = 0.0,
        router_id: MemberId | None = None,
    ) -> None:
        """Adds load on an encoder, dispatched at `now`, to the attempt; ignores an encoder that has left."""
        slot = self._encoders.member_to_slot.get(encoder_id)
        if slot is None:
            return
        if not self._encoders.num_open[slot] and self._encoders.is_done(slot, now):
            self._encoders.empty(slot, now)
            load = load._replace(key=load.key_since(now), key_at_s=now)
        share = self._share(attempt_id, encoder_id, self._encoders, slot)
        share.dispatched_s, share.router_id = now, router_id
        self._change(share, load.seconds, load.seconds)
        share.encodings.append(load)
        share.pended.append(load)
        self._slot_to_encodings.setdefault(slot, {})[attempt_id] = share
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

    def num_in_use(self, worker_id: MemberId, scheme: KvScheme | None, marks: Sequence[bytes]) -> int:
        """Returns how many leading blocks of a prompt with these marks open attempts have on a worker, or will have."""
        slot, prompts = self._workers.member_to_slot.get(worker_id), None
        if scheme is not None:
            prompts = self._prompts.get(scheme)
        return 0 if slot is None or prompts is None else prompts.depth_on(slot, marks)

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
        """Records that the member's report contains these attempts of this router. Work at an encoder stays pending
        until the columns hold the queue of such a report (`note_encoder_report`)."""
        for attempt_id in attempt_ids:
            share = self._attempt_to_shares.get(attempt_id, {}).get(member_id)
            if share is not None and share.router_id is None:
                share.is_acknowledged = True
                if share.columns is self._workers:
                    self._settle(share)

    def latest_dispatch_s(self, member_id: MemberId, attempt_ids: Iterable[AttemptId]) -> float | None:
        """Returns when the latest of these attempts of this router was dispatched to a member."""
        shares = (self._attempt_to_shares.get(attempt_id, {}).get(member_id) for attempt_id in attempt_ids)
        return max((each.dispatched_s for each in shares if each is not None and each.router_id is None), default=None)

    def note_report(self, report: WorkerReport, state_at_s: float) -> None:
        """Takes in that the columns hold the queue of a worker's report, which describes the worker at `state_at_s`:
        what is dispatched and not in the report is pending. Attempts of other routers are taken to be in the report if
        they were dispatched before that moment."""
        slot = self._workers.member_to_slot[report.worker_id]
        self._blocks.acknowledge(slot, report.acknowledged)
        self._blocks.report(slot, state_at_s)
        if self._workers.state_at_s[slot] != state_at_s:
            return
        self._renewed.discard(slot)
        self._forget_lost(report.worker_id, self._slot_to_uncomputed.get(slot, {}), state_at_s)
        for share in self._slot_to_uncomputed.get(slot, {}).values():
            if share.router_id is not None and share.dispatched_s <= state_at_s:
                self._settle(share)
            elif share.is_pending:
                self._pend(share, share.left_units)
        self._note_behind(report, state_at_s)

    def note_encoder_report(self, encoder_id: MemberId, state_at_s: float) -> None:
        """Takes in that the columns hold the queue of an encoder's report, as `note_report` does for a worker."""
        slot = self._encoders.member_to_slot[encoder_id]
        if self._encoders.state_at_s[slot] == state_at_s:
            shares = self._slot_to_encodings.get(slot, {})
            self._forget_lost(encoder_id, shares, state_at_s)
            for share in shares.values():
                if share.is_acknowledged or (share.router_id is not None and share.dispatched_s <= state_at_s):
                    self._settle(share)

    def _note_behind(self, report: WorkerReport, now: float) -> None:
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

    def computed(self, attempt_id: AttemptId, now: float) -> float:
        """Records that the attempt's first token came, so that its prompt was computed a little earlier. Returns that
        moment."""
        at_s = now
        for share in self._attempt_to_shares.get(attempt_id, {}).values():
            if share.columns is self._workers and not share.is_computed:
                at_s = now - float(self._workers.delivery_s[share.slot])
                self._note_computed(attempt_id, share, at_s)
        return at_s

    def computed_at(self, attempt_id: AttemptId, at_s: float) -> None:
        """Records that the prompt of another router's attempt was computed at `at_s`. It is no longer pending, because
        no report acknowledges it to this router."""
        for share in self._attempt_to_shares.get(attempt_id, {}).values():
            if share.columns is self._workers and not share.is_computed:
                self._note_computed(attempt_id, share, at_s)
                self._settle(share)

    def end(self, attempt_id: AttemptId, now: float) -> Iterable[MemberId]:
        """Ends the attempt on all members, and returns them."""
        for share in self._attempt_to_shares.get(attempt_id, {}).values():
            if share.columns is self._workers:
                self._blocks.end(share.slot, attempt_id, now - float(self._workers.delivery_s[share.slot]))
        return self.forget(attempt_id)

    def forget(self, attempt_id: AttemptId) -> Iterable[MemberId]:
        """Drops the attempt's load on all members, and returns them. It may not have ended, so nothing that members
        have reported of it changes."""
        shares = self._attempt_to_shares.pop(attempt_id, {})
        for member_id, share in shares.items():
            self._drop(attempt_id, member_id, share)
        return shares

    def end_at(self, attempt_id: AttemptId, member_id: MemberId, at_s: float | None = None) -> None:
        """Ends the attempt on one member, as when an encoder has delivered at `at_s`."""
        shares = self._attempt_to_shares.get(attempt_id, {})
        share = shares.pop(member_id, None)
        if share is not None and at_s is not None and share.columns is self._encoders:
            state_at_s = float(self._encoders.state_at_s[share.slot])
            at_s = max(at_s, state_at_s)  # News of another router may be older than a report.
            left_s, was_pending = self._encoders.left_s(share.slot, at_s), share.is_pending
            self._drop(attempt_id, member_id, share)
            is_all_known = left_s <= float(self._encoders.open_units[share.slot]) + SAME_MOMENT_S
            if at_s - state_at_s >= OLD_QUEUE_S or (was_pending and is_all_known):
                self._note_encoded(share.slot, at_s, left_s)
        elif share is not None:
            self._drop(attempt_id, member_id, share)
        if not shares:
            self._attempt_to_shares.pop(attempt_id, None)

    def forget_member(self, member_id: MemberId) -> None:
        """Drops all load of a member that leaves; it must be called while the member still has its slot."""
        for attempt_id in [attempt for attempt, shares in self._attempt_to_shares.items() if member_id in shares]:
            self.end_at(attempt_id, member_id)
        if (slot := self._workers.member_to_slot.get(member_id)) is not None:
            self._renewed.discard(slot)
            self._blocks.forget_worker(slot)

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
        self._blocks.check_invariants()
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
        share.is_acknowledged = False
        if not share.is_pending:
            share.is_pending = True
            columns.num_pending[slot] += 1
        return share

    def _change(self, share: _Share, units: float, pending_units: float) -> None:
        share.units += units
        share.pending_units += pending_units
        share.columns.open_units[share.slot] += units
        share.columns.pending_units[share.slot] += pending_units

    def _forget_lost(self, member_id: MemberId, shares: dict[AttemptId, _Share], state_at_s: float) -> None:
        """Ends the load of other routers' attempts of whose end no news will come any more."""
        oldest_s = state_at_s - MAX_PEER_LOAD_S
        for attempt_id in [at for at, each in shares.items() if each.router_id and each.dispatched_s < oldest_s]:
            self.end_at(attempt_id, member_id)

    def _pend(self, share: _Share, units: float) -> None:
        """Sets how much of a share is not in the queue that the columns describe."""
        change, share.pending_units = units - share.pending_units, units
        share.columns.pending_units[share.slot] += change

    def _is_idle(self, slot: int, now: float) -> bool:
        """Returns whether a worker has computed all that is known."""
        known = self._slot_to_uncomputed.get(slot, {})
        return self._workers.is_done(slot, now) and not any(share.left_units > 0.0 for share in known.values())

    def _note_computed(self, attempt_id: AttemptId, share: _Share, at_s: float) -> None:
        """Records that a worker computed a prompt, in a step that ended at `at_s`."""
        workers, slot = self._workers, share.slot
        self._forget_awaited(attempt_id, share)
        uncomputed = self._slot_to_uncomputed.get(slot, {})
        uncomputed.pop(attempt_id, None)
        was_queued = not share.pending_units
        self._pend(share, 0.0)
        share.is_computed = True
        if not workers.is_reported[slot]:
            return
        is_renewed = slot in self._renewed
        if at_s - float(workers.state_at_s[slot]) > (0.0 if is_renewed else SAME_MOMENT_S):
            self._renew(slot, at_s)
        elif was_queued:
            self._take_from_queue(share)

    def _take_from_queue(self, share: _Share) -> None:
        """Takes a prompt from the queue that the columns describe, if that is not the queue of a report."""
        workers, slot = self._workers, share.slot
        if slot in self._renewed:
            workers.queued_tokens[slot] = max(float(workers.queued_tokens[slot]) - share.left_units, 0.0)

    def _renew(self, slot: int, at_s: float) -> None:
        """Takes the prompts that are not computed for the queue of a worker at `at_s`, at the end of a step. If one
        was in the queue before and lacks features, that step has computed the rest of it."""
        num_queued, before_s = 0.0, float(self._workers.state_at_s[slot])
        awaiting = self._slot_to_awaited.get(slot, {})
        for attempt_id, share in self._slot_to_uncomputed.get(slot, {}).items():
            if share.dispatched_s > at_s:
                self._pend(share, share.left_units)
                continue
            if share.dispatched_s <= before_s and attempt_id in awaiting:
                share.left_units = 0.0
            num_queued += share.left_units
            self._pend(share, 0.0)
        self._workers.set_queue(slot, KnownQueue(at_s, num_queued))
        self._renewed.add(slot)

    def _note_encoded(self, slot: int, at_s: float, left_s: float) -> None:
        """Takes the work that has not ended for the queue of an encoder at `at_s`, when an encoding ended. `left_s` is
        what was known of the queue before that. Work of one unit is whole until it ends; if less than all work is left,
        some units of other work are done, as of a video."""
        encoders = self._encoders
        if not encoders.is_reported[slot]:
            return
        encoders.empty(slot, at_s)
        shares = self._slot_to_encodings.get(slot, {}).values()
        long_s = sum(share.units for share in shares if share.has_several_units)
        whole_s = sum(share.units for share in shares) - long_s
        part = min(max(left_s - whole_s, 0.0) / max(long_s, 1e-9), 1.0)
        for share in shares:
            self._settle(share)
            left = part if share.has_several_units else 1.0
            share.pended = [
                each._replace(seconds=left * each.seconds, key=each.key_since(at_s), key_at_s=at_s)
                for each in share.encodings
            ]
            share.is_pending = True
            encoders.num_pending[slot] += 1
            self._pend(share, left * share.units)
            for load in share.pended:
                encoders.add_pending(slot, load.seconds, load.key, load.decode_s)

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
        if isinstance(columns, EncoderColumns):
            for load in share.pended:
                columns.add_pending(slot, -load.seconds, load.key, -load.decode_s)
            share.pended = []

    def _drop(self, attempt_id: AttemptId, member_id: MemberId, share: _Share) -> None:
        if share.columns is self._workers:
            self._blocks.forget_open(share.slot, attempt_id)
            if not share.is_computed and not share.pending_units:
                self._take_from_queue(share)
        self._settle(share)
        self._forget_awaited(attempt_id, share)
        columns, slot = share.columns, share.slot
        slot_to_shares = self._slot_to_uncomputed if columns is self._workers else self._slot_to_encodings
        if (known := slot_to_shares.get(slot)) is not None and known.pop(attempt_id, None) is not None and not known:
            del slot_to_shares[slot]
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
            share.prompts.remove(share.marks, slot)
        if share.hashes:
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
    is_pending: bool = False
    dispatched_s: float = 0.0
    router_id: MemberId | None = None
    """Names the other router whose attempt it is."""
    is_acknowledged: bool = False
    """Says whether a report contained the attempt, so that all later ones do."""
    left_units: float = 0.0
    """Counts the tokens on a worker that await no features and are not known to be computed."""
    is_computed: bool = False
    """Says whether the first token has come."""
    encodings: list[EncoderShare] = field(default_factory=list)
    """Holds the work on an encoder."""
    pended: list[EncoderShare] = field(default_factory=list)
    """Holds the part of that work which is pending."""
    flights: list[MmHash] = field(default_factory=list)
    prompts: PromisedPrompts | None = None
    marks: Sequence[bytes] = ()
    hashes: bytes = b""
    """Holds the hashes of all full blocks of the prompt."""

    @property
    def has_several_units(self) -> bool:
        """Says whether the work on an encoder has several units, so that a part of it may be done."""
        return sum(each.num_units for each in self.encodings) > 1


@dataclass(slots=True, eq=False)
class _Flight:
    """A `_Flight` is a feature that an encoder makes for open attempts."""

    slot: int
    done_s: float
    users: list[AttemptId] = field(default_factory=list)
    """Holds an open attempt once for each of its encodings."""
