"""Chooses the work of one step: which sequences compute how many tokens. The phases run in this order:

    decodes    one token for each decoding sequence, by rank, so that none waits for a long prompt
    prefills   prompt tokens up to the doorstep, as far as the budget goes, in the order of `PrefillQueue`; a sequence
               that does not fit is passed over, but only a limited number of those that would begin
    drafts     guessed tokens, with the rest of the budget and of the free blocks, so that a guess takes no sequence's
               place; a sequence with a grammar has none, because the mask at each guess would have to be rolled back

Rank is priority, then age. A sequence's doorstep is the first placeholder whose feature has not landed. Blocks are
taken per chunk. When none is left, the sequences that rank last give their blocks up to one of higher rank, and never
the other way round: so the first in rank that can compute always does, and no sequences wait for each other in a
circle. A step looks at the sequences that run and at a bounded number of those that wait.

`StepPlanner` runs the phases and collects what they choose in a `StepDraft`; `propose` makes the guesses by prompt
lookup. This module knows nothing of results, and looks at the values of tokens for the guesses alone.
"""

from __future__ import annotations

from contextlib import closing

import numpy as np
import numpy.typing as npt

from fabric.contracts import SequenceId, UnitKey
from llm_workers.scheduling.decode_batch import DecodeBatch
from llm_workers.scheduling.sequence import Rank, Sequence
from llm_workers.scheduling.sequence_resources import SequenceResources
from llm_workers.scheduling.standings import Standings
from llm_workers.worker_config import WorkerConfig

MAX_PASSED_OVER = 8
"""A step looks at no more than this many sequences that can't begin for lack of blocks before it stops searching for a
smaller one."""
_QUICK_VICTIMS = 8
"""This many sequences of the lowest ranks are checked one by one before the blocks of all lower ranks are counted."""


