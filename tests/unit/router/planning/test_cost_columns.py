"""Tests the arrays of costs: what is believed of a member that was seen, and of one that was not."""

from math import isnan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.planning.cost_columns import CostColumns
from router.planning.member_costs import ZERO, LearnedLine
from router.planning.plan_types import Line

coefficients = st.floats(1e-6, 10.0)
lines = st.one_of(st.just(ZERO), st.builds(Line, coefficients, coefficients))
members = st.tuples(lines, st.sampled_from([0.0, 0.3]), st.booleans(), st.sampled_from("ab"))


@settings(deadline=None, max_examples=100)
@given(st.lists(members, max_size=6))
def test_a_member_costs_what_it_has_shown_and_otherwise_the_mean_of_its_group(
    drawn: list[tuple[Line, float, bool, str]],
) -> None:
    columns = CostColumns(1)
    group_to_known: dict[str, list[tuple[Line, float]]] = {}
    for start, weight, is_seen, group in drawn:
        cost = LearnedLine(start, weight)
        if is_seen:
            cost.observe(10.0, 1.0, 5.0)
        columns.put(columns.add_row(group), 0, cost)
        assert cost.weight == (1.0 if is_seen else weight)
        group_to_known.setdefault(group, []).append((cost.line, cost.weight))
    found, group_to_common = columns.believed(), columns.common()
    assert found.shape == (1, 2, len(drawn))
    group_to_next = {group: iter(known) for group, known in group_to_known.items()}
    for row, (_, _, _, group) in enumerate(drawn):
        (line, its_weight), known = next(group_to_next[group]), group_to_known[group]
        total = sum(weight for _, weight in known)
        mean = [sum(line[index] * each for line, each in known) / total if total else np.nan for index in range(2)]
        assert found[0, :, row] == pytest.approx(line if its_weight or not total else mean, rel=1e-9)
        assert group_to_common[group][0][0] == pytest.approx(mean, rel=1e-9, nan_ok=True)
        assert group_to_common[group][1][0] == (5.0 if any(one[2] and one[3] == group for one in drawn) else -np.inf)


def measured(per_unit_s: float) -> LearnedLine:
    cost = LearnedLine(ZERO)
    cost.anchor(Line(0.01, per_unit_s), 0.0)
    return cost


def test_rows_are_used_again_and_keep_nothing_of_the_member_before() -> None:
    columns = CostColumns(2)
    rows = [columns.add_row("") for _ in range(40)]
    for row in rows:
        columns.put(row, 1, measured(1e-3 * (1 + row)))
    columns.remove_row(7)
    assert np.isnan(columns.believed()[0]).all()
    assert columns.add_row("other") == 7
    assert np.isnan(columns.believed()[1, :, 7]).all(), "members of another group teach it nothing"
    assert columns.num_rows == 40
    assert columns.believed()[1, 1, 30] > columns.believed()[1, 1, 3]


def test_a_stage_that_a_member_has_not_shown_costs_what_it_costs_at_others() -> None:
    columns = CostColumns(1)
    known, unknown = columns.add_row(""), columns.add_row("")
    columns.put(known, 0, measured(1e-3))
    assert columns.believed()[0, :, unknown] == pytest.approx((0.01, 1e-3))
    columns.add_columns(2)
    assert columns.believed().shape == (3, 2, 2)
    assert all(isnan(value) for value in columns.believed()[2, :, known])


def test_newcomers_cost_the_mean() -> None:
    columns = CostColumns(1)
    for per_unit_s in (1e-3, 3e-3):
        columns.put(columns.add_row(""), 0, measured(per_unit_s))
    columns.put(columns.add_row(""), 0, LearnedLine(Line(1.0, 1.0)))
    assert columns.believed()[0, 1] == pytest.approx([1e-3, 3e-3, 2e-3])
