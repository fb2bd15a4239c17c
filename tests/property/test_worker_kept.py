"""Checks features that are kept after prefill: the store against a plain list, and the receiver that uses it."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_worker_receiver import ACTIONS, finish, play, requests
from worker_world import ROW_BYTES, World, request_of, unit_of

from fabric.channel import LandedFeature
from fabric.ids import AttemptId, RequestId
from fabric.messages import FeatureTicket
from llm_workers.kept import NO_SLOT, KeptFeatures

BUDGET = 10
names = st.sampled_from("abcdef")


def landed(value: int, nbytes: int) -> LandedFeature:
    ticket = FeatureTicket("e", b"", 0, 0, nbytes, 1, (1, nbytes, 1), "float32", 1.0)
    return LandedFeature(7, np.full(nbytes, value, np.uint8), ticket, 0.5)


class Store(RuleBasedStateMachine):
    """Checks the mode `always`: the store keeps every feature that fits and drops the least recently used ones."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = KeptFeatures("always", BUDGET, is_prefix_cached=True)
        self.free: list[tuple[str, int, int]] = []
        """Holds `(name, value, bytes)`, the least recently used first."""
        self.lent: list[tuple[str, int, int]] = []
        self.distrusted: set[str] = set()
        self.num_hits = 0

    @rule(name=names, value=st.integers(0, 255), nbytes=st.integers(1, 12))
    def offer(self, name, value, nbytes):
        feature = landed(value, nbytes)
        taken = self.kept.offer(unit_of(name), feature)
        feature.buffer[:] = 0  # another feature uses the inbox slot now
        if any(one[0] == name for one in self.lent):
            assert not taken
            return
        self.free = [one for one in self.free if one[0] != name]
        fits = nbytes + sum(one[2] for one in self.lent) <= BUDGET
        assert taken == fits
        if fits:
            while nbytes + sum(one[2] for one in (*self.free, *self.lent)) > BUDGET:
                self.free.pop(0)
            self.free.append((name, value, nbytes))

    @rule(name=names)
    def distrust(self, name):
        """Distrusts a feature; one that is lent is dropped when it comes back."""
        self.kept.distrust(unit_of(name), any(one[0] == name for one in self.lent))
        self.free = [one for one in self.free if one[0] != name]
        self.distrusted |= {one[0] for one in self.lent if one[0] == name}

    @rule(name=names, nbytes=st.integers(1, 10))
    def distrust_in_the_inbox(self, name, nbytes):
        if all(one[0] != name for one in self.lent):
            self.kept.distrust(unit_of(name), True)
            self.free = [one for one in self.free if one[0] != name]
            assert not self.kept.offer(unit_of(name), landed(1, nbytes))

    @precondition(lambda self: self.free)
    @rule(number=st.integers(0, 99))
    def lend(self, number):
        one = self.free.pop(number % len(self.free))
        feature = self.kept.lend(unit_of(one[0]))
        assert feature.slot_id == NO_SLOT
        assert (feature.buffer == one[1]).all()
        assert feature.buffer.nbytes == one[2]
        self.lent.append(one)
        self.num_hits += 1

    @precondition(lambda self: self.lent)
    @rule(number=st.integers(0, 99))
    def give_back(self, number):
        one = self.lent.pop(number % len(self.lent))
        self.kept.give_back(unit_of(one[0]))
        if one[0] in self.distrusted:
            self.distrusted.remove(one[0])
        else:
            self.free.append(one)

    @invariant()
    def agrees(self):
        assert [name for name in "abcdef" if unit_of(name) in self.kept] == sorted(one[0] for one in self.free)
        assert self.kept.used_bytes == sum(one[2] for one in (*self.free, *self.lent)) <= BUDGET
        assert self.kept.num_hits == self.num_hits


Store.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
TestStore = Store.TestCase


@settings(deadline=None, max_examples=100)
@given(requests(), ACTIONS, st.sampled_from([4, 5, 7]), st.integers(1, 12), st.sampled_from(["always", "auto"]))
def test_every_interleaving_serves_all_and_keeps_within_its_budget(waiting, actions, inbox_rows, kept_rows, mode):
    async def scenario():
        world = World(inbox_rows * ROW_BYTES)
        world.receiver.kept = KeptFeatures(mode, kept_rows * ROW_BYTES, is_prefix_cached=False)
        for request in waiting:
            world.will_announce(request)
        await play(world, waiting, actions)
        await finish(world, waiting)
        world.clock.advance(6.0)
        world.receiver.settle()
        assert not world.failed
        assert world.receiver.num_held == 0
        assert not world.sink.slots
        assert not world.landed
        assert world.receiver.kept.used_bytes <= kept_rows * ROW_BYTES
        assert not world.receiver.kept._lent
        released = [message.generation for message in world.releases]
        assert sorted(released) == list(range(1, world.num_announced + 1))

    asyncio.run(scenario())


async def serve(world: World, name: str, age: float) -> None:
    """Serves a request for picture `a`, from its announcement (if an encoder encodes it) to its end."""
    world.begin(request_of(name, age, [("a", 2)], []))
    for _ in range(4):
        world.turn()
        world.deliver()
        while world.coming:
            world.announce(0)
        while world.sink.pulls:
            await world.end_pull(0, is_lost=False)
    assert AttemptId(RequestId(name), 0) not in world.live


def asked(mode: str, is_prefix_cached: bool, num_requests: int) -> tuple[int, World]:
    """Returns how often the picture was encoded and announced for this many requests in a row, and the world."""

    async def scenario():
        world = World(100 * ROW_BYTES)
        world.receiver.kept = KeptFeatures(mode, 100 * ROW_BYTES, is_prefix_cached)
        for number in range(num_requests):
            await serve(world, f"r{number}", float(number))
        return world.num_announced, world

    return asyncio.run(scenario())


def test_what_was_kept_is_not_asked_for_again() -> None:
    num_announced, world = asked("always", True, 4)
    assert (num_announced, world.receiver.kept.num_hits) == (1, 3)
    assert world.receiver.kept.used_bytes == 2 * ROW_BYTES
    assert not world.sink.slots


def test_auto_keeps_from_the_second_time_on() -> None:
    num_announced, world = asked("auto", True, 5)
    assert (num_announced, world.receiver.kept.num_hits) == (2, 3)


def test_never_keeps_nothing() -> None:
    num_announced, world = asked("never", False, 3)
    assert (num_announced, world.receiver.kept.num_hits, world.receiver.kept.used_bytes) == (3, 0, 0)
