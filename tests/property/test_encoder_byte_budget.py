"""Checks a byte budget that many tasks take from: never more bytes are taken than there are, the first to ask is served
first, and no bytes are lost, whichever task is cancelled."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_pool.decoder import ByteBudget, Hold

TOTAL = 100
STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "release", "release twice", "cancel", "turn"]), st.integers(0, TOTAL)),
    max_size=40,
)


class World:
    """Holds the tasks that take bytes, in the order in which they came."""

    def __init__(self) -> None:
        self.budget = ByteBudget(TOTAL)
        self.taking: dict[asyncio.Task[Hold], int] = {}
        self.holds: list[tuple[Hold, int]] = []

    async def step(self, action: str, number: int) -> None:
        if action == "take":
            self.taking[asyncio.create_task(self.budget.take(number))] = number
        elif action == "turn":
            await asyncio.sleep(0)
        elif action == "cancel" and self.taking:
            list(self.taking)[number % len(self.taking)].cancel()
        elif action.startswith("release") and self.holds:
            hold, _ = self.holds.pop(number % len(self.holds))
            hold.release()
            if action == "release twice":
                hold.release()
        self.collect()

    def collect(self) -> None:
        for task in [task for task in self.taking if task.done()]:
            num_bytes = self.taking.pop(task)
            if not task.cancelled():
                self.holds.append((task.result(), num_bytes))
        assert 0 <= self.budget.num_taken <= TOTAL
        assert sum(num_bytes for _, num_bytes in self.holds) <= self.budget.num_taken

    async def settle(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        self.collect()


@settings(deadline=None, max_examples=200)
@given(STEPS)
def test_bytes_are_never_more_than_there_are_and_none_are_lost(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        world = World()
        for action, number in steps:
            await world.step(action, number)
        await world.settle()
        assert sum(num_bytes for _, num_bytes in world.holds) == world.budget.num_taken
        if world.taking:
            first = next(iter(world.taking.values()))
            assert world.budget.num_taken + first > TOTAL, "the first that waits does not fit"
        while world.taking:
            waiting = list(world.taking.values())
            served = len(world.holds)
            world.holds.pop(0)[0].release()
            await world.settle()
            newly = [num_bytes for _, num_bytes in world.holds[served - 1 :]]
            assert newly == waiting[: len(newly)], "first come, first served"
        for hold, _ in world.holds:
            hold.release()
        assert world.budget.num_taken == 0

    asyncio.run(run())


def test_who_leaves_in_the_turn_in_which_bytes_come_free_is_only_cancelled() -> None:
    async def run() -> None:
        budget = ByteBudget(TOTAL)
        hold = await budget.take(TOTAL)
        leaving, next_one = (asyncio.create_task(budget.take(number)) for number in (5, 6))
        await asyncio.sleep(0)
        leaving.cancel()
        hold.release()
        done = await asyncio.gather(leaving, next_one, return_exceptions=True)
        assert isinstance(done[0], asyncio.CancelledError)
        assert isinstance(done[1], Hold)
        assert budget.num_taken == 6

    asyncio.run(run())
