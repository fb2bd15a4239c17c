"""A deterministic language model over simulated paged KV, for the scheduler's property tests.

What a slot holds depends on the token, its position, its feature row and on *everything read through the block table
in front of it*. So a wrong table, a block reused too early, a hit on another prefix, a missing splice or a wrong row
shows as another token than `reference_tokens` gives, which knows nothing of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fabric.ids import SequenceId, UnitKey
from fabric.messages import GenerateRequest, SamplingParams
from llm_workers.scheduling.plan import Chunk, StepPlan, StepResult
from llm_workers.scheduling.stopping import finish_reason
from modalities.family import Positions

VOCABULARY = 40
EOS = 1
NOTHING = -1


def positions_of(request: GenerateRequest) -> Positions:
    """Three axes; as with M-RoPE a picture takes fewer positions than tokens, and text goes on behind it, so that
    generated tokens do not stand at their index. A position follows from what stands in front of it."""
    ids = np.zeros((3, len(request.token_ids)), dtype=np.int64)
    start, position = 0, 0
    for run in (*request.placeholders, None):
        end = run.offset if run else len(request.token_ids)
        ids[:, start:end] = np.arange(position, position + end - start)
        position += end - start
        if run:
            ids[:, run.offset : run.end] = position
            ids[1, run.offset : run.end] += np.arange(run.row, run.row + run.length)
            position, start = position + 2, run.end
    return Positions(ids, position - len(request.token_ids))


def reference_tokens(request: GenerateRequest, choice: int, max_total: int) -> tuple[list[int], str]:
    """Tokens and finish reason of one choice, computed with unlimited memory in one piece."""
    rows = _rows_of(request)
    positions = positions_of(request)
    values: list[int] = []
    token_ids = list(request.token_ids)
    drawn: list[int] = []
    while True:
        for index in range(len(values), len(token_ids)):
            is_prompt = index < len(request.token_ids)
            axes = positions.ids[:, index].tolist() if is_prompt else [index + positions.delta] * 3
            values.append(_value(values, token_ids[index], axes, rows.get(index)))
        token = _draw(values, request.sampling, choice, len(drawn))
        token_ids.append(token)
        drawn.append(token)
        reason = finish_reason(request.stop, token, len(drawn), len(token_ids) >= max_total)
        if reason:
            return drawn, reason


class PagedFake:
    """Executes plans. `features`: the units that are readable now."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._slots = [[NOTHING] * block_size for _ in range(num_blocks)]
        self._block_size = block_size
        self.features: set[UnitKey] = set()
        self._side: dict[tuple[str, int, int], int] = {}
        """(name, block, slot) -> what was stored there."""

    def execute(self, plan: StepPlan) -> StepResult:
        token_ids: dict[SequenceId, int] = {}
        for chunk in plan.chunks:
            values = self._compute(chunk)
            if chunk.sampling is not None:
                token_ids[chunk.sequence_id] = _draw(values, chunk.sampling, chunk.sequence_id.choice, chunk.draw_index)
        return StepResult(token_ids)

    def _compute(self, chunk: Chunk) -> list[int]:
        assert chunk.num_tokens == len(chunk.token_ids) == chunk.positions.shape[1] > 0
        rows: dict[int, tuple[UnitKey, int]] = {}
        for splice in chunk.splices:
            assert splice.unit in self.features, f"{splice.unit} is read and is not here"
            for offset in range(splice.length):
                rows[chunk.start + splice.at + offset] = (splice.unit, splice.row + offset)
        values = [self._slots[block][slot] for block, slot in (self._place(chunk, i) for i in range(chunk.start))]
        for offset in range(chunk.num_tokens):
            index = chunk.start + offset
            axes = chunk.positions[:, offset].tolist()
            values.append(_value(values, int(chunk.token_ids[offset]), axes, rows.get(index)))
            block, slot = self._place(chunk, index)
            self._slots[block][slot] = values[-1]
            for name in chunk.side_names:
                self._side[name, block, slot] = values[-1]
        for name in chunk.side_names:
            found = [self._side.get((name, *self._place(chunk, index))) for index in range(chunk.end)]
            assert found == values, f"side rows {name} are missing or another prefix's"
        return values

    def _place(self, chunk: Chunk, index: int) -> tuple[int, int]:
        return int(chunk.block_ids[index // self._block_size]), index % self._block_size


def _rows_of(request: GenerateRequest) -> dict[int, tuple[UnitKey, int]]:
    return {
        run.offset + step: (UnitKey(request.media[run.item].mm_hash, run.unit), run.row + step)
        for run in request.placeholders
        for step in range(run.length)
    }


def _value(before: Sequence[int], token_id: int, axes: Sequence[int], row: tuple[UnitKey, int] | None) -> int:
    """63 bits; hashing integers is the same in every process."""
    feature = (0, 0, 0) if row is None else (int(row[0].mm_hash, 16), row[0].unit + 1, row[1])
    return hash((tuple(before), token_id, tuple(axes), feature)) & (2**63 - 1)


def _draw(values: Sequence[int], sampling: SamplingParams, choice: int, draw_index: int) -> int:
    return hash((values[-1], sampling.seed, choice, draw_index)) % VOCABULARY
