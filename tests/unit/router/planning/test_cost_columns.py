"""Tests the arrays of costs against the scalar functions, which define what is believed."""

from math import isnan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.planning.cost_columns import CostColumns
from router.planning.member_costs import ZERO, AgeingCost, CostEstimator, ExponentialAverage, believed, common_line
from router.planning.plan_types import Line

coefficients = st.floats(1e-6, 10.0)
times = st.floats(0.0, 200.0)
lines = st.one_of(st.just(ZERO), st.builds(Line, coefficients, coefficients))


@st.composite
def estimators(draw: st.DrawFn) -> AgeingCost:
    cost = AgeingCost(draw(lines), draw(st.sampled_from([0.0, 0.3])))
    for at_s in sorted(draw(st.lists(times, max_size=3))):
        if draw(st.booleans()):
            cost.anchor(draw(lines), at_s)
        else:
            cost.observe(draw(st.floats(0.0, 1000.0)), draw(coefficients), at_s)
    return cost


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(estimators(), st.sampled_from("ab")), max_size=6), st.floats(200.0, 400.0))
def test_what_the_arrays_believe_of_each_member_is_what_the_scalars_believe(
    members: list[tuple[AgeingCost, str]], now: float
) -> None:
    columns = CostColumns(1)
    for cost, group in members:
        columns.put(columns.add_row(group), 0, cost)
    found = columns.believed(now)
    assert found.shape == (1, 2, len(members))
    group_to_common = columns.common(now)
    for row, (cost, group) in enumerate(members):
        common = common_line(other.estimate(now) for other, its_group in members if its_group == group)
        expected = believed(cost.estimate(now), common)
        assert found[0, :, row] == pytest.approx(expected, rel=1e-9)
        if common is None:
            assert np.isnan(group_to_common[group][0]).all()
        else:
            assert group_to_common[group][0][0] == pytest.approx(common, rel=1e-9)


def measured(per_unit_s: float, kind: type[AgeingCost] | type[ExponentialAverage] = AgeingCost) -> CostEstimator:
    cost = kind(ZERO)
    cost.anchor(Line(0.01, per_unit_s), 0.0)
    return cost


def test_rows_are_used_again_and_keep_nothing_of_the_member_before() -> None:
    columns = CostColumns(2)
    rows = [columns.add_row("") for _ in range(40)]
    for row in rows:
        columns.put(row, 1, measured(1e-3 * (1 + row)))
    columns.remove_row(7)
    assert np.isnan(columns.believed(0.0)[0]).all()
    assert columns.add_row("other") == 7
    assert np.isnan(columns.believed(0.0)[1, :, 7]).all(), "members of another group teach it nothing"
    assert columns.num_rows == 40
    assert columns.believed(0.0)[1, 1, 30] > columns.believed(0.0)[1, 1, 3]


def test_a_stage_that_a_member_has_not_shown_costs_what_it_costs_at_others() -> None:
    columns = CostColumns(1)
    known, unknown = columns.add_row(""), columns.add_row("")
    columns.put(known, 0, measured(1e-3))
    assert columns.believed(0.0)[0, :, unknown] == pytest.approx((0.01, 1e-3))
    columns.add_columns(2)
    assert columns.believed(0.0).shape == (3, 2, 2)
    assert all(isnan(value) for value in columns.believed(0.0)[2, :, known])


def test_averages_are_believed_as_they_are_and_newcomers_cost_the_mean() -> None:
    columns = CostColumns(1, is_ageing=False)
    for per_unit_s in (1e-3, 3e-3):
        columns.put(columns.add_row(""), 0, measured(per_unit_s, ExponentialAverage))
    columns.put(columns.add_row(""), 0, ExponentialAverage(Line(1.0, 1.0)))
    for now in (0.0, 1e6):
        assert columns.believed(now)[0, 1] == pytest.approx([1e-3, 3e-3, 2e-3])
