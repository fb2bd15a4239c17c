"""One step's choice: which sequences compute how many tokens. Phases in order: decodes, then prefills, then drafts.

    decodes    one token each, oldest first, so that none waits for a long prompt
    prefills   up to the doorstep, as far as the budget goes; first those that have all their media, then by priority
               (lower first, as in vLLM), then tenants in turn by what they were served (`fairness`), of each the
               oldest first; what does not fit is passed over
    drafts     with what is left of the budget and of the free blocks, so that guessing costs nobody a place; not for
               a sequence with a grammar, whose mask at each guess would have to be rolled back

Blocks are taken per chunk. When none is left, the youngest sequences give theirs up to an older one, never the other
way: so the oldest sequence that can compute always does, and nothing waits in a circle.
Knows no tokens and no results.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from fabric.ids import SequenceId
from llm_workers.config import WorkerConfig
from llm_workers.scheduling.drafts import propose
from llm_workers.scheduling.fairness import Claim, FairShare
from llm_workers.scheduling.residency import Residency
from llm_workers.scheduling.sequence import Sequence


class StepDraft:
    """A step while it is being chosen."""

    def __init__(self, max_tokens: int, max_sequences: int) -> None:
        self.num_tokens_left = max_tokens
        self._num_places = max_sequences
        self.chunks: dict[SequenceId, tuple[Sequence, int]] = {}
        """-> the sequence and the end of its chunk."""
        self.preempted: dict[SequenceId, Sequence] = {}
        self.drafts: dict[SequenceId, npt.NDArray[np.int64]] = {}
        """Guessed tokens behind the end of a chunk."""
        self.thrown_out: list[SequenceId] = []
        """The preempted that had begun. The others only held blocks that they had hit."""

    @property
    def is_full(self) -> bool:
        return self.num_tokens_left <= 0 or len(self.chunks) >= self._num_places

    def end_of(self, sequence: Sequence) -> int:
        """So many of its tokens are computed behind this step."""
        return self.chunks[sequence.sequence_id][1] if sequence.sequence_id in self.chunks else sequence.num_computed

    def take(self, sequence: Sequence, end: int) -> None:
        self.num_tokens_left -= end - sequence.num_computed
        assert self.num_tokens_left >= 0
        self.chunks[sequence.sequence_id] = (sequence, end)

    def guess(self, sequence: Sequence, drafts: npt.NDArray[np.int64]) -> None:
        self.num_tokens_left -= len(drafts)
        assert self.num_tokens_left >= 0
        self.drafts[sequence.sequence_id] = drafts

    def drop(self, sequence: Sequence) -> None:
        """It is preempted: its chunk, if it had one, goes and gives its tokens back."""
        planned = self.chunks.pop(sequence.sequence_id, None)
        if planned:
            self.num_tokens_left += planned[1] - sequence.num_computed
        self.preempted[sequence.sequence_id] = sequence
        if sequence.is_started:
            self.thrown_out.append(sequence.sequence_id)


class StepPlanner:
    def __init__(self, config: WorkerConfig, residency: Residency) -> None:
        self._config = config
        self._residency = residency
        self._shares = FairShare()

    def draft(self, by_age: SequenceOf[Sequence], held: frozenset[SequenceId]) -> StepDraft:
        """`by_age`: all live sequences, the oldest first. `held`: those that wait for a sibling to compute their
        prompt. Takes and frees blocks; changes no sequence's computed tokens except by preemption and hits."""
        draft = StepDraft(self._config.max_step_tokens, self._config.max_sequences)
        prefills = [one for one in by_age if not one.is_decoding and one.sequence_id not in held]
        self._plan_decodes(draft, by_age)
        self._plan_prefills(draft, by_age, self._in_turn(prefills))
        for sequence, end in draft.chunks.values():
            self._shares.charge(sequence.tenant, end - sequence.num_computed)
        ready = [one for one in prefills if self._residency.inbox.is_complete(one.sequence_id)]
        self._shares.end_step({one.tenant for one in ready if draft.end_of(one) < one.num_tokens})
        self._plan_drafts(draft)
        if not by_age:
            self._shares.clear()
        return draft

    # ------------------------------------------------------------ phases

    def _plan_decodes(self, draft: StepDraft, by_age: SequenceOf[Sequence]) -> None:
        for sequence in by_age:
            if draft.is_full:
                return
            if sequence.is_decoding:
                self._place(draft, by_age, sequence)

    def _in_turn(self, by_age: SequenceOf[Sequence]) -> list[Sequence]:
        """The order in which prompts are tried."""
        inbox = self._residency.inbox
        ranked = sorted(((not inbox.is_complete(one.sequence_id), one.priority), one.age, one) for one in by_age)
        self._shares.begin_step({one.tenant for (is_waiting, _), _, one in ranked if not is_waiting})
        most = self._config.max_step_tokens
        claims = [Claim(rank, one.tenant, min(one.num_tokens - one.num_computed, most)) for rank, _, one in ranked]
        return [ranked[index][2] for index in self._shares.order(claims)]

    def _plan_prefills(self, draft: StepDraft, by_age: SequenceOf[Sequence], prefills: SequenceOf[Sequence]) -> None:
        for sequence in prefills:
            if draft.is_full:
                return
            if sequence.sequence_id in draft.preempted:
                continue
            if not sequence.is_started:
                self._residency.extend_hits(sequence)
                if not self._may_start(draft, by_age, sequence):
                    continue
            self._place(draft, by_age, sequence)

    def _plan_drafts(self, draft: StepDraft) -> None:
        wanted, residency = self._config.speculation, self._residency
        for sequence, end in draft.chunks.values() if wanted.max_tokens else ():
            if draft.num_tokens_left <= 0:
                return
            if not sequence.is_decoding or sequence.guide is not None:
                continue
            room = min(wanted.max_tokens, draft.num_tokens_left, sequence.num_open - 1, residency.reach(sequence) - end)
            drafts = propose(sequence.tokens.view(), room, wanted.min_ngram, wanted.max_ngram)
            if len(drafts):
                residency.grow(sequence, end + len(drafts))
                draft.guess(sequence, drafts)

    # ------------------------------------------------------------ one sequence

    def _may_start(self, draft: StepDraft, by_age: SequenceOf[Sequence], sequence: Sequence) -> bool:
        """A sequence begins if all its tokens find room and every chunk of this step one block more, so that it is
        not thrown out at once; or by right of age; or if nothing else could be done in this step."""
        pool = self._residency.pool
        needed = self._residency.num_new_blocks(sequence, sequence.num_tokens)
        if needed + len(draft.chunks) <= pool.num_free:
            return True
        younger = _younger_holders(by_age, sequence)
        if younger and needed <= pool.num_free + self._residency.num_reclaimable(younger):
            return True
        return not draft.chunks

    def _place(self, draft: StepDraft, by_age: SequenceOf[Sequence], sequence: Sequence) -> None:
        """Plans as much of the sequence as the doorstep, the budget and the blocks allow."""
        end = min(sequence.num_tokens, sequence.num_computed + draft.num_tokens_left)
        end = self._whole_runs(sequence, self._residency.doorstep(sequence, end))
        if end <= sequence.num_computed:
            return
        least = self._least_end(sequence)
        if self._residency.reach(sequence) < least:
            self._make_room(draft, by_age, sequence, least)
        end = self._whole_runs(sequence, min(end, self._residency.reach(sequence)))
        if end > sequence.num_computed:
            self._residency.grow(sequence, end)
            draft.take(sequence, end)

    def _make_room(self, draft: StepDraft, by_age: SequenceOf[Sequence], sequence: Sequence, end: int) -> None:
        """Preempts younger sequences, the youngest first, until tokens up to `end` have blocks; none if that would
        not be enough."""
        residency = self._residency
        younger = _younger_holders(by_age, sequence)
        needed = residency.num_new_blocks(sequence, end, younger)
        if needed > residency.pool.num_free + residency.num_reclaimable(younger):
            return
        while residency.pool.num_free < residency.num_new_blocks(sequence, end):
            victim = younger.pop()
            draft.drop(victim)
            residency.give_up(victim)

    def _whole_runs(self, sequence: Sequence, end: int) -> int:
        """`end`, moved to the start of a run that it would cut, if media must be computed in one piece."""
        run = None if self._config.is_chunked_media_enabled else sequence.layout.run_around(end)
        return end if run is None else run.offset

    def _least_end(self, sequence: Sequence) -> int:
        """End of the smallest chunk that it could compute next."""
        least = sequence.num_computed + 1
        run = None if self._config.is_chunked_media_enabled else sequence.layout.run_around(least)
        return least if run is None else run.end


def _younger_holders(by_age: SequenceOf[Sequence], sequence: Sequence) -> list[Sequence]:
    """Younger sequences with blocks, the youngest last."""
    holders: list[Sequence] = []
    for other in reversed(by_age):
        if other is sequence:
            break
        if len(other.table):
            holders.append(other)
    return holders[::-1]
