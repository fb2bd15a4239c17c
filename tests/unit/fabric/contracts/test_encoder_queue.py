"""Tests the profile of an encoder's queue and the waits that follow from it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.contracts import (
    EMPTY_PROFILE,
    NUM_BINS,
    PROFILE_LENGTH,
    CallTurn,
    QueuedCalls,
    QueueState,
    add_work,
    bin_of,
    decode_waits_s,
    key_of,
    keys_of,
    queue_profile,
    wait_s,
    waits_s,
)

PATIENCE = 4.0
NOW_S = 100.0
SECONDS = st.floats(0.0, 100.0)


def state(*calls: tuple[float, float, float, int, int, int]) -> QueueState:
    """Returns the profile of calls, each given as (waited, remaining, done, priority, units, running units). A forward
    pass takes as long as the call is ranked by."""
    rows = [
        (NOW_S - waited, remaining, done, priority, units, running, remaining * units / max(units + running, 1))
        for waited, remaining, done, priority, units, running in calls
    ]
    return queue_profile(QueuedCalls(*np.array(rows).reshape(-1, 7).T), NOW_S, PATIENCE)


def wait(queue: QueueState, own_s: float, age_s: float = 0.0, left_s: float = 0.0, priority: int = 0) -> float:
    return wait_s(queue.profile, left_s, key_of(own_s, PATIENCE, age_s, priority), age_s, queue.unit_s)


def test_an_empty_queue_has_an_empty_profile() -> None:
    assert state() == QueueState(EMPTY_PROFILE, 0.0)
    assert len(EMPTY_PROFILE) == PROFILE_LENGTH == 2 * NUM_BINS
    assert wait(state(), 1.0, left_s=0.25) == 0.25


def test_new_work_waits_for_what_is_shorter_and_not_for_what_is_longer() -> None:
    queue = state((0.0, 0.01, 0.0, 0, 1, 0), (0.0, 0.3, 0.0, 0, 1, 0), (0.0, 5.0, 0.0, 0, 1, 0))
    assert wait(queue, 0.005) == 0.0
    assert wait(queue, 0.1) == pytest.approx(0.01)
    assert wait(queue, 1.0) == pytest.approx(0.31)
    assert wait(queue, 10.0) == pytest.approx(5.31)


def test_long_waits_make_a_call_go_first() -> None:
    assert wait(state((3.9, 1.0, 0.0, 0, 1, 0)), 0.01) == 0.0
    assert wait(state((4.1, 1.0, 0.0, 0, 1, 0)), 0.01) == pytest.approx(1.0)


def test_a_video_spends_its_wait_unit_by_unit() -> None:
    """It has waited 4.3 seconds and needs 1: it is ahead of a picture of 10 ms until the time of its own units has made
    up for the rest of 0.3 seconds."""
    queue = state((4.3, 1.0, 0.0, 0, 10, 0))
    assert wait(queue, 0.01) == pytest.approx(0.4)


def test_units_in_the_forward_pass_are_not_part_of_the_profile() -> None:
    queue = state((0.0, 1.0, 0.0, 0, 9, 1))
    assert sum(queue.profile[:NUM_BINS]) == pytest.approx(0.9)
    assert wait(queue, 0.01, left_s=0.1) == pytest.approx(0.1)
    assert wait(queue, 10.0, left_s=0.1) == pytest.approx(1.0)


def test_priority_is_strict() -> None:
    queue = state((0.0, 0.5, 0.0, -1, 1, 0), (0.0, 0.001, 0.0, 1, 1, 0), (0.0, 3.0, 0.0, 0, 1, 0))
    assert wait(queue, 0.1) == pytest.approx(0.5)
    assert wait(queue, 100.0) == pytest.approx(3.5)
    assert wait(queue, 0.0001, priority=1) == pytest.approx(3.501)
    assert wait(queue, 100.0, priority=-1) == pytest.approx(0.5)


def test_a_queue_drains_while_its_report_ages() -> None:
    queue = state((0.0, 0.01, 0.0, 0, 1, 0), (0.0, 1.0, 0.0, 0, 10, 0))
    assert wait(queue, 0.02, age_s=0.0, left_s=0.03) == pytest.approx(0.04)
    assert wait(queue, 0.02, age_s=0.025, left_s=0.03) == pytest.approx(0.015)
    assert wait(queue, 0.02, age_s=0.045, left_s=0.03) == pytest.approx(0.05, rel=0.02), "half a unit of the long call"
    assert wait(queue, 0.02, age_s=1.035, left_s=0.03) == pytest.approx(0.005), "the end of the last unit"
    assert wait(queue, 0.02, age_s=9.0, left_s=0.03) == 0.0


def test_work_that_a_router_adds_counts_as_if_it_were_reported() -> None:
    profile = list(EMPTY_PROFILE)
    add_work(profile, 0.1, key_of(0.1, PATIENCE))
    add_work(profile, 0.1, key_of(0.1, PATIENCE))
    assert wait(QueueState(tuple(profile), 0.0), 0.1) == pytest.approx(0.2)
    assert wait(QueueState(tuple(profile), 0.0), 0.09) == 0.0
    add_work(profile, -0.1, key_of(0.1, PATIENCE))
    assert wait(QueueState(tuple(profile), 0.0), 0.1) == pytest.approx(0.1)


CALLS = st.lists(
    st.tuples(
        st.floats(0.0, 20.0),
        st.floats(1e-3, 20.0),
        SECONDS,
        st.integers(-1, 1),
        st.integers(0, 5),
        st.integers(0, 2),
    ),
    max_size=6,
)


@given(st.lists(CALLS, min_size=1, max_size=4), st.floats(1e-3, 30.0), SECONDS, SECONDS, st.integers(-1, 1))
def test_many_encoders_are_predicted_as_one_is(
    queues: list[list[tuple[float, float, float, int, int, int]]],
    own_s: float,
    age_s: float,
    left_s: float,
    priority: int,
) -> None:
    states = [state(*calls) for calls in queues]
    num = len(states)
    ages_s, patiences = np.full(num, age_s), np.full(num, PATIENCE)
    keys = keys_of(np.full(num, own_s), patiences, ages_s, priority)
    units = np.array([each.unit_s for each in states])
    found = waits_s(np.array([each.profile for each in states]), np.full(num, left_s), keys, ages_s, units)
    alone = [wait(each, own_s, age_s, left_s, priority) for each in states]
    assert found.tolist() == pytest.approx(alone, abs=1e-6)


@given(CALLS, st.floats(1e-3, 30.0), SECONDS)
def test_a_profile_holds_all_work_and_a_wait_is_within_it(
    calls: list[tuple[float, float, float, int, int, int]], own_s: float, left_s: float
) -> None:
    queue = state(*calls)
    work_s = sum(remaining * units / (units + running) for _, remaining, _, _, units, running in calls if units)
    assert sum(queue.profile[:NUM_BINS]) == pytest.approx(work_s)
    assert left_s <= wait(queue, own_s, left_s=left_s) <= left_s + work_s + 1e-9
    assert wait(queue, own_s, left_s=left_s, priority=1) == pytest.approx(left_s + work_s)


@given(CALLS, st.floats(1e-3, 30.0), st.floats(1.0, 10.0))
def test_more_work_of_its_own_never_shortens_a_wait(
    calls: list[tuple[float, float, float, int, int, int]], own_s: float, factor: float
) -> None:
    queue = state(*calls)
    assert wait(queue, own_s) <= wait(queue, own_s * factor) + 1e-9


@given(st.floats(0.0, 10.0), st.floats(1e-3, 20.0), st.integers(1, 8), st.floats(1e-3, 20.0), st.floats(0.1, 8.0))
def test_a_call_alone_is_ahead_by_as_many_units_as_it_is_served_before_new_work(
    waited_s: float, remaining_s: float, num_units: int, own_s: float, patience: float
) -> None:
    """The model serves the units of one call, with the real `CallTurn`, until new work has the lower rank."""
    turn, new = CallTurn(1, (0.0, "a"), NOW_S - waited_s), CallTurn(2, (1.0, "b"), NOW_S)
    own, unit_s, now_s, num_ahead = new.rank(own_s, patience, 0), remaining_s / num_units, NOW_S, 0
    for number in range(num_units):
        rank = turn.rank(remaining_s - number * unit_s, patience, 0)
        if abs(rank.virtual_s - own.virtual_s) < 1e-6:
            return  # which goes first is a matter of rounding
        if rank > own:
            break
        num_ahead += 1
        now_s += unit_s
        turn.served(unit_s, unit_s, now_s, patience)
    columns = QueuedCalls(*np.array([[NOW_S - waited_s, remaining_s, 0.0, 0, num_units, 0, remaining_s]]).T)
    queue = queue_profile(columns, NOW_S, patience)
    found = wait_s(queue.profile, 0.0, key_of(own_s, patience), 0.0, queue.unit_s)
    # Units of one bin count together, by their mean key, so only units in the bin of the new work may be off.
    in_own_bin_s = queue.profile[bin_of(key_of(own_s, patience))]
    assert abs(found - num_ahead * unit_s) <= in_own_bin_s + 1e-6


def test_a_new_item_waits_for_a_decode_process() -> None:
    waits = decode_waits_s(
        np.array([0.0, 0.5, 0.5]), np.array([0.0, 1.0, 1.0]), np.array([2, 2, 1]), np.array([0.0, 0.0, 1.0])
    )
    assert waits.tolist() == [0.0, 1.0, 0.5]
