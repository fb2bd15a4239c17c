"""Shares the tokens that a request's videos may have together among the videos. It is pure, and knows nothing of
requests or media.
"""

from __future__ import annotations

from collections.abc import Sequence


def share_tokens(wanted: Sequence[int], budget: int) -> list[int]:
    """Shares `budget` tokens max-min fairly: a video that wants less than an equal share gets what it wants, and the
    other videos share what it leaves.

    `wanted` holds the tokens that each video wants. Returns the tokens of each video, never more than it wants, and
    together at most `budget`. The remainder of a division is not given out, so that videos with equal wishes get equal
    shares."""
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
