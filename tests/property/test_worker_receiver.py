"""Checks, for any order in which announcements, transfers and the engine's updates arrive, that every request is
served, the engine never reads freed memory, every announcement is released once, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_world import ROW_BYTES, World, assert_settled, request_of, unit_of

from fabric.contracts import AttemptId, FeatureMismatch, GenerateRequest, InvalidMedia, RequestId, UnitRelease
from llm_workers.features.feature_entries import UnitState

NAMES = "abcd"
ROWS = {"a": 1, "b": 2, "c": 3, "d": 4}
KINDS = ("begin", "announce", "pull", "lose", "turn", "preempt", "distrust", "deliver", "abort", "wait")
ACTIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 99)), max_size=120)


@st.composite
def requests(draw: st.DrawFn) -> list[GenerateRequest]:
    made = []
    for number in range(draw(st.integers(1, 5))):
        names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3))
        dispatched = [index for index in range(len(names)) if draw(st.booleans())]
        age = float(draw(st.integers(0, 3)))
        made.append(request_of(f"r{number}", age, [(name, ROWS[name]) for name in names], dispatched))
    return made


async def play(world: World, waiting: list[GenerateRequest], actions: list[tuple[str, int]]) -> None:
    for action, number in actions:
        if action == "begin" and waiting:
            world.begin(waiting.pop(0))
        elif action == "announce" and world.coming:
            world.announce(number % len(world.coming))
        elif action in ("pull", "lose") and world.sink.pulls:
            await world.end_pull(number % len(world.sink.pulls), action == "lose")
        elif action == "turn":
            world.turn()
        elif action == "preempt":
            world.turn(preempt=number)
        elif action == "distrust":
            world.turn(distrust=number)
        elif action == "deliver" and world.updates:
            world.deliver()
        elif action == "abort" and world.live and number < 20:
            world.abort(list(world.live)[number % len(world.live)])
        elif action == "wait":
            world.clock.advance(number / 10)
            world.receiver.settle()
        assert_settled(world.receiver)


async def finish(world: World, waiting: list[GenerateRequest]) -> None:
    """Continues fairly and without further failures until every request ends; fails the test if one does not."""
    for _ in range(400):
        while waiting:
            world.begin(waiting.pop(0))
        while world.coming:
            world.announce(0)
        while world.sink.pulls:
            await world.end_pull(0, is_lost=False)
        world.turn()
        while world.updates:
            world.deliver()
        assert_settled(world.receiver)
        if not (world.live or world.coming or world.sink.pulls or world.commands):
            return
    pytest.fail(f"no progress: {list(world.live)} wait, {world.reading}, held {world.held}")


@settings(deadline=None, max_examples=150)
@given(requests(), ACTIONS, st.sampled_from([4, 5, 7, 100]))
def test_every_interleaving_serves_all_and_leaves_nothing(
    waiting: list[GenerateRequest], actions: list[tuple[str, int]], inbox_rows: int
) -> None:
    async def scenario() -> None:
        world = World(inbox_rows * ROW_BYTES)
        for request in waiting:
            world.will_announce(request)
        await play(world, waiting, actions)
        await finish(world, waiting)
        world.clock.advance(6.0)
        world.receiver.settle()
        assert not world.failed
        assert world.receiver.store.num_held == 0
        for entry in world.receiver.store._entries.values():
            assert entry.state is UnitState.KEPT, "a unit is remembered that no attempt uses"
            assert not entry.readers.attempts
            assert not entry.readers.named
        assert not world.sink.slots
        assert not world.landed
        released = [message.generation for message in world.releases]
        assert sorted(released) == list(range(1, world.num_announced + 1))

    asyncio.run(scenario())


# ---------------------------------------------------------------- single rules


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_the_oldest_is_pulled_first_in_the_order_of_its_prompt() -> None:
    async def scenario() -> None:
        world = World(100 * ROW_BYTES)
        young = request_of("young", 2.0, [("c", 3)], [0])
        old = request_of("old", 1.0, [("a", 1), ("b", 2)], [0, 1])
        blocker = request_of("older", 0.0, [("d", 4)], [0])
        world.sink.total_bytes = 4 * ROW_BYTES
        for request in (blocker, young, old):
            world.will_announce(request)
            world.begin(request)
        world.announce(0)
        while world.coming:
            world.announce(len(world.coming) - 1)
        assert len(world.sink.pulls) == 1
        world.turn()
        world.deliver()
        await world.end_pull(0, is_lost=False)
        world.turn()
        world.deliver()
        assert [ticket.shape[1] for ticket, _, _ in world.sink.pulls] == [1, 2], "a then b; c has no room"

    run(scenario)


def test_a_shared_unit_is_pulled_once_and_a_late_announcement_released_at_once() -> None:
    async def scenario() -> None:
        world = World(100 * ROW_BYTES)
        both = [request_of(name, 0.0, [("a", 1), ("b", 2)], [0, 1]) for name in ("r1", "r2")]
        for request in both:
            world.begin(request)
            world.will_announce(request)
        world.turn()
        world.deliver()
        world.announce(world.coming.index((AttemptId(RequestId("r1"), 0), unit_of("a"))))
        assert len(world.sink.pulls) == 1
        await world.end_pull(0, is_lost=False)
        assert [message.request_id for message in world.releases] == ["r1"], "released as soon as it landed"
        world.announce(world.coming.index((AttemptId(RequestId("r2"), 0), unit_of("a"))))
        assert [message.request_id for message in world.releases] == ["r1", "r2"]
        assert not world.sink.pulls

    run(scenario)


def test_an_announcement_before_its_request_is_kept_and_then_given_back() -> None:
    async def scenario() -> None:
        world = World(100 * ROW_BYTES)
        early, never = (request_of(name, 0.0, [("a", 1)], [0]) for name in ("early", "never"))
        for request in (early, never):
            world.will_announce(request)
            world.announce(0)
        assert not world.sink.pulls
        assert not world.releases
        world.begin(early)
        assert len(world.sink.pulls) == 1
        await world.end_pull(0, is_lost=False)
        for _ in range(3):
            world.turn()
            world.deliver()
        assert not world.live
        world.clock.advance(5.1)
        world.receiver.settle()
        assert {message.request_id for message in world.releases} == {"early", "never"}
        world.begin(never)
        world.turn()
        world.deliver()
        assert world.coming == [(AttemptId(RequestId("never"), 0), unit_of("a"))], "asked for again"

    run(scenario)


def test_a_lost_lease_is_asked_for_again() -> None:
    async def scenario() -> None:
        world = World(100 * ROW_BYTES)
        request = request_of("r", 0.0, [("a", 1)], [0])
        world.will_announce(request)
        world.begin(request)
        world.turn()
        world.deliver()
        world.announce(0)
        await world.end_pull(0, is_lost=True)
        assert world.coming == [(AttemptId(RequestId("r"), 0), unit_of("a"))]
        assert len(world.releases) == 1
        assert isinstance(world.releases[0], UnitRelease)
        assert not world.sink.slots

    run(scenario)


def test_what_was_lost_on_the_way_is_asked_for_again_and_again() -> None:
    async def scenario() -> None:
        world = World(100 * ROW_BYTES)
        request = request_of("r", 0.0, [("a", 1), ("b", 2)], [0])
        world.begin(request)
        world.turn()
        world.deliver()
        attempt = AttemptId(RequestId("r"), 0)
        assert world.coming == [(attempt, unit_of("b"))], "a was dispatched"
        for _ in range(2):
            world.coming.clear()  # neither the announcement of a nor the request for b arrives
            world.clock.advance(9.9)
            world.receiver.settle()
            assert not world.coming
            world.clock.advance(0.2)
            world.receiver.settle()
            assert world.coming == [(attempt, unit_of("a")), (attempt, unit_of("b"))]
        world.announce(0)
        world.clock.advance(11.0)
        world.coming.clear()
        world.receiver.settle()
        assert world.coming == [(attempt, unit_of("b"))], "a is here, only not read yet"

    run(scenario)


def test_a_reference_that_meets_a_distrusted_unit_on_its_way_is_given_back() -> None:
    """The engine distrusts a unit while another reference to it is on its way, for a request that reads it after
    another unit, for which there is no room. If the engine kept this reference, no eviction could make room."""

    async def scenario() -> None:
        world = World(2 * ROW_BYTES)
        first, second = request_of("first", 0.0, [("a", 1)], [0]), request_of("second", 1.0, [("b", 2), ("a", 1)], [])
        world.will_announce(first)
        world.begin(first)
        world.turn()
        world.deliver()
        world.announce(0)
        world.begin(second)
        world.turn()  # the engine misses both units of the second request, and nobody knows it yet
        await world.end_pull(0, is_lost=False)
        world.turn(distrust=0)
        world.deliver()
        assert [kind for kind, *_ in world.commands] == ["hold"], "for the second request"
        world.deliver()
        await finish(world, [])

    run(scenario)


def test_a_source_that_left_is_asked_for_again() -> None:
    async def scenario() -> None:
        world = World(2 * ROW_BYTES)
        request = request_of("r", 0.0, [("b", 2), ("a", 1)], [0, 1])
        world.will_announce(request)
        world.begin(request)
        world.turn()
        world.deliver()
        world.announce(0)
        world.announce(0)
        assert len(world.sink.pulls) == 1
        world.receiver.drop_source("e")
        assert world.coming == [(AttemptId(RequestId("r"), 0), unit_of("a"))]

    run(scenario)


def test_a_feature_of_another_size_fails_those_that_planned_otherwise() -> None:
    async def scenario() -> None:
        world = World(100 * ROW_BYTES)
        right, wrong = request_of("right", 0.0, [("a", 1)], [0]), request_of("wrong", 0.0, [("a", 2)], [])
        world.begin(wrong)
        world.will_announce(right)
        world.begin(right)
        world.announce(0)
        await world.end_pull(0, is_lost=False)
        assert [(attempt.request_id, type(error)) for attempt, error in world.failed.items()] == [
            ("wrong", FeatureMismatch)
        ]
        late = request_of("late", 0.0, [("a", 3)], [])
        world.begin(late)
        assert {attempt.request_id for attempt in world.failed} == {"wrong", "late"}

    run(scenario)


def test_a_feature_that_never_fits_is_refused() -> None:
    async def scenario() -> None:
        world = World(3)
        with pytest.raises(InvalidMedia, match="inbox has 3") as caught:
            world.begin(request_of("r", 0.0, [("d", 4)], [0]))
        assert caught.value.param == "p0"

    run(scenario)


def test_what_was_pulled_and_is_covered_after_all_is_freed_at_admission() -> None:
    async def scenario() -> None:
        world = World(100 * ROW_BYTES)
        request = request_of("r", 0.0, [("a", 1), ("b", 2)], [0, 1])
        attempt = AttemptId(RequestId("r"), 0)
        world.will_announce(request)
        world.begin(request)
        while world.coming:
            world.announce(0)
        await world.end_pull(0, is_lost=False)
        await world.end_pull(0, is_lost=False)
        assert world.landed == {unit_of("a"), unit_of("b")}
        world.receiver.admit(attempt, [unit_of("b")])
        world.receiver.settle()
        assert world.landed == {unit_of("b")}, "cached KV covers a"
        assert len(world.sink.slots) == 1
        assert_settled(world.receiver)

    run(scenario)
