"""Defines the weighted token: what a token costs after a context, in tokens without a context. It is the unit
in which workers measure their steps and routers predict them.

The arithmetic is a module of its own, so that workers and routers use the same one. It knows nothing of a model except
its hidden size.
"""

from __future__ import annotations

_LINEAR_TO_ATTENTION = 6
"""Per layer, a token's linear parts cost about 24 * hidden^2 FLOP, and its attention costs 4 * hidden FLOP per token of
context, so the two are equal at a context of 6 * hidden."""


def context_scale_tokens(hidden_size: int) -> float:
    """Returns the context at which a token's attention costs as much as its linear layers."""
    return float(_LINEAR_TO_ATTENTION * hidden_size)


def weighted_tokens(num_tokens: int, context: int, scale_tokens: float) -> float:
    """Returns how many tokens at context 0 take as long as `num_tokens` after `context` computed ones: attention makes
    a token dearer by `context / scale_tokens`. The result is additive over a split."""
    return num_tokens * (1.0 + (context + 0.5 * num_tokens) / scale_tokens)
