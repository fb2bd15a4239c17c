"""Which tokens a sequence has seen and how often it generated each: what the penalties go by.

Sparse, so that a long vocabulary costs nothing; adding a token costs the same however long the context is. Rebuilt
from the ids alone, so a migrated sequence counts as the first attempt did. Knows no penalty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llm_workers.scheduling.growing import GrowingArray


class SeenTokens(NamedTuple):
    """As `TokenCounts`, of one moment."""

    ids: npt.NDArray[np.int64]
    num_generated: npt.NDArray[np.int64]


class TokenCounts:
    """`ids` and `num_generated` go together, `(num_distinct,)` int64 each. A token of the prompt that was never
    generated counts 0."""

    def __init__(self, prompt: npt.NDArray[np.int64], generated: npt.NDArray[np.int64]) -> None:
        distinct, counts = np.unique(generated, return_counts=True)
        prompt_only = np.setdiff1d(prompt, distinct)
        self._ids = GrowingArray(np.concatenate([prompt_only, distinct]))
        self._counts = GrowingArray(np.concatenate([np.zeros(len(prompt_only), dtype=np.int64), counts]))
        self._id_to_place = {token_id: place for place, token_id in enumerate(self._ids.view().tolist())}

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct, in no order. A view."""
        return self._ids.view()

    @property
    def num_generated(self) -> npt.NDArray[np.int64]:
        """A view."""
        return self._counts.view()

    def add(self, token_id: int) -> None:
        """It was generated."""
        place = self._id_to_place.get(token_id)
        if place is None:
            self._id_to_place[token_id] = len(self._ids)
            self._ids.append(token_id)
            self._counts.append(1)
        else:
            self._counts.replace(place, (self._counts[place] + 1,))

    def after(self, token_ids: Sequence[int]) -> SeenTokens:
        """As they would be if these few tokens were generated too."""
        ids, counts = self.ids, self.num_generated.copy()
        fresh: dict[int, int] = {}
        for token_id in token_ids:
            place = self._id_to_place.get(token_id)
            if place is None:
                fresh[token_id] = fresh.get(token_id, 0) + 1
            else:
                counts[place] += 1
        if not fresh:
            return SeenTokens(ids, counts)
        more = np.array(list(fresh.items()), dtype=np.int64).T
        return SeenTokens(np.concatenate([ids, more[0]]), np.concatenate([counts, more[1]]))
