"""A small burst of pictures on a simulated cluster that scales itself. `weft simulate choice autoscaling` runs a large
one, which the bars are about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.scaling import ScalingRules
from loadtest.simulator.scaling_burst import BurstRun, BurstScenario, run_burst, text_ratio

RULES = ScalingRules(1, 6, slo_ttft_s=4.0, interval_s=4.0, downscale_delay_s=8.0, startup_s=8.0)
SMALL = BurstScenario(
    text_rate=2.0,
    image_rate=2.0,
    factor=7.0,
    burst_from_s=24.0,
    burst_until_s=60.0,
    end_s=150.0,
    startup_s=8.0,
    encoder_slowness=120.0,
    encoders=RULES,
    workers=replace(RULES, min_replicas=3),
)


@pytest.fixture(scope="module")
def burst() -> BurstRun:
    return run_burst("burst", SMALL, has_burst=True, scaled=("encoder", "worker"))


@pytest.fixture(scope="module")
def calm() -> BurstRun:
    return run_burst("calm", SMALL, has_burst=False, scaled=("encoder", "worker"))


def test_encoders_grow_within_two_intervals_and_shrink_again(burst: BurstRun) -> None:
    assert burst.intervals_until_growth("encoder") <= 2
    before = burst.size("encoder", SMALL.burst_from_s)
    assert burst.size("encoder", burst.peak_s("encoder")) > before
    assert burst.size("encoder", SMALL.end_s) <= before
    reasons = {change.told.partition("(")[2].partition(")")[0] for change in burst.changes}
    assert "less work" in reasons


def test_no_request_and_no_token_is_lost(burst: BurstRun, calm: BurstRun) -> None:
    assert (burst.num_lost, calm.num_lost) == (0, 0)
    assert len(burst.result.outcomes) > len(calm.result.outcomes)


def test_texts_hardly_notice_the_burst(burst: BurstRun, calm: BurstRun) -> None:
    assert text_ratio(burst, calm) <= 1.5  # The bar is 1.3, over a longer run.


def test_new_encoders_take_their_shares_at_once(burst: BurstRun) -> None:
    """Requests go to the encoders that have just joined as soon as these are there, and spread over them."""
    before = burst.size("encoder", SMALL.burst_from_s)
    joined_s, number = next(taken for taken in burst.kind_to_sizes["encoder"] if taken[1] > before)
    new = {f"encoder-{index}" for index in range(before, number)}
    since = [one for one in burst.result.outcomes if joined_s <= one.arrival_s < joined_s + 8]
    counts = {name: sum(name in one.encoder_ids for one in since) for name in new}
    assert sum(counts.values()) > len(since) / 3
    assert max(counts.values()) <= 3 * sum(counts.values()) / len(new)
    assert min(counts.values()) > 0


def test_a_text_burst_adds_no_encoder() -> None:
    texts = replace(SMALL, picture="text", text_rate=1.0, image_rate=2.0, factor=8.0, end_s=60.0, workers=RULES)
    run = run_burst("texts", texts, has_burst=True, scaled=("encoder", "worker"))
    assert [change for change in run.changes if change.kind == "encoder"] == []
    assert run.num_lost == 0


def test_a_run_repeats_itself() -> None:
    short = replace(SMALL, end_s=36.0, burst_until_s=34.0)
    first, second = (run_burst("again", short, has_burst=True, scaled=("encoder",)) for _ in range(2))
    assert first.changes == second.changes
    assert first.result.outcomes == second.result.outcomes


def test_streams_that_outlast_the_time_of_a_worker_move() -> None:
    """Workers have hardly any time to finish, so their streams move, and none loses a token."""
    scenario = replace(SMALL, text_rate=6.0, image_rate=0.5, end_s=90.0, workers=replace(RULES, target_utilization=0.9))
    object.__setattr__(scenario, "settings", replace(scenario.settings, drain_s=0.05, num_workers=4))
    run = run_burst("moving", scenario, has_burst=False, scaled=("worker",))
    assert run.num_moved > 0
    assert run.num_lost == 0


def test_workers_that_are_full_come_sooner_when_the_routers_say_what_waits() -> None:
    """Texts fill the KV blocks of the workers, and the routers keep the others."""
    rules = ScalingRules(2, 10, slo_ttft_s=2.0, interval_s=4.0, downscale_delay_s=20.0, startup_s=4.0)
    texts = BurstScenario(
        text_rate=1.0,
        image_rate=0.1,
        factor=1.0,
        text_factor=12.0,
        burst_from_s=8.0,
        burst_until_s=28.0,
        end_s=32.0,
        startup_s=4.0,
        num_blocks=128,
        encoders=replace(rules, max_replicas=2),
        workers=rules,
    )
    seeing, blind = (
        run_burst(str(sees), replace(texts, sees_routers=sees), has_burst=True, scaled=("worker",))
        for sees in (True, False)
    )
    assert (seeing.num_lost, blind.num_lost) == (0, 0)
    assert seeing.ttft_ms("text", 0.99) < blind.ttft_ms("text", 0.99)
    sizes = [sum(size for at_s, size in run.kind_to_sizes["worker"] if at_s <= 24.0) for run in (seeing, blind)]
    assert sizes[0] > sizes[1]
    assert any("wait at the routers" in change.told for change in seeing.changes)
