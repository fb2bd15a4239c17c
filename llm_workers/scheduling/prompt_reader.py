"""Collects what a request wants of its prompt besides tokens: an embedding, or the log-probabilities of its tokens.

    Chunk.reading = reader.reading(...)      what a step hands back of a chunk
    StepResult.readings[id] = PromptRows     what the runner computed
    reader.take(...), reader.outputs()       what `commit` adds, and what it makes of all chunks together

A prompt is computed in chunks of any size, so a `PromptReader` adds up their parts. A step that fails adds nothing, and
a sequence that is preempted begins with an empty reader. Sums over chunks are float64, so that they hardly depend on
where the chunks end.

This module knows nothing of tensors, and of why a chunk ends where it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fabric.contracts import PromptLogprobs, PromptOutputs

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

SCORED_AT_ONCE = 64
"""Limits the rows of a prompt whose logits are in memory at once. More rows would save little time, because the head's
weights are read once for so many rows, and the largest step of a worker with the default config draws from as many."""

# ---------------------------------------------------------------- one chunk


@dataclass(frozen=True, slots=True)
class PromptReading:
    """Says what the runner hands back of a chunk of a prompt."""

    pooling: str
    """Is `last` for the hidden state of the chunk's last token, `mean` for the sum over its tokens, and empty for
    neither."""
    targets: Ints
    """Holds the tokens after the chunk's first tokens, one by one: row i of the chunk predicts `targets[i]`. It is
    shorter than the chunk at the end of the prompt, and empty if no log-probabilities are wanted."""
    num_top: int = 0
    """Counts the most probable tokens that are wanted at each of these rows."""

    @property
    def needs_all_rows(self) -> bool:
        """Returns whether the last hidden states of all rows of the chunk are needed, and not only that of the last
        one."""
        return self.pooling == "mean" or len(self.targets) > 0


class ScoredRows(NamedTuple):
    """Holds the log-probabilities of n targets, each with `num_top` most probable tokens (or with the whole vocabulary
    if that is smaller)."""

    token_ids: npt.NDArray[np.int64]
    """Holds the target and the most probable tokens in descending order, with shape `(n, 1 + num_top)`."""
    logprobs: Floats
    """Has the same shape."""
    ranks: npt.NDArray[np.int64]
    """Holds 1 plus the number of tokens that are more probable than the target, with shape `(n,)`."""


class PromptRows(NamedTuple):
    """Holds what the runner hands back of one chunk."""

    hidden: Floats | None
    """Holds the hidden state or the sum, with shape `(hidden_size,)`, if the reading has a pooling."""
    scores: ScoredRows | None
    """Is set if the reading has targets."""


# ---------------------------------------------------------------- a prompt


class PromptReader:
    """Collects the outputs of one prompt, chunk after chunk. It takes no memory before the first chunk, and then at
    most `num_prompt * (1 + num_top)` scores and one hidden state."""

    def __init__(self, wanted: PromptOutputs, prompt: Ints) -> None:
        """Creates an empty reader. `prompt` holds the tokens with shape `(num_prompt,)`; the reader keeps a reference
        to it."""
        self._wanted, self._prompt = wanted, prompt
        self.needs_all_positions = wanted.needs_all_positions
        self.num_read = 0
        """Counts the tokens of the prompt up to the end of the last chunk that was taken."""
        self._hidden: npt.NDArray[np.float64] | None = None
        self._scores: list[ScoredRows] = []

    def reset(self) -> None:
        """Forgets every chunk, because the sequence begins again."""
        self.num_read, self._hidden = 0, None
        self._scores = []

    def reading(self, start: int, end: int) -> PromptReading | None:
        """Returns what is wanted of the chunk `[start, end)`, which may go on after the prompt; None if that is
        nothing."""
        num_prompt = len(self._prompt)
        pooling = self._wanted.pooling if self._wanted.pooling == "mean" or end >= num_prompt else ""
        num_top = self._wanted.num_top_logprobs
        targets = self._prompt[start + 1 : end + 1] if num_top is not None else self._prompt[:0]
        return PromptReading(pooling, targets, num_top or 0) if pooling or len(targets) else None

    def take(self, end: int, rows: PromptRows | None) -> None:
        """Adds the chunk that ends at `end`; it begins where the last one ended, or after tokens that the prefix cache
        had. `rows` is None if nothing was wanted of it."""
        self.num_read = min(end, len(self._prompt))
        if rows is None:
            return
        if rows.hidden is not None:
            hidden = rows.hidden.astype(np.float64)
            self._hidden = hidden if self._hidden is None else self._hidden + hidden
        if rows.scores is not None:
            self._scores.append(rows.scores)

    @property
    def is_complete(self) -> bool:
        return self.num_read == len(self._prompt)

    def embedding(self) -> bytes:
        """Returns the embedding as float32, little-endian, or nothing if none is wanted. The reader must be
        complete."""
        assert self.is_complete
        if not self._wanted.pooling:
            return b""
        assert self._hidden is not None
        vector = self._hidden / len(self._prompt) if self._wanted.pooling == "mean" else self._hidden
        if self._wanted.is_normalised:
            vector = vector / max(float(np.linalg.norm(vector)), float(np.finfo(np.float32).tiny))
        return vector.astype("<f4").tobytes()

    def logprobs(self) -> PromptLogprobs | None:
        """Returns the log-probabilities of the whole prompt, or None if they are not wanted. The reader must be
        complete."""
        assert self.is_complete
        if self._wanted.num_top_logprobs is None:
            return None
        if not self._scores:
            return PromptLogprobs(self._wanted.num_top_logprobs, b"", b"", b"")
        token_ids, logprobs, ranks = (np.concatenate(parts) for parts in zip(*self._scores, strict=True))
        assert len(token_ids) == len(self._prompt) - 1, "a part of the prompt was not scored"
        packed = (token_ids.astype("<i4"), logprobs.astype("<f4"), ranks.astype("<i4"))
        return PromptLogprobs(token_ids.shape[1] - 1, *(each.tobytes() for each in packed))
