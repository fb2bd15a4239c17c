from __future__ import annotations

import asyncio

import pytest

from loadtest.simulator.event_loop import VirtualLoop


def new_loop() -> VirtualLoop:
    return VirtualLoop()  # type: ignore[abstract]  # it has what the simulated code calls


def test_events_run_in_the_order_of_their_times_and_then_of_their_scheduling() -> None:
    loop, ran = new_loop(), []
    for name, at_s in (("late", 2.0), ("first", 1.0), ("second", 1.0)):
        loop.at(at_s, lambda name=name: ran.append((name, loop.now())))
    loop.at(1.5, loop.soon, ran.append, "soon")
    loop.run_while(lambda: True)
    assert ran == [("first", 1.0), ("second", 1.0), "soon", ("late", 2.0)]
    assert loop.num_events == 5


def test_a_cancelled_event_does_not_run_and_takes_no_time() -> None:
    loop = new_loop()
    loop.at(5.0, pytest.fail).cancel()
    loop.run_while(lambda: True)
    assert loop.now() == 0.0


def test_an_event_of_the_past_runs_now() -> None:
    loop, ran = new_loop(), []
    loop.at(3.0, lambda: loop.at(1.0, lambda: ran.append(loop.now())))
    loop.run_while(lambda: True)
    assert ran == [3.0]


def test_tasks_sleep_in_virtual_time() -> None:
    loop, ran = new_loop(), []

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds)
        ran.append((seconds, loop.now()))

    for seconds in (3600.0, 60.0):
        loop.create_task(sleep(seconds))
    loop.run_while(lambda: True)
    assert ran == [(60.0, 60.0), (3600.0, 3600.0)]


def test_the_error_of_an_event_or_a_task_ends_the_run() -> None:
    loop = new_loop()
    loop.at(1.0, int, "no number")
    with pytest.raises(ValueError, match="no number"):
        loop.run_while(lambda: True)


def test_the_run_ends_with_its_condition() -> None:
    loop, ran = new_loop(), []
    for at_s in (1.0, 2.0, 3.0):
        loop.at(at_s, ran.append, at_s)
    loop.run_while(lambda: len(ran) < 2)
    assert ran == [1.0, 2.0]
