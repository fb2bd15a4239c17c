"""Tests the budgets of fetching: who waits, in which order, and that nothing is lost."""

from __future__ import annotations

import asyncio

import pytest

from fabric.contracts import InvalidMedia, Overloaded
from router.fetch.fetch_budget import ByteAllowance, FetchBudget


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_fetches_wait_in_the_order_of_their_arrival() -> None:
    budget, order = FetchBudget(100), []

    async def fetch(name: str, num_bytes: int) -> None:
        await budget.take(num_bytes, 60.0)
        order.append(name)

    await budget.take(60, 60.0)
    tasks = [asyncio.create_task(fetch(name, size)) for name, size in (("large", 90), ("small", 10), ("last", 20))]
    await turns()
    assert order == []
    with pytest.raises(Overloaded):
        budget.take_now(1)
    budget.give_back(60)
    await turns()
    assert order == ["large", "small"]
    budget.give_back(90)
    await asyncio.gather(*tasks)
    assert budget.used == 30


async def test_a_fetch_that_no_longer_waits_lets_the_next_one_in() -> None:
    budget = FetchBudget(100)
    await budget.take(60, 60.0)
    large, small = asyncio.create_task(budget.take(90, 60.0)), asyncio.create_task(budget.take(40, 60.0))
    await turns()
    large.cancel()
    await small
    assert budget.used == 100


async def test_what_was_given_to_a_cancelled_fetch_comes_back() -> None:
    budget = FetchBudget(100)
    await budget.take(100, 60.0)
    waiting = asyncio.create_task(budget.take(70, 60.0))
    await turns()
    budget.give_back(100)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert budget.used == 0


async def test_a_wait_that_is_too_long_is_overloaded() -> None:
    budget = FetchBudget(100)
    await budget.take(100, 60.0)
    with pytest.raises(Overloaded, match="all the memory"):
        await budget.take(1, 0.0)
    budget.give_back(100)
    budget.take_now(100)


async def test_a_file_larger_than_the_budget_is_fetched_alone() -> None:
    budget = FetchBudget(100)
    await budget.take(500, 60.0)
    budget.give_back(500)
    assert budget.used == 0


def test_an_allowance_is_spent_once() -> None:
    allowance = ByteAllowance(100)
    allowance.take(60)
    with pytest.raises(InvalidMedia, match="more than 100 bytes together"):
        allowance.take(41)
    allowance.take(40)
    with pytest.raises(InvalidMedia):
        allowance.take(1)
