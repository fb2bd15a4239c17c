"""Checks features that are kept after prefill: the cache against a plain list, and the receiver that uses it."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_worker_receiver import ACTIONS, finish, play, requests
from worker_world import ROW_BYTES, World, request_of, unit_of

from fabric.contracts import (
    AttemptId,
    FeatureLog,
    FeatureStats,
    FeatureTicket,
    GenerateRequest,
    MemberId,
    MmHash,
    RequestId,
    UnitKey,
)
from fabric.transport import LandedFeature
from llm_workers.features import HostCache
from llm_workers.features.host_cache import NO_SLOT
from llm_workers.worker_config import WorkerConfig

BUDGET = 10
names = st.sampled_from("abcdef")


def landed(value: int, nbytes: int) -> LandedFeature:
    ticket = FeatureTicket("e", b"", 0, 0, nbytes, 1, (1, nbytes, 1), "float32", 1.0)
    return LandedFeature(7, np.full(nbytes, value, np.uint8), ticket, 0.5)


class KeptItems:
    """A `KeptItems` follows the events of a log as a router does."""

    def __init__(self) -> None:
        self.items: set[MmHash] = set()
        self.last_seq = 0

    def follow(self, log: FeatureLog) -> None:
        for message in log.drain():
            assert message.first_seq == self.last_seq + 1
            self.last_seq += len(message.stored) + len(message.removed)
            self.items = (self.items | set(message.stored)) - set(message.removed)
        assert (set(log.snapshot().stored), log.snapshot().first_seq) == (self.items, self.last_seq)


class Cache(RuleBasedStateMachine):
    """Checks that the cache takes every feature that fits, and drops the least recently used ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stats = FeatureStats()
        self.log = FeatureLog(MemberId("worker"), 1)
        self.cache = HostCache(BUDGET, self.stats, self.log)
        self.seen = KeptItems()
        self.free: list[tuple[str, int, int]] = []
        """Holds `(name, value, bytes)`, the least recently used first."""
        self.lent: list[tuple[str, int, int]] = []
        self.num_hits = 0

    @rule(name=names, value=st.integers(0, 255), nbytes=st.integers(1, 12))
    def put(self, name: str, value: int, nbytes: int) -> None:
        if any(one[0] == name for one in (*self.free, *self.lent)):
            return
        feature = landed(value, nbytes)
        dropped = self.cache.put(unit_of(name), feature, 1)
        feature.buffer[:] = 0  # another feature uses the inbox slot now
        expected = []
        if nbytes + sum(one[2] for one in self.lent) <= BUDGET:
            while nbytes + sum(one[2] for one in (*self.free, *self.lent)) > BUDGET:
                expected.append(unit_of(self.free.pop(0)[0]))
            self.free.append((name, value, nbytes))
        assert dropped == expected

    @rule(name=names)
    def drop(self, name: str) -> None:
        if all(one[0] != name for one in self.lent):
            self.cache.drop(unit_of(name))
            self.free = [one for one in self.free if one[0] != name]

    @precondition(lambda self: self.free)
    @rule(number=st.integers(0, 99))
    def lend(self, number: int) -> None:
        one = self.free.pop(number % len(self.free))
        feature = self.cache.lend(unit_of(one[0]))
        assert feature.slot_id == NO_SLOT
        assert (feature.buffer == one[1]).all()
        assert feature.buffer.nbytes == one[2]
        self.lent.append(one)
        self.num_hits += 1

    @precondition(lambda self: self.lent)
    @rule(number=st.integers(0, 99))
    def give_back(self, number: int) -> None:
        one = self.lent.pop(number % len(self.lent))
        self.cache.give_back(unit_of(one[0]))
        self.free.append(one)

    @invariant()
    def agrees(self) -> None:
        self.cache.check_invariants()
        assert [name for name in "abcdef" if unit_of(name) in self.cache] == sorted(one[0] for one in self.free)
        assert [name for name in "abcdef" if self.cache.is_lent(unit_of(name))] == sorted(one[0] for one in self.lent)
        assert self.cache.used_bytes == sum(one[2] for one in (*self.free, *self.lent)) <= BUDGET
        assert self.stats.num_kept_hits == self.num_hits
        self.seen.follow(self.log)
        assert self.seen.items == {unit_of(one[0]).mm_hash for one in (*self.free, *self.lent)}


