"""Tests by which observations a sudden change of a machine is told from pauses."""

from __future__ import annotations

import pytest

from fabric.contracts import CHANGE_RUN, CONFIRMED, SurpriseRun


def changes(times: list[float]) -> list[float | None]:
    run = SurpriseRun()
    return [run.change(1.0, actual_s) for actual_s in times]


@pytest.mark.parametrize("factor", [2.0, 0.5, 1.01 * CONFIRMED, 0.99 / CONFIRMED])
def test_a_run_of_surprises_is_a_change(factor: float) -> None:
    assert changes([1.0, *[factor] * CHANGE_RUN]) == [None] * CHANGE_RUN + [factor]


def test_a_change_is_as_large_as_the_least_surprise() -> None:
    assert changes([2.0, 50.0, 2.2, 1.9])[-1] == 1.9
    assert changes([0.5, 0.01, 0.4, 0.6])[-1] == 0.6


@pytest.mark.parametrize("between", [1.0, 1.4, 0.7, 0.5])
def test_a_run_ends_where_a_time_was_as_predicted_or_missed_in_the_other_direction(between: float) -> None:
    times = [2.0] * (CHANGE_RUN - 1)
    assert set(changes([*times, between, *times])) == {None}


def test_what_was_small_is_no_surprise_however_often_it_comes() -> None:
    assert set(changes([1.45, 0.7] * 20 + [1.45] * 20)) == {None}


def test_the_next_run_begins_after_a_change() -> None:
    found = changes([2.0] * (2 * CHANGE_RUN))
    assert [at for at, change in enumerate(found) if change] == [CHANGE_RUN - 1, 2 * CHANGE_RUN - 1]
