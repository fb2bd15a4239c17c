"""Checks properties of one plan over random clusters and prompts."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planning_reference import all_scores, covered_tokens, lacking, score
from planning_samples import (
    Cluster,
    WorkerSpec,
    encoder,
    image,
    plan_route,
    query,
    snapshot,
    worker,
)

from fabric.contracts import MediaItem, MmHash, NoCapacity
from router.planning import RoutePlan, RouteQuery, compiled_search
from router.planning.link_classes import LinkClass
from router.planning.plan_types import Chance, EncoderCosts, Line, PlanSettings
from router.planning.route_plan import RouteSearch

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
    kept=st.frozensets(st.sampled_from([MmHash(digit * 32) for digit in "abcd"]), max_size=1),
)
awaiting_workers = st.builds(
    lambda spec, **fields: spec._replace(**fields),
    workers,
    step_left_s=st.just(0.0) | seconds,
    report_age_s=st.just(0.0) | seconds,
    awaited=st.lists(st.tuples(seconds, st.floats(1.0, 500.0)), max_size=6).map(lambda pairs: tuple(sorted(pairs))),
)
encoders = st.builds(
    lambda name, **fields: encoder(name, **fields),
    st.just("e"),
    host=st.sampled_from(HOSTS),
    modalities=st.frozensets(st.sampled_from(MODALITIES)),
    queued_cost=st.integers(0, 5000),
    cached=st.frozensets(st.sampled_from([digit * 32 for digit in "abcd"]), max_size=2),
    costs=st.builds(EncoderCosts, lines, st.just(Line(0.0, 0.0)) | lines, lines),
    num_decoders=st.integers(1, 3),
)


@st.composite
def queries(draw: st.DrawFn, max_items: int = 3) -> RouteQuery:
    parts: list[int | MediaItem] = [draw(st.integers(0, 200))]
    hash_to_first: dict[str, MediaItem] = {}
    for index in range(draw(st.integers(0, max_items))):
        units = tuple(draw(st.lists(st.integers(1, 80), min_size=1, max_size=3)))
        item = image(index, digit=draw(st.sampled_from("abcd")), modality=draw(st.sampled_from(MODALITIES)))
        item = msgspec.structs.replace(item, unit_tokens=units, cost=draw(st.integers(1, 2000)))
        # A hash stands for one content, which has one geometry and one cost.
        first = hash_to_first.setdefault(item.mm_hash, item)
        parts += [msgspec.structs.replace(first, index=index, part=item.part), draw(st.integers(0, 200))]
    request = query(*parts)
    assume(request.token_count > 0)
    return request


@st.composite
def clusters(draw: st.DrawFn, specs: st.SearchStrategy[WorkerSpec] = workers) -> Cluster:
    views = [
        view._replace(worker_id=f"w{number}")
        for number, view in enumerate(draw(st.lists(specs, min_size=1, max_size=5)))
    ]
    makers = [
        view._replace(encoder_id=f"e{number}") for number, view in enumerate(draw(st.lists(encoders, max_size=3)))
    ]
    state = snapshot(views, makers, tie_break=draw(st.floats(0.0, 1.0, exclude_max=True)))
    links = {link: draw(lines) for link in LinkClass}
    return replace(state, links=links, context_scale_tokens=draw(st.sampled_from([math.inf, 600.0])))


def planned(request: RouteQuery, state: Cluster) -> RoutePlan:
    try:
        return plan_route(request, state, 0.0)
    except NoCapacity:
        assume(False)


@settings(deadline=None, max_examples=150)
@given(queries(), clusters())
def test_every_item_is_covered_or_goes_to_a_live_encoder_that_has_its_modality(
    request_: RouteQuery, state: Cluster
) -> None:
    plan = planned(request_, state)
    encoder_to_view = {view.encoder_id: view for view in state.encoders}
    assigned = {each.item_index for each in plan.assignments}
    assert sorted([*assigned, *plan.covered_items]) == [item.index for item in request_.media]
    assert len(assigned) == len(plan.assignments)
    for each in plan.assignments:
        assert request_.media[each.item_index].modality in encoder_to_view[each.encoder_id].modalities
    covered_tokens = plan.explanation.winner.covered_tokens
    (chosen,) = [view for view in state.workers if view.worker_id == plan.worker_id]
    for run in request_.placeholders:
        has_it = run.end <= covered_tokens or request_.media[run.item].mm_hash in chosen.kept
        assert run.item in assigned or has_it
    lacked = {item.mm_hash for item in lacking(request_, chosen)}
    assert {request_.media[index].mm_hash for index in assigned} == lacked, "what the worker has is never encoded"


@settings(deadline=None, max_examples=150)
@given(queries(), clusters())
def test_no_capacity_exactly_when_no_worker_could_get_all_it_lacks(request_: RouteQuery, state: Cluster) -> None:
    has_encoder = {m: any(m in view.modalities for view in state.encoders) for m in MODALITIES}

    def lacks(view: WorkerSpec) -> set[str]:
        return {item.modality for item in lacking(request_, view) if not has_encoder[item.modality]}

    if all(lacks(view) for view in state.workers):
        with pytest.raises(NoCapacity) as caught:
            plan_route(request_, state, 0.0)
        assert any(modality in caught.value.message for modality in MODALITIES)
    else:
        plan_route(request_, state, 0.0)


def tolerance_s(plan: RoutePlan, state: Cluster) -> float:
    """Returns an upper bound of what the planner counts as near-equal."""
    winner = plan.explanation.winner
    return state.settings.tolerance * (winner.ttft_s - winner.queue_s)


@settings(deadline=None, max_examples=150)
@given(queries(), clusters() | clusters(awaiting_workers))
def test_predictions_equal_those_of_the_reference(request_: RouteQuery, state: Cluster) -> None:
    """The reference walks over the prompt of the chosen worker, with the chosen encoders."""
    plan = planned(request_, state)
    for terms in (plan.explanation.winner, *plan.explanation.alternatives):
        (chosen,) = [view for view in state.workers if view.worker_id == terms.worker_id]
        hash_to_encoder = {item.mm_hash: item.encoder_id for item in terms.items}
        ids = [hash_to_encoder[item.mm_hash] for item in lacking(request_, chosen)]
        encoders = [next(view for view in state.encoders if view.encoder_id == each) for each in ids]
        expected = score(request_, state, chosen, encoders)
        assert terms.ttft_s == pytest.approx(expected.ttft_s, rel=1e-9)


def lacks_a_later_place(request_: RouteQuery, worker: WorkerSpec) -> bool:
    """Returns whether a worker has cached the first of several places of a medium, and not the last one."""
    covered = covered_tokens(worker, request_.token_count)
    lacked = {item.mm_hash for item in lacking(request_, worker)}
    index_to_end = {run.item: run.end for run in request_.placeholders}
    return any(item.mm_hash in lacked and index_to_end[item.index] <= covered for item in request_.media)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(queries(), clusters())
def test_no_choice_of_a_worker_and_its_encoders_is_much_better(request_: RouteQuery, state: Cluster) -> None:
    """Compares the plan with every assignment on every worker. It is never worse than the best one with a single
    encoder, and at most 2 % worse than the best one of all. The cases are always the same, because the search is a
    heuristic: of random clusters without any sense, one in a thousand has a better choice that it does not find. No
    cached prompt is given up, as it would be for a long queue, because the best choice keeps to it. A medium that a
    worker has cached at its first place, and lacks at another, is left out: the planner encodes it in the turn of its
    first place."""
    assume(not any(lacks_a_later_place(request_, worker) for worker in state.workers))
    state = replace(state, settings=state.settings._replace(affinity_limit_s=math.inf))
    plan = planned(request_, state)
    scores = list(all_scores(request_, state))
    best_s = min(each.ttft_s for each in scores)
    single_s = min(
        (each.ttft_s for each in scores if len({encoder.encoder_id for encoder in each.encoders}) <= 1),
        default=math.inf,
    )
    slack_s = tolerance_s(plan, state) + 1e-9
    assert best_s * (1 - 1e-9) <= plan.predicted_ttft_s <= 1.02 * best_s + slack_s
    assert plan.predicted_ttft_s <= single_s * (1 + 1e-9) + slack_s


@st.composite
def unsettled_searches(draw: st.DrawFn) -> RouteSearch:
    """Returns searches in clusters in which anything may be: members are silent, unknown, excluded or barred, queues
    are too long for affinity, features and prompts are on their way, and the plan may explore."""
    request, state = draw(queries(max_items=5)), draw(clusters() | clusters(awaiting_workers))
    names = [view.worker_id for view in state.workers] + [view.encoder_id for view in state.encoders]
    excluded = draw(st.frozensets(st.sampled_from(names), max_size=2))
    request = replace(request, excluded=excluded, priority=draw(st.sampled_from([0, 0, -1, 1])))
    columns, hints, now = state.columns(1000.0), state.hints(request), 1000.0
    for members in (columns.workers, columns.encoders):
        for slot in range(len(members)):
            members.report_at_s[slot] -= draw(st.sampled_from([0.0, 0.0, 0.5, 3.5, 30.0]))
            members.state_at_s[slot] = members.report_at_s[slot] - draw(st.sampled_from([-0.2, 0.0, 0.0, 0.5]))
            members.is_reported[slot] = draw(st.sampled_from([1.0, 1.0, 1.0, 0.0]))
            members.barred_until_s[slot] = draw(st.sampled_from([-math.inf, -math.inf, now, now + 1.0]))
            members.open_units[slot] += draw(st.sampled_from([0.0, 7.0]))
    columns.workers.delivery_s[: len(columns.workers)] = draw(seconds)
    for slot in range(len(columns.workers)):
        columns.workers.kv_blocks_coming[slot] = draw(st.sampled_from([0.0, 2.5, 300.0]))
        columns.workers.pending_blocks[slot] += draw(st.sampled_from([0.0, 40.0, -8.0]))
    for slot in range(len(columns.encoders)):
        columns.encoders.forward_left_s[slot], columns.encoders.unit_s[slot] = draw(seconds), draw(seconds)
        columns.encoders.add_pending(slot, draw(seconds), draw(seconds), draw(seconds))
    promised = [draw(st.sampled_from([0.0, 64.0, 640.0])) for _ in state.workers]
    ready = {
        item.mm_hash: [(slot, draw(st.sampled_from([0.0, 0.004]))) for slot in range(len(state.encoders))]
        for item in draw(st.lists(st.sampled_from(request.media), max_size=2) if request.media else st.just([]))
    }
    hints = hints._replace(
        promised_tokens=np.array(promised) if draw(st.booleans()) else None,
        encoder_ready={**hints.encoder_ready, **ready},
    )
    settings_ = PlanSettings(
        stale_after_s=3.0,
        tolerance=draw(st.sampled_from([0.0, 0.02, 0.5])),
        affinity_limit_s=draw(st.sampled_from([0.01, 10.0])),
        exploration=0.5,
        num_alternatives=draw(st.integers(0, 4)),
    )
    chance = Chance(draw(st.floats(0.0, 1.0, exclude_max=True)), draw(st.sampled_from([0.0, 0.9])))
    return RouteSearch(request, columns, hints, now, settings_, chance)


@settings(deadline=None, max_examples=400)
@given(unsettled_searches())
def test_without_a_compiler_the_plans_are_the_same(search: RouteSearch) -> None:
    """The search in C leaves out the workers that can't matter, and the one in Python scores them all."""
    plan = planned_or_refused(search)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_search, "load_library", lambda: None)
        other = planned_or_refused(search)
    if isinstance(plan, str) or isinstance(other, str):
        assert plan == other
        return
    assert_alike(plan, other)


