"""Checks properties of one plan over random clusters and prompts."""

import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planning_samples import BLOCK_SIZE, encoder, image, query, snapshot, worker

from fabric.contracts import MediaItem, NoCapacity, weighted_tokens
from router.planning import RoutePlan, RouteQuery
from router.planning.link_classes import LinkClass
from router.planning.route_plan import Search, cut, plan_route, walk
from router.planning.views import ClusterView, EncoderCosts, Line, WorkerView

HOSTS = ["h-0", "h-0/p", "h-1", "h-2/p"]
MODALITIES = ["image", "audio"]
seconds = st.floats(1e-6, 1.0)
lines = st.builds(Line, seconds, st.floats(1e-9, 1e-2))
workers = st.builds(
    lambda name, **fields: worker(name, **fields),
    st.just("w"),
    host=st.sampled_from(HOSTS),
    covered_blocks=st.integers(0, 40),
    queued_tokens=st.integers(0, 2000),
    num_decoding=st.integers(0, 50),
    num_open=st.integers(0, 3),
    kv_blocks_free=st.none() | st.integers(0, 100),
    prefill=lines,
    decode_s=st.just(0.0) | seconds,
    pending_tokens=st.integers(0, 2000),
    num_pending=st.integers(0, 4),
    max_step_tokens=st.just(0) | st.integers(8, 600),
    place_wait_s=st.just(0.0) | seconds,
    kv_blocks_per_s=st.just(0.0) | st.floats(0.1, 1e3),
)
encoders = st.builds(
    lambda name, **fields: encoder(name, **fields),
    st.just("e"),
    host=st.sampled_from(HOSTS),
    modalities=st.frozensets(st.sampled_from(MODALITIES)),
    queued_cost=st.integers(0, 5000),
    cached=st.frozensets(st.sampled_from([digit * 32 for digit in "abcd"]), max_size=2),
    costs=st.builds(EncoderCosts, lines, lines, lines),
)


@st.composite
def queries(draw: st.DrawFn, max_items: int = 4) -> RouteQuery:
    parts: list[int | MediaItem] = [draw(st.integers(0, 200))]
    for index in range(draw(st.integers(0, max_items))):
        units = tuple(draw(st.lists(st.integers(1, 80), min_size=1, max_size=3)))
        item = image(index, digit=draw(st.sampled_from("abcd")), modality=draw(st.sampled_from(MODALITIES)))
        parts += [msgspec.structs.replace(item, unit_tokens=units, cost=draw(st.integers(1, 2000)))]
        parts += [draw(st.integers(0, 200))]
    request = query(*parts)
    # A hash stands for one content, which has one geometry.
    first = {item.mm_hash: item for item in reversed(request.media)}
    assume(all(first[item.mm_hash].unit_tokens == item.unit_tokens for item in request.media))
    assume(all(first[item.mm_hash].modality == item.modality for item in request.media))
    assume(request.token_count > 0)
    return request


@st.composite
def clusters(draw: st.DrawFn) -> ClusterView:
    views = [
        view._replace(worker_id=f"w{number}")
        for number, view in enumerate(draw(st.lists(workers, min_size=1, max_size=8)))
    ]
    makers = [
        view._replace(encoder_id=f"e{number}") for number, view in enumerate(draw(st.lists(encoders, max_size=5)))
    ]
    state = snapshot(views, makers, tie_break=draw(st.floats(0.0, 1.0, exclude_max=True)))
    links = {link: draw(lines) for link in LinkClass}
    return replace(state, links=links, context_scale_tokens=draw(st.sampled_from([math.inf, 600.0])))


def planned(request: RouteQuery, state: ClusterView) -> RoutePlan:
    try:
        return plan_route(request, state, 0.0)
    except NoCapacity:
        assume(False)


@settings(deadline=None, max_examples=300)
@given(queries(), clusters())
def test_every_item_is_covered_or_goes_to_a_live_encoder_that_has_its_modality(
    request_: RouteQuery, state: ClusterView
) -> None:
    plan = planned(request_, state)
    encoder_to_view = {view.encoder_id: view for view in state.encoders}
    assigned = {each.item_index for each in plan.assignments}
    assert sorted([*assigned, *plan.covered_items]) == [item.index for item in request_.media]
    assert len(assigned) == len(plan.assignments)
    for each in plan.assignments:
        assert request_.media[each.item_index].modality in encoder_to_view[each.encoder_id].modalities
    covered_tokens = plan.explanation.winner.covered_tokens
    for run in request_.placeholders:
        assert run.item in assigned or run.end <= covered_tokens


