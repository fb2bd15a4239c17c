"""Makes the choice: `plan_route` scores workers, each with the encoders that suit it best, and takes the one with the
earliest first token. Its functions are pure functions of frozen values; chance enters only as the snapshot's
`tie_break`. It knows nothing of how the views come about."""

from __future__ import annotations

from collections.abc import Sequence

from fabric.errors import NoCapacity
from fabric.ids import MemberId
from router.planning.landing import land_items
from router.planning.links import link_class
from router.planning.search import Search, encoder_options
from router.planning.views import Assignment, ClusterView, Explanation, ItemTerms, RoutePlan, RouteQuery


def plan_route(query: RouteQuery, snapshot: ClusterView, now: float) -> RoutePlan:
    """Returns the plan with the earliest predicted first token: a worker, and an encoder for each item that the worker
    lacks. Of workers that are near-equal, it takes one with the fewest open attempts; `tie_break` decides among those.

    Raises NoCapacity if there is no worker, or if no encoder can take a modality; the error then names the modality.
    """
    search = Search.of(query, snapshot)
    scored = search.run()
    best_s = min(candidate.ttft_s for candidate in scored)
    near = [candidate for candidate in scored if candidate.ttft_s <= best_s + search.tolerance_s]
    fewest = min(candidate.worker.num_open for candidate in near)
    near = [candidate for candidate in near if candidate.worker.num_open == fewest]
    winner = near[int(snapshot.tie_break * len(near))]
    others = [candidate for candidate in scored if candidate is not winner]
    runner_up = min(others, key=lambda candidate: candidate.ttft_s, default=None)
    items = winner.landings.items
    missing = {terms.item_index for terms in items}
    return RoutePlan(
        attempt_id=query.attempt_id,
        worker_id=winner.worker.worker_id,
        worker_address=winner.worker.address,
        assignments=tuple(Assignment(terms.item_index, terms.encoder_id) for terms in items),
        covered_items=tuple(item.index for item in query.media if item.index not in missing),
        predicted_ttft_s=winner.ttft_s,
        lower_bound_s=search.lower_bound_s(winner),
        explanation=Explanation(
            winner=winner.terms(),
            runner_up=runner_up.terms() if runner_up else None,
            num_workers=len(search.bounds),
            num_scored=len(scored),
            num_near_equal=len(near),
        ),
        planned_at_s=now,
    )


def plan_encoding(
    query: RouteQuery, worker_id: MemberId, item_indexes: Sequence[int], snapshot: ClusterView
) -> tuple[ItemTerms, ...]:
    """Returns encoders, chosen by the same landing times, for items that a worker needs after all (because it evicted
    them, or because an encoder is lost).

    Raises NoCapacity, naming the modality, if no encoder can take it.
    """
    options = encoder_options(query, snapshot)
    items = [item for item in query.media if item.index in set(item_indexes)]
    for item in items:
        if not options[item.index]:
            raise NoCapacity(f"no encoder is available for {item.modality}")
    host = next((worker.host for worker in snapshot.workers if worker.worker_id == worker_id), "")
    links = {encoder.encoder_id: snapshot.links[link_class(encoder.host, host)] for encoder in snapshot.encoders}
    return land_items(items, options, links, query.feature_row_bytes).items