def planned_or_refused(search: RouteSearch) -> RoutePlan | str:
    try:
        return search.plan()
    except NoCapacity as refused:
        return refused.message


def assert_alike(plan: RoutePlan, other: RoutePlan) -> None:
    """Compares everything that two plans say; numbers may differ by roundings."""
    texts, numbers = [], []
    for each in (plan, other):
        leaves = dict(leaves_of("plan", msgspec.to_builtins(each)))
        texts.append({path: value for path, value in leaves.items() if not isinstance(value, float)})
        numbers.append({path: value for path, value in leaves.items() if isinstance(value, float)})
    assert texts[0] == texts[1]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-9, abs=1e-12)


def leaves_of(path: str, value: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, dict | list | tuple):
        yield path, value
        return
    for name, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves_of(f"{path}.{name}", part)


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 40), st.integers(0, 60), st.integers(0, 12), st.randoms(use_true_random=False))
def test_of_many_members_too_the_plans_are_the_same(
    num_workers: int, num_encoders: int, num_items: int, rng: random.Random
) -> None:
    """Large clusters have more encoders than an item considers, and more workers than the search looks at."""
    workers_ = [
        worker(
            f"w{number}",
            host=f"h-{number // 4}",
            covered_blocks=rng.choice([0, 0, 8, 30]),
            queued_tokens=rng.choice([0, 0, 500]),
            num_decoding=rng.randint(0, 9),
            prefill=Line(0.005, 1e-4 * rng.choice([1.0, rng.uniform(0.9, 1.1)])),
        )
        for number in range(num_workers)
    ]
    encoders_ = [
        encoder(
            f"e{number}",
            host=f"h-{number // 4}",
            queued_cost=rng.choice([0, 0, 3000]),
            costs=EncoderCosts(Line(1e-3, 1e-6), Line(0.0, 0.0), Line(5e-3, 1e-5 * rng.choice([1.0, rng.random()]))),
            num_decoders=rng.randint(1, 3),
        )
        for number in range(num_encoders)
    ]
    parts = [part for number in range(num_items) for part in (rng.randint(0, 60), image(number))]
    digits = {number: format(number, "032x") for number in range(num_items)}
    media = [
        part if isinstance(part, int) else msgspec.structs.replace(part, mm_hash=MmHash(digits[part.index]))
        for part in parts
    ]
    costs = {LinkClass.SAME_HOST: Line(1e-4, 1e-10), LinkClass.TCP: Line(1e-3, 1e-9)}
    state = snapshot(workers_, encoders_, tie_break=rng.random())
    search = replace(state, links={**state.links, **costs}).search(query(*media, 100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_search, "load_library", lambda: None)
        try:
            other = search.plan()
        except NoCapacity:
            assume(False)
    assert_alike(search.plan(), other)


@settings(deadline=None, max_examples=150)
@given(queries(), clusters() | clusters(awaiting_workers))
def test_bounds_are_bounds_and_terms_sum_to_the_score(request_: RouteQuery, state: Cluster) -> None:
    plan = planned(request_, state)
    assert 0.0 < plan.lower_bound_s <= plan.predicted_ttft_s
    for terms in (plan.explanation.winner, *plan.explanation.alternatives):
        parts_s = terms.queue_s + terms.prefill_s + terms.held_s + terms.first_token_s + terms.delivery_s
        assert parts_s == pytest.approx(terms.ttft_s)
        assert min(terms.queue_s, terms.prefill_s, terms.held_s, terms.first_token_s, terms.delivery_s) >= 0.0


@settings(deadline=None, max_examples=150)
@given(queries(), clusters(), st.integers(0, 5000), st.integers(0, 64), st.integers(0, 100))
def test_load_on_the_chosen_worker_never_makes_it_look_faster(
    request_: RouteQuery, state: Cluster, tokens: int, decoding: int, blocks: int
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


@settings(deadline=None, max_examples=150)
@given(queries(), clusters(), st.data())
def test_excluded_members_are_never_chosen(request_: RouteQuery, state: Cluster, data: st.DataObject) -> None:
    everyone = [view.worker_id for view in state.workers] + [view.encoder_id for view in state.encoders]
    excluded = data.draw(st.frozensets(st.sampled_from(everyone)))
    plan = planned(replace(request_, excluded=excluded), state)
    assert plan.worker_id not in excluded
    assert excluded.isdisjoint(each.encoder_id for each in plan.assignments)


@settings(deadline=None, max_examples=150)
@given(queries(), clusters())
def test_plans_are_a_function_of_their_arguments(request_: RouteQuery, state: Cluster) -> None:
    assert planned(request_, state) == planned(request_, state)
    assert msgspec.to_builtins(planned(request_, state).explanation)


@settings(deadline=None, max_examples=150)
@given(workers, st.integers(1, 2000), st.floats(0.0, 100.0), st.integers(0, 3), st.integers(0, 5000))
def test_an_unknown_worker_is_never_preferred_to_the_same_one_known_idle(
    spec: WorkerSpec, num_tokens: int, silent_s: float, num_open: int, num_tokens_open: int
) -> None:
    """One worker is idle in its report. The other one is equal to it, and has sent no report or none for a while."""
    idle = WorkerSpec(spec.worker_id, prefill=spec.prefill, max_step_tokens=spec.max_step_tokens)
    other = idle._replace(worker_id="other", num_open=num_open, pending_tokens=num_tokens_open if num_open else 0)
    state = replace(snapshot([other, idle], tie_break=0.0), settings=PlanSettings(stale_after_s=3.0))
    search = state.search(query(num_tokens), now=1000.0)
    columns = search._columns.workers
    columns.report_at_s[0] = columns.state_at_s[0] = 1000.0 - 3.0 - silent_s
    columns.is_reported[0] = float(silent_s > 0.0)
    ttft_s = search.score().ttft_s
    assert ttft_s[0] >= ttft_s[1]
    assert search.plan().worker_id == idle.worker_id or ttft_s[0] <= ttft_s[1] * 1.02


@settings(deadline=None, max_examples=150)
@given(workers, st.integers(1, 2000), st.floats(0.0, 100.0))
def test_silence_takes_no_more_from_a_queue_than_the_worker_can_have_done(
    spec: WorkerSpec, num_tokens: int, age_s: float
) -> None:
    state = replace(snapshot([spec._replace(report_age_s=0.0)]), settings=PlanSettings(stale_after_s=3.0))
    search = state.search(query(num_tokens), now=1000.0)
    columns = search._columns.workers
    before_s = float(search.score().times.queue_s[0])
    columns.report_at_s[0] = columns.state_at_s[0] = 1000.0 - age_s
    assert float(search.score().times.queue_s[0]) >= min(before_s - age_s, 0.0) - 1e-9
    if columns.queued_tokens[0] and not columns.num_decoding[0]:
        left_s = before_s - age_s
        assert float(search.score().times.queue_s[0]) >= left_s - 1e-9
