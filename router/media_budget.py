"""How the tokens that a request's videos may have together are shared among them. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def share_tokens(wanted: Sequence[int], budget: int) -> list[int]:
    """Max-min fair: who wants less than an equal share gets what it wants, and the others share what it leaves.

    `wanted` tokens per video, `budget` for all. Returns tokens per video, never more than wanted, together at most
    `budget`; what a division leaves over goes to nobody, so that equal wishes get equal shares."""
    shares = [0] * len(wanted)
    left, order = max(0, budget), sorted(range(len(wanted)), key=lambda index: wanted[index])
    for at, index in enumerate(order):
        fair = left // (len(order) - at)
        if wanted[index] > fair:
            for other in order[at:]:
                shares[other] = fair
            break
        shares[index] = wanted[index]
        left -= wanted[index]
    return shares
