"""Keeps the sequences that decode plainly, one row of arrays each, which a step only advances.

A sequence decodes plainly if only its last token is not computed and it asks for nothing that only a `Chunk` can
express. Most sequences of a busy worker are in this state, and from step to step only one token and one position of
each change. So a step takes what it needs of them (`Decodes`) as a copy of these arrays, and a step that succeeds adds
one to them; a block table is written again when the sequence took a block, once in `block_size` steps. The sequences
remain the source of truth: a row can be rebuilt from its sequence at any time, and when a row leaves, the last row
moves to its index.

    is_plain(sequence)     says whether a sequence decodes plainly
    the row's arrays       equal what the sequence holds, whenever no step is in flight
    growing()              returns the sequences whose next token needs a block

This module knows nothing of budgets and of the block pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric.contracts import SamplingParams, SequenceId
from llm_workers.scheduling.sequence import Sequence, ending_ids
from llm_workers.scheduling.step_plan import NO_BLOCK, Decodes, Ints

_FEWEST_ROWS, _FEWEST_BLOCKS = 16, 8


def is_plain(sequence: Sequence) -> bool:
    """Returns whether a row can express all that a step needs of the sequence. A sequence whose last block siblings
    share is not plain, because that block has to be copied first."""
    sampling = sequence.sampling
    is_shaped = sampling.logit_bias or sampling.num_top_logprobs is not None or sequence.counts is not None
    is_bound = sequence.guide is not None or sequence.num_barred or sequence.side_names
    is_copied = sequence.may_share_tail or sequence.copied_from != NO_BLOCK
    return sequence.is_decoding and not (is_shaped or is_bound or is_copied)


class DecodeBatch:
    """Holds the rows in no particular order."""

    def __init__(self, block_size: int, *, is_used: bool) -> None:
        """Creates an empty batch. If `is_used` is false, no sequence ever has a row: with drafts, every step consists
        of chunks."""
        self._block_size, self._is_used = block_size, is_used
        self.sequences: list[Sequence] = []
        self.ending_ids: list[frozenset[int]] = []
        """Holds the ids that end the sequence, per row."""
        self.tenant_to_num: Counter[str] = Counter()
        self._sequence_ids: list[SequenceId] = []
        self._sampling: list[SamplingParams] = []
        self._id_to_row: dict[SequenceId, int] = {}
        self._columns = np.zeros((6, _FEWEST_ROWS), dtype=np.int64)
        """Holds one column per sequence; its rows are: last token, index of that token, distance from that index to the
        token's position, number of blocks, index of the next draw, and index of the draw that is the last one by
        count."""
        self._tables = np.zeros((_FEWEST_ROWS, _FEWEST_BLOCKS), dtype=np.int64)
        self._num_axes = 1

    def __len__(self) -> int:
        return len(self.sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._id_to_row

    # ------------------------------------------------------------ membership

    def refresh(self, sequence: Sequence) -> None:
        """Updates the batch after a live sequence has changed in another way than by `advance`: the sequence enters,
        its row is rebuilt, or it leaves."""
        if not self._is_used or not is_plain(sequence):
            self.discard(sequence)
            return
        row = self._id_to_row.get(sequence.sequence_id)
        if row is None:
            row = self._enter(sequence)
        self._num_axes = sequence.num_axes
        last_draw = min(sequence.stop.max_tokens, sequence.max_total_tokens - sequence.num_prompt) - 1
        at = sequence.num_computed
        numbers = (sequence.tokens[at], at, sequence.position_delta, 0, sequence.num_generated, last_draw)
        self._columns[:, row] = numbers
        self._write_table(row)

    def discard(self, sequence: Sequence) -> None:
        """Removes the sequence's row; the last row moves to its index. A sequence without a row is ignored."""
        row = self._id_to_row.pop(sequence.sequence_id, None)
        if row is None:
            return
        self.tenant_to_num[sequence.tenant] -= 1
        if not self.tenant_to_num[sequence.tenant]:
            del self.tenant_to_num[sequence.tenant]
        for column in (self.sequences, self.ending_ids, self._sequence_ids, self._sampling):
            _swap_remove(column, row)
        last = len(self.sequences)
        if row != last:
            self._columns[:, row] = self._columns[:, last]
            self._tables[row] = self._tables[last]
            self._id_to_row[self._sequence_ids[row]] = row

    def _enter(self, sequence: Sequence) -> int:
        row = len(self.sequences)
        self.sequences.append(sequence)
        self.ending_ids.append(frozenset(ending_ids(sequence.stop)))
        self._sequence_ids.append(sequence.sequence_id)
        self._sampling.append(sequence.sampling)
        self._id_to_row[sequence.sequence_id] = row
        self.tenant_to_num[sequence.tenant] += 1
        if row == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
            self._tables = np.concatenate([self._tables, np.zeros_like(self._tables)])
        return row

    # ------------------------------------------------------------ a step

    def growing(self) -> list[Sequence]:
        """Returns the sequences whose next token needs a block that they do not have."""
        places, blocks = self._columns[1, : len(self)], self._columns[3, : len(self)]
        return [self.sequences[row] for row in np.flatnonzero(places >= blocks * self._block_size)]

    def take_blocks(self, sequences: Iterable[Sequence]) -> None:
        """Copies the block tables of these sequences into their rows, after these tables and nothing else have changed.
        Sequences without a row are ignored."""
        for sequence in sequences:
            row = self._id_to_row.get(sequence.sequence_id)
            if row is not None:
                self._write_table(row)

    def decodes(self) -> Decodes:
        """Returns copies of all rows for the step that begins. There must be at least one row."""
        tokens, places, deltas, blocks, draws, _ = self._columns[:, : len(self)].copy()
        positions = np.broadcast_to(places + deltas, (self._num_axes, len(self)))
        tables = self._tables[: len(self), : int(blocks.max())].copy()
        ids, sampling = tuple(self._sequence_ids), tuple(self._sampling)
        return Decodes(ids, sampling, tokens, places, positions, tables, blocks, draws)

    def is_of(self, decodes: Decodes) -> bool:
        """Returns whether the rows are still those of the step."""
        return len(decodes) == len(self) and decodes.sequence_ids == tuple(self._sequence_ids)

    def is_last_draw(self) -> npt.NDArray[np.bool_]:
        """Returns, with shape `(n,)`, whether the next token of each row is its last one by count."""
        is_last: npt.NDArray[np.bool_] = self._columns[4, : len(self)] >= self._columns[5, : len(self)]
        return is_last

    def advance(self, token_ids: Ints, num_steps: int = 1) -> list[Sequence]:
        """Advances each row by `num_steps` drawn tokens, the last of which is in `token_ids` `(n,)`, after the same was
        done with its sequence. Returns the sequences whose last block is full now."""
        rows = self._columns[:, : len(self)]
        rows[0] = token_ids
        rows[1] += num_steps
        rows[4] += num_steps
        return [self.sequences[row] for row in np.flatnonzero(rows[1] % self._block_size == 0)]

    # ------------------------------------------------------------ many equal steps

    def num_draws_before_last(self) -> int:
        """Returns how many tokens each row may draw before the first row draws its last one by count."""
        columns = self._columns[:, : len(self)]
        return max(0, int((columns[5] - columns[4]).min()))

    def num_growing(self, num_steps: int) -> int:
        """Returns how many blocks the rows lack for this many steps."""
        places, blocks = self._columns[1, : len(self)], self._columns[3, : len(self)]
        return int(np.maximum(-(-(places + num_steps) // self._block_size) - blocks, 0).sum())

    def block_changes(self, num_steps: int) -> list[tuple[Sequence, int, bool]]:
        """Returns what happens to blocks in this many steps, in order, as (sequence, its computed tokens after that
        step, is_filled): in each step the rows that need a block take it, and then those whose block is full publish
        it."""
        changes: list[tuple[int, bool, int]] = []
        size = self._block_size
        for row, (place, blocks) in enumerate(zip(*self._columns[[1, 3], : len(self)].tolist(), strict=True)):
            changes += [(step, False, row) for step in range(blocks * size - place, num_steps, size)]
            changes += [(step, True, row) for step in range(-(place + 1) % size, num_steps, size)]
        changes.sort()
        places = self._columns[1].tolist()
        return [(self.sequences[row], places[row] + step + 1, is_filled) for step, is_filled, row in changes]

    def _write_table(self, row: int) -> None:
        table = self.sequences[row].table.view()
        if len(table) > self._tables.shape[1]:
            wider = np.zeros((len(self._tables), 2 * len(table)), dtype=np.int64)
            wider[:, : self._tables.shape[1]] = self._tables
            wider[:, self._tables.shape[1] :] = self._tables[:, :1]
            self._tables = wider
        self._tables[row, : len(table)] = table
        self._tables[row, len(table) :] = table[0]
        self._columns[3, row] = len(table)

    # ------------------------------------------------------------ checks

    def check_invariants(self, live: Iterable[Sequence]) -> None:
        """Asserts, between calls, that exactly those of the `live` sequences that decode plainly have a row, and that
        each row equals its sequence. `live` must hold every live sequence."""
        expected = {one.sequence_id: one for one in live if self._is_used and is_plain(one)}
        assert expected.keys() == self._id_to_row.keys(), "the rows are not those of the sequences that decode plainly"
        assert self.tenant_to_num == Counter(one.tenant for one in expected.values())
        for row, sequence in enumerate(self.sequences):
            assert expected[self._sequence_ids[row]] is sequence
            assert self._id_to_row[sequence.sequence_id] == row
            token, place, delta, num_blocks, draw, last_draw = self._columns[:, row].tolist()
            assert (place, token) == (sequence.num_computed, sequence.tokens[sequence.num_tokens - 1])
            assert place + delta == sequence.positions(place, place + 1)[0, 0]
            assert draw == sequence.num_generated
            assert last_draw - draw + 1 == sequence.num_open
            assert self._tables[row, :num_blocks].tolist() == sequence.table.view().tolist()
            assert set(self._tables[row, num_blocks:].tolist()) <= {sequence.table[0]}


def _swap_remove(column: list[Any], row: int) -> None:
    column[row] = column[-1]
    column.pop()
