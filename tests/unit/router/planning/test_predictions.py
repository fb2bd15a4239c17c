"""Tests how long a request waits at a worker: the prediction models the worker's steps from its last report."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from planning_samples import BLOCK_SIZE, PREFILL, WorkerSpec, encoder, snapshot, worker

from router.planning.member_columns import idle_pace
from router.planning.plan_types import Line
from router.planning.predictions import MediaRuns, RequestSize, WorkerSchedule, await_landings, worker_times

DECODE_S = 0.0005
STEP = {"max_step_tokens": 100, "decode_s": DECODE_S}
FULL_S = PREFILL.at(100)


class Need(NamedTuple):
    """A `Need` is the size of a prompt; `weighted_tokens` is what its attention makes of it."""

    num_tokens: int = 64
    weighted_tokens: float = 70.0


class Waiting(NamedTuple):
    queue_s: float
    shared_s: float
    pace: Line


NEED = Need()


def waiting(spec: WorkerSpec, need: Need) -> Waiting:
    more = need.weighted_tokens - need.num_tokens
    scale = 0.5 * need.num_tokens**2 / more if more else float("inf")
    columns = snapshot([spec]).columns(0.0).workers
    times = worker_times(columns, RequestSize(need.num_tokens, scale, np.zeros(1, np.int32), None), 0.0, 1e9)
    queue_s, shared_s, s_per_token, last_s = (
        float(each[0]) for each in (times.queue_s, times.shared_s, times.s_per_token, times.last_s)
    )
    return Waiting(queue_s, shared_s, Line(last_s, s_per_token))


def alone(spec: WorkerSpec, need: Need) -> Line:
    s_per_token, last_s = idle_pace(snapshot([spec]).columns(0.0).workers, 0, *need)
    return Line(last_s, s_per_token)


def of(**fields: Any) -> Waiting:
    return waiting(worker("w", **STEP, **fields), NEED)


def test_an_idle_worker_begins_at_once() -> None:
    assert of()[:2] == (0.0, 0.0)
    assert of().pace == alone(worker("w", **STEP), NEED) == PREFILL


def test_decodes_make_the_running_step_and_all_others_longer() -> None:
    found, step_s = of(num_decoding=20), PREFILL.base_s + 20 * DECODE_S
    assert found.queue_s == pytest.approx(step_s / 2), "its end is half a step away on average"
    assert found.pace.base_s == pytest.approx(step_s)
    assert found.pace.per_unit_s == PREFILL.per_unit_s, "it fits in one step"
    assert alone(worker("w", num_decoding=20, **STEP), NEED) == PREFILL


@pytest.mark.parametrize(("num_tokens", "num_steps"), [(100, 1), (101, 2), (250, 3)])
def test_each_step_that_a_prompt_takes_costs(num_tokens: int, num_steps: int) -> None:
    need = Need(num_tokens, 2.0 * num_tokens)
    pace = waiting(worker("w", **STEP), need).pace
    expected_s = num_steps * PREFILL.base_s + PREFILL.per_unit_s * need.weighted_tokens
    assert pace.at(need.weighted_tokens) == pytest.approx(expected_s)


@pytest.mark.parametrize(("num_shared", "num_more"), [(0, 0), (36, 0), (37, 1), (99, 1)])
def test_what_does_not_fit_beside_those_in_front_costs_a_step_more(num_shared: int, num_more: int) -> None:
    found = of(queued_tokens=100 + num_shared)
    assert found.shared_s == pytest.approx(num_shared * PREFILL.per_unit_s + num_more * PREFILL.base_s)
    assert found.pace == of().pace, "which it waits for; what comes behind media that land later costs what it costs"


@pytest.mark.parametrize(
    ("age_s", "queue_s", "shared"),
    [
        (0.0, 2 * FULL_S, 30),
        (0.5 * FULL_S, 1.5 * FULL_S, 30),
        (1.5 * FULL_S, 0.5 * FULL_S, 30),
        (2 * FULL_S + 0.01, PREFILL.at(30) - 0.01, 0),
        (2 * FULL_S + PREFILL.at(30) + 0.01, 0.0, 0),
    ],
)
def test_what_was_in_front_at_the_report_is_computed_since(age_s: float, queue_s: float, shared: int) -> None:
    """The 230 tokens take two full steps and a third, which has room for this request unless it has begun."""
    found = of(queued_tokens=230, report_age_s=age_s)
    assert found.queue_s == pytest.approx(queue_s)
    assert found.shared_s == pytest.approx(shared * PREFILL.per_unit_s)


def test_what_was_dispatched_since_joins_the_step_that_this_request_joins() -> None:
    found = of(queued_tokens=60, pending_tokens=150, num_pending=2)
    assert found.queue_s == pytest.approx(PREFILL.at(60) + FULL_S)
    assert found.shared_s == pytest.approx(PREFILL.at(50)), "and one more: 114 tokens don't fit in it"


def test_of_a_burst_onto_an_idle_worker_the_first_is_computed_already() -> None:
    found = of(pending_tokens=80, num_pending=4)
    assert found.queue_s == pytest.approx(PREFILL.at(20) / 2)
    assert found.shared_s == pytest.approx(PREFILL.at(60))


def test_places_and_blocks_come_free_as_sequences_end() -> None:
    assert of(place_wait_s=3.0).queue_s == 3.0
    assert of(kv_blocks_free=1).queue_s == pytest.approx(PREFILL.at(3 * BLOCK_SIZE))
    assert of(kv_blocks_free=1, kv_blocks_per_s=2.0).queue_s == pytest.approx(1.5)
    assert of(kv_blocks_free=4).queue_s == 0.0


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0, 2.0])
def test_what_is_in_front_is_computed_while_a_place_is_waited_for(part: float) -> None:
    begin_s, shared_s, _ = of(queued_tokens=60, pending_tokens=150, num_pending=2)
    wait_s = begin_s + part * shared_s
    found = of(queued_tokens=60, pending_tokens=150, num_pending=2, place_wait_s=wait_s)
    assert found.queue_s == pytest.approx(wait_s)
    assert found.shared_s == pytest.approx(max(0.0, 1.0 - part) * shared_s)


def test_one_more_that_decodes_never_lets_a_request_begin_earlier() -> None:
    """A property test found this case: with 21 decodes there is room for both tokens ahead of the request, which share
    its first step; with 22 there is not, so they take a step before it, within the wait for a place."""
    line = PREFILL._replace(base_s=0.125, per_unit_s=0.0078125)
    one = Need(1, 1.0)

    def first_s(num_decoding: int) -> float:
        fields = {"prefill": line, "max_step_tokens": 24, "place_wait_s": 0.5, "pending_tokens": 2, "decode_s": 0.0}
        found = waiting(worker("w", num_decoding=num_decoding, **fields), one)
        return found.queue_s + found.shared_s

    assert first_s(21) <= first_s(22) <= first_s(23)


def test_without_a_limit_all_fits_in_one_step() -> None:
    found = waiting(worker("w", queued_tokens=5000), NEED)
    assert found.queue_s == pytest.approx(PREFILL.at(5000))
    assert found.pace == pytest.approx(PREFILL)


def test_features_that_land_for_others_fill_the_step_that_a_request_joins() -> None:
    landing = ((0.5 * FULL_S, 20.0), (0.9 * FULL_S, 30.0), (1.1 * FULL_S, 40.0))
    found = of(queued_tokens=100, awaited=landing)
    assert found.queue_s == pytest.approx(FULL_S)
    assert found.shared_s == pytest.approx(36 * PREFILL.per_unit_s), "64 tokens leave room for 36 of the 50"
    assert of(awaited=landing) == of(), "none has landed when an idle worker begins"


def test_features_wait_for_the_running_step_and_share_the_next_one() -> None:
    """A step runs for 0.3 s; 20 tokens are queued, and 30 tokens of another request can be computed after 0.2 s."""
    fields = {"step_left_s": 0.3, "queued_tokens": 20, "awaited": ((0.2, 30.0), (1.0, 40.0))}
    state = snapshot([worker("w", **STEP, **fields)], [encoder("e")])
    workers = state.columns(0.0).workers
    times = worker_times(workers, RequestSize(64, float("inf"), np.zeros(1, np.int32)), 0.0, 1e9)
    second_s = 0.3 + PREFILL.at(50)
    runs = MediaRuns(np.zeros(1, np.int64), np.array([64.0]), np.array([10.0]))

    def end_s(landing_s: float) -> float:
        ends_s, rows = np.zeros(1), np.zeros(1, np.int64)
        await_landings(workers, times, 0.0, np.array([[landing_s]]), rows, runs, ends_s)
        return float(ends_s[0]) - 10 * PREFILL.per_unit_s

    assert end_s(0.1) == end_s(0.3) == pytest.approx(0.3 + 50 * PREFILL.per_unit_s)
    assert end_s(0.31) == pytest.approx(second_s), "it has missed the second step"
    assert end_s(0.7) == pytest.approx(0.7), "the worker is idle"
    assert end_s(1.01) == pytest.approx(1.0 + PREFILL.at(40)), "a third step has begun"
    assert end_s(-1.0) == -10 * PREFILL.per_unit_s, "the worker has the unit, so nothing waits for it"


@pytest.mark.parametrize(
    ("room", "at_s", "joined_s"),
    [
        (1.0, 0.0, 0.0),  # The worker is idle now.
        (1.0, 1.2, 1.7),  # It is idle at that time; a step of decodes is half over in the mean.
        (1.0, 2.0, 4.5),  # It computes three full steps from 1.5 on.
        (1.0, 5.0, 5.5),
        (2.0, 1.4, 1.9),
        (2.0, 2.0, 2.5),  # One full step, and then one with room for the request.
    ],
)
def test_a_worker_is_busy_while_it_computes_full_steps(room: float, at_s: float, joined_s: float) -> None:
    """Three tokens of other requests land after one second; a step takes one second, its tokens nothing."""
    schedule = WorkerSchedule.of(0.0, 0.0, (1.0, 0.0, room), 1.0, [(1.0, 3.0)])
    assert schedule.joined_s(at_s, 1.0) == pytest.approx(joined_s)
