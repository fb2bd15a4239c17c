"""Checks the age of reports under any delays and any difference of the clocks."""

from hypothesis import given
from hypothesis import strategies as st

from router.planning.report_age import MAX_AGE_S, ReportAge

delays = st.floats(0.0, 3.0)
history = st.lists(st.tuples(st.floats(0.001, 5.0), delays, delays, st.booleans(), st.floats(0.0, 0.5)), min_size=1)


@given(st.floats(-1e4, 1e4).filter(lambda ahead_s: abs(ahead_s) > 1.0), history)
def test_a_report_counts_as_no_younger_than_it_is_once_it_acknowledged(
    ahead_s: float, steps: list[tuple[float, float, float, bool, float]]
) -> None:
    """Each step is a dispatch, the report that contains it, and the way of the report."""
    age, now, is_bounded = ReportAge(), 1e5, False
    for pause_s, to_report_s, way_s, acknowledges, before_s in steps:
        dispatched_s = now + pause_s
        made_s = dispatched_s + to_report_s
        now = made_s + way_s
        is_bounded |= acknowledges
        told_s = dispatched_s if acknowledges else None
        found_s = age.state_at_s(made_s + ahead_s, now, told_s, before_s)
        assert now - MAX_AGE_S - before_s <= found_s <= now
        if is_bounded:
            assert found_s <= max(made_s - before_s, dispatched_s) + 1e-6
        if acknowledges:
            assert found_s >= dispatched_s
