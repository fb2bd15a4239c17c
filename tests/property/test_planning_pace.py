"""Sends requests one after the other, and in bursts, to workers of several paces: equal workers share, and a slow one
gets its part of a burst and nothing else."""

import pytest
from planning_pace_world import PaceWorld

# Hypothesis does not draw these values: a simulation is long, and a smaller one would not show the same behaviour.
seeds = pytest.mark.parametrize("seed", range(2))


@seeds
@pytest.mark.parametrize("slowness", [2.0, 5.0])
@pytest.mark.parametrize("pause_s", [0.5, 5.0])
def test_a_worker_that_is_slow_gets_nothing_while_others_are_idle(seed: int, slowness: float, pause_s: float) -> None:
    world = PaceWorld(slowness, 1.0, 1.0, seed=seed)
    served = world.shares(200, pause_s)
    assert served["w0"] <= 2
    assert min(served["w1"], served["w2"]) > 0.1 * served.total()


@seeds
@pytest.mark.parametrize("pause_s", [0.05, 30.0])
def test_equals_share_whatever_the_pace(seed: int, pause_s: float) -> None:
    world = PaceWorld(1.0, 1.0, 1.0, seed=seed)
    for name in world.workers:
        for _ in range(10):
            world.serve(only=name)
    served = world.shares(120, pause_s)
    assert min(served[name] for name in world.workers) >= 20


@pytest.mark.parametrize("silence_s", [0.0, 1e4])
def test_a_burst_is_spread_by_what_is_believed_and_a_slow_one_gets_its_part(silence_s: float) -> None:
    """A worker with a third of the pace gets a third of what the other gets, if both have a queue, however long ago
    they were last heard of."""
    world = PaceWorld(3.0, 1.0)
    for _ in range(40):
        world.serve(only="w0")
        world.serve(only="w1")
    world.pause(silence_s)
    chosen = world.burst(60)
    assert 11 <= chosen["w0"] <= 20


@seeds
@pytest.mark.parametrize("load", [2.0, 6.0])
def test_a_worker_that_was_slow_once_gets_its_part_of_bursts_again(seed: int, load: float) -> None:
    """While the other one is idle, it is not asked; the first requests that it gets beside a queue show that it is as
    fast as the other."""
    world = PaceWorld(1.0, 1.0, noise=0.1, seed=seed)
    for _ in range(40):
        world.serve(load=load, only="w0")
    for _ in range(40):
        world.serve(only="w1")
    assert world.shares(5, pause_s=0.05)["w1"] == 5
    for _ in range(4):
        world.burst(60)
        for _ in range(5):
            world.serve(only="w0")
    chosen = world.burst(60)
    assert min(chosen["w0"], chosen["w1"]) >= 20
