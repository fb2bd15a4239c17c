"""Provides the engine's decisions through one class, `Scheduler`.

    prepare -> add                             a request arrives
    abort / hold_feature / evict_feature       something happens to a request or to the worker's features
    plan_step -> (execute) -> commit           one step; `rollback` replaces `commit` when execution failed
    drain_needed / drain_kv_events / ...       the worker reports changes to other components

The scheduler follows one rule: the computed tokens of every sequence catch up with its total, under a budget of tokens
per step. It is not thread-safe: one engine owns it, and at most one step is in flight. It knows nothing of tensors and
sockets, and knows no time but the clock that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from math import inf

from fabric.clock import Clock
from fabric.errors import ProtocolError
from fabric.ids import AttemptId, SequenceId, UnitKey
from fabric.messages import BlocksStored, GenerateRequest, KvEvent
from llm_workers.config import WorkerConfig
from llm_workers.scheduling import events
from llm_workers.scheduling.arrival import Arrival, prepare
from llm_workers.scheduling.blocks import BlockPool
from llm_workers.scheduling.decode_batch import DecodeBatch
from llm_workers.scheduling.events import (
    AdmittedSequences,
    NeededUnit,
    NextRead,
    SchedulerStats,
    SequenceTimes,
    StepEvents,
)
from llm_workers.scheduling.feature_references import FeatureReference, FeatureReferences, Reads, ReleasedFeature
from llm_workers.scheduling.guidance import Guide
from llm_workers.scheduling.plan import StepPlan, StepResult
from llm_workers.scheduling.planning import StepPlanner
from llm_workers.scheduling.roster import Roster
from llm_workers.scheduling.sequence_resources import SequenceResources
from llm_workers.scheduling.standings import Standings
from llm_workers.scheduling.steps import Steps, finished_sequence
from llm_workers.scheduling.tally import SchedulerTally
from llm_workers.step_costs import StepWork
from modalities.family import Positions

__all__ = ["AdmittedSequences", "NeededUnit", "Scheduler", "SchedulerStats", "StepEvents"]


BLOCKS_CHECKED_AT_REST = 256
"""Limits the blocks of the pool that are checked each time the worker comes to rest: this many take about a tenth of a
millisecond."""


class Scheduler:
    def __init__(
        self, config: WorkerConfig, shape_max_model_len: int, clock: Clock, context_scale_tokens: float = inf
    ) -> None:
        """Creates a scheduler without requests. `context_scale_tokens` belongs to the model and gives the weight of
        tokens (`fabric.weighted_tokens`)."""
        self._config = config
        self._context_scale_tokens = context_scale_tokens
        self._max_model_len = shape_max_model_len
        self._clock = clock
        self._pool = BlockPool(config.num_blocks)
        self.references = FeatureReferences()
        """Holds the engine's references to features; the runner reads the features through them."""
        self._resources = SequenceResources(
            self._pool, self.references, config.block_size, config.is_prefix_cache_enabled
        )
        self._roster = Roster()
        self._tally = SchedulerTally()
        self._needed_by_released: list[NeededUnit] = []
        """Holds needed units of siblings that waited for their leader and whose blocks were evicted meanwhile."""
        batch = DecodeBatch(config.block_size, is_used=not config.speculation.max_tokens)
        self._standings = Standings(self._roster, self._resources, batch, config.max_step_tokens, context_scale_tokens)
        planner = StepPlanner(config, self._resources, self._standings)
        self._steps = Steps(planner, self._resources, self._roster, self._standings, self._tally, clock)

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
            raise ProtocolError(f"attempt {attempt_id.attempt} of {attempt_id.request_id} is already here")
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

    def kv_snapshot(self) -> tuple[int, list[BlocksStored]]:
        """Returns the number of the newest event (drained or not), and all findable blocks as of that event."""
        return self._pool.snapshot()

    def empty_block(self) -> int | None:
        """Returns a block that no sequence reads or finds, which the caller may write to until the next step is
        planned. Returns None if every block is in use. As a side effect, the content that was cached in the block is
        evicted."""
        return self._pool.empty_one()

    @property
    def num_sequences(self) -> int:
        """Counts the live sequences, begun or not."""
        return len(self._roster)

    def stats(self) -> SchedulerStats:
        tally, standings, backlog = self._tally, self._standings, self._standings.backlog
        return SchedulerStats(
            num_running=len(standings.holders),
            num_waiting=len(self._roster) - len(standings.holders),
            num_at_doorstep=standings.num_at_doorstep,
            queued_tokens=backlog.num_tokens,
            num_decoding=len(standings.decodes),
            kv_blocks_used=self._pool.num_used,
            kv_blocks_total=self._pool.num_blocks,
            num_features=self.references.num_readable,
            steps=tally.steps,
            tokens_generated=tally.tokens_generated,
            prompt_tokens_computed=tally.prompt_tokens_computed,
            prefix_hit_tokens=tally.prefix_hit_tokens,
            prefix_query_tokens=tally.prefix_query_tokens,
            num_preemptions=tally.num_preemptions,
            drafts_proposed=tally.drafts_proposed,
            drafts_accepted=tally.drafts_accepted,
            queued_flat_tokens=backlog.weighted_tokens,
        )

    def check_at_rest(self) -> None:
        """Asserts, in production after the last sequence has left, a bounded part of `check_invariants`, which is
        another part at each call. No step may be in flight."""
        assert not len(self._roster), "a sequence is there"
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
            assert sequence is not None, "a sequence that left waits for a unit"
            self._standings.refresh(sequence)
