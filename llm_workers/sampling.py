"""Drawing the next token: temperature, then min-p, then top-k, then top-p, by inverse CDF.

A draw depends on (seed, choice, index of the token) alone, so a preempted or migrated sequence draws the same
again. Greedy rows take the exact argmax, the lowest id on a tie. Knows nothing of sequences or steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fabric.digest import uniform
from fabric.messages import SamplingParams
from llm_workers.scheduling.plan import NOT_FINITE_TOKEN

Draw = tuple[SamplingParams, int, int]
"""Parameters, choice, index of the token to draw."""


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id per row. `logits` `(n, vocab)` float32, left unchanged; `draws` has n entries. A row that is not
    finite gives NOT_FINITE_TOKEN: its sequence can't go on, the others can."""
    tokens = logits.argmax(dim=-1)
    rows = [row for row, (params, _, _) in enumerate(draws) if params.temperature > 0]
    is_plain = [draws[row][0].top_k <= 0 and draws[row][0].top_p >= 1 for row in rows]
    for plain, draw in ((True, _draw_plain), (False, _draw_truncated)):
        chosen = [row for row, row_is_plain in zip(rows, is_plain, strict=True) if row_is_plain is plain]
        if chosen:
            at = torch.tensor(chosen, device=logits.device)
            tokens.index_copy_(0, at, draw(logits.index_select(0, at), [draws[row] for row in chosen]))
    is_finite = torch.isfinite(logits.amax(dim=-1))
    return torch.where(is_finite, tokens, NOT_FINITE_TOKEN).tolist()


def _probabilities(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """What min-p leaves, float64 `(n, vocab)`: single precision loses the tail of a large vocabulary in a running
    sum. Rows need not add up to 1."""
    numbers = torch.tensor(
        [(params.temperature, params.min_p) for params, _, _ in draws], dtype=torch.float64, device=logits.device
    )
    scaled = logits.double()
    scaled -= scaled.amax(dim=-1, keepdim=True)
    probabilities = torch.softmax(scaled / numbers[:, :1], dim=-1)
    if any(params.min_p > 0 for params, _, _ in draws):
        least = probabilities.amax(dim=-1, keepdim=True) * numbers[:, 1:]
        probabilities.masked_fill_(probabilities < least, 0.0)
    return probabilities


def _targets(draws: Sequence[Draw], device: torch.device) -> torch.Tensor:
    """The uniform numbers of the rows: float64 `(n, 1)`."""
    numbers = [uniform(params.seed, choice, index) for params, choice, index in draws]
    return torch.tensor(numbers, dtype=torch.float64, device=device)[:, None]


def _invert(probabilities: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """First column whose running sum passes `u * total`; never one of probability 0. Returns int64 `(n,)`."""
    running = probabilities.cumsum(dim=-1)
    targets = _targets(draws, probabilities.device) * running[:, -1:]
    columns = torch.searchsorted(running, targets, right=True)
    last = (
        (probabilities > 0)
        .long()
        .mul_(torch.arange(probabilities.shape[-1], device=probabilities.device))
        .amax(dim=-1, keepdim=True)
    )
    return torch.minimum(columns, last)[:, 0]


def _draw_plain(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Without truncation no order is needed: the CDF runs over the vocabulary."""
    return _invert(_probabilities(logits, draws), draws)


def _draw_truncated(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """The CDF runs from the most probable token down (lowest id first on a tie), over what top-k and top-p leave:
    top-p keeps the shortest head whose sum reaches p, the sum taken over what top-k left (as transformers does)."""
    ordered, ids = _probabilities(logits, draws).sort(dim=-1, descending=True, stable=True)
    vocab = ordered.shape[-1]
    top_k = torch.tensor([params.top_k if params.top_k > 0 else vocab for params, _, _ in draws], device=logits.device)
    ordered.masked_fill_(torch.arange(vocab, device=logits.device) >= top_k[:, None], 0.0)
    ordered /= ordered.sum(dim=-1, keepdim=True)
    top_p = torch.tensor([params.top_p for params, _, _ in draws], dtype=torch.float64, device=logits.device)
    before = ordered.cumsum(dim=-1) - ordered
    is_beyond = before >= top_p[:, None]
    is_beyond[:, 0] = False
    columns = _invert(ordered.masked_fill(is_beyond, 0.0), draws)
    return ids.gather(1, columns[:, None])[:, 0]
