"""Holds one choice of one attempt: its tokens, how far they are computed, and the blocks that hold the result.

Prompt, generated and migrated tokens are one array; there is no prefill phase and no decode phase. Adding one token
never costs time in proportion to the context. This module knows nothing of the pool and the inbox: `sequence_resources`
assigns blocks and takes them away.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from fabric.digest import block_hashes
from fabric.ids import BlockHash, SequenceId
from fabric.messages import GenerateRequest
from llm_workers.scheduling.growing import GrowingArray
from llm_workers.scheduling.guidance import Guide
from llm_workers.scheduling.layout import PromptLayout
from llm_workers.scheduling.plan import NO_BLOCK
from llm_workers.scheduling.stopping import ending_ids, finish_reason
from llm_workers.scheduling.timing import Stopwatch
from llm_workers.scheduling.token_counts import TokenCounts
from modalities.family import Positions

AgeKey = tuple[float, str, int, int]
"""Defines a total order over all sequences: (wall time of admission, request id, attempt, choice)."""
Rank = tuple[int, float, str, int, int]
"""Holds the priority (the lowest number comes first), then the age. It orders which sequence is served first; the last
one gives up blocks first."""


class Sequence:
    """Holds the state of one sequence. Tokens `[0, num_computed)` have their KV in `table`; `hashes` names the full
    blocks in order, as far as they are known; the first `num_published` of them are findable."""

    def __init__(
        self,
        sequence_id: SequenceId,
        request: GenerateRequest,
        prompt: npt.NDArray[np.int64],
        layout: PromptLayout,
        positions: Positions,
        max_total_tokens: int,
        stopwatch: Stopwatch,
        guide: Guide | None = None,
    ) -> None:
        """Creates a sequence. `prompt` holds the request's tokens, `(num_prompt,)`. `guide` belongs to this sequence
        alone and is at the grammar's beginning; the constructor advances it past the emitted tokens."""
        self.sequence_id = sequence_id
        self.layout = layout
        self.sampling = request.sampling
        self.stop = request.stop
        self.priority = request.priority
        self.tenant = request.cache_salt
        """Tenants are told apart by their cache salt: requests that share no cache are served in turn."""
        self.side_names = frozenset(request.side_names)
        self.age: AgeKey = (*request.age, request.attempt, sequence_id.choice)
        self.rank: Rank = (request.priority, *self.age)
        self.max_total_tokens = max_total_tokens
        self.stopwatch = stopwatch
        self.num_prompt = len(prompt)
        emitted = request.emitted[sequence_id.choice] if request.emitted else ()
        self.tokens = GrowingArray(prompt)
        self.tokens.extend(emitted)
        self.counts = self._counts() if request.sampling.has_penalties else None
        self.guide = guide
        if guide is not None:
            guide.advance(emitted)
        self._positions = positions
        self.table = GrowingArray(spare=16)
        self.hashes: list[BlockHash] = []
        self.num_computed = 0
        self.num_covered = 0
        """Counts, while the sequence has not begun, the tokens that were findable in the prefix cache when units were
        last claimed for it. The sequence holds none of their blocks."""
        self.num_published = 0
        self.is_private = False
        """Says that the sequence publishes no more blocks, because a block of its chain is findable without the side
        tensors and in use."""
        self.num_cached = 0
        """Counts the prompt tokens that were found in the prefix cache before the first step."""
        self.is_started = False
        """Says that the sequence had a chunk since it was added or preempted. Until then it holds no blocks."""
        self.is_forked = False
        """Says that the sequence took over its prompt from a sibling that had computed it."""
        self.may_share_tail = False
        """Says that the sequence gave or took over the block that its prompt ends in, and has not written after the
        prompt since."""
        self.is_at_doorstep = False
        self.copied_from = NO_BLOCK
        """Holds, until the step in flight has ended, the shared block whose content the step copies into the
        sequence's own block; otherwise it is `NO_BLOCK`."""

    @property
    def num_axes(self) -> int:
        """Counts the axes of the sequence's positions."""
        return int(self._positions.ids.shape[0])

    @property
    def position_delta(self) -> int:
        """Returns how far the position of a generated token is ahead of its index, on every axis."""
        return self._positions.delta

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def claims_from(self) -> int:
        """Returns the position after which the sequence claims units: it claims those whose last run ends later."""
        return self.num_computed if self.is_started else self.num_covered

    @property
    def is_decoding(self) -> bool:
        """Returns whether only the token that was drawn last is not computed yet, and the sequence is not one that
        begins again."""
        num_tokens = len(self.tokens)
        return self.is_started and self.num_computed == num_tokens - 1 and num_tokens > self.num_prompt

    @property
    def num_barred(self) -> int:
        """Returns how many of the next draws must not end the sequence (as in vLLM). With a grammar the answer is 0,
        because the grammar decides: at its end no other token may come."""
        return 0 if self.guide is not None else max(0, self.stop.min_tokens - self.num_generated)

    @property
    def barred(self) -> tuple[int, ...]:
        """Returns the ids that must not be drawn yet."""
        return ending_ids(self.stop) if self.num_barred else ()

    @property
    def num_open(self) -> int:
        """Returns how many tokens may still be drawn at most."""
        return min(self.stop.max_tokens - self.num_generated, self.max_total_tokens - self.num_tokens)

    def take(self, token_ids: SequenceOf[int]) -> tuple[int, str | None]:
        """Adds drawn tokens up to one that ends the sequence. Returns how many it added, and the finish reason if there
        is one."""
        for index, token_id in enumerate(token_ids):
            self.tokens.append(token_id)
            if self.counts is not None:
                self.counts.add(token_id)
            if self.guide is not None:
                self.guide.advance((token_id,))
            if reason := self.finish_reason():
                return index + 1, reason
        return len(token_ids), None

    def finish_reason(self) -> str | None:
        """Returns the finish reason of the sequence in its present state; None while it may go on, or if nothing was
        generated yet."""
        if not self.num_generated:
            return None
        is_full = self.num_tokens >= self.max_total_tokens
        return finish_reason(self.stop, self.tokens[self.num_tokens - 1], self.num_generated, is_full)

    def _counts(self) -> TokenCounts:
        return TokenCounts(self.tokens.view(0, self.num_prompt), self.tokens.view(self.num_prompt))

    def positions(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Returns positions with shape `(num_axes, end - start)`: the prompt's as given, and index + delta on every
        axis after the prompt."""
        ids = self._positions.ids
        if end <= self.num_prompt:
            return ids[:, start:end]
        behind = np.arange(max(start, self.num_prompt), end, dtype=np.int64) + self._positions.delta
        generated = np.empty((ids.shape[0], len(behind)), dtype=np.int64)
        generated[:] = behind
        return generated if start >= self.num_prompt else np.concatenate([ids[:, start:], generated], axis=1)

    def extend_hashes(self, num_blocks: int, block_size: int) -> None:
        """Makes `hashes` name the first `num_blocks` blocks, all of which must be full; each hash is computed once."""
        first = len(self.hashes)
        if first >= num_blocks:
            return
        content = self.tokens.view(first * block_size, num_blocks * block_size).astype("<i4").tobytes()
        keys = self.layout.block_keys(first, num_blocks, block_size)
        self.hashes += block_hashes(self.hashes[-1] if self.hashes else None, content, 4 * block_size, keys)
