"""Manages what a sequence holds: its blocks in the pool and its claims on features, changed together so that they
agree.

    claims(sequence) == units whose last run ends after claims_from
    table(sequence) covers num_computed; blocks after it belong to the step that runs

A sequence that waits for its first chunk holds no blocks: its hits in the prefix cache are looked up when it is
admitted, which says what units it needs, and again when the planner tries it. If blocks were evicted in between, the
sequence needs their units and claims them then. So any number of waiting requests takes no memory, and a step pays
nothing for them.

Choices of one request share the blocks of their prompt, and the last block too where the prompt ends inside of it. A
choice that writes after the prompt in that block takes a block of its own first, into which the step copies the content
of the shared one. The reference to the shared block stays until the step has ended, so that it can be copied again if
the step fails.

This module knows nothing of order and budget: the planner decides which sequence to serve.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from fabric.contracts import UnitKey
from llm_workers.scheduling.blocks import BlockPool
from llm_workers.scheduling.feature_references import FeatureReferences, ReadLog
from llm_workers.scheduling.sequence import Sequence
from llm_workers.scheduling.step_plan import NO_BLOCK


class SequenceResources:
    def __init__(
        self,
        pool: BlockPool,
        references: FeatureReferences,
        block_size: int,
        is_cache_enabled: bool,
        *,
        is_overlap_enabled: bool = True,
    ) -> None:
        self.pool = pool
        self.references = references
        self.reads = ReadLog()
        self._block_size = block_size
        self._is_cache_enabled = is_cache_enabled
        self._is_overlap_enabled = is_overlap_enabled

    # ------------------------------------------------------------ queries

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def reach(self, sequence: Sequence) -> int:
        """Returns the number of tokens that the sequence's own blocks and all free blocks could hold."""
        num_free = self.pool.num_free
        if self._has_foreign_tail(sequence):
            if not num_free:
                return max(sequence.num_prompt, sequence.num_computed)
            num_free -= 1
        return (len(sequence.table) + num_free) * self._block_size

    def num_new_blocks(self, sequence: Sequence, end: int, given_up: Collection[Sequence] = ()) -> int:
        """Returns how many blocks the sequence must take to compute tokens up to `end`, once the sequences in
        `given_up` have given theirs up."""
        is_copied = end > sequence.num_prompt and self._has_foreign_tail(sequence, given_up)
        return self.blocks_for(end) - len(sequence.table) + is_copied

    def blocks_of(self, sequence: Sequence) -> list[int]:
        """Returns all blocks that the sequence refers to."""
        blocks: list[int] = sequence.table.view().tolist()
        return blocks if sequence.copied_from == NO_BLOCK else [*blocks, sequence.copied_from]

    def num_missing_blocks(self, sequence: Sequence) -> int:
        """Returns how many blocks a sequence without any would have to take for all its tokens, in addition to those
        that it hits."""
        return self.blocks_for(sequence.num_tokens) - len(self._find_hits(sequence))

    def num_reclaimable(self, sequences: Iterable[Sequence]) -> int:
        """Returns how many blocks would become free if these sequences gave theirs up."""
        return self.pool.num_reclaimable(
            [
                one.table.view() if one.copied_from == NO_BLOCK else np.array(self.blocks_of(one), dtype=np.int64)
                for one in sequences
            ]
        )

    def doorstep(self, sequence: Sequence, start: int, end: int) -> int:
        """Returns how far the sequence may compute from `start`, at most `end`: up to the first placeholder whose unit
        is not readable. That index is called the sequence's doorstep. Without overlap, the doorstep is `start` while a
        unit that the sequence needs is not readable."""
        if not self._is_overlap_enabled and not self.references.is_complete(sequence.sequence_id):
            return start
        for run, unit in sequence.layout.runs_between(start, end):
            if not self.references.is_readable(unit):
                return max(run.offset, start)
        return end

    # ------------------------------------------------------------ arrival and departure

    def admit(self, sequence: Sequence) -> list[UnitKey]:
        """Looks up what is findable of a sequence without blocks, new or preempted, and makes its claims agree. Returns
        the units that it newly claims and that are not here. The sequence does not hold the blocks that it hits, but
        they become the last ones to be given away."""
        assert not len(sequence.table), f"{sequence.sequence_id} already holds blocks"
        assert not sequence.is_started
        hits = self._find_hits(sequence)
        self.pool.touch(hits)
        sequence.num_covered = min(len(hits) * self._block_size, sequence.num_tokens - 1)
        self._drop_completed(sequence, 0, sequence.num_covered)
        return self._claim(sequence)

    def try_hits(self, sequence: Sequence) -> list[UnitKey]:
        """Makes the sequence refer, before its first chunk, to the blocks that it hits now; `start` or `withdraw` comes
        next. Returns the units that it must now claim and that are not here, because blocks were evicted since it was
        admitted. Drops the units that lie in blocks which became findable since."""
        hits = self._find_hits(sequence)
        self.pool.acquire(sequence.sequence_id, hits)
        sequence.table.extend(hits)
        sequence.num_published = len(hits)
        sequence.num_computed = min(len(hits) * self._block_size, sequence.num_tokens - 1)
        before, sequence.num_covered = sequence.num_covered, sequence.num_computed
        if sequence.num_covered < before:
            return self._claim(sequence)
        self._drop_completed(sequence, before, sequence.num_covered)
        return []

    def start(self, sequence: Sequence) -> None:
        """Notes that the sequence has its first chunk and keeps what `try_hits` took."""
        sequence.is_started = True

    def withdraw(self, sequence: Sequence) -> None:
        """Notes that the sequence got no chunk, and releases what `try_hits` took."""
        self.give_up(sequence)

    def give_up(self, sequence: Sequence) -> None:
        """Frees the sequence's blocks, so that it begins again from its first token. Its claims stay (`admit` comes
        next)."""
        sequence.num_covered = sequence.claims_from
        self.pool.free(sequence.sequence_id, self.blocks_of(sequence))
        sequence.table.truncate(0)
        sequence.copied_from = NO_BLOCK
        sequence.num_computed = sequence.num_published = 0
        if sequence.reader is not None:
            sequence.reader.reset()
        sequence.is_started = sequence.is_private = sequence.may_share_tail = False

    def fork(self, leader: Sequence, sibling: Sequence) -> list[UnitKey]:
        """Makes `sibling`, which holds nothing, refer to the same blocks as `leader`, which has computed the prompt and
        read what the request wants of it. Without tokens of an earlier attempt, the sibling computes the last token
        again, for its logits. Returns, as `admit` does, the units that it newly claims and that are not here."""
        assert not len(sibling.table), f"{sibling.sequence_id} already holds blocks"
        num_full = sibling.num_prompt // self._block_size
        # If the leader has filled the last block with tokens of its own and published it, the sibling does not share
        # that block.
        is_tail_shared = leader.num_published <= num_full
        num_shared = sibling.num_prompt if is_tail_shared else num_full * self._block_size
        sibling.num_computed = min(num_shared, sibling.num_tokens - 1)
        blocks = leader.table.view(0, self.blocks_for(sibling.num_computed)).tolist()
        num_full = min(len(blocks), num_full)
        self.pool.share(sibling.sequence_id, blocks)
        sibling.table.extend(blocks)
        sibling.hashes = leader.hashes[:num_full]
        sibling.num_published = min(leader.num_published, num_full)
        sibling.is_private = sibling.num_published < num_full
        sibling.is_started = sibling.is_forked = True
        sibling.reader = None
        leader.may_share_tail = sibling.may_share_tail = is_tail_shared
        return self._claim(sibling)

    def leave(self, sequence: Sequence) -> None:
        """Frees the sequence's blocks and drops its claims."""
        units = sequence.layout.units_after(sequence.claims_from)
        self.give_up(sequence)
        self._drop(sequence, units)

    # ------------------------------------------------------------ a step

    def grow(self, sequence: Sequence, end: int) -> None:
        """Takes the blocks that are missing for tokens up to `end`; the caller has checked that they are free."""
        if end > sequence.num_prompt and self._has_foreign_tail(sequence):
            at = sequence.num_computed // self._block_size
            sequence.copied_from = sequence.table[at]
            sequence.table.replace(at, self.pool.allocate(sequence.sequence_id, 1))
        count = self.blocks_for(end) - len(sequence.table)
        if count > 0:
            sequence.table.extend(self.pool.allocate(sequence.sequence_id, count))

    def trim(self, sequence: Sequence) -> None:
        """Gives back the blocks after the computed tokens. If the copy of a shared block was planned and not committed,
        gives back the sequence's own block and puts the shared one in its place."""
        if sequence.copied_from != NO_BLOCK:
            at = sequence.num_computed // self._block_size
            self.pool.free(sequence.sequence_id, [sequence.table[at]])
            sequence.table.replace(at, [sequence.copied_from])
            sequence.copied_from = NO_BLOCK
        keep = self.blocks_for(sequence.num_computed)
        if keep >= len(sequence.table):
            return
        self.pool.free(sequence.sequence_id, sequence.table.view(keep).tolist())
        sequence.table.truncate(keep)

    def advance(self, sequence: Sequence, end: int) -> None:
        """Notes that tokens up to `end` are computed: full blocks become findable, units that are passed are dropped,
        and blocks that only wrong drafts were written to are given back."""
        before = sequence.num_computed
        if sequence.copied_from != NO_BLOCK:
            self.pool.free(sequence.sequence_id, [sequence.copied_from])
            sequence.copied_from = NO_BLOCK
        sequence.num_computed = end
        sequence.may_share_tail = sequence.may_share_tail and end <= sequence.num_prompt
        self.publish(sequence)
        self._drop_completed(sequence, before, end)
        self.trim(sequence)

    def _has_foreign_tail(self, sequence: Sequence, given_up: Collection[Sequence] = ()) -> bool:
        """Returns whether a sibling that is not in `given_up` also refers to the block into which the sequence's next
        token after the prompt is written."""
        if not sequence.may_share_tail or sequence.copied_from != NO_BLOCK:
            return False
        at = sequence.num_computed // self._block_size
        if not sequence.num_published <= at < len(sequence.table):
            return False
        return self.pool.is_shared(sequence.table[at], {sequence.sequence_id, *(one.sequence_id for one in given_up)})

    def _claim(self, sequence: Sequence) -> list[UnitKey]:
        units = sequence.layout.units_after(sequence.claims_from)
        self.reads.note(sequence.sequence_id, units)
        rows = {unit: sequence.layout.unit_to_tokens[unit] for unit in units}
        return self.references.claim(sequence.sequence_id, rows)

    def publish(self, sequence: Sequence) -> None:
        """Makes the sequence's blocks that are full now findable; afterwards its table may hold other blocks in their
        places."""
        first, last = sequence.num_published, sequence.num_computed // self._block_size
        if first >= last or sequence.is_private or not self._is_cache_enabled:
            return
        sequence.extend_hashes(last, self._block_size)
        parent = sequence.hashes[first - 1] if first else None
        blocks = sequence.table.view(first, last).tolist()
        hashes = sequence.hashes[first:last]
        kept = self.pool.publish(sequence.sequence_id, parent, blocks, hashes, sequence.side_names)
        sequence.table.replace(first, kept)
        sequence.num_published = first + len(kept)
        sequence.is_private = sequence.num_published < last

    def _find_hits(self, sequence: Sequence) -> list[int]:
        """Returns the sequence's blocks that are findable. The last token is always computed again, for its logits: a
        full hit is cut by one token. The block of that token is shared all the same, because the values that are
        written there again equal those that are there. A sequence that has to read the hidden states of all positions
        hits nothing, because cached blocks do not hold them."""
        if not self._is_cache_enabled or (sequence.reader is not None and sequence.reader.needs_all_positions):
            return []
        sequence.extend_hashes(sequence.num_tokens // self._block_size, self._block_size)
        limit = self.blocks_for(sequence.num_tokens - 1)
        return self.pool.lookup(sequence.hashes[:limit], sequence.side_names)

    def _drop_completed(self, sequence: Sequence, before: int, end: int) -> None:
        layout = sequence.layout
        passed = [unit for run, unit in layout.runs_between(before, end) if run.end <= end]
        self.reads.note(sequence.sequence_id, passed)
        self._drop(sequence, layout.units_completed(before, end))

    def _drop(self, sequence: Sequence, units: list[UnitKey]) -> None:
        if units:
            self.references.drop(sequence.sequence_id, units)
            self.reads.note(sequence.sequence_id, units)
