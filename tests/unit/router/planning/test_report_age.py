"""Tests how old reports are found to be when they come."""

import pytest

from router.planning.report_age import MAX_AGE_S, MAX_DRIFT, ReportAge

AHEAD_S = 500.0
"""The member's clock is ahead of the router's by this much."""


def test_a_report_without_a_time_is_of_now() -> None:
    assert ReportAge().state_at_s(0.0, 7.0, 6.0) == 7.0


def test_a_report_is_of_now_until_a_dispatch_tells_the_clocks_apart() -> None:
    age = ReportAge()
    assert age.state_at_s(AHEAD_S + 9.0, 10.0, None) == 10.0


def test_a_constant_delay_of_reports_is_found() -> None:
    age = ReportAge()
    age.state_at_s(AHEAD_S + 10.002, 11.002, 10.0)
    assert age.state_at_s(AHEAD_S + 12.0, 13.0, None) == pytest.approx(12.0, abs=0.003)
    assert age.state_at_s(AHEAD_S + 14.0, 14.5, None) == pytest.approx(14.0, abs=0.003), "a quicker one is younger"
    assert age.state_at_s(AHEAD_S + 16.0, 17.0, None, 0.25) == pytest.approx(15.75, abs=0.003), "its numbers are older"


def test_the_quickest_acknowledgement_counts() -> None:
    age = ReportAge()
    age.state_at_s(AHEAD_S + 10.001, 11.0, 10.0)
    age.state_at_s(AHEAD_S + 20.4, 21.0, 20.0)
    assert age.state_at_s(AHEAD_S + 30.0, 31.0, None) == pytest.approx(30.0, abs=0.003)


def test_a_report_describes_no_moment_before_the_dispatches_that_it_contains() -> None:
    age = ReportAge()
    age.state_at_s(AHEAD_S + 10.3, 10.3, 10.0)
    assert age.state_at_s(AHEAD_S + 12.0, 12.0, 11.9, 0.05) == 11.9


def test_a_clock_that_drifts_away_is_followed() -> None:
    age = ReportAge()
    age.state_at_s(AHEAD_S + 0.001, 0.001, 0.0)
    for number in range(1, 2001):
        at_s = 10.0 * number
        fast_s = AHEAD_S + at_s * (1.0 + 0.5 * MAX_DRIFT)
        found_s = age.state_at_s(fast_s + 0.001, at_s + 0.001, at_s)
    assert found_s == pytest.approx(at_s, abs=0.002)


def test_no_report_is_older_than_the_limit() -> None:
    age = ReportAge()
    age.state_at_s(AHEAD_S + 0.001, 0.001, 0.0)
    assert age.state_at_s(1.0, 100.0, None) == 100.0 - MAX_AGE_S, "the member's clock was set back"
