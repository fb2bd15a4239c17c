"""What a sequence holds: its blocks in the pool and its claims on the inbox, moved together so that they agree.

    claims(sequence) == units whose last run ends behind num_computed
    table(sequence) covers num_computed; blocks behind it belong to the step that runs

Knows no order and no budget: whom to serve is the planner's.
"""

from __future__ import annotations

from collections.abc import Iterable

from fabric.ids import UnitKey
from llm_workers.scheduling.blocks import BlockPool
from llm_workers.scheduling.inbox import Inbox
from llm_workers.scheduling.sequence import Sequence


class Residency:
    def __init__(self, pool: BlockPool, inbox: Inbox, block_size: int, is_cache_enabled: bool) -> None:
        self.pool = pool
        self.inbox = inbox
        self._block_size = block_size
        self._is_cache_enabled = is_cache_enabled

    # ------------------------------------------------------------ queries

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def reach(self, sequence: Sequence) -> int:
        """Tokens that its own and all free blocks could hold."""
        return (len(sequence.table) + self.pool.num_free) * self._block_size

    def num_reclaimable(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that would become free if these sequences gave theirs up."""
        return self.pool.num_reclaimable(sequence.table.view().tolist() for sequence in sequences)

    def doorstep(self, sequence: Sequence, end: int) -> int:
        """How far it may compute, at most `end`: up to the first placeholder whose unit is not here."""
        for run, unit in sequence.layout.runs_between(sequence.num_computed, end):
            if not self.inbox.is_here(unit):
                return max(run.offset, sequence.num_computed)
        return end

    # ------------------------------------------------------------ arrival and departure

    def admit(self, sequence: Sequence) -> list[UnitKey]:
        """For a sequence without blocks, new or preempted: refers to the blocks it hits and makes its claims agree.
        Returns the units that it newly claims and that are not here."""
        assert not len(sequence.table), "it holds blocks"
        self._take_hits(sequence)
        self._drop_completed(sequence, 0)
        units = sequence.layout.units_after(sequence.num_computed)
        return self.inbox.claim(sequence.sequence_id, {unit: sequence.layout.unit_to_tokens[unit] for unit in units})

    def extend_hits(self, sequence: Sequence) -> None:
        """Before its first chunk: refers to blocks that became findable since it was admitted."""
        before = sequence.num_computed
        self._take_hits(sequence)
        self._drop_completed(sequence, before)

    def give_up(self, sequence: Sequence) -> None:
        """Frees its blocks; it begins again from its first token. Its claims stay (`admit` comes next)."""
        self.pool.free(sequence.sequence_id, sequence.table.view().tolist())
        sequence.table.truncate(0)
        sequence.num_computed = sequence.num_published = 0
        sequence.is_started = sequence.is_private = False

    def leave(self, sequence: Sequence) -> None:
        """Frees its blocks and drops its claims."""
        units = sequence.layout.units_after(sequence.num_computed)
        self.give_up(sequence)
        self.inbox.drop(sequence.sequence_id, units)

    # ------------------------------------------------------------ a step

    def grow(self, sequence: Sequence, end: int) -> None:
        """Blocks for tokens up to `end`; the caller has seen that they are there."""
        count = self.blocks_for(end) - len(sequence.table)
        if count > 0:
            sequence.table.extend(self.pool.allocate(sequence.sequence_id, count))

    def trim(self, sequence: Sequence) -> None:
        """Gives back blocks behind the computed tokens."""
        keep = self.blocks_for(sequence.num_computed)
        self.pool.free(sequence.sequence_id, sequence.table.view(keep).tolist())
        sequence.table.truncate(keep)

    def advance(self, sequence: Sequence, end: int) -> None:
        """Tokens up to `end` are computed: full blocks become findable, units that are behind are dropped."""
        before = sequence.num_computed
        sequence.num_computed = end
        if self._is_cache_enabled:
            self._publish(sequence)
        self._drop_completed(sequence, before)

    def _publish(self, sequence: Sequence) -> None:
        first, last = sequence.num_published, sequence.num_computed // self._block_size
        if first >= last or sequence.is_private:
            return
        sequence.extend_hashes(last, self._block_size)
        parent = sequence.hashes[first - 1] if first else None
        blocks = sequence.table.view(first, last).tolist()
        hashes = sequence.hashes[first:last]
        kept = self.pool.publish(sequence.sequence_id, parent, blocks, hashes, sequence.side_names)
        sequence.table.replace(first, kept)
        sequence.num_published = first + len(kept)
        sequence.is_private = sequence.num_published < last

    def _take_hits(self, sequence: Sequence) -> None:
        """The last token is always computed again, for its logits: a full hit is cut by one token. The block that
        it stands in is shared all the same; what is written there again is what stands there."""
        if not self._is_cache_enabled:
            return
        assert sequence.num_computed == min(len(sequence.table) * self._block_size, sequence.num_tokens - 1)
        sequence.extend_hashes(sequence.num_tokens // self._block_size, self._block_size)
        limit = self.blocks_for(sequence.num_tokens - 1)
        blocks = self.pool.lookup(sequence.hashes[len(sequence.table) : limit], sequence.side_names)
        self.pool.acquire(sequence.sequence_id, blocks)
        sequence.table.extend(blocks)
        sequence.num_published = len(sequence.table)
        sequence.num_computed = min(len(sequence.table) * self._block_size, sequence.num_tokens - 1)

    def _drop_completed(self, sequence: Sequence, before: int) -> None:
        completed = sequence.layout.units_completed(before, sequence.num_computed)
        if completed:
            self.inbox.drop(sequence.sequence_id, completed)
