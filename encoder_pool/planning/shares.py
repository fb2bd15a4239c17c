"""How much of a pool one worker may hold, so that a worker that gives nothing back leaves room for the others.

The rule is the dynamic threshold of shared-memory switches (Choudhury and Hahne, 1998): a holder may take more while it
holds no more than what stays free. Nobody has to say who will want something: one stuck holder ends with a half, two
with three quarters, and there is always something free. Knows nothing of what is held.
"""

from __future__ import annotations


def is_within_share(held: float, more: float, free: float) -> bool:
    """Whether a holder of `held` may take `more` of the `free` part of a pool. One that holds nothing always may: what
    is larger than any share must be had at some time, too."""
    return held == 0 or held + more <= free - more
