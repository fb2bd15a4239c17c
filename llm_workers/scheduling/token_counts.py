"""Counts which tokens a sequence has seen and how often it generated each, which is what the penalties need.

The counts are sparse, so that a long vocabulary costs nothing; adding a token costs the same however long the context
is. They follow from the ids alone, so a migrated sequence counts as its first attempt did. This module knows nothing of
penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llm_workers.scheduling.growing import GrowingArray


class SeenTokens(NamedTuple):
    """Holds the arrays of `TokenCounts` at one moment."""

    ids: npt.NDArray[np.int64]
    num_generated: npt.NDArray[np.int64]


class TokenCounts:
    """Keeps `ids` and `num_generated`, which belong together, int64 with shape `(num_distinct,)` each. A token of the
    prompt that was never generated counts 0."""

    def __init__(self, prompt: npt.NDArray[np.int64], generated: npt.NDArray[np.int64]) -> None:
        distinct, counts = np.unique(generated, return_counts=True)
        prompt_only = np.setdiff1d(prompt, distinct)
        self._ids = GrowingArray(np.concatenate([prompt_only, distinct]))
        self._counts = GrowingArray(np.concatenate([np.zeros(len(prompt_only), dtype=np.int64), counts]))
        self._id_to_place = {token_id: place for place, token_id in enumerate(self._ids.view().tolist())}

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Returns a view of the distinct ids, in no particular order."""
        return self._ids.view()

    @property
    def num_generated(self) -> npt.NDArray[np.int64]:
        """Returns a view of the counts."""
        return self._counts.view()

    def add(self, token_id: int) -> None:
        """Counts one generated token."""
        place = self._id_to_place.get(token_id)
        if place is None:
            self._id_to_place[token_id] = len(self._ids)
            self._ids.append(token_id)
            self._counts.append(1)
        else:
            self._counts.replace(place, (self._counts[place] + 1,))

    def after(self, token_ids: Sequence[int]) -> SeenTokens:
        """Returns the ids and counts as they would be if these few tokens were generated too."""
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
