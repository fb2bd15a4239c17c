"""Checks helpers that many tasks wait for: one task at a time has each helper, the first to ask is served first, and no
helper is lost, whichever task is cancelled."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modalities.probing import InTurn

NEVER_S = 3600.0
STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "take", "give back", "cancel", "turn"]), st.integers(0, 9)), max_size=40
)


class World:
    def __init__(self, num_helpers: int) -> None:
        self.helpers = InTurn(range(num_helpers))
        self.waiting: list[asyncio.Task[int]] = []
        """Holds the waiting tasks in the order in which they came."""
        self.taken: list[int] = []

    async def step(self, action: str, number: int) -> None:
        if action == "take":
            self.waiting.append(asyncio.create_task(self.helpers.take(NEVER_S)))
        elif action == "turn":
            await asyncio.sleep(0)
        elif action == "cancel" and self.waiting:
            self.waiting[number % len(self.waiting)].cancel()
        elif action == "give back" and self.taken:
            self.helpers.give_back(self.taken.pop(number % len(self.taken)))
        self.collect()

    def collect(self) -> None:
        self.taken += [task.result() for task in self.waiting if task.done() and not task.cancelled()]
        self.waiting = [task for task in self.waiting if not task.done()]
        assert len(set(self.taken)) == len(self.taken), "one that two have"

    async def settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)
        self.collect()


@settings(deadline=None, max_examples=200)
@given(num_helpers=st.integers(1, 3), steps=STEPS)
def test_each_is_had_by_one_and_goes_to_who_waited_longest(num_helpers: int, steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        world = World(num_helpers)
        for action, number in steps:
            await world.step(action, number)
        await world.settle()
        assert len(world.taken) == num_helpers or not world.waiting, "one lies idle while somebody waits"
        while world.waiting:
            first = world.waiting[0]
            one = world.taken.pop()
            world.helpers.give_back(one)
            newcomer = asyncio.create_task(world.helpers.take(NEVER_S))
            assert await first == one
            world.waiting.append(newcomer)
            await world.settle()
            newcomer.cancel()
            await world.settle()
        for one in world.taken:
            world.helpers.give_back(one)
        assert sorted([await world.helpers.take(0) for _ in range(num_helpers)]) == list(range(num_helpers))

    asyncio.run(run())


async def test_a_newcomer_does_not_take_what_is_on_its_way_to_another() -> None:
    helpers = InTurn(["only"])
    assert await helpers.take(NEVER_S) == "only"
    first = asyncio.create_task(helpers.take(NEVER_S))
    await asyncio.sleep(0)
    helpers.give_back("only")
    with pytest.raises(TimeoutError):  # it asks before the first task has resumed
        await helpers.take(0)
    assert await first == "only"


async def test_who_waits_too_long_leaves_its_place() -> None:
    helpers = InTurn(["only"])
    await helpers.take(NEVER_S)
    with pytest.raises(TimeoutError):
        await helpers.take(0.001)
    second = asyncio.create_task(helpers.take(NEVER_S))
    await asyncio.sleep(0)
    helpers.give_back("only")
    assert await second == "only"
