"""Tests that the fetches of an event loop run by turns, in the order of what their parties have used. The clocks are
passed in, and a step takes as long as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fabric.contracts import MediaUnreachable
from router.fetch.fair_shares import SHARED_TENANT, Party
from router.fetch.fair_turns import FairTurns, SteppedFetch

A, B, C = Party("a", "one"), Party("b", "one"), Party("c", "one")


class Scene:
    """A `Scene` has a clock that moves only within steps, and lists the steps in their order."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.turns = FairTurns(lambda: self.time_s, lambda: self.time_s)
        self.steps: list[str] = []

    async def work(self, name: str, num_steps: int, step_s: float) -> str:
        for _ in range(num_steps):
            self.steps.append(name)
            self.time_s += step_s
            await asyncio.sleep(0)
        return name

    def fetch(
        self, name: str, party: Party, num_steps: int, step_s: float, allowed_s: Callable[[], float] = lambda: 1e9
    ) -> SteppedFetch[str]:
        return self.turns.fetch(party, lambda: self.work(name, num_steps, step_s), allowed_s)

    async def until(self, num_steps: int) -> None:
        """Waits until so many steps have run since the list was cleared."""
        while len(self.steps) < num_steps:  # noqa: ASYNC110 - the steps run in these turns of the loop
            await asyncio.sleep(0)


async def ended(fetch: SteppedFetch[str]) -> str:
    return await fetch


def start(*fetches: SteppedFetch[str]) -> list[asyncio.Task[str]]:
    return [asyncio.create_task(ended(fetch)) for fetch in fetches]


async def test_a_fetch_alone_runs_to_its_end() -> None:
    scene = Scene()
    assert await scene.fetch("a", A, 5, 1.0) == "a"
    assert scene.steps == ["a"] * 5
    assert scene.turns.busy_s == 5.0


async def test_many_long_steps_of_one_party_leave_every_other_turn_to_another() -> None:
    scene = Scene()
    floods = [scene.fetch(f"flood {number}", A, 20, 1.0) for number in range(12)]
    tasks = start(*floods)
    await scene.until(24)
    scene.steps.clear()
    tasks += start(scene.fetch("b", B, 8, 0.01))
    assert await tasks[-1] == "b"
    others = [step for step in scene.steps if step != "b"]
    assert len(others) <= 3, "after its first step, B has used less than A for the rest"
    for task in tasks[:-1]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_parties_with_long_steps_take_turns_by_what_they_have_used() -> None:
    scene = Scene()
    tasks = start(*(scene.fetch("a", A, 10, 3.0) for _ in range(3)), scene.fetch("b", B, 30, 1.0))
    await tasks[-1]
    assert 6 <= scene.steps[:28].count("a") <= 8
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("tenant", ["a", SHARED_TENANT])
async def test_the_hosts_of_a_tenant_take_turns_too(tenant: str) -> None:
    scene = Scene()
    floods = start(*(scene.fetch("flood", Party(tenant, "one"), 20, 1.0) for _ in range(5)))
    await scene.until(10)
    scene.steps.clear()
    await scene.fetch("small", Party(tenant, "two"), 8, 0.01)
    assert scene.steps.count("flood") <= 3
    await asyncio.gather(*floods)


async def test_a_party_that_comes_late_has_no_credit() -> None:
    """A party without a past would otherwise keep all others from running until it had used as much as they have."""
    scene = Scene()
    tasks = start(*(scene.fetch("a", A, 60, 1.0) for _ in range(2)))
    await scene.until(60)
    scene.steps.clear()
    tasks += start(*(scene.fetch("b", B, 20, 1.0) for _ in range(2)))
    await scene.until(20)
    assert 8 <= scene.steps[:20].count("a") <= 12
    await asyncio.gather(*tasks)


async def test_one_step_runs_in_a_turn_of_the_loop() -> None:
    """What the loop has to do besides does not wait for all fetches that could run."""
    scene = Scene()
    tasks = start(*(scene.fetch("a", A, 10, 1.0) for _ in range(8)))
    most, before = 0, 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        most, before = max(most, len(scene.steps) - before), len(scene.steps)
    assert most <= 2


async def test_beyond_its_processor_time_a_fetch_fails_where_it_waits() -> None:
    scene = Scene()
    fetch = scene.fetch("a", A, 1000, 1.0, lambda: 5.5 + 0.5 * len(scene.steps))
    with pytest.raises(MediaUnreachable, match="too much processor time"):
        await fetch
    assert len(scene.steps) == 12
    assert await scene.fetch("b", A, 3, 1.0) == "b"


async def test_what_a_fetch_does_at_its_end_is_not_cut_short() -> None:
    scene = Scene()
    closed: list[str] = []

    async def work() -> None:
        try:
            await scene.work("a", 100, 1.0)
        finally:
            await scene.work("closing", 3, 1.0)
            closed.append("a")

    with pytest.raises(MediaUnreachable):
        await scene.turns.fetch(A, work, lambda: 5.0)
    assert closed == ["a"]


async def test_a_cancelled_fetch_ends_at_once_and_gives_its_turn_up() -> None:
    scene = Scene()
    tasks = start(*(scene.fetch(str(number), A, 50, 1.0) for number in range(6)))
    await scene.until(6)
    for task in tasks[:5]:
        task.cancel()
    found = await asyncio.gather(*tasks[:5], return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in found)
    assert len(scene.steps) < 20
    assert await tasks[5] == "5"


async def test_a_fetch_knows_whether_others_have_kept_it_back() -> None:
    scene = Scene()
    flood, victim = scene.fetch("a", A, 40, 1.0), scene.fetch("b", B, 4, 0.01)
    await asyncio.gather(*start(flood, victim))
    assert victim.was_kept_back
    assert not flood.was_kept_back
    alone = scene.fetch("c", C, 4, 1.0)
    await alone
    scene.time_s += 100.0
    assert not alone.was_kept_back


async def test_errors_and_results_pass_through() -> None:
    scene = Scene()

    async def work() -> None:
        await asyncio.sleep(0)
        raise KeyError("a")

    with pytest.raises(KeyError):
        await scene.turns.fetch(A, work, lambda: 1.0)
    async with asyncio.timeout(20):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await scene.turns.fetch(A, asyncio.Event().wait, lambda: 1.0)
    assert not scene.turns._owner_to_account