class StepPlanner:
    """Chooses one step at a time for the sequences in `standings`, with the blocks of `resources`."""

    def __init__(self, config: WorkerConfig, resources: SequenceResources, standings: Standings) -> None:
        self._config = config
        self._resources = resources
        self._standings = standings

    def draft(self) -> StepDraft:
        """Chooses the next step. Takes and frees blocks; changes no sequence's computed tokens except by preemption and
        by hits. The caller has to refresh the standings of the sequences in `preempted` and in `covered_anew`."""
        draft = StepDraft(self._config.max_step_tokens, self._config.max_sequences)
        self._standings.prefills.begin_step()
        self._plan_decodes(draft)
        self._plan_prefills(draft)
        self._standings.prefills.end_step(draft.chunks.values(), draft.batch.tenant_to_num if draft.batch else {})
        self._plan_drafts(draft)
        return draft

    def has_room_for(self, num_decodes: int) -> bool:
        """Returns whether a step has room for this many sequences that decode and nothing else."""
        return num_decodes <= min(self._config.max_step_tokens, self._config.max_sequences)

    # ------------------------------------------------------------ phases

    def _plan_decodes(self, draft: StepDraft) -> None:
        """Plans the whole batch at once, where budget and blocks suffice for every sequence that decodes: then the
        order does not matter. Otherwise it plans the sequences one by one, by rank."""
        decodes, batch = self._standings.decodes, self._standings.batch
        growing = batch.growing()
        num_beside = len(decodes) - len(batch)
        is_fitting = draft.has_room_for(len(decodes)) and len(growing) + num_beside <= self._resources.pool.num_free
        if len(batch) and is_fitting:
            for sequence in growing:
                self._resources.grow(sequence, sequence.num_tokens)
            batch.take_blocks(growing)
            draft.take_batch(batch)
            if not num_beside:
                return
        for sequence in decodes:
            if draft.is_full:
                return
            if sequence.sequence_id not in draft.preempted and (draft.batch is None or sequence not in batch):
                self._place(draft, sequence)

    def _plan_prefills(self, draft: StepDraft) -> None:
        """Plans prefills in turn, until the limit of sequences passed over is reached. Then it plans those that have
        begun, which need no decision to begin. If nothing at all can be computed, it goes by rank: the first in rank
        can compute, if any can."""
        num_passed_over = 0
        with closing(self._standings.prefills.in_turn()) as in_turn:
            for sequence in in_turn:
                if draft.is_full:
                    return
                if sequence.sequence_id in draft.preempted:
                    continue
                num_passed_over += not self._try(draft, sequence) and not sequence.is_started
                if num_passed_over >= MAX_PASSED_OVER:
                    break
            else:
                return
        for sequence in tuple(self._standings.holders):
            is_tried = sequence.sequence_id in draft.chunks or sequence.sequence_id in draft.preempted
            if not is_tried and not draft.is_full and sequence in self._standings.prefills:
                self._place(draft, sequence)
        for sequence in () if draft.num_sequences else self._standings.prefills.first_by_rank(MAX_PASSED_OVER):
            if not draft.num_sequences:
                self._try(draft, sequence)

    def _plan_drafts(self, draft: StepDraft) -> None:
        wanted, resources = self._config.speculation, self._resources
        for sequence, end in draft.chunks.values() if wanted.max_tokens else ():
            if draft.num_tokens_left <= 0:
                return
            if sequence not in self._standings.decodes or sequence.guide is not None:
                continue
            room = min(wanted.max_tokens, draft.num_tokens_left, sequence.num_open - 1, resources.reach(sequence) - end)
            drafts = propose(sequence.tokens.view(), room, wanted.min_ngram, wanted.max_ngram)
            if len(drafts):
                resources.grow(sequence, end + len(drafts))
                draft.guess(sequence, drafts)

    # ------------------------------------------------------------ one sequence

    def _try(self, draft: StepDraft, sequence: Sequence) -> bool:
        """Plans a chunk of a sequence that has begun, or that may begin now. Returns False if the sequence gets no
        chunk."""
        if sequence.is_started:
            return self._place(draft, sequence)
        resources, holders = self._resources, self._standings.holders
        if draft.num_sequences and not holders.has_below(sequence):
            # The common case under load costs a look-up at most: there is no room, and no sequence to take it from.
            num_left = resources.pool.num_free - draft.num_sequences
            if num_left < 0 or resources.num_missing_blocks(sequence) > num_left:
                return False
        num_covered, missing = sequence.num_covered, resources.try_hits(sequence)
        if sequence.num_covered != num_covered:
            draft.covered_anew.append((sequence, missing))
        if not self._may_begin(draft, sequence) or not self._place(draft, sequence):
            resources.withdraw(sequence)
            return False
        resources.start(sequence)
        draft.begun.add(sequence.sequence_id)
        holders.add(sequence)
        return True

    def _may_begin(self, draft: StepDraft, sequence: Sequence) -> bool:
        """Returns whether a sequence may begin. It may if all its tokens find room and each chunk of this step could
        still take one more block, so that the sequence is not preempted at once; or by right of its rank; or if this
        step could do nothing else."""
        needed = self._resources.num_new_blocks(sequence, sequence.num_tokens)
        if needed + draft.num_sequences <= self._resources.pool.num_free:
            return True
        if self._standings.holders.has_below(sequence) and self._can_have(draft, sequence, needed):
            return True
        return not draft.num_sequences

    def _place(self, draft: StepDraft, sequence: Sequence) -> bool:
        """Plans as much of the sequence as the doorstep, the budget and the blocks allow. Returns False if that is
        nothing."""
        end = min(sequence.num_tokens, sequence.num_computed + self._room(draft, sequence))
        end = self._resources.doorstep(sequence, sequence.num_computed, end)
        if end <= sequence.num_computed:
            return False
        least = sequence.num_computed + 1
        if self._resources.reach(sequence) < least:
            self._make_room(draft, sequence, least)
        end = min(end, self._resources.reach(sequence))
        if end <= sequence.num_computed:
            return False
        self._resources.grow(sequence, end)
        self._standings.batch.take_blocks((sequence,))
        draft.take(sequence, end)
        return True

    def _room(self, draft: StepDraft, sequence: Sequence) -> int:
        """Returns how many tokens the sequence may compute in this step."""
        limit = self._config.media_chunk_tokens
        is_limited = bool(limit) and sequence.has_media and self._standings.has_text
        return min(draft.num_tokens_left, limit) if is_limited else draft.num_tokens_left

    def _make_room(self, draft: StepDraft, sequence: Sequence, end: int) -> None:
        """Preempts sequences of lower rank, the last one first, until tokens up to `end` have blocks. Preempts none if
        that would not be enough."""
        resources, holders = self._resources, self._standings.holders
        if not holders.has_below(sequence):
            return
        lower = holders.below(sequence)
        if not self._can_have(draft, sequence, resources.num_new_blocks(sequence, end, lower)):
            return
        while resources.pool.num_free < resources.num_new_blocks(sequence, end):
            victim = lower.pop()
            holders.discard(victim)
            draft.drop(victim)
            resources.give_up(victim)

    def _can_have(self, draft: StepDraft, sequence: Sequence, num_blocks: int) -> bool:
        """Returns whether this many blocks are free, or would be if all lower ranks gave theirs up."""
        pool = self._resources.pool
        if draft.is_hopeless(sequence, num_blocks):
            return False
        lower = self._standings.holders.below(sequence)
        num_found = pool.num_free
        for victim in reversed(lower[-_QUICK_VICTIMS:]):
            num_found += self._resources.num_reclaimable((victim,))
            if num_found >= num_blocks:
                return True
        num_found = pool.num_free + self._resources.num_reclaimable(lower)
        # The blocks of a sequence that only tries to begin become free again if it does not begin.
        draft.note_most(sequence, num_found + (0 if sequence.is_started else len(sequence.table)))
        return num_found >= num_blocks


