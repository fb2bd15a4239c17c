"""Chooses the work of one step: which sequences compute how many tokens. The phases run in this order:

    decodes    one token for each decoding sequence, by rank, so that none waits for a long prompt
    prefills   prompt tokens up to the doorstep, as far as the budget goes, in the order of `PrefillQueue`; a sequence
               that does not fit is passed over, but only a limited number of those that would begin
    media      among the prefills, prompts with media while a request without media is here, or was a moment ago: they
               compute what texts leave of a limit, and at least an eighth of what they could compute (`TextPrefills`)
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

from bisect import bisect_left, insort
from collections import deque
from contextlib import closing
from math import ceil, inf

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
MEDIA_SPREAD_STEPS = 8
"""Divides the tokens that all prompts with media could compute: they compute at least this part in a step, however long
it takes. So a worker that gets more of them than the limit allows still computes them as fast as they come."""
TEXT_MEMORY_S = 2.0
"""Prompts with media are limited for this long after the last text has left."""
NUM_TEXT_STEPS = 64
"""What texts usually compute is seen from this many steps."""
_QUICK_VICTIMS = 8
"""This many sequences of the lowest ranks are checked one by one before the blocks of all lower ranks are counted."""


class StepPlanner:
    """Chooses one step at a time for the sequences in `standings`, with the blocks of `resources`."""

    def __init__(self, config: WorkerConfig, resources: SequenceResources, standings: Standings) -> None:
        self._config = config
        self._resources = resources
        self._standings = standings
        self._texts = TextPrefills()

    def draft(self, now_s: float) -> StepDraft:
        """Chooses the next step, which begins at `now_s`. Takes and frees blocks; changes no sequence's computed tokens
        except by preemption and by hits. The caller has to refresh the standings of the sequences in `preempted` and in
        `covered_anew`."""
        draft = StepDraft(self._config.max_step_tokens, self._config.max_sequences)
        self._standings.prefills.begin_step()
        self._plan_decodes(draft)
        self._limit_media(draft, now_s)
        self._plan_prefills(draft)
        self._texts.note(draft.num_text_tokens)
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
        for key in self._standings.prefills.groups:
            with closing(self._standings.prefills.in_turn(key)) as in_turn:
                for sequence in in_turn:
                    if draft.is_full:
                        return
                    if sequence.sequence_id in draft.preempted:
                        continue
                    if self._room(draft, sequence) <= 0:
                        break  # The rest of this group has no room either; the next group may have some.
                    num_passed_over += not self._try(draft, sequence) and not sequence.is_started
                    if num_passed_over >= MAX_PASSED_OVER:
                        break
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

    def _limit_media(self, draft: StepDraft, now_s: float) -> None:
        """Sets what the prompts with media may compute in this step beside texts."""
        draft.text_priority = self._texts.priority(self._standings.text_priority, now_s)
        draft.least_media = max(1, self._standings.num_media_tokens // MEDIA_SPREAD_STEPS)
        limit = self._config.media_chunk_tokens
        most = self._texts.usual_most if limit is None else limit
        if most:
            draft.media_room = max(most, draft.least_media)

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
        if not sequence.is_decoding:
            weight = self._standings.weight_at(sequence.num_computed)
            draft.note_prompt(end - sequence.num_computed, weight, has_media=sequence.has_media)
        draft.take(sequence, end)
        return True

    def _room(self, draft: StepDraft, sequence: Sequence) -> int:
        """Returns how many tokens the sequence may compute in this step. A prompt without media leaves `least_media` to
        prompts of its priority that have all their media, but no more than half of a step's budget."""
        if sequence.is_decoding:
            return draft.num_tokens_left
        if not sequence.has_media:
            most = self._config.max_step_tokens // 2 - draft.num_media_tokens
            kept = min(draft.least_media, most, self._standings.num_ready_tokens(sequence.priority))
            return draft.num_tokens_left - max(0, int(kept))
        if draft.media_room == inf or sequence.priority < draft.text_priority:
            return draft.num_tokens_left
        return min(draft.num_tokens_left, ceil(draft.media_room / self._standings.weight_at(sequence.num_computed)))

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
        self.text_priority = inf
        """Holds the most urgent priority of texts that are here or were a moment ago."""
        self.media_room = inf
        """Holds how many weighted tokens prompts with media may still compute in this step beside texts."""
        self.least_media = 0
        """Holds how many tokens the others leave to prompts with media."""
        self.num_media_tokens = 0
        """Counts the tokens of prompts with media in this step."""
        self.num_text_tokens = 0.0
        """Counts the weighted tokens of prompts without media."""
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

    def note_prompt(self, num_tokens: int, weight: float, *, has_media: bool) -> None:
        """Notes that a prompt computes this many tokens of this weight, which prompts with media then can't compute in
        this step, even if the sequence is preempted. A prompt without media leaves them `least_media`."""
        least = 0.0 if has_media else min(self.media_room, self.least_media)
        self.media_room = max(least, self.media_room - num_tokens * weight)
        if has_media:
            self.num_media_tokens += num_tokens
        else:
            self.num_text_tokens += num_tokens * weight

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


# ---------------------------------------------------------------- how much texts compute in a step


class TextPrefills:
    """Remembers how many weighted tokens of prompts without media the latest steps computed, among those that computed
    any.

    A text waits for the step in which it arrives and for the step that computes it, so what it meets of other prompts
    decides its time to first token. If prompts with media add to a step at most what makes it as long as nine in ten
    steps of texts alone, they delay a text hardly more than other texts do: where texts are short, prompts with media
    take short chunks, and where texts are long, they lose little. The rule needs no measured times."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._ordered: list[float] = []
        self._priority = inf
        self._seen_s = -inf

    def priority(self, most_urgent: float, now_s: float) -> float:
        """Takes the most urgent priority of the texts that are here, or infinity if there is none. Returns it, or the
        last one if it was not long ago, because the next text may come while a step runs that has begun without it."""
        if most_urgent < inf:
            self._priority, self._seen_s = most_urgent, now_s
        return self._priority if now_s - self._seen_s <= TEXT_MEMORY_S else inf

    @property
    def usual_most(self) -> float:
        """Returns the number of tokens that nine in ten of these steps do not exceed, or 0 before the first one."""
        return self._ordered[len(self._ordered) * 9 // 10] if self._ordered else 0.0

    def note(self, num_tokens: float) -> None:
        """Notes a step that computed this many tokens; 0 is not remembered."""
        if not num_tokens:
            return
        self._latest.append(num_tokens)
        insort(self._ordered, num_tokens)
        if len(self._latest) > NUM_TEXT_STEPS:
            del self._ordered[bisect_left(self._ordered, self._latest.popleft())]


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
