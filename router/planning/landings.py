"""Assigns the media of a request to encoders, and predicts when their features land at a worker.

    land(unit, w) = max(wait(e), decode_queue(e) + decode)   the device is free, and the unit is decoded
                    + device_prepare + encode_e(units of this request on e, up to and including this one)
                    + alpha(e,w) + beta(e,w) * bytes         over a link that the request's units share

The items of a request that go to one encoder queue behind each other: for a decode process, and on the device. All
units share the links to the worker, and the unit that is complete first takes the link first. A feature that an encoder
holds, or that is on its way there, costs only its transfer. `LandingProblem` holds these numbers for one request.

`land_rows` makes a greedy choice for each row: a row stands for the workers that lack the same items and reach all
encoders over links of the same classes. `improve` then improves the choice for one worker, because a greedy choice may
be a few percent worse than the best one. Both are computed in C (`landings.h`), or in Python where the machine has no
compiler (`landing_search`). The module knows nothing of how the numbers come about, or of the score of a worker except
that a unit which lands later may end its prefill later.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from fabric.c_structures import address_of, structure_of
from router.planning import compiled_search, landing_search
from router.planning.compiled_search import MAX_TRIALS
from router.planning.landing_search import (
    Bytes,
    Floats,
    Improved,
    Ints,
    ItemStage,
    LandingGoal,
    LandingProblem,
    LandingRows,
)


def land_rows(problem: LandingProblem, classes: Bytes, lacks: Bytes) -> LandingRows:
    """Chooses encoders for each row and predicts the landings. `classes` holds the link class of each encoder, with
    shape `(rows, stride)`, and `lacks` says which items the row lacks, with shape `(rows, items)`."""
    num_rows, library = len(lacks), compiled_search.load_library()
    if library is None:
        return landing_search.land_rows(problem, classes, lacks)
    rows = LandingRows(
        np.empty((num_rows, problem.num_items), np.int64), np.empty((num_rows, problem.num_units), np.float64)
    )
    library.land_rows(
        ctypes.byref(_described(library, problem)),
        num_rows,
        address_of(classes),
        address_of(lacks),
        problem.first,
        address_of(_offers(problem)),
        address_of(rows.encoders),
        address_of(rows.landings_s),
    )
    return rows


def land_idle(problem: LandingProblem, classes: Bytes, lacks: Bytes) -> Floats:
    """Returns the landings of the greedy choice for one row with every queue empty, and with all features complete that
    are on their way. Has shape `(units,)`."""
    landings_s: Floats = land_rows(problem.idle(), classes[None, :], lacks[None, :]).landings_s[0]
    return landings_s


def improve(
    problem: LandingProblem,
    classes: Bytes,
    lacks: Bytes,
    encoders: Ints,
    goal: LandingGoal,
    max_trials: int = MAX_TRIALS,
) -> Improved:
    """Returns a choice for one worker that is at least as good as `encoders`, the choice of `land_rows` for the same
    problem. The arrays are those of one row. With `max_trials` 0 the choice stays."""
    library = compiled_search.load_library()
    if library is None:
        return landing_search.improve(problem, classes, lacks, encoders, goal, max_trials)
    chosen, landings_s = encoders.copy(), np.empty(problem.num_units)
    stages = np.zeros((problem.num_items, len(ItemStage._fields)))
    end_s = library.improve(
        ctypes.byref(_described(library, problem)),
        address_of(_offers(problem)),
        address_of(classes),
        address_of(lacks),
        goal.least_s,
        goal.s_per_token,
        address_of(goal.behind),
        max_trials,
        address_of(chosen),
        address_of(landings_s),
        address_of(stages),
    )
    return Improved(end_s, chosen.tolist(), landings_s, [ItemStage(*row) for row in stages.tolist()])


# ------------------------------------------------------------ the C library

_OFFER = np.dtype("f8, i8, i8")


def _described(library: ctypes.CDLL, problem: LandingProblem) -> ctypes.Structure:
    """Returns `Problem` of `landings.h` for a problem; it is valid as long as the problem lives."""
    found: ctypes.Structure | None = problem.kept.get("described")
    if found is None:
        found = problem.kept["described"] = structure_of(
            library,
            "Problem",
            problem,
            num_items=problem.num_items,
            num_units=problem.num_units,
            num_encoders=problem.num_encoders,
            stride=problem.stride,
            num_bins=len(problem.waits_s),
            num_classes=len(problem.alpha_s),
        )
    return found


def _offers(problem: LandingProblem) -> npt.NDArray[np.void]:
    """Returns the array in which the C library keeps what it knows of each item alone on each encoder; its `land_rows`
    fills it. Has shape `(items * num_encoders,)`."""
    found: npt.NDArray[np.void] | None = problem.kept.get("offers")
    if found is None:
        found = problem.kept["offers"] = np.empty(problem.num_items * problem.num_encoders, _OFFER)
    return found
