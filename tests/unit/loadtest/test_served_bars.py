"""Tests the arithmetic of the bars of `weft bench prediction`, `isolation` and `overlap`."""

from __future__ import annotations

import pytest

from loadtest.benches.served.isolation_bench import TextLoad, percentile_ms
from loadtest.benches.served.overlap_bench import EVEN_STAGES, VIDEO, OverlapCase, OverlapFinding
from loadtest.benches.served.prediction_bench import (
    PredictionErrors,
    PredictionRound,
    StageSums,
    mixed_kinds,
    stage_sums,
    worst_stages,
)
from loadtest.benches.served.timed_chats import ChatKind, TimedChat
from loadtest.benches.served.timed_cluster import AloneCosts, MediaCosts, TimedStages


class TestPredictionErrors:
    def test_errors_are_shares_of_the_actual_time(self) -> None:
        errors = PredictionErrors.of_pairs([(1.1, 1.0), (0.8, 1.0), (2.0, 2.0)])
        assert errors.num == 3
        assert errors.actual_s == 1.0
        assert errors.bias == 0.0
        assert errors.median == pytest.approx(0.1)
        assert errors.p90 == pytest.approx(0.18)

    def test_a_bias_has_a_sign(self) -> None:
        assert PredictionErrors.of_pairs([(0.5, 1.0), (1.5, 2.0)]).bias == pytest.approx(-0.375)

    def test_the_stage_with_the_most_seconds_of_error_is_named_first(self) -> None:
        stages = {
            "queue": StageSums(2, 1.0, 2.0, 1.0),
            "held": StageSums(1, 0.0, 3.0, 3.0),
            "ttft": StageSums(1, 0, 9, 9),
        }
        named = worst_stages([PredictionRound(1, [None], stages)])
        assert named == "held (3000 ms per request), queue (1000 ms per request)"

    def test_sums_come_from_the_routers_metrics(self) -> None:
        names = ("observations", "predicted", "actual", "abs_error")
        metrics = {f"weft_planner_{name}_total {stage}": 1.0 for name in names for stage in ("queue", "cached_items")}
        assert stage_sums(metrics) == {"queue": StageSums(1.0, 1.0, 1.0, 1.0)}
        assert StageSums(3.0, 2.0, 2.0, 1.0).minus(StageSums(1.0, 1.0, 1.0, 1.0)) == StageSums(2.0, 1.0, 1.0, 0.0)


class TestTheRequests:
    def test_the_mix_is_two_fifths_text_and_two_fifths_pictures(self) -> None:
        names = [kind.name for kind in mixed_kinds(20, seed=3)]
        assert [names.count(name) for name in ("text", "picture", "video")] == [8, 8, 4]

    def test_both_halves_have_the_same_texts_and_a_fifth_as_many_media(self) -> None:
        load = TextLoad(num=50, per_s=2.0, num_rounds=1)
        assert load.kinds(4) == load.kinds(4)
        kinds, moments_s = load.media(4)
        assert len(kinds) == len(moments_s) == 10
        assert {kind.name for kind in kinds} == {"picture", "video"}
        assert all(kind.has_media for kind in kinds)

    def test_a_percentile_is_in_milliseconds(self) -> None:
        assert percentile_ms([1.0, 2.0, 3.0], 50.0) == 2000.0


class TestFrozenCosts:
    def test_stage_times_become_settings(self) -> None:
        sections = TimedStages(1.0, 2.0, 3.0, 4.0, 5.0).sections()
        assert sections["encoders"] == {"encode_delay_s": 1.0, "encode_delay_s_per_cost": 2.0}
        assert sections["workers"]["step_delay_s_per_decode"] == 5.0

    def test_tokens_after_a_context_take_longer(self) -> None:
        costs = AloneCosts(0.0, 0.001, 1000.0, {})
        assert costs.prefill_s(100) == pytest.approx(0.105)
        assert costs.prefill_s(100, 500) == pytest.approx(0.155)
        assert costs.num_tokens_of(0.105) in (99, 100)


class TestWhatOverlapCanSave:
    """A video of two units, each of which takes 1 s to encode and 0.5 s to prefill, is encoded from 0.25 s on."""

    KIND = ChatKind(VIDEO, num_frames=4)

    def finding(self, on_s: float, off_s: float) -> OverlapFinding:
        finding = OverlapFinding(OverlapCase(EVEN_STAGES, (self.KIND,), False))
        finding.costs = AloneCosts(0.0, 0.005, float("inf"), {VIDEO: MediaCosts(0.25, 1.0, 0.0, 2)})
        finding.with_overlap, finding.without_overlap = [self.chat(on_s)], [self.chat(off_s)]
        return finding

    def chat(self, ttft_s: float) -> TimedChat:
        events = [{"name": "first_token", "at_s": 7.0 + ttft_s, "member_id": "w"}]
        trace = {"num_prompt_tokens": 210, "media": [{"num_tokens": 200}], "events": events}
        return TimedChat(self.KIND, 7.0, {}, trace)

    def test_it_is_all_that_the_time_without_it_is_longer_than_the_bound(self) -> None:
        finding = self.finding(on_s=3.0, off_s=5.5)
        assert finding.bound_s(VIDEO) == pytest.approx(2.75)
        assert finding.possible(VIDEO) == pytest.approx(0.5)
        assert finding.saved(VIDEO) == pytest.approx(2.5 / 5.5)
        assert finding.efficiencies() == [pytest.approx(2.75 / 3.0)]

    def test_a_request_at_its_bound_saves_exactly_that_whatever_the_time_without_overlap_contains(self) -> None:
        for off_s in (3.3, 4.0, 9.0):
            finding = self.finding(on_s=2.75, off_s=off_s)
            assert finding.saved(VIDEO) == pytest.approx(finding.possible(VIDEO))

    def test_a_bound_that_a_request_beats_is_shown(self) -> None:
        assert self.finding(on_s=2.5, off_s=4.0).efficiencies() == [pytest.approx(1.1)]

    def test_the_formula_for_equal_units_stands_next_to_it(self) -> None:
        assert self.finding(on_s=3.0, off_s=4.0).possible_by_formula(VIDEO) == pytest.approx(0.5 * 1.0 / 3.05, abs=1e-3)
