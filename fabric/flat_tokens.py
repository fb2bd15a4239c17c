"""What a token costs behind a context: the unit in which workers measure their steps and routers predict them.

An arithmetic of its own, so that both say the same. Knows no model but its hidden size.
"""

from __future__ import annotations

_LINEAR_TO_ATTENTION = 6
"""A token's linear layers cost about 24 * hidden^2 FLOP per layer, its attention 4 * hidden per token of context:
they are equal at a context of 6 * hidden."""


def context_scale_tokens(hidden_size: int) -> float:
    """The context at which a token's attention costs as much as the rest of it."""
    return float(_LINEAR_TO_ATTENTION * hidden_size)


def flat_tokens(num_tokens: int, context: int, scale_tokens: float) -> float:
    """How many tokens at context 0 take as long as `num_tokens` behind `context` computed ones: attention makes a
    token dearer by `context / scale_tokens`. Additive over a split."""
    return num_tokens * (1.0 + (context + 0.5 * num_tokens) / scale_tokens)
