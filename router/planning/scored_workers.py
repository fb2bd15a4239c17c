"""Holds what the search for a route computes on its way: the scores of all workers (`WorkerScores`), the media that
they may lack (`LackedMedia`), and when these land (`WorkerLandings`).

The module knows nothing of how the values are computed, or of the choice between workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fabric.contracts import MediaItem
from router.planning.landing_search import LandingProblem, LandingRows
from router.planning.member_columns import Bytes, Flags, Floats
from router.planning.plan_types import RouteQuery
from router.planning.predictions import MediaRuns, WorkerTimes

Ints = npt.NDArray[np.int64]


def alike_rows(patterns: Ints, lacks: Flags) -> tuple[Ints, Ints]:
    """Groups workers of one pattern that lack the same media. Returns the group of each worker, with shape
    `(worker slots,)`, and the first worker of each group."""
    if lacks.shape[1] < 40:
        masks = lacks @ (1 << np.arange(lacks.shape[1]))
    else:
        row_to_mask: dict[bytes, int] = {}
        packed = np.packbits(lacks, axis=1)
        masks = np.array([row_to_mask.setdefault(row.tobytes(), len(row_to_mask)) for row in packed], np.int64)
    _, first, group = np.unique(masks * (int(patterns.max()) + 1) + patterns, return_index=True, return_inverse=True)
    return group, first


class WorkerScores(NamedTuple):
    """Holds the scores of all workers. All arrays have shape `(worker slots,)`."""

    times: WorkerTimes
    end_s: Floats
    """Holds the end of the prefill."""
    ttft_s: Floats
    """Holds the time to first token; it is infinite for a worker that the request can't use."""
    least_own_s: float
    """This is the least time of the request's own work on any usable worker."""
    landed: WorkerLandings | None
    """Holds the landings; None if no usable worker lacks an item."""
    released_s: Floats | None = None
    """Holds what the choice adds to the scores of workers with long queues; None if it adds nothing."""

    def released_at(self, slot: int) -> float:
        return 0.0 if self.released_s is None else float(self.released_s[slot])


class LackedMedia(NamedTuple):
    """Holds the different media that workers may lack."""

    items: Sequence[MediaItem]
    first_unit: Ints
    ends: Floats
    """Holds where the last run of each medium ends; it is 0 for one without a run."""
    runs: MediaRuns
    index_to_number: Mapping[int, int]
    """Maps `MediaItem.index` to the number in `items`."""

    @property
    def nothing_behind(self) -> Floats:
        return np.zeros(int(self.first_unit[-1]))


class WorkerLandings(NamedTuple):
    """Holds the landings at all workers."""

    media: LackedMedia
    problem: LandingProblem
    rows: LandingRows
    classes: Bytes
    """Holds the classes of the links to each encoder. Has shape `(rows, encoder capacity)`."""
    lacks: Bytes
    """Says which media the workers of a row lack. Has shape `(rows, media)`."""
    row_of_worker: Ints
    is_possible: Flags
    """Says which workers can get all that they lack. Has shape `(worker slots,)`."""

    def behind(self, times: WorkerTimes, slot: int) -> Floats:
        """Returns, for each unit, the weighted tokens that a worker computes from the unit's first missing run on. A
        unit without such a run decides nothing."""
        runs = self.media.runs
        found = np.full(int(self.media.first_unit[-1]), -1e30)
        is_missing = runs.end > times.covered[slot]
        np.maximum.at(found, runs.unit[is_missing], np.minimum(runs.behind[is_missing], times.weighted[slot]))
        return found


class ScoredPrompt(NamedTuple):
    """Says where the media of a query end in its prompt."""

    item_to_end: Mapping[int, int]
    """Maps `MediaItem.index` to the end of the medium's last run."""
    last_media_end: int
    num_text_first: int
    """Counts the tokens ahead of the first medium."""


def scored_prompt(query: RouteQuery) -> ScoredPrompt:
    item_to_end: dict[int, int] = {}
    for run in query.placeholders:
        if run.length > 0:
            item_to_end[run.item] = run.end
    num_text_first = next((run.offset for run in query.placeholders if run.length > 0), query.token_count)
    return ScoredPrompt(item_to_end, max(item_to_end.values(), default=0), num_text_first)
