"""Tests learned lines: they find the truth from far away, and one pause hardly moves them."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planning_samples import encoder_report

from fabric.contracts import EncodeCost
from router.planning.member_costs import GENERAL, ZERO, CostDefaults, EncoderCost, LearnedLine
from router.planning.plan_types import EncoderCosts, Line

TRUTH = Line(0.02, 3e-4)


def taught(start: Line, num_observations: int = 300, noise: float = 0.0) -> LearnedLine:
    cost, rng = LearnedLine(start), random.Random(7)
    for number in range(num_observations):
        x = rng.choice([1, 10, 100, 1000, 5000])
        cost.observe(x, TRUTH.at(x) * (1 + noise * (2 * rng.random() - 1)), float(number))
    return cost


@pytest.mark.parametrize("start", [Line(0.02, 3e-4), Line(2e-3, 3e-6), Line(1.0, 1e-2), Line(1e-3, 3e-3)])
def test_finds_base_and_slope_from_a_wrong_start(start: Line) -> None:
    line = taught(start).line
    assert line.base_s == pytest.approx(TRUTH.base_s, rel=0.1)
    assert line.per_unit_s == pytest.approx(TRUTH.per_unit_s, rel=0.1)


def test_noise_of_a_third_leaves_an_error_of_less_than_that() -> None:
    line = taught(TRUTH, noise=0.33).line
    for x in (1, 100, 5000):
        assert line.at(x) == pytest.approx(TRUTH.at(x), rel=0.33)


def test_one_size_only_still_predicts_that_size() -> None:
    cost = LearnedLine(Line(0.001, 1e-6))
    for number in range(60):
        cost.observe(500, 0.4, float(number))
    assert cost.line.at(500) == pytest.approx(0.4, rel=0.05)


def test_an_outlier_moves_the_line_no_more_than_a_small_surprise() -> None:
    paused, surprised = taught(TRUTH), taught(TRUTH)
    before_s = paused.line.at(100)
    paused.observe(100, 60.0, 1000.0)
    surprised.observe(100, 4 * TRUTH.at(100), 1000.0)
    assert paused.line == surprised.line
    assert paused.line.at(100) < 1.15 * before_s


@pytest.mark.parametrize("actual_s", [0.0, -1.0, float("nan"), float("inf")])
def test_values_that_say_nothing_change_nothing(actual_s: float) -> None:
    cost = LearnedLine(TRUTH)
    cost.observe(100, actual_s, 0.0)
    assert (cost.line, cost.seen_at_s, cost.weight) == (TRUTH, None, 0.0)


def test_a_measurement_of_the_member_replaces_what_was_learned() -> None:
    cost = taught(Line(1.0, 1.0))
    for line in (TRUTH, Line(0.0, 1e-3)):
        cost.anchor(line, 1000.0)
        assert cost.line == line


def test_an_unknown_measurement_is_ignored() -> None:
    cost = LearnedLine(TRUTH)
    cost.anchor(Line(0.0, 0.0), 0.0)
    assert (cost.line, cost.is_measured, cost.seen_at_s) == (TRUTH, False, None)


def test_the_same_report_again_is_no_news() -> None:
    cost = LearnedLine(ZERO)
    cost.anchor(TRUTH, 1.0)
    cost.anchor(TRUTH, 5.0)
    assert cost.seen_at_s == 1.0


def test_a_stage_that_was_never_seen_begins_with_its_first_observation() -> None:
    cost = LearnedLine(ZERO)
    cost.observe(100, 0.0, 0.0)
    assert cost.line == ZERO
    cost.observe(100, 0.2, 0.0)
    assert cost.line == Line(0.1, 1e-3)
    assert taught(ZERO).line.at(1000) == pytest.approx(TRUTH.at(1000), rel=0.1)
    at_nothing = LearnedLine(ZERO)
    at_nothing.observe(0, 0.3, 0.0)
    assert at_nothing.line == Line(0.3, 0.0)


def test_a_stage_of_one_modality_costs_others_nothing() -> None:
    cost = EncoderCost(CostDefaults().encoder)
    cost.observe_device_prepare("audio", 100, 0.2, 0.0)
    assert cost.of("audio").device_prepare.at(100) == pytest.approx(0.2)
    assert cost.of("image").device_prepare == cost.of(GENERAL).device_prepare == ZERO


def test_every_stage_that_an_encoder_reports_is_taken_and_the_others_stay() -> None:
    cost = EncoderCost(CostDefaults().encoder)
    reported = EncodeCost("audio", 1e-3, 0.2, decode_s_per_cost=1e-5, decode_overhead_s=0.01)
    cost.anchor(encoder_report("e0", 1, costs=(reported,)), 0.0)
    assert cost.of("audio") == EncoderCosts(Line(0.01, 1e-5), ZERO, Line(0.2, 1e-3))
    reported = EncodeCost("audio", 1e-3, 0.2, device_prepare_s_per_cost=1e-4, device_prepare_overhead_s=0.05)
    cost.anchor(encoder_report("e0", 2, costs=(reported,)), 1.0)
    assert cost.of("audio") == EncoderCosts(Line(0.01, 1e-5), Line(0.05, 1e-4), Line(0.2, 1e-3))


# ------------------------------------------------------------ changes and outliers


def settled(seed: int = 3) -> tuple[LearnedLine, random.Random, float]:
    """Returns a line that has learned the truth, a source of chance, and the time."""
    cost, rng, now = LearnedLine(Line(2e-3, 3e-6)), random.Random(seed), 0.0
    for _ in range(300):
        now += 0.1
        observe(cost, rng, now)
    return cost, rng, now


def observe(cost: LearnedLine, rng: random.Random, now: float, factor: float = 1.0, pause_s: float = 0.0) -> None:
    x = rng.choice([1, 10, 100, 1000, 5000])
    cost.observe(x, factor * TRUTH.at(x) * rng.uniform(0.9, 1.1) + pause_s, now)


def error(cost: LearnedLine, factor: float = 1.0) -> float:
    return max(abs(cost.line.at(x) / (factor * TRUTH.at(x)) - 1.0) for x in (10, 1000, 5000))


def test_a_line_finds_the_truth_and_follows_a_sudden_change() -> None:
    cost, rng, now = settled()
    assert error(cost) < 0.15
    errors = []
    for number in range(200):
        observe(cost, rng, now + 0.1 * number, factor=2.0)
        errors.append(error(cost, factor=2.0))
    assert min(errors[:20]) < 0.1, "200 requests to sixteen workers are a dozen each"
    assert sorted(errors[20:])[len(errors[20:]) // 2] < 0.1


def test_pauses_of_seconds_hardly_move_a_line() -> None:
    cost, rng, now = settled()
    worst = 0.0
    for number in range(200):
        observe(cost, rng, now + 0.1 * number, pause_s=rng.uniform(1.0, 5.0) if number % 10 == 0 else 0.0)
        worst = max(worst, error(cost))
    assert worst < 0.25


def test_a_line_says_when_it_has_changed_and_what_its_evidence_is() -> None:
    heard: list[LearnedLine] = []
    cost = LearnedLine(TRUTH, 0.25, heard.append)
    assert (cost.seen_at_s, cost.weight, cost.is_measured) == (None, 0.25, False)
    cost.observe(100, 0.0, 1.0)
    cost.anchor(Line(0.0, 0.0), 1.0)
    assert (cost.line, heard) == (TRUTH, [])
    cost.observe(100, 0.1, 2.0)
    assert (cost.seen_at_s, cost.weight, cost.is_measured) == (2.0, 1.0, False)
    cost.anchor(Line(0.01, 1e-3), 3.0)
    assert (cost.line, cost.seen_at_s, cost.is_measured) == (Line(0.01, 1e-3), 3.0, True)
    assert heard == [cost, cost]


@settings(deadline=None, max_examples=50)
@given(
    start=st.builds(Line, st.floats(0.0, 10.0), st.floats(0.0, 1.0)),
    events=st.lists(st.tuples(st.floats(0.0, 1e5), st.floats(0.0, 1e3), st.floats(0.0, 50.0), st.booleans())),
)
@example(start=Line(0.0, 0.0), events=[(0.0, 2.0, 0.0, False), (0.0, 5e-324, 0.0, False)])
def test_a_learned_line_is_never_negative_or_infinite(
    start: Line, events: list[tuple[float, float, float, bool]]
) -> None:
    cost, now = LearnedLine(start), 0.0
    for x, seconds, pause_s, is_report in events:
        now += pause_s
        if is_report:
            cost.anchor(Line(seconds, x * 1e-6), now)
        else:
            cost.observe(x, seconds, now)
        assert 0.0 <= cost.line.base_s < float("inf")
        assert 0.0 <= cost.line.per_unit_s < float("inf")
