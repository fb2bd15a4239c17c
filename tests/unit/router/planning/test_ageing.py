"""Tests estimates that age: they lie between a member's own and its kind's, by trust, and an estimate that is confirmed
is believed longer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.planning.member_costs import HALF_LIFE_S, MAX_HALF_LIFE_S, Age, AgeingCost, Estimate, believed, common_line
from router.planning.plan_types import Line

FAST, SLOW = Line(0.01, 1e-3), Line(0.03, 3e-3)
costs = st.floats(1e-7, 10.0)
lines = st.builds(Line, costs, costs)
trusts = st.floats(0.0, 1.0)
estimates = st.lists(st.builds(Estimate, lines, trusts), min_size=1, max_size=6)


def measured(line: Line, now: float = 0.0) -> AgeingCost:
    cost = AgeingCost(Line(1.0, 1.0))
    cost.anchor(line, now)
    return cost


@settings(deadline=None, max_examples=50)
@given(lines, lines, trusts, trusts)
def test_what_is_believed_lies_between_own_and_common_and_nearer_the_less_it_is_trusted(
    own: Line, common: Line, one: float, other: float
) -> None:
    less, more = sorted((one, other))
    for index in range(2):
        doubted = believed(Estimate(own, less), common)[index]
        trusted = believed(Estimate(own, more), common)[index]
        low, high = sorted((common[index], own[index]))
        assert low * (1 - 1e-9) <= doubted <= high * (1 + 1e-9)
        assert abs(doubted - common[index]) <= abs(trusted - common[index]) * (1 + 1e-9)


@settings(deadline=None, max_examples=50)
@given(estimates)
def test_the_common_line_lies_among_those_that_are_known_at_all(several: list[Estimate]) -> None:
    common = common_line(several)
    known = [line for line, trust in several if trust > 0.0]
    if not known:
        assert common is None
        return
    for index in range(2):
        assert common[index] in {line[index] for line in known}


def test_one_slow_member_makes_not_its_kind_slow() -> None:
    fresh = [Estimate(FAST, 1.0), Estimate(SLOW, 1.0), Estimate(FAST, 0.7)]
    assert common_line(fresh) == FAST
    assert common_line([Estimate(SLOW, 1.0), Estimate(FAST, 0.2)]) == SLOW


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.booleans()), max_size=20), st.floats(0.0, 1e6), st.floats(0.0, 1e6))
def test_trust_falls_with_time_and_is_whole_at_each_evidence(
    evidence: list[tuple[float, bool]], one: float, other: float
) -> None:
    age, now = Age(), 0.0
    assert age.trust(now) == 0.0
    for pause_s, is_confirmed in evidence:
        now += pause_s
        age.renew(now, is_confirmed)
        assert age.trust(now) == 1.0
        sooner, later = sorted((one, other))
        assert 0.0 < age.trust(now + later) <= age.trust(now + sooner) <= 1.0
        assert age.trust(now + MAX_HALF_LIFE_S) < 0.51
        assert age.trust(now + HALF_LIFE_S) > 0.49


def test_an_old_estimate_moves_to_the_fresh_one_and_a_confirmed_one_is_back_at_once() -> None:
    old, fresh = measured(SLOW), measured(FAST)
    at = [0.0]
    for number in range(1, 12):
        now = number * HALF_LIFE_S
        fresh.anchor(Line(FAST.base_s, FAST.per_unit_s + 1e-9 * number), now)
        common = common_line([old.estimate(now), fresh.estimate(now)])
        at.append(believed(old.estimate(now), common).at(100) / believed(fresh.estimate(now), common).at(100))
    assert at[1:] == sorted(at[1:], reverse=True)
    assert at[1] < 2.2
    assert at[3:] == pytest.approx([1.0] * 9)
    old.anchor(Line(SLOW.base_s, SLOW.per_unit_s + 1e-9), now)
    common = common_line([old.estimate(now), fresh.estimate(now)])
    ratio = believed(old.estimate(now), common).at(100) / believed(fresh.estimate(now), common).at(100)
    assert ratio == pytest.approx(3.0, rel=0.01)


def test_equals_within_the_noise_are_equal() -> None:
    one, other = measured(FAST), measured(Line(FAST.base_s * 1.2, FAST.per_unit_s * 1.2))
    common = common_line([one.estimate(0.0), other.estimate(0.0)])
    assert believed(one.estimate(0.0), common) == believed(other.estimate(0.0), common)


@settings(deadline=None, max_examples=50)
@given(lines, lines, trusts)
def test_what_is_believed_moves_no_faster_than_twice_what_is_known(own: Line, common: Line, trust: float) -> None:
    """There is no jump at the border of the noise: estimates that differ by a little are believed to differ by
    little."""
    near = own._replace(per_unit_s=own.per_unit_s * 1.01)
    one, other = (believed(Estimate(line, trust), common).per_unit_s for line in (own, near))
    assert one * (1 - 1e-9) <= other <= one * 1.01**2 * (1 + 1e-9)


def test_what_is_found_true_after_each_silence_is_believed_longer_until_it_is_not() -> None:
    cost, now, halves = measured(SLOW), 0.0, []
    for number in range(1, 8):
        half_s = next(s for s in range(1, 10_000) if cost.estimate(now + s).trust < 0.5)
        halves.append(half_s)
        now += 2 * half_s
        cost.anchor(Line(SLOW.base_s, SLOW.per_unit_s * (1 + 0.01 * number)), now)
    assert halves[:3] == pytest.approx([HALF_LIFE_S, 2 * HALF_LIFE_S, 4 * HALF_LIFE_S], abs=1.1)
    assert halves[-1] == pytest.approx(MAX_HALF_LIFE_S, abs=1.1)
    cost.anchor(FAST, now + 1.0)
    assert cost.estimate(now + 1.0 + HALF_LIFE_S).trust == pytest.approx(0.5)


def test_the_same_report_again_is_no_news() -> None:
    cost = measured(SLOW)
    cost.anchor(SLOW, 5.0)
    assert cost.estimate(HALF_LIFE_S).trust == pytest.approx(0.5)


def test_a_result_after_a_silence_counts_for_much_and_one_of_many_for_little() -> None:
    fresh, old = measured(SLOW), measured(SLOW)
    fresh.observe(100, FAST.at(100), 0.0)
    old.observe(100, FAST.at(100), 20 * HALF_LIFE_S)
    assert fresh.line.at(100) > 0.7 * SLOW.at(100)
    assert old.line.at(100) == pytest.approx(FAST.at(100), rel=0.25)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_results_that_say_nothing_are_no_evidence(seconds: float) -> None:
    cost = measured(SLOW)
    cost.observe(100, seconds, HALF_LIFE_S)
    assert cost.line == SLOW
    assert cost.estimate(HALF_LIFE_S).trust == pytest.approx(0.5)
