"""Checks the line before the decoders: later items pass an item that has no room, until it is due; from then on it
waits for no item that began after that moment."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_pool.planning import DecodeLine, DecodeRoom, EncodeJob, EncodeJobs, waiter_of
from encoder_pool.planning.encode_job import Phase
from fabric.contracts import CallTurn, Destination, EncodeRequest, MediaItem, MemberId, MmHash, RequestId, UnitKey
from modalities.family import EncoderInput

PASSED_S = 3.0
ROOM = DecodeRoom(max_cost=20, max_items=6, max_long_cost=14, max_long_items=2, max_decode_bytes=100)
PIXELS = np.zeros((1, 1), np.float32)


class World:
    """Holds the jobs, the items that are being decoded, and the line; a decoded item is encoded when the test says
    so."""

    def __init__(self, passed_s: float = PASSED_S) -> None:
        self.jobs = EncodeJobs(4.0, lambda modality, cost: float(cost))
        self.being_decoded: dict[EncodeJob, None] = {}
        self.blocked: set[MemberId] = set()
        self.line = DecodeLine(
            self.jobs, ROOM, self.being_decoded.keys(), passed_s, lambda worker_id: worker_id in self.blocked
        )
        self.now_s = 0.0
        self.num_arrived = 0

    def arrive(self, worker: str, cost: int, decode_bytes: int = 0, num_units: int = 1) -> EncodeJob:
        self.num_arrived += 1
        name = f"item-{self.num_arrived}"
        item = MediaItem(0, "image", MmHash(name), (1, 1, 1), (1,) * num_units, cost, "part")
        item = msgspec.structs.replace(item, decode_bytes=decode_bytes)
        age, destination = (self.now_s, name), Destination(MemberId(worker), f"local://{worker}")
        request = EncodeRequest(RequestId(name), 0, MemberId("router"), (item,), destination, age)
        turn = CallTurn(self.num_arrived, age, self.now_s)
        return self.jobs.join(waiter_of(request, turn, item, b"file", self.now_s))

    def begin(self) -> list[EncodeJob]:
        """Begins all items that have room now and returns them."""
        begun = []
        while job := self.line.next(self.now_s, has_shares=True):
            assert job.phase is Phase.WAITING
            self.jobs.decode_started(job)
            self.being_decoded[job] = None
            begun.append(job)
            self.check_room()
        return begun

    def check_room(self) -> None:
        totals = self.jobs.totals
        assert totals.num_prepared <= ROOM.max_items
        assert totals.num_prepared == 1 or self.jobs.decoded_cost <= ROOM.max_cost
        nbytes = sum(job.item.decode_bytes for job in self.being_decoded)
        assert len(self.being_decoded) == 1 or nbytes <= ROOM.max_decode_bytes

    def decode(self, job: EncodeJob) -> None:
        del self.being_decoded[job]
        inputs = [EncoderInput("image", PIXELS, (1, 1, 1)) for _ in job.item.unit_tokens]
        self.jobs.decoded(job, inputs)

    def encode(self, job: EncodeJob) -> None:
        """Ends the item; an item that is still being decoded is decoded first."""
        if job in self.being_decoded:
            self.decode(job)
        for waiter in list(job.waiters):
            self.jobs.leave(waiter)
        self.jobs.check_invariants()


ARRIVALS = st.tuples(
    st.sampled_from(["w-1", "w-2", "w-3"]), st.integers(1, 24), st.sampled_from([0, 10, 40, 90]), st.integers(1, 2)
)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_nothing_that_is_due_waits_for_what_began_after_it_was(data: st.DataObject) -> None:
    """Room stays within its budgets, other items continue while there is room in addition to the due item's, and a due
    item begins when the items that were there before it have gone."""
    world = World()
    active: list[EncodeJob] = []
    due: tuple[EncodeJob, set[EncodeJob]] | None = None
    for _ in range(data.draw(st.integers(5, 40))):
        for arrival in data.draw(st.lists(ARRIVALS, max_size=3)):
            world.arrive(*arrival)
        begun = world.begin()
        active += begun
        first = world.line._first
        if due is not None and (due[0] in begun or due[0] is not first):
            assert due[0] in begun, "room is kept for it until it begins"
            due = None
        if due is None and first is not None and world.line._refused.is_due(world.now_s):
            due = (first, set(active))
        if due is not None:
            due[1].intersection_update(active)
            may_be_long = world.jobs.totals.num_long_decoding < ROOM.max_long_items
            assert due[1] or (due[0].is_long and not may_be_long), "what was there before it is gone, and it waits"
        world.now_s += 1.0
        for job in data.draw(st.lists(st.sampled_from(active), unique=True)) if active else ():
            world.encode(job)
            active.remove(job)
    for _ in range(2 * world.num_arrived):
        world.now_s += PASSED_S
        active += world.begin()
        while active:
            world.encode(active.pop())
    assert not list(world.jobs), "an item waits for ever"


def test_what_is_due_gets_the_room_of_what_can_not_go_on() -> None:
    """The line names items that are decoded for a blocked worker, last in line first, until there is room. It never
    names items that another worker wants too, items with a unit in the forward pass, or any item before one is due."""
    world = World()
    held = [world.arrive("stuck", 4) for _ in range(2)]
    shared = world.arrive("stuck", 3)
    waiter = next(iter(shared.waiters))
    assert world.begin() == [shared, *held]
    for job in held:
        world.decode(job)
    world.decode(shared)
    world.blocked.add(MemberId("stuck"))
    large = world.arrive("well", 16)
    assert world.begin() == []
    assert world.line.in_the_way(world.now_s) is None, "it is not due"
    assert world.begin() == []
    small = world.arrive("well", 1)
    world.now_s += PASSED_S / 2
    assert world.begin() == [small]
    world.encode(small)
    world.now_s += PASSED_S / 2
    world.jobs.forward_started(UnitKey(shared.item.mm_hash, 0))
    for job in reversed(held):
        assert world.line.in_the_way(world.now_s) is job
        world.jobs.end(job)
        assert world.begin() == ([] if job is held[1] else [large])
    assert world.line.in_the_way(world.now_s) is None
    assert waiter in shared.waiters


def test_one_item_is_decoded_ahead_for_a_worker_that_can_not_use_it() -> None:
    world = World()
    world.blocked.add(MemberId("stuck"))
    ahead = world.arrive("stuck", 1)
    assert world.begin() == [ahead]
    world.decode(ahead)
    waiting = world.arrive("stuck", 1)
    other = world.arrive("well", 1)
    assert world.begin() == [other]
    world.blocked.clear()
    assert world.begin() == [waiting]


def put_back(world: World, job: EncodeJob) -> EncodeJob:
    """Puts a job back as the pipeline does: its waiters then wait for another job."""
    world.being_decoded.pop(job, None)
    waiters = world.jobs.end(job)
    (again,) = [world.jobs.join(waiter) for waiter in waiters]
    return again


def test_nothing_gives_way_in_vain() -> None:
    """The due item would find no room without the stuck worker's items either, because a healthy worker's item is in
    its way too."""
    world = World()
    stuck, healthy = world.arrive("stuck", 4), world.arrive("busy", 12)
    assert world.begin() == [stuck, healthy]
    for job in (stuck, healthy):
        world.decode(job)
    world.blocked.add(MemberId("stuck"))
    due = world.arrive("well", 10)
    assert world.begin() == []
    world.now_s += PASSED_S
    assert world.line.in_the_way(world.now_s) is None
    world.encode(healthy)
    assert world.begin() == [due]


def test_what_gave_way_is_not_begun_again_before_what_it_gave_way_to() -> None:
    world = World()
    held = [world.arrive("stuck", 4) for _ in range(2)]
    assert world.begin() == held
    for job in held:
        world.decode(job)
    world.blocked.add(MemberId("stuck"))
    due = world.arrive("well", 18)
    assert world.begin() == []
    world.now_s += PASSED_S
    first = world.line.in_the_way(world.now_s)
    assert first is held[1]
    put_back(world, first)
    assert world.begin() == []
    second = world.line.in_the_way(world.now_s)
    assert second is held[0]
    again = put_back(world, second)
    assert world.begin() == [due]
    world.encode(due)
    assert again in world.begin()


def test_what_gave_way_does_not_take_the_room_that_it_gave() -> None:
    """The item would fit next to the due one, for which another item has to give way too; without this rule the two
    would take turns forever."""
    world = World()
    held = [world.arrive("stuck-1", 4)]
    world.now_s += 100.0
    held.append(world.arrive("stuck-2", 2))
    assert world.begin() == held, "the older one is first in line"
    for job in held:
        world.decode(job)
        world.blocked.update(waiter.destination.worker_id for waiter in job.waiters)
    due = world.arrive("well", 18)
    assert world.begin() == []
    world.now_s += PASSED_S
    assert world.line.in_the_way(world.now_s) is held[1]
    again = put_back(world, held[1])
    assert world.begin() == []
    assert world.line.in_the_way(world.now_s) is held[0]
    put_back(world, held[0])
    assert world.begin() == [due, again]


def test_what_is_due_is_passed_by_no_more_than_fits_beside_it_together() -> None:
    world = World()
    before = world.arrive("w-1", 8)
    assert world.begin() == [before]
    due = world.arrive("w-2", 14)
    assert world.begin() == []
    world.now_s += PASSED_S
    small = [world.arrive(worker, 4) for worker in ("w-3", "w-4")]
    assert world.begin() == small[:1], "each alone leaves 14 of 20, both do not"
    world.encode(before)
    assert world.begin() == [due]
    world.encode(small[0])
    assert world.begin() == small[1:]


@pytest.mark.parametrize("is_decoding_older", [False, True])
def test_memory_is_given_back_by_what_is_being_decoded_alone(is_decoding_older: bool) -> None:
    world = World()
    pair = [world.arrive("stuck", 1, decode_bytes=nbytes) for nbytes in (60, 30)]
    assert world.begin() == pair
    decoding, decoded = pair if is_decoding_older else reversed(pair)
    world.decode(decoded)
    world.blocked.add(MemberId("stuck"))
    due = world.arrive("well", 1, decode_bytes=90)
    assert world.begin() == []
    world.now_s += PASSED_S
    assert world.line.in_the_way(world.now_s) is decoding
    put_back(world, decoding)
    assert world.line.in_the_way(world.now_s) is None
    assert world.begin() == [due]


def test_a_worker_that_is_blocked_for_a_moment_keeps_its_place() -> None:
    """The time until an item is due continues meanwhile; an item whose worker stays blocked gives up its place."""
    world = World()
    others = [world.arrive("busy", 6) for _ in range(3)]
    assert world.begin() == others
    large = world.arrive("well", 14)
    assert world.begin() == []
    for _ in range(2):
        world.now_s += PASSED_S / 3
        world.blocked.add(MemberId("well"))
        assert world.begin() == []
        world.blocked.clear()
        assert world.begin() == []
    world.now_s += PASSED_S / 3
    world.encode(others.pop())
    small = world.arrive("busy", 7)
    assert world.begin() == [], "the item is due, and there is no room for both"
    world.blocked.add(MemberId("well"))
    assert world.begin() == []
    world.now_s += PASSED_S
    assert world.begin() == [small], "room is kept for it no longer"
    world.blocked.clear()
    for job in (*others, small):
        world.encode(job)
    assert world.begin() == [large]
