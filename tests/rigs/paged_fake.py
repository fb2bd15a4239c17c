"""Provides a deterministic language model over simulated paged KV, for the scheduler's property tests.

The content of a slot depends on the token, its position, its feature row and, in order, on *everything earlier that is
read through the block table*. So a wrong table, a block reused too early, a hit on another prefix, a missing splice or
a wrong row gives another token than `reference_tokens` does, which knows nothing of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fabric.contracts import GenerateRequest, PromptLogprobs, SamplingParams, SequenceId, UnitKey
from llm_workers.scheduling import Chunk, PromptReading, PromptRows, ScoredRows, StepPlan, StepResult
from llm_workers.scheduling.sequence import finish_reason
from modalities.family import Positions

VOCABULARY = 40
EOS = 1
NOTHING = 12345
MASK = 2**64 - 1
WEIGHTS = 2 * np.arange(1024, dtype=np.uint64) + 1
FEW = 3
"""Most draws are one of this few tokens, so that a text often repeats itself and drafts are often right."""


def positions_of(request: GenerateRequest) -> Positions:
    """Returns positions on three axes. As with M-RoPE, a picture takes fewer positions than tokens and the text
    continues after it, so that the position of a generated token differs from its index. A position follows from the
    tokens before it."""
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
    """Returns the tokens and the finish reason of one choice, computed in one piece with unlimited memory."""
    if not request.stop.max_tokens:
        return [], "length"
    rows = _rows_of(request)
    positions = positions_of(request)
    axes = positions.ids.T.tolist()
    value, digest, num_values = 0, 0, 0
    token_ids = list(request.token_ids)
    drawn: list[int] = []
    while True:
        for index in range(num_values, len(token_ids)):
            at = axes[index] if index < len(axes) else [index + positions.delta] * 3
            value = _value(digest, token_ids[index], at, rows.get(index))
            digest = _digest_after(digest, index, value)
        num_values = len(token_ids)
        token = _draw(value, request.sampling, choice, len(drawn))
        token_ids.append(token)
        drawn.append(token)
        reason = finish_reason(request.stop, token, len(drawn), len(token_ids) >= max_total)
        if reason:
            return drawn, reason


def reference_values(request: GenerateRequest, generated: Sequence[int]) -> list[int]:
    """Returns the values of a prompt and of the tokens behind it, computed in one piece."""
    rows, positions = _rows_of(request), positions_of(request)
    axes = positions.ids.T.tolist()
    digest, values = 0, []
    for index, token_id in enumerate((*request.token_ids, *generated)):
        at = axes[index] if index < len(axes) else [index + positions.delta] * 3
        values.append(_value(digest, token_id, at, rows.get(index)))
        digest = _digest_after(digest, index, values[-1])
    return values


def reference_outputs(request: GenerateRequest) -> tuple[np.ndarray, PromptLogprobs | None]:
    """Returns the embedding (empty without a pooling) and the log-probabilities that a request wants of its prompt,
    computed in one piece."""
    wanted, rows = request.prompt_outputs, _rows_of(request)
    axes = positions_of(request).ids.T.tolist()
    digest, values = 0, []
    for index, token_id in enumerate(request.token_ids):
        values.append(_value(digest, token_id, axes[index], rows.get(index)))
        digest = _digest_after(digest, index, values[-1])
    hidden = np.array([_hidden(value) for value in values], dtype=np.float64)
    pooled = {"": np.zeros(0), "last": hidden[-1], "mean": hidden.mean(axis=0)}[wanted.pooling]
    if wanted.pooling and wanted.is_normalised:
        pooled = pooled / np.sqrt((pooled**2).sum())
    if wanted.num_top_logprobs is None:
        return pooled, None
    scores = [
        _score(value, target, wanted.num_top_logprobs)
        for value, target in zip(values, request.token_ids[1:], strict=False)
    ]
    ids, logprobs, ranks = zip(*scores, strict=True) if scores else ((), (), ())
    packed = (np.array(ids, "<i4"), np.array(logprobs, "<f4"), np.array(ranks, "<i4"))
    return pooled, PromptLogprobs(wanted.num_top_logprobs, *(each.tobytes() for each in packed))


class PagedFake:
    """Executes plans; `features` holds the units that are readable now."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._slots = np.full((num_blocks, block_size), NOTHING, dtype=np.uint64)
        self._block_size = block_size
        self.features: set[UnitKey] = set()
        self._name_to_side: dict[str, np.ndarray] = {}
        """Holds one array per side tensor, shaped as the slots are."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Executes the plan; it copies blocks before it writes anything, as a device does."""
        for pages in (self._slots, *self._name_to_side.values()):
            copies = [(self._target(chunk), pages[chunk.copied_from].copy()) for chunk in plan.chunks if _copies(chunk)]
            for target, content in copies:
                pages[target] = content
        token_ids: dict[SequenceId, tuple[int, ...]] = {}
        readings: dict[SequenceId, PromptRows] = {}
        for chunk in plan.chunks:
            values = self._compute(chunk)
            if chunk.sampling is not None:
                drawn = [
                    _draw(value, chunk.sampling, chunk.sequence_id.choice, chunk.draw_index + ahead)
                    for ahead, value in enumerate(values[len(values) - 1 - chunk.num_drafts :])
                ]
                token_ids[chunk.sequence_id] = tuple(chunk.accepted(drawn))
            if chunk.reading is not None:
                readings[chunk.sequence_id] = _read(values, chunk.reading)
        return StepResult(token_ids, readings=readings)

    def side_rows(self, name: str, block_ids: np.ndarray, start: int, end: int) -> np.ndarray:
        """Returns the rows `(end - start, 1)` of a side tensor at positions `[start, end)` of a sequence with the given
        blocks. A row consists of the value of its token."""
        at = np.arange(start, end)
        return self._name_to_side[name][block_ids[at // self._block_size], at % self._block_size][:, None]

    def _compute(self, chunk: Chunk) -> list[int]:
        """Returns the values of the chunk's tokens."""
        assert chunk.num_tokens == len(chunk.token_ids) == chunk.positions.shape[1] > 0
        rows: dict[int, tuple[UnitKey, int]] = {}
        for splice in chunk.splices:
            assert splice.unit in self.features, f"{splice.unit} is read and is not here"
            for offset in range(splice.length):
                rows[splice.at + offset] = (splice.unit, splice.row + offset)
        at = np.arange(chunk.end)
        blocks, slots = chunk.block_ids[at // self._block_size], at % self._block_size
        digest = _digest(self._slots[blocks[: chunk.start], slots[: chunk.start]])
        values: list[int] = []
        axes = chunk.positions.T.tolist()
        for offset, token_id in enumerate(chunk.token_ids.tolist()):
            values.append(_value(digest, token_id, axes[offset], rows.get(offset)))
            digest = _digest_after(digest, chunk.start + offset, values[-1])
        written = blocks[chunk.start :], slots[chunk.start :]
        self._slots[written] = values
        for name in chunk.side_names:
            side = self._name_to_side.setdefault(name, np.full_like(self._slots, NOTHING))
            side[written] = values
            assert (side[blocks, slots] == self._slots[blocks, slots]).all(), f"side rows {name} are another prefix's"
        return values

    def _target(self, chunk: Chunk) -> int:
        return int(chunk.block_ids[chunk.start // self._block_size])


def _copies(chunk: Chunk) -> bool:
    return chunk.copied_from >= 0


def _hidden(value: int) -> list[float]:
    """Returns a hidden state whose sums over a prompt are exact."""
    return [1.0 + value % 251, value // 251 % 241]


def _score(value: int, target: int, num_top: int) -> tuple[list[int], list[float], int]:
    """Returns the ids, log-probabilities and rank of a target, all of which depend on the value of the token before
    it."""
    top = [(value // 7 + place) % VOCABULARY for place in range(num_top)]
    return [target, *top], [-float((value + target) % 97), *(-float(each) for each in top)], 1 + value % 53


def _read(values: Sequence[int], reading: PromptReading) -> PromptRows:
    hidden = np.array([_hidden(value) for value in values], dtype=np.float32)
    pooled = {"": None, "last": hidden[-1], "mean": hidden.sum(axis=0)}[reading.pooling]
    if not len(reading.targets):
        return PromptRows(pooled, None)
    scores = [
        _score(value, target, reading.num_top) for value, target in zip(values, reading.targets.tolist(), strict=False)
    ]
    ids, logprobs, ranks = zip(*scores, strict=True)
    return PromptRows(pooled, ScoredRows(np.array(ids), np.array(logprobs, np.float32), np.array(ranks)))


def _rows_of(request: GenerateRequest) -> dict[int, tuple[UnitKey, int]]:
    return {
        run.offset + step: (UnitKey(request.media[run.item].mm_hash, run.unit), run.row + step)
        for run in request.placeholders
        for step in range(run.length)
    }


def _digest(values: np.ndarray) -> int:
    """Returns the digest of everything that a token sees, in its order."""
    return int(np.dot(values, WEIGHTS[: len(values)]))


def _digest_after(digest: int, index: int, value: int) -> int:
    """Returns the digest after value number `index` is added."""
    return (digest + value * (2 * index + 1)) & MASK


def _value(before: int, token_id: int, axes: Sequence[int], row: tuple[UnitKey, int] | None) -> int:
    """Returns a value of 63 bits; the hash of integers is the same in every process."""
    if row is None:
        return hash((before, token_id, *axes)) & (2**63 - 1)
    unit, place = row
    return hash((before, token_id, *axes, int(unit.mm_hash, 16), unit.unit, place)) & (2**63 - 1)


def _draw(value: int, sampling: SamplingParams, choice: int, draw_index: int) -> int:
    token = hash((value, sampling.seed, choice, draw_index)) % VOCABULARY
    return token if token < VOCABULARY // 4 else 2 + token % FEW
