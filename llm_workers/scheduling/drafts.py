"""Guesses by prompt lookup which tokens a sequence generates next, if it repeats text of its prompt or its output.

The module searches the earlier tokens for the sequence's last tokens; the tokens that followed them there are the draft
(Saxena, "Prompt Lookup Decoding", 2023). The longest match decides, and of several longest matches the last one. The
search keeps no state and does no Python work per token: it makes a few passes of numpy over the ids, so a preempted or
migrated sequence has drafts at once. This module knows nothing of blocks and budgets.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NOTHING: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


def propose(token_ids: npt.NDArray[np.int64], num_tokens: int, min_ngram: int, max_ngram: int) -> npt.NDArray[np.int64]:
    """Returns `(num_tokens,)` ids that may follow `token_ids` `(n,)`, or an empty array. Where the match is so near the
    end that fewer tokens follow it, the text repeats itself with that period, and so does the draft."""
    if num_tokens < 1 or len(token_ids) <= min_ngram:
        return NOTHING
    ends = np.flatnonzero(token_ids[:-1] == token_ids[-1]) + 1
    length = 1
    while length < max_ngram and len(ends):
        longer = ends[ends > length]
        longer = longer[token_ids[longer - 1 - length] == token_ids[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if length < min_ngram or not len(ends):
        return NOTHING
    return np.resize(token_ids[ends[-1] :], num_tokens)
