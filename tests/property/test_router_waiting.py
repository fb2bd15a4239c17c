"""Checks the queue of requests that wait for capacity over random histories: order, deadlines, no herd of released
requests, and no forgotten request."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from planning_samples import BLOCK_SIZE, SHAPE, encoder_member, image, query, worker_member

from fabric.contracts import MemberId, NoCapacity
from router.planning import CapacityNeed, CapacityQueue, ClusterState, KvRoom, RoomNeed, Waiter
from router.planning.capacity_queue import MIN_DROPPED

MODALITIES = ("image", "audio")
MEMBERS = tuple(MemberId(f"member-{index}") for index in range(4))
FIRST_ON_THE_WAY = 2
SECONDS = st.sampled_from([0.5, 1.0, 2.0, 5.0])


class Members:
    """`Members` is a `Supply`: each member is a worker (which has no modality) or an encoder, and may be excluded until
    some time. Its workers have room for everything."""

    def __init__(self) -> None:
        self.there: dict[MemberId, frozenset[str]] = {}
        self.aside_until_s: dict[MemberId, float] = {}

    def can_serve(self, modalities: frozenset[str], excluded: frozenset[MemberId], now: float) -> bool:
        usable = [
            served
            for member_id, served in self.there.items()
            if member_id not in excluded and self.aside_until_s.get(member_id, now) <= now
        ]
        return frozenset() in usable and modalities <= frozenset().union(*usable)

    def room(self, need: RoomNeed, excluded: frozenset[MemberId], now: float) -> KvRoom:
        return KvRoom("now")

    def next_return_s(self, now: float) -> float | None:
        return min((until for until in self.aside_until_s.values() if until > now), default=None)


class Waiting(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.num_joined = 0
        self.members = Members()
        self.queue = CapacityQueue(self.members, FIRST_ON_THE_WAY)
        self.limit = dict.fromkeys((False, True), FIRST_ON_THE_WAY)
        """Maps whether requests have media to the number of them that may be on the way."""
        self.waiting: list[Waiter] = []
        self.on_the_way: list[Waiter] = []

    def begin_line(self, has_media: bool) -> None:
        if not any(other.has_media == has_media for other in self.waiting):
            self.limit[has_media] = FIRST_ON_THE_WAY

    def is_held_back(self, waiter: Waiter) -> bool:
        return sum(other.has_media == waiter.has_media for other in self.on_the_way) >= self.limit[waiter.has_media]

    def is_served(self, waiter: Waiter) -> bool:
        return self.members.can_serve(waiter.need.modalities, waiter.need.excluded(self.now), self.now)

    @rule(
        modalities=st.frozensets(st.sampled_from(MODALITIES)),
        limit_s=SECONDS,
        excluded=st.dictionaries(st.sampled_from(MEMBERS), SECONDS, max_size=2),
    )
    def join(self, modalities: frozenset[str], limit_s: float, excluded: dict[MemberId, float]) -> None:
        self.num_joined += 1
        ends_s = frozenset((member_id, self.now + seconds) for member_id, seconds in excluded.items())
        waiter = Waiter((float(self.num_joined), ""), CapacityNeed(modalities, ends_s), self.now + limit_s)
        rivals = [other for other in self.waiting if waiter.has_media or not other.has_media]
        assert self.queue.must_wait(waiter, self.now) == any(self.is_served(other) for other in rivals)
        self.begin_line(waiter.has_media)
        self.queue.join(waiter)
        self.waiting.append(waiter)

    @precondition(lambda self: self.on_the_way)
    @rule(which=st.integers(0), has_arrived=st.booleans(), limit_s=SECONDS)
    def arrive(self, which: int, has_arrived: bool, limit_s: float) -> None:
        """Ends the wait of a released request: the request either gets its token, or finds that the member has left
        again and takes its old place in the queue."""
        waiter = self.on_the_way.pop(which % len(self.on_the_way))
        for _ in range(2):  # the second call changes nothing
            self.queue.leave(waiter, has_arrived)
        self.limit[waiter.has_media] += has_arrived
        if not has_arrived:
            self.begin_line(waiter.has_media)
            again = Waiter(waiter.age, waiter.need, self.now + limit_s)
            self.queue.join(again)
            self.waiting.append(again)
            self.waiting.sort(key=lambda each: each.age)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0))
    def leave(self, which: int) -> None:
        self.queue.leave(self.waiting.pop(which % len(self.waiting)))

    @rule(member_id=st.sampled_from(MEMBERS), serves=st.sampled_from([(), ("image",), ("audio",), MODALITIES]))
    def come(self, member_id: MemberId, serves: tuple[str, ...]) -> None:
        self.members.there[member_id] = frozenset(serves)

    @rule(member_id=st.sampled_from(MEMBERS))
    def go(self, member_id: MemberId) -> None:
        self.members.there.pop(member_id, None)

    @rule(member_id=st.sampled_from(MEMBERS), seconds=SECONDS)
    def set_aside(self, member_id: MemberId, seconds: float) -> None:
        self.members.aside_until_s[member_id] = self.now + seconds

    @rule(share=st.sampled_from([0.25, 0.5, 0.999]))
    def sleep_until_woken(self, share: float) -> None:
        """Sleeps as the event loop does: it ends everything that can end, then looks at nothing before `next_at_s`."""
        self.release()
        next_s = self.queue.next_at_s(self.now)
        assert (next_s is None) == (not self.waiting)
        if next_s is not None:
            assert next_s > self.now
            early_s = self.now + (next_s - self.now) * share
            if not any(self.is_held_back(waiter) for waiter in self.waiting):
                assert self.queue.take(early_s) is None, "somebody was to be woken earlier"
            self.now = next_s
            self.release()

    @rule()
    def release(self) -> None:
        while (turn := self.queue.take(self.now)) is not None:
            waiter, is_served = turn
            assert is_served == self.is_served(waiter)
            is_late = waiter.deadline_s <= self.now
            if is_served:
                older = [each for each in self.waiting if each.age < waiter.age and self.is_served(each)]
                assert all(map(self.is_held_back, older)) or is_late, "a younger one was released first"
                assert not self.is_held_back(waiter) or is_late, "a herd"
                self.on_the_way.append(waiter)
            else:
                assert is_late, "given up before its time"
            self.waiting.remove(waiter)
        for waiter in self.waiting:
            assert waiter.deadline_s > self.now, "forgotten at its deadline"
            assert not self.is_served(waiter) or self.is_held_back(waiter), "forgotten"

    @invariant()
    def counts(self) -> None:
        assert self.queue.num_waiting == len(self.waiting)
        assert self.queue.num_on_the_way == len(self.on_the_way)


TestWaiting = Waiting.TestCase


NAMES = ("w0", "w1", "e0", "e1")


@given(
    there=st.sets(st.sampled_from(NAMES)),
    aside=st.dictionaries(st.sampled_from(NAMES), st.sampled_from([1.0, 2.0, 3.0])),
    excluded=st.sets(st.sampled_from(NAMES), max_size=2),
    wanted=st.lists(st.sampled_from(MODALITIES), max_size=2),
    now=st.sampled_from([0.0, 1.0, 2.0]),
)
def test_who_is_released_finds_a_route(
    there: set[str], aside: dict[str, float], excluded: set[str], wanted: list[str], now: float
) -> None:
    """Checks that `can_serve` and the planner agree; otherwise a released request would return and wait again at
    once."""
    state = ClusterState(SHAPE, BLOCK_SIZE, random.Random(3))
    known = {"w0": worker_member("w0"), "w1": worker_member("w1"), "e0": encoder_member("e0")}
    known["e1"] = encoder_member("e1", modalities=("audio",))
    state.update_members([known[name] for name in sorted(there)])
    for name, until in aside.items():
        state.exclude(MemberId(name), until)
    request = query(10, *(image(at, modality=modality) for at, modality in enumerate(wanted)), excluded=list(excluded))
    try:
        state.plan(request, now)
        has_route = True
    except NoCapacity:
        has_route = False
    assert state.can_serve(frozenset(wanted), request.excluded, now) == has_route
    returns_s = [until for name, until in aside.items() if name in there and until > now]
    assert state.next_return_s(now) == min(returns_s, default=None)


def test_a_line_that_most_have_left_forgets_them_and_keeps_its_order() -> None:
    members = Members()
    queue = CapacityQueue(members, 100)
    waiters = [Waiter((float(age), ""), CapacityNeed(), 1000.0 - age) for age in range(100)]
    random.Random(3).shuffle(waiters)
    for waiter in waiters:
        queue.join(waiter)
    leaving, staying = waiters[:80], waiters[80:]
    for waiter in leaving:
        queue.leave(waiter)
    late = Waiter((-1.0, ""), CapacityNeed(), 2000.0)
    queue.join(late)
    assert queue.num_waiting == 21
    for line in (queue._by_deadline, *queue._lines.values()):
        assert len(line._entries) <= 2 * 21 + MIN_DROPPED
    assert queue.next_at_s(0.0) == min(waiter.deadline_s for waiter in staying)
    members.there[MEMBERS[0]] = frozenset()
    released = [queue.take(0.0) for _ in range(21)]
    assert [turn.waiter for turn in released if turn] == [late, *sorted(staying)]