class StepDraft:
    """A `StepDraft` is a step while it is being chosen."""

    def __init__(self, max_tokens: int, max_sequences: int) -> None:
        self.num_tokens_left = max_tokens
        self._num_places = max_sequences
        self.chunks: dict[SequenceId, tuple[Sequence, int]] = {}
        """Maps the sequence's id to the sequence and the end of its chunk."""
        self.batch: DecodeBatch | None = None
        """All rows of this batch decode in this step, in addition to the chunks."""
        self.begun: set[SequenceId] = set()
        """Holds the sequences whose first chunk this is, even those that were preempted again."""
        self.preempted: dict[SequenceId, Sequence] = {}
        self.covered_anew: list[tuple[Sequence, list[UnitKey]]] = []
        """Holds the sequences that hit more or fewer blocks than at the last look, with the units that they now miss
        because of it."""
        self.drafts: dict[SequenceId, npt.NDArray[np.int64]] = {}
        """Holds the guessed tokens that follow the end of a chunk."""
        self.thrown_out: list[SequenceId] = []
        """Holds those preempted sequences that had begun before this step."""
        self._most: tuple[Rank, int] | None = None

    @property
    def is_full(self) -> bool:
        return self.num_tokens_left <= 0 or self.num_sequences >= self._num_places

    @property
    def num_sequences(self) -> int:
        """Counts the sequences that compute something in this step."""
        return len(self.chunks) + (0 if self.batch is None else len(self.batch))

    def has_room_for(self, num_decodes: int) -> bool:
        return num_decodes <= min(self.num_tokens_left, self._num_places - self.num_sequences)

    def take_batch(self, batch: DecodeBatch) -> None:
        """Adds all rows of the batch to the step. The caller has checked that there is room for them."""
        self.batch = batch
        self.num_tokens_left -= len(batch)

    def take(self, sequence: Sequence, end: int) -> None:
        self.num_tokens_left -= end - sequence.num_computed
        assert self.num_tokens_left >= 0
        self.chunks[sequence.sequence_id] = (sequence, end)

    def guess(self, sequence: Sequence, drafts: npt.NDArray[np.int64]) -> None:
        self.num_tokens_left -= len(drafts)
        assert self.num_tokens_left >= 0
        self.drafts[sequence.sequence_id] = drafts

    def drop(self, sequence: Sequence) -> None:
        """Notes that the sequence is preempted: its chunk, if it had one, is removed and its tokens return to the
        budget."""
        planned = self.chunks.pop(sequence.sequence_id, None)
        if planned:
            self.num_tokens_left += planned[1] - sequence.num_computed
        elif self.batch is not None and sequence in self.batch:
            self.batch.discard(sequence)
            self.num_tokens_left += 1
        self.preempted[sequence.sequence_id] = sequence
        if sequence.sequence_id not in self.begun:
            self.thrown_out.append(sequence.sequence_id)

    def note_most(self, sequence: Sequence, num_blocks: int) -> None:
        """Notes that a sequence of this rank could have at most this many blocks. No later sequence of this step that
        ranks behind it can have more, because the blocks that are free and those that lower ranks hold only become
        fewer while a step is chosen."""
        self._most = (sequence.rank, num_blocks)

    def is_hopeless(self, sequence: Sequence, num_blocks: int) -> bool:
        """Returns whether it is known that the sequence can't have this many blocks."""
        return self._most is not None and sequence.rank >= self._most[0] and num_blocks > self._most[1]


# ---------------------------------------------------------------- guesses by prompt lookup

NOTHING: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
"""Stands for the draft of a sequence that has none."""


def propose(token_ids: npt.NDArray[np.int64], num_tokens: int, min_ngram: int, max_ngram: int) -> npt.NDArray[np.int64]:
    """Returns `(num_tokens,)` ids that may follow `token_ids` `(n,)`, or an empty array: the tokens that a sequence
    generates next, if it repeats text of its prompt or its output.

    The function searches the earlier tokens for the sequence's last tokens; the tokens that followed them there are the
    draft (Saxena, "Prompt Lookup Decoding", 2023). The longest match decides, and of several longest matches the last
    one. Where the match is so near the end that fewer tokens follow it, the text repeats itself with that period, and
    so does the draft. The search keeps no state and does no Python work per token: it makes a few passes of numpy over
    the ids, so a preempted or migrated sequence has drafts at once."""
    if num_tokens < 1 or len(token_ids) <= min_ngram:
        return NOTHING
    ends = np.flatnonzero(token_ids[:-1] == token_ids[-1]) + 1
    length = 1
    while length < max_ngram and len(ends):
        longer = ends[ends > length]
        longer = longer[token_ids[longer - 1 - length] == token_ids[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if length < min_ngram or not len(ends):
        return NOTHING
    return np.resize(token_ids[ends[-1] :], num_tokens)
