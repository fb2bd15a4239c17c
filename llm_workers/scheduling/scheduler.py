"""Provides the engine's decisions through one class, `Scheduler`.

    prepare -> add                             a request arrives
    abort / hold_feature / evict_feature       something happens to a request or to the worker's features
    plan_step -> (execute) -> commit           one step; `rollback` replaces `commit` when execution failed
    drain_needed / drain_kv_events / ...       the worker reports changes to other components

The scheduler follows one rule: the computed tokens of every sequence catch up with its total, under a budget of tokens
per step. `Scheduler` creates the parts of this package and answers the calls above; `Steps` runs the life of a step for
it, from the planner's draft to tokens and events.

The scheduler is not thread-safe: one engine owns it, and at most one step is in flight. It knows nothing of tensors and
sockets, of how `StepPlanner` chooses a step, and no time but the clock that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from copy import copy
from itertools import repeat
from math import inf

import numpy as np
import numpy.typing as npt

from fabric.contracts import (
    AttemptId,
    Clock,
    EngineStats,
    GenerateRequest,
    KvEvent,
    ProtocolError,
    SequenceId,
    UnitKey,
)
from llm_workers.scheduling import scheduler_events as events
from llm_workers.scheduling.blocks import BlockPool, ChainPage
from llm_workers.scheduling.decode_batch import DecodeBatch
from llm_workers.scheduling.feature_references import FeatureReference, FeatureReferences, Reads, ReleasedFeature
from llm_workers.scheduling.scheduler_events import (
    AdmittedSequences,
    FinishedSequence,
    NeededUnit,
    NextRead,
    PrefillProgress,
    SequenceOutputs,
    SequenceTimes,
    SequenceTokens,
    StepEvents,
)
from llm_workers.scheduling.sequence import Arrival, Sequence, prepare
from llm_workers.scheduling.sequence_resources import SequenceResources
from llm_workers.scheduling.standings import Roster, Standings
from llm_workers.scheduling.step_plan import Chunk, Decodes, Guide, StepPlan, StepResult, StepWork
from llm_workers.scheduling.step_planner import NOTHING, StepDraft, StepPlanner
from llm_workers.worker_config import WorkerConfig
from modalities.family import Positions

DrawTokens = Callable[[SequenceId, int, int], SequenceOf[int]]
"""Returns, for a sequence, the tokens that are drawn at the indexes `[first, first + count)`; none of them ends it."""
BLOCKS_CHECKED_AT_REST = 256
"""Limits the blocks of the pool that are checked each time the worker comes to rest: this many take about a tenth of a
millisecond."""


class Scheduler:
    """Decides, for all sequences of one worker, what the engine computes next, in which blocks and from which
    features."""

    def __init__(
        self, config: WorkerConfig, shape_max_model_len: int, clock: Clock, context_scale_tokens: float = inf
    ) -> None:
        """Creates a scheduler without requests. `context_scale_tokens` belongs to the model and gives the weight of
        tokens (`fabric.contracts.learned_cost`)."""
        self._config = config
        self._context_scale_tokens = context_scale_tokens
        self._max_model_len = shape_max_model_len
        self._clock = clock
        self._pool = BlockPool(config.num_blocks)
        self.references = FeatureReferences()
        """Holds the engine's references to features; the runner reads the features through them."""
        self._resources = SequenceResources(
            self._pool,
            self.references,
            config.block_size,
            config.is_prefix_cache_enabled,
            is_overlap_enabled=config.is_overlap_enabled,
        )
        self._roster = Roster()
        self._stats = EngineStats()
        """Holds the counters; `stats` adds the gauges to a copy."""
        self._needed_by_released: list[NeededUnit] = []
        """Holds needed units of siblings that waited for their leader and whose blocks were evicted meanwhile."""
        batch = DecodeBatch(config.block_size, is_used=not config.speculation.max_tokens)
        self._standings = Standings(self._roster, self._resources, batch, config.max_step_tokens, context_scale_tokens)
        planner = StepPlanner(config, self._resources, self._standings)
        self._steps = Steps(planner, self._resources, self._roster, self._standings, self._stats, clock)

    # ------------------------------------------------------------ requests and features

    def prepare(self, request: GenerateRequest, positions: Positions, guide: Guide | None = None) -> Arrival:
        """Creates one sequence per choice (each forks `guide`), which waits from now on. Changes nothing and may be
        called in any thread; takes time in proportion to the prompt, which `add` does not.

        Raises ContextLengthExceeded, InvalidRequest, FeatureMismatch or ProtocolError (numbers that contradict each
        other)."""
        return prepare(request, positions, self._config, self._max_model_len, self._clock.now(), guide)

    def add(self, arrival: Arrival) -> AdmittedSequences:
        """Adds the arrival's sequences: looks up what the prefix cache has of each, and claims the units that it needs
        in addition to that.

        Raises FeatureMismatch (a unit has another size than was promised to others) or ProtocolError (the attempt is
        already here); then nothing has changed."""
        now_s = self._clock.now()
        attempt_id, layout, sequences = arrival
        if attempt_id in self._roster:
            raise ProtocolError(f"attempt {attempt_id.attempt} of {attempt_id.request_id} is already at this worker")
        self.references.check_counts(layout.unit_to_tokens)
        ended = {one.sequence_id: reason for one in sequences if (reason := one.finish_reason()) is not None}
        running = [one for one in sequences if one.sequence_id not in ended]
        self._roster.add(attempt_id, running)
        missing: set[UnitKey] = set()
        for sequence in running:
            if not self._roster.is_held(sequence):
                missing.update(self._resources.admit(sequence))
            self._standings.refresh(sequence)
        return AdmittedSequences(
            sequence_ids=tuple(one.sequence_id for one in running),
            num_cached_tokens=min(running[0].num_covered, running[0].num_prompt) if running else 0,
            missing_units=tuple(unit for unit in layout.units_after(0) if unit in missing),
            reason=events.NOT_COVERED,
            finished=tuple(
                finished_sequence(one, ended[one.sequence_id], now_s) for one in sequences if one.sequence_id in ended
            ),
        )

    def abort(self, attempt_id: AttemptId, choices: SequenceOf[int] = ()) -> list[SequenceId]:
        """Frees everything of these choices (if `choices` is empty, of all choices) at once, also while a step is in
        flight. Returns the sequences that ended by it. The next `release_unneeded` gives up the units that no sequence
        needs any more."""
        aborted: list[SequenceId] = []
        for sequence in self._roster.of_attempt(attempt_id):
            if not choices or sequence.sequence_id.choice in choices:
                self._resources.leave(sequence)
                self._roster.remove(sequence)
                self._standings.remove(sequence)
                aborted.append(sequence.sequence_id)
        return aborted

    def hold_feature(self, reference: FeatureReference) -> None:
        """Takes a reference to a feature, which the runner can read from now on."""
        self._refresh(self.references.hold(reference))

    def evict_feature(self, unit: UnitKey) -> ReleasedFeature | None:
        """Gives up the references to a unit although sequences may need it; these wait again. Returns None if there is
        no reference."""
        references, missing_it = self.references.give_up(unit)
        self._refresh(missing_it)
        missed_by = tuple(sorted({sequence_id.attempt_id for sequence_id in missing_it}))
        return ReleasedFeature(unit, references, missed_by) if references else None

    def release_unneeded(self) -> list[ReleasedFeature]:
        """Gives up the references to units that no live sequence needs and that the step in flight does not read."""
        return self.references.take_unneeded()

    # ------------------------------------------------------------ one step

    def plan_step(self) -> StepPlan:
        """Plans the next step, which may be empty. Takes blocks, and preempts sequences if blocks run out. `commit` or
        `rollback` must come before the next call."""
        for sequence in self._roster.take_released():
            missing = self._resources.admit(sequence)
            self._needed_by_released += [NeededUnit(sequence.sequence_id, unit, events.PREEMPTED) for unit in missing]
            self._standings.refresh(sequence)
        return self._steps.plan()

    def commit(self, plan: StepPlan, result: StepResult) -> StepEvents:
        """Applies the result of an executed step. Chunks of sequences that were aborted meanwhile are ignored."""
        return self._steps.commit(plan, result)

    def rollback(self, plan: StepPlan) -> None:
        """Undoes a step that failed: sequences have the state that they had before it, without its blocks."""
        self._steps.rollback(plan)

    def num_steady_steps(self) -> int:
        """Returns how many of the next steps only compute one plain token of each of the same sequences, as long as
        nothing else is called and no drawn id ends a sequence. The step in which a sequence reaches its last token by
        count is not one of them. No step may be in flight."""
        return 0 if self._roster.has_released else self._steps.num_steady()

    def run_steady_steps(self, num_steps: int, draw: DrawTokens) -> list[SequenceTokens]:
        """Advances by `num_steps` steps in one call, at most `num_steady_steps`, or what earlier calls have left of
        them. Everything but the clock is afterwards as if each step had been planned and committed with these draws,
        block events in their order included. The simulator of `loadtest` needs it; an engine, which learns the tokens
        step by step, does not."""
        return self._steps.run_steady(num_steps, draw)

    # ------------------------------------------------------------ queries and drains

    def work(self, plan: StepPlan) -> StepWork:
        """Returns the work of a step, in the terms in which its cost is calculated."""
        return plan.work(self._context_scale_tokens)

    def times_of(self, attempt_id: AttemptId) -> dict[SequenceId, SequenceTimes]:
        """Returns the times until now of an attempt's live sequences; the caller needs them when it aborts the
        attempt."""
        now_s = self._clock.now()
        return {one.sequence_id: one.stopwatch.times(now_s) for one in self._roster.of_attempt(attempt_id)}

    def needs_unit(self, unit: UnitKey) -> bool:
        """Returns whether a live sequence still has to compute positions of the unit, or the step in flight reads
        it."""
        return self.references.is_needed(unit)

    def drain_needed(self) -> list[NeededUnit]:
        """Returns the units needed again since the last call, as (sequence, unit, reason)."""
        needed, self._needed_by_released = self._needed_by_released, []
        live = [one for one in needed if self._roster.get(one.sequence_id) is not None]
        return live + self._steps.drain_needed()

    def drain_reads(self) -> Reads:
        """Returns what may have changed since the last call: which attempts still have to compute positions of which
        unit, here or not, and where."""
        return self._resources.reads.drain(self._next_read)

    def drain_kv_events(self) -> tuple[int, list[KvEvent]]:
        """Returns the number of the first event, and the events since the last call. Numbers begin with 1. Old events
        are dropped when no caller drains them, which the receiver sees as a gap."""
        return self._pool.drain_events()

    def kv_snapshot(self, page_blocks: int) -> Iterator[ChainPage]:
        """Returns all findable blocks as of the newest event (drained or not), in pages that are made when they are
        taken from the iterator."""
        return self._pool.snapshot(page_blocks)

    def empty_block(self) -> int | None:
        """Returns a block that no sequence reads or finds, which the caller may write to until the next step is
        planned. Returns None if every block is in use. As a side effect, the content that was cached in the block is
        evicted."""
        return self._pool.empty_one()

    @property
    def num_sequences(self) -> int:
        """Counts the live sequences, begun or not."""
        return len(self._roster)

    def stats(self) -> EngineStats:
        """Returns the numbers of this moment, which no later step changes."""
        standings, backlog = self._standings, self._standings.backlog
        stats = copy(self._stats)
        stats.num_running = len(standings.holders)
        stats.num_waiting = len(self._roster) - len(standings.holders)
        stats.num_at_doorstep = standings.num_at_doorstep
        stats.queued_tokens = backlog.num_tokens
        stats.queued_weighted_tokens = backlog.weighted_tokens
        stats.behind_tokens, stats.behind_weighted_tokens = backlog.num_behind, backlog.weighted_behind
        stats.num_decoding = len(standings.decodes)
        stats.kv_blocks_used = self._pool.num_used
        stats.kv_blocks_total = self._pool.num_blocks
        stats.num_features = self.references.num_readable
        return stats

    def check_at_rest(self) -> None:
        """Asserts, in production after the last sequence has left, a bounded part of `check_invariants`, which is
        another part at each call. No step may be in flight."""
        assert not len(self._roster), "a sequence has not left"
        self._pool.check_at_rest(BLOCKS_CHECKED_AT_REST)
        self.references.check_invariants({})

    def check_invariants(self) -> None:
        """Asserts, between calls and with or without a step in flight, that the whole state is consistent. It is for
        tests after every step, because it looks at everything."""
        live = list(self._roster.sequences)
        self._pool.check_invariants({one.sequence_id: self._resources.blocks_of(one) for one in live})
        claiming = [one for one in live if not self._roster.is_held(one)]
        self.references.check_invariants(
            {one.sequence_id: set(one.layout.units_after(one.claims_from)) for one in claiming}
        )
        for one in live:
            assert 0 <= one.num_computed < one.num_tokens <= one.max_total_tokens
            assert len(one.table) * self._config.block_size >= one.num_computed
            if one.reader is not None and one.reader.needs_all_positions:
                assert one.reader.num_read == one.num_computed < one.num_prompt
        self._standings.check_invariants()

    def _next_read(self, unit: UnitKey, attempt_id: AttemptId) -> NextRead | None:
        """Returns the next read of the attempt's first choice that needs the unit, or None if no choice needs it."""
        for sequence in self._roster.of_attempt(attempt_id):
            if self.references.is_needed_by(sequence.sequence_id, unit):
                position = sequence.layout.next_read(unit, sequence.claims_from)
                return NextRead(sequence.sequence_id.choice, position)
        return None

    def _refresh(self, sequence_ids: SequenceOf[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            sequence = self._roster.get(sequence_id)
            assert sequence is not None, f"{sequence_id} has left but waits for a unit"
            self._standings.refresh(sequence)


# ---------------------------------------------------------------- the life of a step


class Steps:
    """Runs the life of a step: it turns a draft into a plan of plain numbers, and the result into tokens and events. A
    sequence that is aborted while the step is in flight has left the roster: its chunk is ignored."""

    def __init__(
        self,
        planner: StepPlanner,
        resources: SequenceResources,
        roster: Roster,
        standings: Standings,
        stats: EngineStats,
        clock: Clock,
    ) -> None:
        self._planner = planner
        self._standings = standings
        self._resources = resources
        self._roster = roster
        self._stats = stats
        self._clock = clock
        self._step = 0
        self._planned_at_s = 0.0
        self._in_flight: dict[SequenceId, Sequence] = {}
        """Holds the sequences that have a chunk in the step in flight."""
        self._decoding: list[Sequence] = []
        """Holds the sequences that have a row in the `decodes` of the step in flight, in the order of the rows."""
        self._units_in_step: set[UnitKey] = set()
        """Holds the units that the step in flight reads."""
        self._needed: list[NeededUnit] = []
        self._preempted: list[SequenceId] = []
        self._at_doorstep: list[SequenceId] = []

    # ------------------------------------------------------------ plan

    def plan(self) -> StepPlan:
        assert not self._in_flight, "the last step was neither committed nor rolled back"
        assert not self._decoding, "the last step was neither committed nor rolled back"
        now_s = self._planned_at_s = self._clock.now()
        draft, decodes = self._planner.draft(now_s), None
        # The rows are copied before `_settle`, which gives a row to a sequence that begins now.
        if draft.batch is not None and len(draft.batch):
            self._decoding, decodes = draft.batch.sequences.copy(), draft.batch.decodes()
        self._settle(draft)
        self._step += 1
        chunks = tuple(
            self._seal(sequence, end, draft.drafts.get(sequence.sequence_id, NOTHING), now_s)
            for sequence, end in draft.chunks.values()
        )
        self._note_doorsteps(now_s)
        return StepPlan(self._step, chunks, decodes)

    def _settle(self, draft: StepDraft) -> None:
        """Applies the draft's other effects. Preempted sequences wait again and ask for units that they need again; so
        do those whose blocks were evicted before they began. All sequences that the draft has moved are refreshed."""
        for sequence, missing in draft.covered_anew:
            self._ask(sequence, missing)
        for sequence in draft.preempted.values():
            self._ask(sequence, self._resources.admit(sequence))
        for sequence, _ in draft.chunks.values():
            if sequence.sequence_id in draft.begun:
                self._standings.refresh(sequence)
        self._preempted += draft.thrown_out
        self._stats.num_preemptions += len(draft.thrown_out)

    def _ask(self, sequence: Sequence, missing: Iterable[UnitKey]) -> None:
        self._needed += [NeededUnit(sequence.sequence_id, unit, events.PREEMPTED) for unit in missing]
        self._standings.refresh(sequence)

    def _seal(self, sequence: Sequence, end: int, drafts: npt.NDArray[np.int64], now_s: float) -> Chunk:
        """Makes the chunk of one sequence. `drafts` come after `end`, where the sequence ends as far as it is known."""
        start, draft_end = sequence.num_computed, end + len(drafts)
        self._note_begin(sequence, now_s)
        splices = sequence.layout.splices(start, end) if start < sequence.num_prompt else ()
        for splice in splices:
            self._resources.references.begin_read(splice.unit)
            self._units_in_step.add(splice.unit)
        self._in_flight[sequence.sequence_id] = sequence
        known = sequence.tokens.view(start, end)
        return Chunk(
            sequence_id=sequence.sequence_id,
            start=start,
            num_tokens=draft_end - start,
            token_ids=np.concatenate([known, drafts]) if len(drafts) else known,
            positions=sequence.positions(start, draft_end),
            block_ids=sequence.table.view(0, self._resources.blocks_for(draft_end)).copy(),
            splices=splices,
            sampling=sequence.sampling if end == sequence.num_tokens and sequence.is_generating else None,
            draw_index=sequence.num_generated,
            counts=sequence.counts,
            side_names=sequence.side_names,
            barred=sequence.barred,
            num_barred=sequence.num_barred,
            guide=sequence.guide,
            num_drafts=len(drafts),
            copied_from=sequence.copied_from,
            reading=None if sequence.reader is None else sequence.reader.reading(start, end),
        )

    def _note_begin(self, sequence: Sequence, now_s: float) -> None:
        """Records that the sequence begins. The call comes before the sequence's first chunk."""
        if sequence.stopwatch.has_begun:
            return
        sequence.stopwatch.begin(now_s)
        sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        if not sequence.is_forked:
            self._stats.prefix_hit_tokens += sequence.num_cached
            self._stats.prefix_query_tokens += sequence.num_prompt

    # ------------------------------------------------------------ end

    def commit(self, plan: StepPlan, result: StepResult) -> StepEvents:
        assert not result.not_finite, "a step with results that are not finite must not be committed"
        now_s = self._clock.now()
        tokens: list[SequenceTokens] = []
        finished: list[FinishedSequence] = []
        prefill: list[PrefillProgress] = []
        outputs: list[SequenceOutputs] = []
        chunks, decoding = self._end_step(plan)
        if plan.decodes is not None:
            tokens = self._commit_decodes(plan.decodes, decoding, result)
            for sequence, given in zip(decoding, tokens, strict=True):
                if given.finish_reason is not None:
                    finished.append(self._finish(sequence, given.finish_reason, now_s))
        for chunk, sequence in chunks:
            if chunk.start < sequence.num_prompt:
                end = min(chunk.end, sequence.num_prompt)
                prefill.append(PrefillProgress(sequence.sequence_id, chunk.start, end))
                self._stats.prompt_tokens_computed += end - chunk.start
                sequence.stopwatch.add_prefill(now_s - self._planned_at_s)
            sampled = self._advance(chunk, sequence, result)
            outputs += sequence.take_reading(chunk.end, result.readings.get(chunk.sequence_id))
            if sequence.num_computed == sequence.num_tokens:
                finished.append(self._finish(sequence, "length", now_s))  # It generates nothing.
                continue
            if sequence in self._standings.decodes:
                self._standings.batch.refresh(sequence)
            else:
                self._standings.refresh(sequence)
            if sampled is None:
                continue
            tokens.append(sampled)
            sequence.stopwatch.first_token(now_s)
            if sampled.finish_reason is not None:
                finished.append(self._finish(sequence, sampled.finish_reason, now_s))
        self._stats.steps += bool(plan.num_sequences)
        self._stats.step_s += now_s - self._planned_at_s
        self._note_doorsteps(now_s)
        at_doorstep, self._at_doorstep = self._at_doorstep, []
        preempted, self._preempted = self._preempted, []
        lists = tuple(tokens), tuple(finished), tuple(prefill), tuple(at_doorstep), tuple(preempted)
        return StepEvents(*lists, self._planned_at_s, now_s, tuple(outputs))

    def rollback(self, plan: StepPlan) -> None:
        chunks, decoding = self._end_step(plan)
        for sequence in (*decoding, *(sequence for _, sequence in chunks)):
            self._resources.trim(sequence)
            self._standings.refresh(sequence)

    # ------------------------------------------------------------ many equal steps

    def num_steady(self) -> int:
        num_steps = self._num_equal()
        while num_steps and self._standings.batch.num_growing(num_steps) > self._resources.pool.num_free:
            num_steps //= 2
        return num_steps

    def _num_equal(self) -> int:
        """Returns how many of the next steps have the same sequences and tokens, if there are blocks for them."""
        standings, batch = self._standings, self._standings.batch
        if not len(batch) or len(batch) != len(standings.decodes) or standings.is_stirred or len(standings.prefills):
            return 0
        return batch.num_draws_before_last() if self._planner.has_room_for(len(batch)) else 0

    def run_steady(self, num_steps: int, draw: DrawTokens) -> list[SequenceTokens]:
        # What is left of steps that were named earlier may be more than `num_steady`, which halves, would name now.
        assert 0 < num_steps <= self._num_equal(), "the steps are not steady"
        assert not self._in_flight, "the last step was neither committed nor rolled back"
        assert not self._decoding, "the last step was neither committed nor rolled back"
        standings, batch = self._standings, self._standings.batch
        standings.prefills.begin_step()
        standings.prefills.end_step((), {name: num * num_steps for name, num in batch.tenant_to_num.items()})
        drawn: list[SequenceTokens] = []
        for sequence in batch.sequences:
            first_index = sequence.num_generated
            token_ids = tuple(draw(sequence.sequence_id, first_index, num_steps))
            drawn.append(SequenceTokens(sequence.sequence_id, first_index, token_ids, None))
            sequence.tokens.extend(token_ids)
        changed: dict[Sequence, None] = {}
        # Blocks are taken and published in the order of the steps, so that the same ones are evicted.
        for sequence, num_computed, is_filled in batch.block_changes(num_steps):
            changed[sequence] = None
            if is_filled:
                sequence.num_computed = num_computed
                self._resources.publish(sequence)
            else:
                self._resources.grow(sequence, num_computed)
        for sequence in batch.sequences:
            sequence.num_computed = sequence.num_tokens - 1
        batch.advance(np.array([each.token_ids[-1] for each in drawn], dtype=np.int64), num_steps)
        batch.take_blocks(changed)
        self._step += num_steps
        self._stats.steps += num_steps
        self._stats.tokens_generated += num_steps * len(batch)
        return drawn

    def drain_needed(self) -> list[NeededUnit]:
        """Returns the units that live sequences need again."""
        needed, self._needed = self._needed, []
        return [one for one in needed if self._roster.get(one.sequence_id) is not None]

    def _end_step(self, plan: StepPlan) -> tuple[list[tuple[Chunk, Sequence]], list[Sequence]]:
        """Ends a step that is in flight. Returns the chunks, and the sequences of rows, that are still alive. Units
        that the step read can be given away from now on."""
        flying, self._in_flight = self._in_flight, {}
        decoding, self._decoding = self._decoding, []
        assert flying.keys() == {chunk.sequence_id for chunk in plan.others}, (
            "the plan is not that of the step in flight"
        )
        assert len(decoding) == plan.num_decodes, "the plan is not that of the step in flight"
        self._resources.references.end_reads(self._units_in_step)
        self._units_in_step.clear()
        pairs = [(chunk, flying[chunk.sequence_id]) for chunk in plan.others]
        chunks = [(chunk, sequence) for chunk, sequence in pairs if self._roster.get(chunk.sequence_id) is sequence]
        if plan.decodes is not None and not self._standings.batch.is_of(plan.decodes):
            decoding = [one for one in decoding if self._roster.get(one.sequence_id) is one]
        return chunks, decoding

    def _commit_decodes(self, decodes: Decodes, decoding: list[Sequence], result: StepResult) -> list[SequenceTokens]:
        """Commits one token for each of these sequences, all of which have rows. The batch still has the rows of the
        step, unless one was aborted meanwhile: then its rows are rebuilt."""
        batch = self._standings.batch
        is_whole = batch.is_of(decodes)
        tokens = [result.token_ids[one.sequence_id] for one in decoding]
        sampled: list[SequenceTokens] = []
        may_end = zip(batch.is_last_draw().tolist(), batch.ending_ids, strict=True) if is_whole else repeat((True, ()))
        indexes = decodes.draw_indexes.tolist() if is_whole else [one.num_generated for one in decoding]
        for sequence, index, token_ids, (is_last, ending) in zip(decoding, indexes, tokens, may_end, strict=False):
            sequence.tokens.append(token_ids[0])
            sequence.num_computed += 1
            reason = sequence.finish_reason() if is_last or token_ids[0] in ending else None
            sampled.append(SequenceTokens(sequence.sequence_id, index, token_ids, reason))
        self._stats.tokens_generated += len(sampled)
        filled = decoding
        if is_whole:
            filled = batch.advance(np.array([token_ids[0] for token_ids in tokens], dtype=np.int64))
        for sequence in filled:
            self._resources.publish(sequence)
        if is_whole:
            batch.take_blocks(filled)
        for sequence in () if is_whole else decoding:
            batch.refresh(sequence)
        return sampled

    def _finish(self, sequence: Sequence, reason: str, now_s: float) -> FinishedSequence:
        self._resources.leave(sequence)
        self._roster.remove(sequence)
        self._standings.remove(sequence)
        return finished_sequence(sequence, reason, now_s)

    def _advance(self, chunk: Chunk, sequence: Sequence, result: StepResult) -> SequenceTokens | None:
        """Commits a computed chunk up to its first wrong draft, and returns the tokens that it gave. Siblings that
        waited for the prompt take it over."""
        first_index, end, sampled = sequence.num_generated, chunk.end - chunk.num_drafts, None
        if chunk.sampling is not None:
            token_ids = result.token_ids[chunk.sequence_id]
            assert tuple(token_ids) == tuple(chunk.accepted(token_ids)), (
                f"{chunk.sequence_id} has tokens after a wrong draft"
            )
            num_taken, reason = sequence.take(token_ids)
            end += num_taken - 1
            self._stats.tokens_generated += num_taken
            self._stats.drafts_proposed += chunk.num_drafts
            self._stats.drafts_accepted += num_taken - 1
            logprobs = result.logprobs.get(chunk.sequence_id, ())[:num_taken]
            sampled = SequenceTokens(
                sequence.sequence_id, first_index, tuple(token_ids[:num_taken]), reason, tuple(logprobs)
            )
        self._resources.advance(sequence, end)
        if end >= sequence.num_prompt:
            for sibling in self._roster.prompt_computed(sequence.sequence_id.attempt_id):
                self._ask(sibling, self._resources.fork(sequence, sibling))
        return sampled

    def _note_doorsteps(self, now_s: float) -> None:
        self._at_doorstep += self._standings.note_doorsteps(self._in_flight, now_s)


def finished_sequence(sequence: Sequence, reason: str, now_s: float) -> FinishedSequence:
    return FinishedSequence(
        sequence.sequence_id,
        reason,
        sequence.num_generated,
        sequence.num_prompt,
        sequence.num_cached,
        sequence.stopwatch.times(now_s),
    )
