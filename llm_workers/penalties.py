"""Changes logits before a token is drawn: it applies penalties, then logit bias, then bars tokens that are not allowed
yet.

All rows are changed together: the token ids of all rows are concatenated, and their logits are gathered, changed and
scattered at once. The meaning is the same as in vLLM: repetition counts prompt and output, presence and frequency count
the output only. This module knows nothing of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from fabric.messages import SamplingParams
from llm_workers.scheduling.token_counts import SeenTokens, TokenCounts


class Penalised(NamedTuple):
    """Describes a row of the logits and its changes. `counts` is set if the parameters have penalties."""

    row: int
    params: SamplingParams
    counts: TokenCounts | SeenTokens | None


def apply_penalties(logits: torch.Tensor, rows: Sequence[Penalised]) -> None:
    """Applies the penalties to `logits` in place. `logits` is float32 and has shape `(n, vocab)`. A logit that is -inf
    stays -inf."""
    counted = [(row, params, counts) for row, params, counts in rows if counts is not None and params.has_penalties]
    if not counted:
        return
    lengths = [len(counts.ids) for _, _, counts in counted]
    at = _flat_indexes(logits, [row for row, _, _ in counted], [counts.ids for _, _, counts in counted])
    numbers = np.repeat(
        np.array([(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for _, p, _ in counted], np.float32),
        lengths,
        axis=0,
    )
    times = np.concatenate([counts.num_generated for _, _, counts in counted])
    subtracted = numbers[:, 1] * times + numbers[:, 2] * (times > 0)
    flat = logits.view(-1)
    values = flat.index_select(0, at)
    repetition = torch.from_numpy(numbers[:, 0].copy()).to(logits.device)
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat.index_copy_(0, at, values - torch.from_numpy(subtracted.astype(np.float32)).to(logits.device))


def apply_logit_bias(logits: torch.Tensor, rows: Sequence[Penalised]) -> None:
    """Adds each row's bias to `logits` in place. `logits` is float32 and has shape `(n, vocab)`."""
    biased = [(row, params.logit_bias) for row, params, _ in rows if params.logit_bias]
    if not biased:
        return
    at = _flat_indexes(
        logits, [row for row, _ in biased], [np.array([id for id, _ in bias], dtype=np.int64) for _, bias in biased]
    )
    added = torch.tensor([value for _, bias in biased for _, value in bias], dtype=logits.dtype, device=logits.device)
    logits.view(-1).index_add_(0, at, added)


def bar_tokens(logits: torch.Tensor, barred: Sequence[tuple[int, tuple[int, ...]]]) -> None:
    """Sets the logits of these pairs (row, ids) to -inf in place. Ids outside the vocabulary are skipped, because they
    are never drawn."""
    vocab = logits.shape[-1]
    pairs = [(row, np.array([one for one in ids if 0 <= one < vocab], dtype=np.int64)) for row, ids in barred if ids]
    if pairs:
        at = _flat_indexes(logits, [row for row, _ in pairs], [ids for _, ids in pairs])
        logits.view(-1).index_fill_(0, at, float("-inf"))


def _flat_indexes(logits: torch.Tensor, rows: Sequence[int], ids: Sequence[np.ndarray]) -> torch.Tensor:
    """Returns the places of each row's `ids` in the flattened logits."""
    vocab = logits.shape[-1]
    return torch.from_numpy(np.concatenate([row * vocab + of for row, of in zip(rows, ids, strict=True)])).to(
        logits.device
    )