@settings(deadline=None, max_examples=300)
@given(queries(), clusters())
def test_no_capacity_exactly_when_no_worker_could_get_all_it_lacks(request_: RouteQuery, state: ClusterView) -> None:
    has_encoder = {m: any(m in view.modalities for view in state.encoders) for m in MODALITIES}
    prompt = cut(request_, state.context_scale_tokens)

    def lacks(view: WorkerView) -> set[str]:
        covered = min(view.covered_blocks, (request_.token_count - 1) // BLOCK_SIZE) * BLOCK_SIZE
        return {item.modality for item in prompt.missing_items(covered) if not has_encoder[item.modality]}

    if all(lacks(view) for view in state.workers):
        with pytest.raises(NoCapacity) as caught:
            plan_route(request_, state, 0.0)
        assert any(modality in caught.value.message for modality in MODALITIES)
    else:
        plan_route(request_, state, 0.0)


@settings(deadline=None, max_examples=300)
@given(queries(), clusters())
def test_the_pruned_search_finds_what_the_full_one_finds(request_: RouteQuery, state: ClusterView) -> None:
    plan = planned(request_, state)
    search = Search.of(request_, state)
    everything = sorted(candidate.ttft_s for candidate in search.run(prune=False))
    best_s = everything[0]
    assert best_s <= plan.predicted_ttft_s <= best_s + search.tolerance_s
    near = {c.worker.worker_id for c in search.run(prune=False) if c.ttft_s <= best_s + search.tolerance_s}
    pruned = {c.worker.worker_id for c in search.run() if c.ttft_s <= best_s + search.tolerance_s}
    assert pruned == near
    assert plan.worker_id in near
    if len(everything) > 1 and plan.predicted_ttft_s == best_s:
        assert plan.explanation.runner_up.ttft_s == pytest.approx(everything[1])


@settings(deadline=None, max_examples=300)
@given(queries(), clusters())
def test_bounds_are_bounds_and_terms_sum_to_the_score(request_: RouteQuery, state: ClusterView) -> None:
    plan = planned(request_, state)
    assert 0.0 < plan.lower_bound_s <= plan.predicted_ttft_s
    search = Search.of(request_, state)
    bounds = {bound.worker.worker_id: bound.bound_s for bound in search.bounds}
    for candidate in search.run(prune=False):
        terms = candidate.terms()
        assert bounds[terms.worker_id] <= terms.ttft_s * (1 + 1e-9)
        parts_s = terms.queue_s + terms.prefill_s + terms.held_s + terms.first_token_s
        assert parts_s == pytest.approx(terms.ttft_s)
        assert min(parts_s, terms.queue_s, terms.prefill_s, terms.held_s, terms.first_token_s) >= 0.0


@settings(deadline=None, max_examples=300)
@given(queries(), clusters(), st.integers(0, 5000), st.integers(0, 64), st.integers(0, 100))
def test_load_on_the_chosen_worker_never_makes_it_look_faster(
    request_: RouteQuery, state: ClusterView, tokens: int, decoding: int, blocks: int
) -> None:
    plan = planned(request_, state)
    (chosen,) = [view for view in state.workers if view.worker_id == plan.worker_id]
    free = None if chosen.kv_blocks_free is None else max(0, chosen.kv_blocks_free - blocks)
    loaded = chosen._replace(
        queued_tokens=chosen.queued_tokens + tokens,
        num_decoding=chosen.num_decoding + decoding,
        kv_blocks_free=free,
    )
    alone = plan_route(request_, replace(state, workers=(chosen,)), 0.0)
    again = plan_route(request_, replace(state, workers=(loaded,)), 0.0)
    assert alone.predicted_ttft_s == plan.predicted_ttft_s
    assert again.predicted_ttft_s >= plan.predicted_ttft_s * (1 - 1e-9)
    assert again.lower_bound_s == plan.lower_bound_s


@settings(deadline=None, max_examples=200)
@given(queries(), clusters(), st.data())
def test_excluded_members_are_never_chosen(request_: RouteQuery, state: ClusterView, data: st.DataObject) -> None:
    everyone = [view.worker_id for view in state.workers] + [view.encoder_id for view in state.encoders]
    excluded = data.draw(st.frozensets(st.sampled_from(everyone)))
    plan = planned(replace(request_, excluded=excluded), state)
    assert plan.worker_id not in excluded
    assert excluded.isdisjoint(each.encoder_id for each in plan.assignments)


@settings(deadline=None, max_examples=200)
@given(queries(), clusters())
def test_plans_are_a_function_of_their_arguments(request_: RouteQuery, state: ClusterView) -> None:
    assert planned(request_, state) == planned(request_, state)
    assert msgspec.to_builtins(planned(request_, state).explanation)


@settings(deadline=None, max_examples=300)
@given(queries(), st.integers(0, 700), st.floats(0.0, 2.0), lines, st.data())
def test_the_walk_is_the_maximum_over_what_may_hold_it_up(
    request_: RouteQuery, covered: int, start_s: float, prefill: Line, data: st.DataObject
) -> None:
    """Compares the walk with the closed form of the lower bound in the literature: the maximum of the start plus all
    the prefill, and of each unit's landing plus the prefill from there on."""
    covered = min(covered, request_.token_count - 1)
    prompt = cut(request_, 600.0)
    landings = {(run.item, run.unit): data.draw(st.floats(0.0, 3.0)) for run in request_.placeholders}
    walked = walk(prompt, covered, start_s, prefill.per_unit_s, landings)

    def rest_s(position: int) -> float:
        return prefill.per_unit_s * weighted_tokens(request_.token_count - position, position, 600.0)

    runs = [run for run in request_.placeholders if run.end > covered]
    ends_s = [landings[run.item, run.unit] + rest_s(max(run.offset, covered)) for run in runs]
    ends_s.append(start_s + rest_s(covered))
    assert walked.end_s == pytest.approx(max(ends_s))
    assert walked.prefill_s == pytest.approx(rest_s(covered))


@settings(deadline=None, max_examples=200)
@given(queries())
def test_spans_tile_the_prompt(request_: RouteQuery) -> None:
    spans = cut(request_, math.inf).spans
    assert [span.start for span in spans] == [0, *[span.end for span in spans[:-1]]]
    assert spans[-1].end == request_.token_count
    assert sum(span.num_weighted for span in spans) == request_.token_count
