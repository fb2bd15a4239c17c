"""Checks who goes next when requests wait for blocks: fairness between tenants by what was really used, classes and
their ageing, no request kept out for ever, and no text behind media."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fabric.contracts import MemberId, WaitingWork
from router.planning import CapacityNeed, CapacityQueue, KvRoom, RoomNeed, Standing, TenantShares, Waiter
from router.planning.capacity_queue import MAX_PASSED_OVER, RESERVE_AFTER_S, RESERVE_FOR_S

TENANT_TO_WEIGHT = {"a": 1.0, "b": 2.0, "c": 0.5}
TENANTS = st.sampled_from(sorted(TENANT_TO_WEIGHT))
IMAGE = frozenset({"image"})


@dataclass
class Pools:
    """`Pools` is a `Supply` of workers with blocks of one token. Encoders are there or not."""

    total: dict[MemberId, int]
    has_encoder: bool = True
    used: dict[MemberId, int] = field(default_factory=dict)

    def free(self, worker_id: MemberId) -> int:
        return self.total[worker_id] - self.used.get(worker_id, 0)

    def can_serve(self, modalities: frozenset[str], excluded: frozenset[MemberId], now: float) -> bool:
        return self.has_encoder or not modalities

    def next_return_s(self, now: float) -> float | None:
        return None

    def room(self, need: RoomNeed, excluded: frozenset[MemberId], now: float) -> KvRoom:
        size = need.num_prompt_tokens
        fitting = [each for each, total in self.total.items() if size <= total]
        if not fitting:
            return KvRoom("never")
        usable = [each for each in fitting if each not in excluded]
        if not usable:
            return KvRoom("later")
        spare = {each: self.free(each) - need.headroom * self.total[each] for each in usable}
        nearest = max(usable, key=lambda each: (spare[each], each))
        return KvRoom("now" if spare[nearest] >= size else "later", nearest=nearest)


# ------------------------------------------------------------ fairness


@given(
    services=st.lists(st.tuples(st.sampled_from([1.0, 5.0, 20.0]), st.sampled_from([0.5, 1.0, 2.0])), min_size=30),
    idle_for=st.integers(0, 20),
)
def test_tenants_that_always_wait_get_shares_by_weight(services: list[tuple[float, float]], idle_for: int) -> None:
    """Each service is predicted and corrected once it has ended, some services later. What two tenants got by weight,
    since both wait, never differs by more than what one service of each can cost."""
    shares = TenantShares(TENANT_TO_WEIGHT)
    for _ in range(idle_for):
        shares.charge("a", 20.0)
    for tenant in TENANT_TO_WEIGHT:
        shares.begin_waiting(tenant)
    got = dict.fromkeys(TENANT_TO_WEIGHT, 0.0)
    begins = {tenant: shares.time_of(tenant) for tenant in TENANT_TO_WEIGHT}
    assert max(begins.values()) - min(begins.values()) <= 20.0, "the time alone gave no credit and no debt"
    for predicted, error in services:
        tenant = min(TENANT_TO_WEIGHT, key=lambda each: (shares.time_of(each), each))
        shares.charge(tenant, predicted)
        shares.correct(tenant, predicted * error - predicted)
        got[tenant] += predicted * error
        normal = {each: begins[each] + got[each] / TENANT_TO_WEIGHT[each] for each in TENANT_TO_WEIGHT}
        for each, time in normal.items():
            assert abs(shares.time_of(each) - time) < 1e-6
        most = 40.0 / min(TENANT_TO_WEIGHT.values())
        assert max(normal.values()) - min(normal.values()) <= most


def test_idleness_gives_no_credit() -> None:
    shares = TenantShares()
    shares.begin_waiting("busy")
    for _ in range(100):
        shares.charge("busy", 10.0)
    shares.begin_waiting("late")
    assert shares.time_of("late") == 990.0, "it begins where the last request that was served began"
    assert shares.time_of("busy") == 1000.0
    shares.end_waiting("late")
    shares.charge("busy", 10.0)
    shares.correct("late", -500.0)
    assert shares.time_of("late") == 1000.0


# ------------------------------------------------------------ the queue


class Admitting(RuleBasedStateMachine):
    """Requests of three tenants wait for the blocks of two workers, and return them when they end."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pools = Pools({MemberId("w0"): 8, MemberId("w1"): 12})
        self.queue = CapacityQueue(self.pools, shares=TenantShares(TENANT_TO_WEIGHT))
        self.waiting: list[Waiter] = []
        self.running: list[tuple[MemberId, int]] = []
        self.num_joined = 0

    def newcomer(self, size: int, tenant: str, is_batch: bool, modalities: frozenset[str], priority: int) -> Waiter:
        self.num_joined += 1
        return Waiter(
            (float(self.num_joined), ""),
            CapacityNeed(modalities),
            1e9,
            Standing(tenant, priority, is_batch, self.now + 10.0),
            RoomNeed(size, headroom=0.25),
            since_s=self.now,
            lacks_members=bool(modalities) and not self.pools.has_encoder,
        )

    @rule(
        size=st.integers(1, 12),
        tenant=TENANTS,
        is_batch=st.booleans(),
        modalities=st.sampled_from([frozenset(), IMAGE]),
        priority=st.integers(-1, 1),
    )
    def come(self, size: int, tenant: str, is_batch: bool, modalities: frozenset[str], priority: int) -> None:
        waiter = self.newcomer(size, tenant, is_batch, modalities, priority)
        if not self.pools.can_serve(modalities, frozenset(), self.now) or self.queue.must_wait(waiter, self.now):
            self.queue.join(waiter)
            self.waiting.append(waiter)
        else:
            self.begin(waiter)

    def begin(self, waiter: Waiter) -> None:
        """Sends the request to the worker with the most room, as a plan would, and charges its tenant."""
        assert waiter.room is not None
        size, kept = waiter.room.num_prompt_tokens, self.queue.reserved_from(waiter)
        usable = [each for each in self.pools.total if each not in kept and self.pools.free(each) >= size]
        assert usable, "a request was released without room"
        worker_id = max(usable, key=lambda each: (self.pools.free(each), each))
        self.pools.used[worker_id] = self.pools.used.get(worker_id, 0) + size
        self.running.append((worker_id, size))
        self.queue.shares.charge(waiter.standing.tenant, float(size))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0))
    def end(self, which: int) -> None:
        worker_id, size = self.running.pop(which % len(self.running))
        self.pools.used[worker_id] -= size
        self.release()

    @rule(is_there=st.booleans())
    def turn_encoder(self, is_there: bool) -> None:
        self.pools.has_encoder = is_there
        self.release()

    @rule(seconds=st.sampled_from([0.1, 2.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.release()

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0))
    def give_up(self, which: int) -> None:
        self.queue.leave(self.waiting.pop(which % len(self.waiting)))
        self.release()

    def release(self) -> None:
        while (turn := self.queue.take(self.now)) is not None:
            assert turn.is_served
            self.waiting.remove(turn.waiter)
            for other in self.waiting:
                self.check_order(turn.waiter, other)
            self.begin(turn.waiter)
            self.queue.leave(turn.waiter, has_arrived=True)

    def check_order(self, released: Waiter, other: Waiter) -> None:
        """Asserts that requests of one line, size and standing are released by age, and that no request of the class
        `batch` takes room while an interactive request waits for it."""
        assert released.room is not None
        assert other.room is not None
        if released.line == other.line and released.room == other.room and released.standing == other.standing:
            assert released.age < other.age
        is_servable = self.pools.can_serve(other.need.modalities, frozenset(), self.now)
        if released.standing.is_spare(self.now) and is_servable:
            ahead = sum(each.line == other.line and each is not other for each in self.waiting)
            assert other.standing.is_spare(self.now) or ahead >= MAX_PASSED_OVER

    @invariant()
    def nothing_is_forgotten(self) -> None:
        self.release()
        assert self.queue.num_waiting == len(self.waiting)
        assert all(used <= self.pools.total[each] for each, used in self.pools.used.items())

    def teardown(self) -> None:
        """Asserts that each request that still waits gets in, although another tenant keeps sending small requests."""
        self.pools.has_encoder = True
        self.now += 20.0
        for _ in range(400):
            self.release()
            if not self.waiting:
                break
            self.now += RESERVE_AFTER_S
            for _ in range(3):
                waiter = self.newcomer(2, "b", is_batch=False, modalities=frozenset(), priority=0)
                if not self.queue.must_wait(waiter, self.now):
                    self.begin(waiter)
            if self.running:
                worker_id, size = self.running.pop(0)
                self.pools.used[worker_id] -= size
        assert not self.waiting, "a request was kept out for ever"


TestAdmitting = Admitting.TestCase
TestAdmitting.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(num_media=st.integers(1, 40), has_encoder=st.booleans())
@settings(deadline=None)
def test_text_passes_any_number_of_requests_with_media(num_media: int, has_encoder: bool) -> None:
    """A request without media does not wait for those that lack an encoder, nor for those that an encoder's return
    releases little by little."""
    pools = Pools({MemberId("w0"): 1000}, has_encoder=False)
    queue = CapacityQueue(pools, first_on_the_way=2)
    for number in range(num_media):
        queue.join(Waiter((float(number), ""), CapacityNeed(IMAGE), 100.0, room=RoomNeed(1)))
    pools.has_encoder = has_encoder
    text = Waiter((1000.0, ""), CapacityNeed(), 100.0, room=RoomNeed(1), lacks_members=False)
    assert not queue.must_wait(text, 1.0)
    while (turn := queue.take(1.0)) is not None:
        assert turn.waiter.has_media
    assert queue.num_on_the_way == (min(num_media, 2) if has_encoder else 0)
    queue.join(text)
    turn = queue.take(1.0)
    assert turn is not None
    assert turn.waiter is text


def test_tenants_with_equal_weights_take_turns_by_what_their_requests_cost() -> None:
    """One tenant's requests take three times as many blocks, so the other one gets three requests for each of them."""
    pools = Pools({MemberId("w0"): 3})
    queue = CapacityQueue(pools)
    pools.used[MemberId("w0")] = 3
    for number in range(40):
        queue.join(Waiter((2.0 * number, ""), CapacityNeed(), 100.0, Standing("large"), RoomNeed(3)))
        queue.join(Waiter((2.0 * number + 1, ""), CapacityNeed(), 100.0, Standing("small"), RoomNeed(1)))
    pools.used.clear()
    order = []
    for _ in range(24):
        turn = queue.take(0.0)
        assert turn is not None
        assert turn.waiter.room is not None
        order.append(turn.waiter.standing.tenant)
        queue.shares.charge(order[-1], float(turn.waiter.room.num_prompt_tokens))
        queue.leave(turn.waiter, has_arrived=True)
    assert order.count("large") == 6


def test_a_batch_request_waits_for_spare_room_until_it_has_aged() -> None:
    pools = Pools({MemberId("w0"): 8})
    queue = CapacityQueue(pools)
    pools.used[MemberId("w0")] = 5
    batch = Waiter((1.0, ""), CapacityNeed(), 100.0, Standing("", 0, True, 30.0), RoomNeed(2, headroom=0.25))
    assert queue.must_wait(batch, 0.0), "two of eight blocks must stay free"
    queue.join(batch)
    late = Waiter((2.0, ""), CapacityNeed(), 100.0, room=RoomNeed(3))
    assert not queue.must_wait(late, 0.0), "an interactive request goes ahead"
    assert queue.take(29.9) is None
    assert queue.next_at_s(0.0) == 30.0
    turn = queue.take(30.0)
    assert turn is not None
    assert turn.waiter is batch


def test_a_large_request_reserves_the_worker_that_is_nearest() -> None:
    w0, w1 = MemberId("w0"), MemberId("w1")
    pools = Pools({w0: 10, w1: 10}, used={w0: 9, w1: 5})
    queue = CapacityQueue(pools)
    large = Waiter((1.0, ""), CapacityNeed(), 100.0, room=RoomNeed(8), lacks_members=False)
    small = Waiter((2.0, ""), CapacityNeed(), 100.0, room=RoomNeed(2), lacks_members=False)
    queue.join(large)
    assert not queue.must_wait(small, 0.5)
    assert queue.reserved_from(small) == frozenset()
    assert queue.must_wait(small, RESERVE_AFTER_S), "the only room is at the worker that the large one drains"
    assert queue.reserved_from(small) == {w1}
    assert queue.reserved_from(large) == frozenset()
    pools.used[w0] = 0
    turn = queue.take(1.0)
    assert turn is not None
    assert turn.waiter is large
    assert queue.reserved_from(small) == frozenset()


def test_a_reservation_ends_when_its_request_can_use_no_worker() -> None:
    """The request has reserved the only worker, and then its encoder dies: texts must not wait for its deadline."""
    w0 = MemberId("w0")
    pools = Pools({w0: 10}, used={w0: 5})
    queue = CapacityQueue(pools)
    large = Waiter((1.0, ""), CapacityNeed(IMAGE), 1000.0, room=RoomNeed(8), lacks_members=False)
    queue.join(large)
    small = Waiter((2.0, ""), CapacityNeed(), 1000.0, room=RoomNeed(2), lacks_members=False)
    assert queue.must_wait(small, RESERVE_AFTER_S)
    assert queue.reserved_from(small) == {w0}
    pools.has_encoder = False
    assert not queue.must_wait(small, RESERVE_AFTER_S + RESERVE_FOR_S)
    assert queue.reserved_from(small) == frozenset()
    pools.has_encoder = True
    assert queue.must_wait(small, RESERVE_AFTER_S + RESERVE_FOR_S)
    pools.used[w0] = 0
    turn = queue.take(10.0 * RESERVE_FOR_S)
    assert turn is not None
    assert turn.waiter is large, "a reservation that ends while there is room is still kept"


def test_only_requests_that_go_first_are_ahead() -> None:
    pools = Pools({MemberId("w0"): 10}, used={MemberId("w0"): 10})
    queue = CapacityQueue(pools)
    batch = Standing("", 0, True, ages_at_s=30.0)
    for number, (need, standing, size) in enumerate(
        [(CapacityNeed(), batch, 1), (CapacityNeed(IMAGE), Standing(), 2), (CapacityNeed(), Standing(), 4)]
    ):
        queue.join(Waiter((float(number), ""), need, 100.0, standing, RoomNeed(size)))

    def ahead(need: CapacityNeed, standing: Standing, now: float = 0.0) -> int:
        return queue.num_tokens_ahead(Waiter((9.0, ""), need, 100.0, standing, RoomNeed(1)), now)

    assert ahead(CapacityNeed(), Standing()) == 4
    assert ahead(CapacityNeed(IMAGE), Standing()) == 2 + 4
    assert ahead(CapacityNeed(), batch) == 1 + 4
    assert ahead(CapacityNeed(), Standing(), now=30.0) == 1 + 4
    pools.used.clear()
    while (turn := queue.take(0.0)) is not None:
        queue.leave(turn.waiter, has_arrived=True)
    assert ahead(CapacityNeed(IMAGE), batch) == 0


def test_the_work_of_requests_whose_members_are_missing_is_left_out() -> None:
    pools = Pools({MemberId("w0"): 1}, has_encoder=False)
    queue = CapacityQueue(pools)
    text_work, media_work = WaitingWork(2.0, 0.5), WaitingWork(1.0, 0.25, 4.0)
    waiters = [
        Waiter((float(number), ""), need, 100.0, room=RoomNeed(2), work=work)
        for number, (need, work) in enumerate([(CapacityNeed(), text_work), (CapacityNeed(IMAGE), media_work)] * 2)
    ]
    for waiter in waiters:
        queue.join(waiter)
    assert queue.waiting_work(1.0) == (WaitingWork(4.0, 1.0, 0.0),)
    pools.has_encoder = True
    assert queue.waiting_work(1.0) == (WaitingWork(6.0, 1.5, 8.0),)
    barred = WaitingWork(1.0, 0.25, barred_pools=("small",))
    queue.join(Waiter((9.0, ""), CapacityNeed(), 100.0, room=RoomNeed(2), work=barred))
    assert set(queue.waiting_work(1.0)) == {WaitingWork(6.0, 1.5, 8.0), barred}
    waiters += [each for each in queue._waiting if each.work is barred]
    for waiter in waiters:
        queue.leave(waiter)
    assert queue.waiting_work(1.0) == ()
