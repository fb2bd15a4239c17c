"""Sends requests one after the other to workers whose estimates are old: a worker that is as good as others gets its
share, and a slow one does not."""

import pytest
from planning_pace_world import PaceWorld

from router.planning.member_costs import HALF_LIFE_S

# Hypothesis does not draw these values: a simulation is long, and a smaller one would not show the same behaviour.
seeds = pytest.mark.parametrize("seed", range(2))
pauses = pytest.mark.parametrize("pause_s", [0.5, 5.0])


def slowed(world: PaceWorld, name: str, load: float, num_requests: int = 40) -> None:
    """Lets the worker serve for a while on a machine with other load; then the other workers serve on a quiet
    machine."""
    for _ in range(num_requests):
        world.serve(load=load, only=name)
    for other in world.workers:
        if other != name:
            for _ in range(num_requests):
                world.serve(only=other)


@seeds
@pauses
@pytest.mark.parametrize("load", [2.0, 6.0])
def test_a_worker_that_was_slow_once_serves_again_soon_and_no_other_starves(
    seed: int, load: float, pause_s: float
) -> None:
    world = PaceWorld(1.0, 1.0, noise=0.1, seed=seed)
    slowed(world, "w0", load)
    at_first = world.shares(5, pause_s=0.05)
    assert at_first["w1"] == 5, "what is fresh is believed"
    world.shares(int(8 * HALF_LIFE_S / pause_s), pause_s)
    later = world.shares(60, pause_s)
    assert min(later["w0"], later["w1"]) >= 10


@seeds
@pauses
@pytest.mark.parametrize("slowness", [2.0, 5.0])
def test_a_worker_that_is_slow_gets_few_and_fewer(seed: int, slowness: float, pause_s: float) -> None:
    world = PaceWorld(slowness, 1.0, 1.0, noise=0.1, seed=seed)
    served = world.shares(int(20 * HALF_LIFE_S / pause_s), pause_s)
    again = world.shares(int(20 * HALF_LIFE_S / pause_s), pause_s)
    # The slow worker is asked after about 3, 6, 12, 24 half-lives; the cost of that is a request now and then.
    assert 1 <= served["w0"] <= 5
    assert again["w0"] <= 3
    assert min(served["w1"], served["w2"]) > 0.1 * served.total()


@seeds
@pytest.mark.parametrize("pause_s", [0.05, 30.0])
@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_equals_share_whatever_the_noise_and_the_pace(seed: int, pause_s: float, noise: float) -> None:
    world = PaceWorld(1.0, 1.0, 1.0, noise=noise, seed=seed)
    for name in world.workers:
        for _ in range(10):
            world.serve(only=name)
    served = world.shares(120, pause_s)
    assert min(served[name] for name in world.workers) >= 20


def test_a_burst_is_spread_by_what_is_believed_and_a_slow_one_gets_its_part() -> None:
    """A worker with a third of the pace gets a third of what the other gets, if both have a queue."""
    world = PaceWorld(3.0, 1.0)
    slowed(world, "w1", load=1.0)
    world.serve(only="w0")
    world.serve(only="w1")
    chosen = world.burst(60)
    assert 11 <= chosen["w0"] <= 20


@pytest.mark.parametrize("silence_s", [1.0, 100.0, 1e4, 1e7])
def test_after_any_silence_both_are_asked_and_the_slow_one_is_known_again_after_one_request(silence_s: float) -> None:
    world = PaceWorld(3.0, 1.0, seed=1)
    slowed(world, "w1", load=1.0)
    world.serve(only="w0")
    world.pause(silence_s)
    served = world.shares(1, 0.1)
    while len(served) < 2 and served.total() < 20:  # After a long silence both are believed equal: chance decides.
        served += world.shares(1, 0.1)
    assert set(served) == ({"w0", "w1"} if silence_s > HALF_LIFE_S else {"w1"})
    assert world.shares(20, 0.1)["w0"] <= 1
