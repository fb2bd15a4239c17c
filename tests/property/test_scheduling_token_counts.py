"""Checks token counts, updated token by token or rebuilt from ids, against `collections.Counter`."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_workers.scheduling import TokenCounts

IDS = st.lists(st.integers(0, 12), max_size=40)


def contents(counts: TokenCounts) -> dict[int, int]:
    ids = counts.ids.tolist()
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, counts.num_generated.tolist(), strict=True))


@settings(deadline=None, max_examples=200)
@given(IDS, IDS, IDS)
def test_counts_are_those_of_a_counter_however_they_came(
    prompt: list[int], emitted: list[int], drawn: list[int]
) -> None:
    counts = TokenCounts(np.array(prompt, dtype=np.int64), np.array(emitted, dtype=np.int64))
    for token_id in drawn:
        counts.add(token_id)
    expected = Counter(emitted + drawn)
    assert contents(counts) == {token_id: expected[token_id] for token_id in {*prompt, *expected}}
    rebuilt = TokenCounts(np.array(prompt, dtype=np.int64), np.array(emitted + drawn, dtype=np.int64))
    assert contents(rebuilt) == contents(counts)
