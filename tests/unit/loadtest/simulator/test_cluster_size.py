"""Checks the search for the smallest cluster: what it counts as met, where it begins and ends, and what it answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_requests import TABLE, run, small_cluster, small_workload

from deploy.cli import main
from fabric.contracts import ConfigError
from loadtest.simulator.cluster_size import (
    CASES,
    HARDWARE,
    SIZE_HEADINGS,
    SizeGoal,
    SizeSearch,
    SizingCase,
    SizingHardware,
    figures_of,
    size_cases,
    size_row,
)
from loadtest.simulator.workloads import WorkloadSpec

PICTURES = WorkloadSpec(60, 8.0, {"text": 0.5, "image": 0.5}, mean_prompt=50, mean_output=4)
SLOW_ENCODERS = small_cluster(encoder_slowness=(100.0,))
"""A picture takes half a second on one of these."""


def test_texts_and_media_have_to_be_in_time_each_by_themselves() -> None:
    """Nearly all requests are texts and come in time, but no picture does."""
    settings = small_cluster(encoder_slowness=(1000.0,))
    result = run(settings, small_workload(60, 2.0, kind_to_share={"text": 0.9, "image": 0.1}))
    goal = SizeGoal(ttft_s=1.0, tpot_s=1.0)
    found = figures_of(result, settings, goal)
    assert (found.share_met, found.is_met) == (0.0, False)
    assert found.text_ttft_ms < 1000.0 < found.media_ttft_ms
    assert figures_of(result, settings, replace(goal, ttft_s=1e9)).is_met
    assert not figures_of(result, settings, replace(goal, ttft_s=1e9, tpot_s=1e-9)).is_met


def test_a_group_without_requests_is_in_time() -> None:
    settings = small_cluster()
    found = figures_of(run(settings, small_workload(20, 2.0, kind_to_share={"text": 1.0})), settings, SizeGoal())
    assert (found.share_met, found.media_ttft_ms) == (1.0, 0.0)
    assert size_row(found)[SIZE_HEADINGS.index("media TTFT (ms)")] == "-"


def test_the_fewest_encoders_meet_the_goal_and_one_less_does_not() -> None:
    goal = SizeGoal(ttft_s=1.5)
    search = SizeSearch(SLOW_ENCODERS, PICTURES, goal)
    found = search.with_fewest_encoders(4)
    assert found.is_met
    assert found.num_encoders > 1
    (one_less,) = search.at((4, found.num_encoders - 1))
    assert not one_less.is_met
    assert one_less.share_met < goal.share <= found.share_met
    assert search.with_fewest_encoders(4) == found, "a size is simulated once"


def test_the_work_says_where_the_search_begins() -> None:
    search = SizeSearch(SLOW_ENCODERS, PICTURES, SizeGoal())
    encode_s = TABLE.modality_to_encoding["image"].forward_s(TABLE.kind("image").cost)
    assert search.least_encoders == pytest.approx(8.0 * 0.5 * 100.0 * encode_s, abs=1)
    faster = SizeSearch(small_cluster(), PICTURES, SizeGoal())
    assert faster.least_encoders < search.least_encoders
    assert SizeSearch(small_cluster(), replace(PICTURES, kind_to_share={"text": 1.0}), SizeGoal()).least_encoders == 0


def test_texts_alone_need_no_encoder() -> None:
    texts = replace(PICTURES, kind_to_share={"text": 1.0}, rate=30.0)
    found = SizeSearch(small_cluster(), texts, SizeGoal()).smallest()
    assert (found.num_encoders, found.is_met) == (0, True)


def test_a_goal_out_of_reach_is_refused() -> None:
    search = SizeSearch(SLOW_ENCODERS, PICTURES, SizeGoal(ttft_s=0.001))
    with pytest.raises(ConfigError, match=r"no cluster with \d+ to \d+ workers serves 95% .* 0\.001 s"):
        search.smallest()


def test_slower_encoders_take_more_of_them_for_the_same_workers() -> None:
    settings, cases = small_cluster(num_workers=1), [SizingCase("pictures", {"image": 1.0})]
    hardware = [SizingHardware("fast", 1.0, 1.0), SizingHardware("slow", 1.0, 120.0)]
    fast, slow = size_cases(settings, PICTURES, SizeGoal(), cases=cases, hardware=hardware)
    assert fast.rate == slow.rate
    assert fast.smallest is not None
    assert slow.smallest is not None
    assert slow.smallest.num_encoders <= slow.least_encoders, "batches save work"
    assert fast.smallest.num_encoders < slow.smallest.num_encoders
    assert slow.one_less is not None
    assert not slow.one_less.is_met
    (out_of_reach,) = size_cases(settings, PICTURES, SizeGoal(ttft_s=1e-6), cases=cases, hardware=hardware[:1])
    assert out_of_reach.smallest is None
    known = {kind for case in CASES for kind in case.kind_to_share} - {"text"}
    assert known <= set(TABLE.media)
    assert len({one.name for one in HARDWARE}) == len(HARDWARE)


def test_the_command_prints_the_smallest_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["simulate", "size", "--rate", "8", "--requests", "60", "--processes", "1"]
    size += ["--mix", "text=0.5,image=0.5", "--slow-encoders", "100", "--prompt", "50", "--output", "4"]
    assert main([*size, "--slo-ttft", "1.5"]) == 0
    printed = capsys.readouterr().out
    assert "serve 8 requests/s" in printed
    assert "the work alone would fill" in printed
    assert main([*size, "--slo-ttft", "0.001"]) == 1
    assert "no cluster with" in capsys.readouterr().err
