"""Prompt lookup: what a sequence may say next, if it says again what stands in its prompt or its output already.

Its last tokens are looked for further up; what followed them there is the draft (Saxena, "Prompt Lookup Decoding",
2023). The longest match decides, of several the last one. No state and no Python work per token: a few passes of
numpy over the ids, so a preempted or migrated sequence drafts at once. Knows neither blocks nor budgets.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NOTHING: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


def propose(token_ids: npt.NDArray[np.int64], num_tokens: int, min_ngram: int, max_ngram: int) -> npt.NDArray[np.int64]:
    """`(num_tokens,)` ids that may follow `token_ids` `(n,)`, or none. Where the match is so near the end that fewer
    tokens follow it, the text repeats itself with that period, and so does the draft."""
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
