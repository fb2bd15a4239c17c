"""Tests the budgets of fetching: fetches wait, are woken in order, and nothing is lost."""

from __future__ import annotations

import asyncio

import pytest

from fabric.contracts import InvalidMedia, Overloaded
from router.fetch.fair_shares import FairShares, Party
from router.fetch.fetch_budget import ByteAllowance, FetchBudget

FULL = "all the memory is taken"
ONE, TWO = Party("", "one.test"), Party("", "two.test")


def budget_of(limit: int, max_waiting: int = 100) -> FetchBudget:
    return FetchBudget(FairShares(limit, 1, max_waiting), FULL)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_fetches_of_a_party_wait_in_the_order_of_their_arrival() -> None:
    budget, order = budget_of(100), []

    async def fetch(name: str, num_bytes: int) -> int:
        number = await budget.take(ONE, num_bytes, 60.0)
        order.append(name)
        return number

    first = await budget.take(ONE, 90, 60.0)
    tasks = [asyncio.create_task(fetch(name, size)) for name, size in (("large", 30), ("small", 10), ("last", 40))]
    await turns()
    assert order == []
    with pytest.raises(Overloaded):
        budget.take_more(first, 5)
    budget.give_back(first)
    await turns()
    assert order == ["large", "small"]
    budget.give_back(await tasks[0])
    await asyncio.gather(*tasks)
    assert order == ["large", "small", "last"]
    assert budget.used == 50


async def test_a_fetch_that_no_longer_waits_lets_the_next_one_in() -> None:
    budget = budget_of(100)
    await budget.take(ONE, 40, 60.0)
    large, small = asyncio.create_task(budget.take(ONE, 90, 60.0)), asyncio.create_task(budget.take(ONE, 10, 60.0))
    await turns()
    large.cancel()
    await small
    assert budget.used == 50


async def test_what_was_given_to_a_cancelled_fetch_comes_back() -> None:
    budget = budget_of(100)
    first = await budget.take(ONE, 100, 60.0)
    waiting = asyncio.create_task(budget.take(ONE, 70, 60.0))
    await turns()
    budget.give_back(first)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert budget.used == 0


async def test_what_comes_back_twice_counts_once() -> None:
    budget = budget_of(100)
    first, second = await budget.take(ONE, 30, 60.0), await budget.take(TWO, 20, 60.0)
    budget.give_back(first)
    budget.give_back(first)
    assert budget.used == 20
    budget.give_back(second)
    assert budget.used == 0


async def test_a_wait_that_is_too_long_is_overloaded() -> None:
    budget = budget_of(100)
    first = await budget.take(ONE, 100, 60.0)
    with pytest.raises(Overloaded, match=FULL) as refused:
        await budget.take(TWO, 1, 0.0)
    assert refused.value.retry_after_s == 0.0
    budget.give_back(first)
    assert budget.used == 0
    budget.take_more(await budget.take(TWO, 10, 0.0), 10)
    assert budget.used == 20


async def test_a_line_that_is_full_refuses_at_once() -> None:
    budget = budget_of(100, max_waiting=2)
    await budget.take(ONE, 100, 60.0)
    waiting = asyncio.create_task(budget.take(ONE, 1, 60.0))
    await turns()
    with pytest.raises(Overloaded, match="too many fetches of media wait"):
        await budget.take(ONE, 1, 60.0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_file_larger_than_the_budget_is_fetched_alone() -> None:
    budget = budget_of(100)
    number = await budget.take(ONE, 500, 60.0)
    budget.give_back(number)
    assert budget.used == 0


def test_an_allowance_is_spent_once() -> None:
    allowance = ByteAllowance(100)
    allowance.take(60)
    with pytest.raises(InvalidMedia, match="more than 100 bytes together"):
        allowance.take(41)
    allowance.take(40)
    with pytest.raises(InvalidMedia):
        allowance.take(1)
