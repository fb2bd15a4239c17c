"""Changes the logits of single rows as their requests demand, and draws the next tokens from them.

First the logits are changed: penalties, then logit bias, and then the tokens are barred that are not allowed yet. All
rows are changed together: the token ids of all rows are concatenated, and their logits are gathered, changed and
scattered at once. The meaning is the same as in vLLM: repetition counts prompt and output, presence and frequency count
the output only.

Then tokens are drawn: temperature, then min-p, then top-k, then top-p are applied, and the CDF is inverted. A draw
depends on (seed, choice, index of the token) alone, so a preempted or migrated sequence draws the same tokens again.
Greedy rows take the exact argmax, and the lowest id on a tie.

This module knows nothing of sequences or steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from fabric.contracts import SamplingParams, uniform
from llm_workers.scheduling import NOT_FINITE_TOKEN, SeenTokens, TokenCounts

# ---------------------------------------------------------------- changes of the logits


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


# ---------------------------------------------------------------- draws

HEAD = 1024
"""Sets how many of the most probable tokens are sorted first. Top-k and top-p usually leave fewer tokens of a trained
model's distribution."""
Draw = tuple[SamplingParams, int, int]
"""Holds the parameters, the choice and the index of the token to draw."""


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draws tokens as `sample_tokens` does and returns them on the host."""
    tokens: list[int] = sample_tokens(logits, draws).tolist()
    return tokens


def sample_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Draws one token id per row, as int64 `(n,)` on the device. `logits` is float32 with shape `(n, vocab)` and stays
    unchanged; `draws` has n entries. A row that is not finite gives NOT_FINITE_TOKEN: its sequence can't go on, but the
    others can."""
    # Like argmax, `max` returns the first of equal values, but it takes a third of the time.
    most, tokens = logits.max(dim=-1)
    rows = [row for row, (params, _, _) in enumerate(draws) if params.temperature > 0]
    is_plain = [draws[row][0].top_k <= 0 and draws[row][0].top_p >= 1 for row in rows]
    for plain, draw in ((True, _draw_plain), (False, _draw_truncated)):
        chosen = [row for row, row_is_plain in zip(rows, is_plain, strict=True) if row_is_plain is plain]
        if chosen:
            at = torch.tensor(chosen, device=logits.device)
            tokens.index_copy_(0, at, draw(logits.index_select(0, at), [draws[row] for row in chosen]))
    return torch.where(torch.isfinite(most), tokens, NOT_FINITE_TOKEN)


def _draw_plain(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Draws without truncation. This needs no order, so the CDF runs over the vocabulary."""
    return _invert(_weights(logits, draws, logits.amax(dim=-1, keepdim=True)), draws)


def _draw_truncated(logits: torch.Tensor, draws: Sequence[Draw], width: int = HEAD) -> torch.Tensor:
    """Draws tokens with truncation. The CDF runs from the most probable token down (lowest id first on a tie), over
    the tokens that top-k and top-p leave.

    These tokens nearly always lie among the `width` most probable tokens, and selecting those is much faster than
    sorting the whole vocabulary. Rows whose remaining tokens may reach further are drawn from the whole sorted
    vocabulary."""
    width = min(width, logits.shape[-1])
    values, ids = _most_probable(logits, width)
    left = _truncated(_weights(values, draws, values[:, :1]), draws, _totals(logits, draws, values[:, :1]))
    tokens = ids.gather(1, _invert(left, draws)[:, None])[:, 0]
    if width == logits.shape[-1]:
        return tokens
    # The number is 0 in a row that is not finite.
    num_left = (left > 0).sum(dim=-1, keepdim=True)
    last_left = values.gather(1, (num_left - 1).clamp_(min=0))
    top_k = torch.tensor([params.top_k for params, _, _ in draws], device=logits.device).clamp_(max=width + 1)
    open_rows = ((last_left <= values[:, -1:])[:, 0] | (top_k > width)).nonzero()[:, 0]
    if len(open_rows):
        rest = [draws[row] for row in open_rows.tolist()]
        tokens[open_rows] = _draw_truncated(logits[open_rows], rest, logits.shape[-1])
    return tokens


def _most_probable(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits and ids, each with shape `(n, width)`, with the largest logit first and the lowest id first among
    equals. If several tokens are equal at the lower edge, it does not define which of them are included."""
    if width == logits.shape[-1]:
        return logits.sort(dim=-1, descending=True, stable=True)
    ids = logits.topk(width, dim=-1).indices.sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _totals(logits: torch.Tensor, draws: Sequence[Draw], most: torch.Tensor) -> torch.Tensor:
    """Returns the weight of the whole vocabulary as float64 `(n, 1)` for rows without top-k, and 0 for the other
    rows."""
    totals = torch.zeros(len(draws), 1, dtype=torch.float64, device=logits.device)
    whole = [row for row, (params, _, _) in enumerate(draws) if params.top_k <= 0]
    if whole:
        totals[whole] = _weights(logits[whole], [draws[row] for row in whole], most[whole]).sum(dim=-1, keepdim=True)
    return totals


def _truncated(weights: torch.Tensor, draws: Sequence[Draw], totals: torch.Tensor) -> torch.Tensor:
    """Returns `weights` with 0 at the tokens that top-k and top-p remove. `weights` has shape `(n, width)` and is in
    descending order. Top-p keeps the shortest head whose share reaches p; the share refers to the tokens that top-k
    leaves, as in transformers."""
    places = torch.arange(weights.shape[-1], device=weights.device)
    top_k = torch.tensor([params.top_k for params, _, _ in draws], device=weights.device)[:, None]
    weights = weights.masked_fill((top_k > 0) & (places >= top_k), 0.0)
    shares = weights / torch.where(top_k > 0, weights.sum(dim=-1, keepdim=True), totals)
    top_p = torch.tensor([params.top_p for params, _, _ in draws], dtype=torch.float64, device=weights.device)
    is_beyond = shares.cumsum(dim=-1) - shares >= top_p[:, None]
    is_beyond[:, 0] = False
    return weights.masked_fill(is_beyond, 0.0)


def _weights(logits: torch.Tensor, draws: Sequence[Draw], most: torch.Tensor) -> torch.Tensor:
    """Returns probabilities up to a factor per row, and 0 where min-p cuts. They are float64 with shape `(n, columns)`,
    because a running sum in single precision loses the tail of a large vocabulary. `most` holds each row's largest
    logit with shape `(n, 1)`; the weight of that logit is 1."""
    numbers = torch.tensor(
        [(params.temperature, params.min_p) for params, _, _ in draws], dtype=torch.float64, device=logits.device
    )
    weights = logits.double().sub_(most.double()).div_(numbers[:, :1]).exp_()
    if any(params.min_p > 0 for params, _, _ in draws):
        weights.masked_fill_(weights < numbers[:, 1:], 0.0)
    return weights


def _invert(weights: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Returns the first column whose running sum exceeds `u * total`, where `u` is a uniform random number, as int64
    `(n,)`. It never returns a column of weight 0."""
    numbers = [uniform(params.seed, choice, index) for params, choice, index in draws]
    running = weights.cumsum(dim=-1)
    targets = torch.tensor(numbers, dtype=torch.float64, device=weights.device)[:, None] * running[:, -1:]
    columns = torch.searchsorted(running, targets, right=True)[:, 0]
    num_columns = weights.shape[-1]
    if bool((columns == num_columns).any()):
        # Rounding has raised `u * total` to the total.
        places = torch.arange(num_columns, device=weights.device)
        columns = torch.minimum(columns, (weights > 0).long().mul_(places).amax(dim=-1))
    return columns