Cache.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
TestCache = Cache.TestCase


def keeping(mode: str, kept_rows: int, is_prefix_cached: bool) -> WorkerConfig:
    return WorkerConfig(
        unclaimed_unit_ttl_s=5.0,
        keep_features=mode,
        kept_bytes=kept_rows * ROW_BYTES,
        is_prefix_cache_enabled=is_prefix_cached,
    )


@settings(deadline=None, max_examples=100)
@given(requests(), ACTIONS, st.sampled_from([4, 5, 7]), st.integers(1, 12), st.sampled_from(["always", "auto"]))
def test_every_interleaving_serves_all_and_keeps_within_its_budget(
    waiting: list[GenerateRequest], actions: list[tuple[str, int]], inbox_rows: int, kept_rows: int, mode: str
) -> None:
    async def scenario() -> None:
        world = World(inbox_rows * ROW_BYTES, keeping(mode, kept_rows, False))
        for request in waiting:
            world.will_announce(request)
        await play(world, waiting, actions)
        await finish(world, waiting)
        world.clock.advance(6.0)
        world.receiver.settle()
        assert not world.failed
        assert world.receiver.store.num_held == 0
        assert not world.sink.slots
        assert not world.landed
        assert world.receiver.store.host_cache.used_bytes <= kept_rows * ROW_BYTES
        assert not world.receiver.store.host_cache._lent
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

    async def scenario() -> tuple[int, World]:
        world = World(100 * ROW_BYTES, keeping(mode, 100, is_prefix_cached))
        for number in range(num_requests):
            await serve(world, f"r{number}", float(number))
        return world.num_announced, world

    return asyncio.run(scenario())


def test_what_was_kept_is_not_asked_for_again() -> None:
    num_announced, world = asked("always", True, 4)
    assert (num_announced, world.receiver.store.stats.num_kept_hits) == (1, 3)
    assert world.receiver.store.host_cache.used_bytes == 2 * ROW_BYTES
    assert not world.sink.slots


def test_auto_keeps_from_the_second_time_on() -> None:
    num_announced, world = asked("auto", True, 5)
    assert (num_announced, world.receiver.store.stats.num_kept_hits) == (2, 3)


def test_never_keeps_nothing() -> None:
    num_announced, world = asked("never", False, 3)
    store = world.receiver.store
    assert (num_announced, store.stats.num_kept_hits, store.host_cache.used_bytes) == (3, 0, 0)


def test_an_item_counts_as_kept_while_all_of_its_units_are() -> None:
    log = FeatureLog(MemberId("worker"), 3)
    cache = HostCache(BUDGET, FeatureStats(), log)
    first, second = (UnitKey(MmHash("film"), number) for number in (0, 1))
    cache.put(first, landed(1, 4), 2)
    assert log.drain() == []
    cache.put(second, landed(1, 4), 2)
    assert [message.stored for message in log.drain()] == [("film",)]
    cache.lend(first)
    assert log.drain() == [], "a feature that is lent is still there"
    cache.put(unit_of("a"), landed(1, 6), 1)
    assert [(message.stored, message.removed) for message in log.drain()] == [((), ("film",)), (("a",), ())]
    cache.clear()
    assert log.snapshot().stored == ()


def test_routers_know_what_is_kept_and_are_asked_at_once_when_it_is_gone() -> None:
    """The inbox's clock never moves, so nothing here waits for a time-out."""

    async def scenario() -> None:
        world, seen = World(100 * ROW_BYTES, keeping("always", 2, True)), KeptItems()
        await serve(world, "r0", 0.0)
        seen.follow(world.receiver.kept_log)
        assert seen.items == {unit_of("a").mm_hash}
        await serve(world, "r1", 1.0)
        assert world.num_announced == 1, "the request was sent to no encoder, and the worker uses what it keeps"
        world.receiver.store.distrust([unit_of("a")])
        seen.follow(world.receiver.kept_log)
        assert seen.items == set()
        await serve(world, "r2", 2.0)
        assert world.num_announced == 2, "the worker has asked for what it does not keep any more"

    asyncio.run(scenario())
