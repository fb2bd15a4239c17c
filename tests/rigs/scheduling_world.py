"""Plays the engine and the service around a scheduler for property tests, with an oracle at every interface.

The oracles check the following for any actions of a test: each request that is not aborted ends exactly once with the
tokens of an unconstrained run; no sequence waits for a feature that was never asked for; the oldest sequence that can
compute does compute; a router that follows the KV events knows what the snapshot says; and at the end nothing is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from paged_fake import PagedFake, positions_of, reference_outputs, reference_tokens

from fabric.contracts import (
    ANCHOR_STRIDE,
    AttemptId,
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    ContextLengthExceeded,
    FeatureLog,
    FeatureTicket,
    GenerateRequest,
    ManualClock,
    MemberId,
    SequenceId,
    UnitKey,
    UnitReady,
    split_hashes,
)
from fabric.transport import LandedFeature
from llm_workers.features import FeatureStore
from llm_workers.scheduling import (
    AdmittedSequences,
    NextRead,
    ReleasedFeature,
    Scheduler,
    SequenceOutputs,
    StepEvents,
    StepPlan,
    StepResult,
)
from llm_workers.worker_config import WorkerConfig

MAX_MODEL_LEN = 60
MAX_STEPS_TO_END = 20_000


class World:
    """Runs one scheduler. `is_watching` decides before each round of full checks whether they run; the output is always
    checked."""

    def __init__(self, config: WorkerConfig, is_watching: Callable[[], bool] = lambda: True) -> None:
        self.config = config
        self._is_watching = is_watching
        self.max_total = min(MAX_MODEL_LEN, config.num_blocks * config.block_size + 1)
        self.clock = ManualClock()
        self.scheduler = Scheduler(config, MAX_MODEL_LEN, self.clock)
        self.fake = PagedFake(config.num_blocks, config.block_size)
        self.requests: dict[AttemptId, GenerateRequest] = {}
        self.live: set[SequenceId] = set()
        self.tokens: dict[SequenceId, list[int]] = {}
        self.finishes: Counter[SequenceId] = Counter()
        self.read: set[AttemptId] = set()
        """Holds the attempts whose prompts have given their outputs."""
        self.asked_for: set[tuple[SequenceId, UnitKey]] = set()
        limits = replace(config, unclaimed_unit_ttl_s=1e6, unit_wait_s=1e6, keep_features="never")
        self.store = FeatureStore(limits, self.clock, FeatureLog(MemberId("worker"), 1))
        """This is the same store that the receiver has; its decision is what evicts."""
        self.reads: dict[tuple[UnitKey, AttemptId], NextRead] = {}
        """Holds the reads that `drain_reads` reported."""
        self.index: dict[BlockHash, BlockHash | None] = {}
        self.next_seq = 1

    # ------------------------------------------------------------ the actions of a test

    def add(self, request: GenerateRequest, num_emitted: list[int] | None = None) -> None:
        """Adds a request; `num_emitted` says how many tokens per choice an earlier attempt had already sent."""
        most = MAX_MODEL_LEN - 1 if request.stop.max_tokens else MAX_MODEL_LEN
        if len(request.token_ids) > min(most, self.config.num_blocks * self.config.block_size):
            try:
                self.scheduler.prepare(request, positions_of(request))
            except ContextLengthExceeded:
                return
            raise AssertionError("a prompt that can never fit was taken")
        if num_emitted is not None and request.stop.max_tokens:
            full = [reference_tokens(request, choice, self.max_total)[0] for choice in range(request.num_choices)]
            cut = zip(full, num_emitted, strict=False)
            request = _with_emitted(request, tuple(tuple(tokens[:count]) for tokens, count in cut))
        self._take_in(request, self.scheduler.add(self.scheduler.prepare(request, positions_of(request))))

    def awaited(self) -> list[UnitKey]:
        """Returns the units that some sequence asked for and that have not landed."""
        return sorted({unit for _, unit in self.asked_for} - self.fake.features)

    def land(self, unit: UnitKey) -> None:
        """Lands the unit if it is needed; the service, too, pulls only what is needed."""
        self._ask_for_needed()
        if self.scheduler.needs_unit(unit) and unit not in self.fake.features:
            self.fake.features.add(unit)
            attempt = self.store.attempts_of(unit)[0]
            ticket = FeatureTicket("e", b"", 0, 0, 1, 1, (1, 1, 1), "float32", 60.0)
            self.store.announce(UnitReady(MemberId("e"), "local://e", *attempt, unit, ticket))
            self.store.begin_pull(unit)
            reference = self.store.land(unit, LandedFeature(0, np.zeros(1, np.uint8), ticket, 0.0))
            assert reference is not None, "no attempt misses a needed unit"
            self.scheduler.hold_feature(reference)

    def lose(self, unit: UnitKey) -> None:
        """Evicts the unit, as the engine does; the sequences that still need it ask for it again."""
        assert self.store.begin_eviction(unit), "the engine holds no reference"
        missed_by = [one for one in self.live if self.scheduler.references.is_needed_by(one, unit)]
        self.asked_for.update((sequence_id, unit) for sequence_id in missed_by)
        released = self.scheduler.evict_feature(unit)
        assert released is not None
        assert set(released.missed_by) == {one.attempt_id for one in missed_by}
        self._release(released)

    def make_inbox_room(self) -> None:
        """Does what the receiver does when a needed unit finds the inbox full."""
        self._follow_reads()
        for unit in [unit for unit in self.awaited() if self.scheduler.needs_unit(unit)][:1]:
            victim = self.store.victim(unit)
            if victim is not None:
                first = min(self._turns(unit))
                turns = self._turns(victim)
                assert turns, "a unit that nobody needs was not reported as done"
                assert min(turns) > first, "it is read before the one that it makes room for"
                self.lose(victim)

    def abort(self, sequence_id: SequenceId, is_whole: bool) -> None:
        gone = self.scheduler.abort(sequence_id.attempt_id, () if is_whole else (sequence_id.choice,))
        siblings = {one for one in self.live if one.attempt_id == sequence_id.attempt_id}
        expected = siblings if is_whole else {sequence_id}
        assert set(gone) == expected
        assert self.scheduler.abort(sequence_id.attempt_id, (sequence_id.choice,)) == []
        self.live -= expected
        for one in expected:
            self._forget_sequence(one)
        self._release_unneeded()

    def step(self) -> None:
        plan = self.plan()
        self.commit(plan, self.fake.execute(plan))

    def step_with_abort_in_flight(self, number: int, is_whole: bool) -> None:
        """Aborts the sequence of chunk `number` (or its whole attempt) before the commit."""
        plan = self.plan()
        result = self.fake.execute(plan)
        if plan.chunks:
            self.abort(plan.chunks[number % len(plan.chunks)].sequence_id, is_whole)
            self.scheduler.check_invariants()
        self.commit(plan, result)

    def failing_step(self, num_done: int) -> None:
        """Runs a step that fails after its first `num_done` chunks were written."""
        plan = self.plan()
        self.fake.execute(StepPlan(plan.step, plan.chunks[:num_done]))
        self.scheduler.rollback(plan)

    def finish(self) -> None:
        """Lands every unit and lets every sequence end; then nothing may be left."""
        for _ in range(MAX_STEPS_TO_END):
            if not self.live:
                break
            for unit in self.awaited():
                self.land(unit)
            plan = self.plan()
            assert plan.chunks or self.awaited(), "everything has landed and nothing advances"
            self.commit(plan, self.fake.execute(plan))
            if self._is_watching():
                self.check()
        assert not self.live, "some request never ended"
        self.check()
        self._release_unneeded()
        assert self.store.num_held == 0
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used, stats.num_features) == (0, 0, 0, 0)
        assert not self.fake.features

    def check(self) -> None:
        self.scheduler.check_invariants()
        self._follow_reads()
        self._follow_kv_events()

    # ------------------------------------------------------------ the engine's part

    def _take_in(self, request: GenerateRequest, admission: AdmittedSequences) -> None:
        attempt_id = AttemptId(request.request_id, request.attempt)
        self.requests[attempt_id] = request
        for choice in range(request.num_choices):
            sequence_id = SequenceId(request.request_id, request.attempt, choice)
            self.tokens[sequence_id] = list(request.emitted[choice]) if request.emitted else []
        self.live.update(admission.sequence_ids)
        for ended in admission.finished:
            self._finish(ended.sequence_id, ended.finish_reason, ended.num_tokens)
        assert len(admission.sequence_ids) + len(admission.finished) == request.num_choices
        if request.prompt_outputs.needs_all_positions:
            assert admission.num_cached_tokens == 0, "cached tokens have no hidden states"
        needed = {UnitKey(request.media[run.item].mm_hash, run.unit) for run in request.placeholders}
        assert set(admission.missing_units) <= needed - self.fake.features
        self.asked_for |= {(one, unit) for one in admission.sequence_ids for unit in admission.missing_units}
        if admission.sequence_ids:
            units = list(dict.fromkeys(UnitKey(request.media[r.item].mm_hash, r.unit) for r in request.placeholders))
            shapes = dict.fromkeys(units, (1, 1, 1))
            self.store.expect(attempt_id, (request.priority, *request.age), shapes, ())
            assert self.store.admit(attempt_id, admission.missing_units) == []

    def plan(self) -> StepPlan:
        self.clock.advance(0.01)
        is_watching = self._is_watching()
        oldest = min(self.live, key=self._rank, default=None)
        num_preempted = len(self.scheduler._steps._preempted)
        plan = self.scheduler.plan_step()
        assert plan.num_tokens <= self.config.max_step_tokens
        assert len(plan.chunks) <= self.config.max_sequences
        self._ask_for_needed()
        if is_watching:
            assert {one.sequence_id for one in self.scheduler._roster.sequences} == self.live
            self.scheduler.check_invariants()
            self._check_waiting()
        if oldest is not None and not plan.chunks:
            assert self._is_waiting_for_media(oldest), "the oldest can compute, and nothing was planned"
            self._check_standstill()
        assert oldest not in self.scheduler._steps._preempted[num_preempted:], "the oldest was thrown out"
        return plan

    def _ask_for_needed(self) -> None:
        """Tells the store what sequences need again, as the engine does at the end of a turn."""
        for need in self.scheduler.drain_needed():
            assert need.sequence_id in self.live
            assert need.unit not in self.fake.features
            self.asked_for.add((need.sequence_id, need.unit))
            assert self.store.need(need.sequence_id.attempt_id, need.unit, need.reason) is None

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        self.clock.advance(0.01)
        events = self.scheduler.commit(plan, result)
        self._deliver(events)

    def _deliver(self, events: StepEvents) -> None:
        for drawn in events.tokens:
            assert drawn.sequence_id in self.live
            assert drawn.first_index == len(self.tokens[drawn.sequence_id])
            self.tokens[drawn.sequence_id] += drawn.token_ids
        for outputs in events.prompt_outputs:
            self._check_outputs(outputs)
        for ended in events.finished:
            attempt_id = ended.sequence_id.attempt_id
            assert attempt_id in self.read or self.requests[attempt_id].prompt_outputs.is_empty
            self.live.remove(ended.sequence_id)
            self._finish(ended.sequence_id, ended.finish_reason, ended.num_tokens)
        assert {one.sequence_id for one in events.tokens if one.finish_reason} == {
            one.sequence_id for one in events.finished if self.requests[one.sequence_id.attempt_id].stop.max_tokens
        }
        self._release_unneeded()

    def _check_outputs(self, outputs: SequenceOutputs) -> None:
        assert outputs.sequence_id in self.live
        attempt_id = outputs.sequence_id.attempt_id
        assert attempt_id not in self.read, "the prompt was read twice"
        self.read.add(attempt_id)
        embedding, logprobs = reference_outputs(self.requests[attempt_id])
        np.testing.assert_allclose(np.frombuffer(outputs.embedding, "<f4"), embedding, rtol=1e-6)
        assert outputs.logprobs == logprobs

    def _finish(self, sequence_id: SequenceId, reason: str, num_tokens: int) -> None:
        self.finishes[sequence_id] += 1
        assert self.finishes[sequence_id] == 1, "ended twice"
        request = self.requests[sequence_id.attempt_id]
        expected, expected_reason = reference_tokens(request, sequence_id.choice, self.max_total)
        assert (self.tokens[sequence_id], reason) == (expected, expected_reason)
        assert num_tokens == len(expected)
        self._forget_sequence(sequence_id)

    def _forget_sequence(self, sequence_id: SequenceId) -> None:
        self.asked_for = {pair for pair in self.asked_for if pair[0] != sequence_id}
        if not any(one.attempt_id == sequence_id.attempt_id for one in self.live):
            self.store.end(sequence_id.attempt_id)

    # ------------------------------------------------------------ the receiver's part

    def _release_unneeded(self) -> None:
        for released in self.scheduler.release_unneeded():
            assert not self.scheduler.needs_unit(released.unit), "released and needed"
            self._release(released)
        assert all(self.scheduler.needs_unit(unit) for unit in self.scheduler.references.readable_units())

    def _release(self, released: ReleasedFeature) -> None:
        assert self.store.release(released) == []
        self.store.take_unneeded()
        self.fake.features = {unit for unit in self.fake.features if self.store.feature(unit) is not None}
        self.store.check_invariants()

    # ------------------------------------------------------------ oracles

    def _rank(self, sequence_id: SequenceId) -> tuple[int, float, str, int, int]:
        request = self.requests[sequence_id.attempt_id]
        return (request.priority, *request.age, sequence_id.attempt, sequence_id.choice)

    def _turns(self, unit: UnitKey) -> list[tuple[tuple[int, float, str], NextRead]]:
        """Returns rank of the request, choice and position of every sequence that still has to read the unit."""
        turns = []
        for sequence in self.scheduler._roster.sequences:
            position = sequence.claims_from
            if not self.scheduler._roster.is_held(sequence) and unit in sequence.layout.units_after(position):
                choice, runs = sequence.sequence_id.choice, sequence.layout.next_read(unit, position)
                turns.append((self._rank(sequence.sequence_id)[:3], NextRead(choice, runs)))
        return turns

    def _first_missing(self, sequence_id: SequenceId) -> tuple[int, UnitKey] | None:
        """Returns position and unit of the first placeholder after the computed tokens that has no feature. Without
        overlap, the position is that of the sequence's next token."""
        sequence = self.scheduler._roster.get(sequence_id)
        assert sequence is not None
        request = self.requests[sequence_id.attempt_id]
        for run in request.placeholders:
            unit = UnitKey(request.media[run.item].mm_hash, run.unit)
            if run.end > sequence.claims_from and unit not in self.fake.features:
                at = run.offset if self.config.is_overlap_enabled else sequence.claims_from
                return max(at, sequence.claims_from), unit
        return None

    def _is_waiting_for_media(self, sequence_id: SequenceId) -> bool:
        sequence = self.scheduler._roster.get(sequence_id)
        assert sequence is not None
        missing = self._first_missing(sequence_id)
        return missing is not None and missing[0] == sequence.claims_from

    def _check_standstill(self) -> None:
        """Checks, after nothing was planned, that every sequence that has the next token's feature lacks a block for
        it."""
        for sequence_id in self._not_held():
            sequence = self.scheduler._roster.get(sequence_id)
            assert sequence is not None
            room = self.scheduler._resources.reach(sequence)
            start = sequence.num_computed
            # Hits in free blocks already count as free blocks, so only the other hits add room.
            if not sequence.is_started:
                hits = self.scheduler._resources._find_hits(sequence)
                num_idle = sum(block in self.scheduler._pool._queue for block in hits)
                room += (len(hits) - num_idle) * self.config.block_size
                start = min(len(hits) * self.config.block_size, sequence.num_tokens - 1)
            assert self._is_waiting_for_media(sequence_id) or room <= start, f"{sequence_id} could compute"

    def _check_waiting(self) -> None:
        """Checks that no sequence waits for a feature that was never asked for; a sequence that waits for a sibling's
        blocks needs none yet."""
        for sequence_id in self._not_held():
            missing = self._first_missing(sequence_id)
            if missing is not None:
                assert (sequence_id, missing[1]) in self.asked_for

    def _not_held(self) -> list[SequenceId]:
        roster = self.scheduler._roster
        return [one.sequence_id for one in roster.sequences if not roster.is_held(one)]

    def _follow_reads(self) -> None:
        """Checks that the summed changes give the next reads of every live sequence that has claimed its units."""
        reads = self.scheduler.drain_reads()
        self.store.update_reads(reads)
        for unit, attempt_to_read in reads.items():
            for attempt_id, read in attempt_to_read.items():
                self.reads.pop((unit, attempt_id), None)
                if read is not None:
                    self.reads[unit, attempt_id] = read
        expected: dict[tuple[UnitKey, AttemptId], NextRead] = {}
        for sequence_id in sorted(self.live, reverse=True):
            sequence, request = self.scheduler._roster.get(sequence_id), self.requests[sequence_id.attempt_id]
            assert sequence is not None
            for run in reversed(() if self.scheduler._roster.is_held(sequence) else request.placeholders):
                if run.end > sequence.claims_from:
                    unit = UnitKey(request.media[run.item].mm_hash, run.unit)
                    expected[unit, sequence_id.attempt_id] = NextRead(sequence_id.choice, run.offset)
        assert self.reads == expected

    def _follow_kv_events(self) -> None:
        """Checks that a router's index, which is fed with events only, equals the snapshot."""
        first_seq, events = self.scheduler.drain_kv_events()
        assert first_seq == self.next_seq
        self.next_seq += len(events)
        for event in events:
            if isinstance(event, BlocksStored):
                _store(self.index, event)
            else:
                assert isinstance(event, BlocksRemoved)
                for block in split_hashes(event.hashes):
                    del self.index[block]
        snapshot: dict[BlockHash, BlockHash | None] = {}
        for page in self.scheduler.kv_snapshot(page_blocks=3):
            assert page.last_seq == self.next_seq - 1
            for chain in page.chains:
                _store(snapshot, chain)
        assert snapshot == self.index


def _store(index: dict[BlockHash, BlockHash | None], chain: BlocksStored) -> None:
    parent = chain.parent
    ahead = _path(index, parent)
    assert chain.depth == len(ahead)
    assert chain.anchor == (ahead[chain.depth // ANCHOR_STRIDE * ANCHOR_STRIDE - 1] if chain.depth >= 4 else None)
    for block in split_hashes(chain.hashes):
        assert parent is None or parent in index, "stored before its parent"
        assert block not in index, "stored twice"
        index[block] = parent
        parent = block


def _path(index: dict[BlockHash, BlockHash | None], block: BlockHash | None) -> list[BlockHash]:
    """Returns the blocks from the root to this one."""
    path: list[BlockHash] = []
    while block is not None:
        path.append(block)
        block = index[block]
    return path[::-1]


def _with_emitted(request: GenerateRequest, emitted: tuple[tuple[int, ...], ...]) -> GenerateRequest:
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return GenerateRequest(**{**fields, "emitted": emitted})
