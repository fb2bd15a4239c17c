"""Runs the life of a step: it turns a draft into a plan of plain numbers, and the result into tokens and events.

At most one step is in flight. A sequence that is aborted meanwhile has left the roster: its chunk is ignored. This
module knows nothing of how a step is chosen or computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

import numpy as np
import numpy.typing as npt

from fabric.clock import Clock
from fabric.ids import SequenceId, UnitKey
from llm_workers.scheduling import events
from llm_workers.scheduling.drafts import NOTHING
from llm_workers.scheduling.events import (
    FinishedSequence,
    NeededUnit,
    PrefillProgress,
    SequenceTokens,
    StepEvents,
)
from llm_workers.scheduling.plan import Chunk, Decodes, StepPlan, StepResult
from llm_workers.scheduling.planning import StepDraft, StepPlanner
from llm_workers.scheduling.roster import Roster
from llm_workers.scheduling.sequence import Sequence
from llm_workers.scheduling.sequence_resources import SequenceResources
from llm_workers.scheduling.standings import Standings
from llm_workers.scheduling.tally import SchedulerTally


class Steps:
    def __init__(
        self,
        planner: StepPlanner,
        resources: SequenceResources,
        roster: Roster,
        standings: Standings,
        tally: SchedulerTally,
        clock: Clock,
    ) -> None:
        self._planner = planner
        self._standings = standings
        self._resources = resources
        self._roster = roster
        self._tally = tally
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
        draft, decodes = self._planner.draft(), None
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
        self._tally.num_preemptions += len(draft.thrown_out)

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
            sampling=sequence.sampling if end == sequence.num_tokens else None,
            draw_index=sequence.num_generated,
            counts=sequence.counts,
            side_names=sequence.side_names,
            barred=sequence.barred,
            num_barred=sequence.num_barred,
            guide=sequence.guide,
            num_drafts=len(drafts),
            copied_from=sequence.copied_from,
        )

    def _note_begin(self, sequence: Sequence, now_s: float) -> None:
        """Records that the sequence begins. The call comes before the sequence's first chunk."""
        if sequence.stopwatch.has_begun:
            return
        sequence.stopwatch.begin(now_s)
        sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        if not sequence.is_forked:
            self._tally.prefix_hit_tokens += sequence.num_cached
            self._tally.prefix_query_tokens += sequence.num_prompt

    # ------------------------------------------------------------ end

    def commit(self, plan: StepPlan, result: StepResult) -> StepEvents:
        assert not result.not_finite, "what is not finite must not be found by others"
        now_s = self._clock.now()
        tokens: list[SequenceTokens] = []
        finished: list[FinishedSequence] = []
        prefill: list[PrefillProgress] = []
        chunks, decoding = self._end_step(plan)
        if plan.decodes is not None:
            tokens += self._commit_decodes(plan.decodes, decoding, result)
        for sequence, given in zip(decoding, tuple(tokens), strict=True):
            if given.finish_reason is not None:
                finished.append(self._finish(sequence, given.finish_reason, now_s))
        for chunk, sequence in chunks:
            if chunk.start < sequence.num_prompt:
                end = min(chunk.end, sequence.num_prompt)
                prefill.append(PrefillProgress(sequence.sequence_id, chunk.start, end))
                self._tally.prompt_tokens_computed += end - chunk.start
                sequence.stopwatch.add_prefill(now_s - self._planned_at_s)
            sampled = self._advance(chunk, sequence, result)
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
        self._tally.steps += bool(plan.num_sequences)
        self._note_doorsteps(now_s)
        at_doorstep, self._at_doorstep = self._at_doorstep, []
        preempted, self._preempted = self._preempted, []
        return StepEvents(tuple(tokens), tuple(finished), tuple(prefill), tuple(at_doorstep), tuple(preempted))

    def rollback(self, plan: StepPlan) -> None:
        chunks, decoding = self._end_step(plan)
        for sequence in (*decoding, *(sequence for _, sequence in chunks)):
            self._resources.trim(sequence)
            self._standings.refresh(sequence)

    def drain_needed(self) -> list[NeededUnit]:
        """Returns the units that live sequences need again."""
        needed, self._needed = self._needed, []
        return [one for one in needed if self._roster.get(one.sequence_id) is not None]

    def _end_step(self, plan: StepPlan) -> tuple[list[tuple[Chunk, Sequence]], list[Sequence]]:
        """Ends a step that is in flight. Returns the chunks, and the sequences of rows, that are still alive. Units
        that the step read can be given away from now on."""
        flying, self._in_flight = self._in_flight, {}
        decoding, self._decoding = self._decoding, []
        assert flying.keys() == {chunk.sequence_id for chunk in plan.others}, "not the step that is in flight"
        assert len(decoding) == plan.num_decodes, "not the step that is in flight"
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
        for sequence, token_ids, (is_last, ending) in zip(decoding, tokens, may_end, strict=False):
            index = sequence.num_generated
            sequence.tokens.append(token_ids[0])
            sequence.num_computed += 1
            reason = sequence.finish_reason() if is_last or token_ids[0] in ending else None
            sampled.append(SequenceTokens(sequence.sequence_id, index, token_ids, reason))
        self._tally.tokens_generated += len(sampled)
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
            assert tuple(token_ids) == tuple(chunk.accepted(token_ids)), "a wrong draft was built upon"
            num_taken, reason = sequence.take(token_ids)
            end += num_taken - 1
            self._tally.tokens_generated += num_taken
            self._tally.drafts_proposed += chunk.num_drafts
            self._tally.drafts_accepted += num_taken - 1
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
