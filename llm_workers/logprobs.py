"""Computes log-probabilities of drawn tokens as the model gave them, before penalties, bias, temperature and
truncation.

This is also vLLM's default (`raw_logprobs`). This module knows nothing of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fabric.messages import TokenLogprobs


def token_logprobs(raw: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Returns, for each row of `raw`, the log-probability of the drawn token and the `num_top` most probable tokens;
    among equally probable tokens the lowest id comes first. `raw` holds float32 log-probabilities with shape
    `(n, vocab)`."""
    sampled = torch.tensor(token_ids, device=raw.device).clamp_(min=0)
    logprobs = raw.gather(1, sampled[:, None])[:, 0].tolist()
    return [TokenLogprobs(logprob, top) for logprob, top in zip(logprobs, _most_probable(raw, num_top), strict=True)]


def _most_probable(raw: torch.Tensor, num_top: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """Returns the most probable tokens of each row. It takes all tokens that are at least as probable as the last one
    requested, sorts them and then cuts the list. So tokens of equal probability at the cut are selected by their id,
    which `topk` alone does not guarantee."""
    most = min(max(num_top, default=0), raw.shape[-1])
    if most == 0:
        return [()] * len(num_top)
    asked = torch.tensor(num_top, device=raw.device).clamp_(max=raw.shape[-1])
    last = raw.topk(most, dim=-1).values.gather(1, (asked - 1).clamp_(min=0)[:, None])
    is_candidate = (raw >= last) & (asked > 0)[:, None]
    rows, ids = (axis.cpu().numpy() for axis in is_candidate.nonzero(as_tuple=True))
    values = raw[is_candidate].cpu().numpy()
    order = np.lexsort((ids, -values, rows))
    pairs = list(zip(ids[order].tolist(), values[order].tolist(), strict=True))
    starts = np.searchsorted(rows, np.arange(len(num_top))).tolist()
    return [tuple(pairs[start : start + count]) for start, count in zip(starts, asked.tolist(), strict=True)]
