"""Runs ten thousand histories of the scheduler, each from its own seed: arrivals, landings in any order, losses,
aborts, failing steps, migration, tiny pools, priorities, tenants, side tensors, several choices, drafts.

Plain random numbers replace hypothesis's search, which gives far more histories in the same time. The tests compare the
output of each history with an unconstrained run and check what is left at its end; they check the scheduler's accounts
at random steps and at the end. The error of a failing history names its seed; `history(seed)` repeats it.
"""

from __future__ import annotations

import random

import pytest
from scheduling_prompts import BEGINNINGS, PICTURES, TEXTS
from scheduling_world import World
from test_scheduling_machine import make_request, tiny

NUM_HISTORIES = 10_000
NUM_PARTS = 10
"""This is the number of tests; several processes can share them."""
MOST_EVENTS = 10
WATCHED = 0.1
"""This is the share of the steps at which everything is checked."""


def history(seed: int) -> World:
    rng = random.Random(seed)
    block_size = rng.choice((1, 4, 4, 5))
    config = tiny(
        block_size,
        rng.randint(16, 64),
        rng.randint(4, 40),
        rng.randint(1, 6),
        rng.random() < 0.7,
        rng.choice((0, 0, 2, 5)),
    )
    world = World(config, lambda: rng.random() < WATCHED)
    arrive(world, rng, 0)
    for turn in range(1, rng.randint(3, MOST_EVENTS)):
        EVENTS[rng.randrange(len(EVENTS))](world, rng, turn)
        for unit in world.awaited():
            if rng.random() < 0.4:
                world.land(unit)
    world.finish()
    return world


def arrive(world: World, rng: random.Random, turn: int) -> None:
    for number in range(rng.choice((1, 1, 2))):
        parts = (*rng.choice(BEGINNINGS), *rng.choices((*TEXTS, *PICTURES), k=rng.choice((0, 0, 1))))
        request = make_request(
            f"r{turn}.{number}",
            parts,
            turn - rng.choice((0, 0, 20)),
            rng.choice((1, 1, 2, 3)),
            rng.choice((1, 4, 9)),
            rng.randrange(3),
            rng.choice(("", "", "tenant")),
            rng.choice((0, 0, 1)),
            rng.choice(((), (), (), ("talker",), ("talker", "other"))),
        )
        world.add(request, [rng.randrange(8) for _ in range(3)] if rng.random() < 0.15 else None)


def step(world: World, rng: random.Random, turn: int) -> None:
    for _ in range(rng.randint(1, 3)):
        world.step()


def abort(world: World, rng: random.Random, turn: int) -> None:
    if world.live:
        world.abort(rng.choice(sorted(world.live)), rng.random() < 0.5)


def abort_in_flight(world: World, rng: random.Random, turn: int) -> None:
    world.step_with_abort_in_flight(rng.randrange(6), rng.random() < 0.5)


def fail(world: World, rng: random.Random, turn: int) -> None:
    world.failing_step(rng.randrange(4))


def lose(world: World, rng: random.Random, turn: int) -> None:
    if world.fake.features:
        world.lose(rng.choice(sorted(world.fake.features)))


def evict(world: World, rng: random.Random, turn: int) -> None:
    world.make_inbox_room()


EVENTS = (arrive, arrive, arrive, step, step, step, step, abort, abort_in_flight, fail, lose, evict)


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_histories(part: int) -> None:
    num_preemptions = num_accepted = 0
    for seed in range(part, NUM_HISTORIES, NUM_PARTS):
        try:
            stats = history(seed).scheduler.stats()
        except Exception as error:
            raise AssertionError(f"history {seed} fails") from error
        num_preemptions += stats.num_preemptions
        num_accepted += stats.drafts_accepted
    assert num_preemptions > 100, "the pools are not tiny enough"
    assert num_accepted > 100, "drafts are hardly ever right"
