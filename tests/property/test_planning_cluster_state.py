"""Checks the router's picture of the cluster under any order of messages: the router makes a plan or raises
`NoCapacity`, never fails otherwise, and forgets all load in the end."""

import random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from planning_samples import (
    BLOCK_SIZE,
    SCHEME,
    SHAPE,
    encoder_member,
    encoder_report,
    image,
    query,
    views_of,
    worker_member,
    worker_report,
)

from fabric.contracts import (
    BlocksRemoved,
    BlocksStored,
    EncodeResult,
    FeatureEvents,
    GenerateResult,
    ItemResult,
    KvEvent,
    KvEvents,
    KvSnapshot,
    MediaItem,
    Member,
    MemberId,
    MmHash,
    NoCapacity,
    RouterNews,
    StageTimes,
    split_hashes,
)
from fabric.contracts.messages import BlocksCleared
from router.planning import ClusterState, RoutePlan, RouteQuery
from router.planning.member_columns import MAX_AWAITED

WORKERS = ["w0", "w1", "w2"]
ENCODERS = ["e0", "e1"]
ROUTER = Member(MemberId("r0"), "router", "address-r0", "h-0", 1)
LONG = query(40, image(0, digit="a"), 300, image(1, digit="b"), 60)
worker_names, encoder_names = st.sampled_from(WORKERS), st.sampled_from(ENCODERS)
counts = st.integers(0, 5000)
three_counts = st.tuples(counts, counts, counts)
rates = st.sampled_from([0.0, 1e-6, 1e-3, 1.0])
hashes = st.lists(st.sampled_from(split_hashes(LONG.scheme_to_hashes[SCHEME])), max_size=6).map(b"".join)
kv_events = st.lists(
    st.one_of(st.builds(BlocksStored, st.none(), hashes), st.builds(BlocksRemoved, hashes), st.builds(BlocksCleared)),
    max_size=3,
).map(tuple)
items = st.lists(st.sampled_from([item.mm_hash for item in LONG.media]), max_size=2).map(tuple)


class AnyOrder(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 99))
    def begin(self, seed: int) -> None:
        self.state = ClusterState(SHAPE, BLOCK_SIZE, random.Random(seed))
        self.peer = ClusterState(SHAPE, BLOCK_SIZE, random.Random(seed))
        self.state.news.start(lambda: None)
        self.now = 0.0
        self.num_attempts = 0
        self.open: dict[str, tuple[RouteQuery, RoutePlan]] = {}
        self.members: set[str] = set()
        self.excluded: dict[str, float] = {}

    @rule(names=st.frozensets(st.sampled_from(WORKERS + ENCODERS)), epoch=st.integers(1, 2))
    def change_members(self, names: frozenset[MemberId], epoch: int) -> None:
        members = [
            worker_member(name, epoch=epoch) if name in WORKERS else encoder_member(name) for name in sorted(names)
        ]
        change = self.state.update_members(members)
        self.peer.update_members([*members, ROUTER])
        left = {member.member_id for member in change.left}
        assert self.members - names <= left
        assert names - self.members <= {member.member_id for member in change.joined}
        self.members = set(names)
        self.excluded = {name: until for name, until in self.excluded.items() if name in names and name not in left}

    @rule(seconds=st.sampled_from([0.01, 0.5, 2.0, 10.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        name=worker_names,
        seq=st.integers(0, 50),
        made_s=st.sampled_from([0.0, 3.0, 200.0]),
        queued=counts,
        total=counts,
        used=counts,
        rate=rates,
        acks=st.booleans(),
        barred=counts,
        left_s=st.sampled_from([0.0, 0.3]),
    )
    def report_worker(
        self,
        name: MemberId,
        seq: int,
        made_s: float,
        queued: int,
        total: int,
        used: int,
        rate: float,
        acks: bool,
        barred: int,
        left_s: float,
    ) -> None:
        acknowledged = tuple(request.attempt_id for request, _ in self.open.values()) if acks else ()
        fields = {"queued_tokens": queued, "kv_blocks_total": total, "kv_blocks_used": used}
        fields |= {"behind_weighted_tokens": barred, "step_left_s": left_s, "at_s": made_s and made_s + self.now}
        report = worker_report(name, seq, prefill_s_per_token=rate, acknowledged=acknowledged, **fields)
        assert set(self.state.apply(report, self.now)) <= {name}
        self.peer.apply(report, self.now)

    @rule(is_lost=st.booleans())
    def tell_the_other_router(self, is_lost: bool) -> None:
        news = self.state.news.take(ROUTER.member_id, self.now)
        if news is not None and not is_lost:
            self.peer.take_news(news, self.now)

    @rule(name=encoder_names, seq=st.integers(0, 50), queued=counts, rate=rates)
    def report_encoder(self, name: MemberId, seq: int, queued: int, rate: float) -> None:
        report = encoder_report(name, seq, queued_cost=queued, encode_s_per_cost=rate)
        assert set(self.state.apply(report, self.now)) <= {name}
        self.peer.apply(report, self.now)

    @rule(name=worker_names, epoch=st.integers(0, 3), seq=st.integers(0, 9), events=kv_events)
    def kv_events(self, name: MemberId, epoch: int, seq: int, events: tuple[KvEvent, ...]) -> None:
        self.state.apply(KvEvents(name, epoch, seq, events), self.now)

    @rule(name=worker_names, epoch=st.integers(0, 3), seq=st.integers(-1, 9), blocks=hashes)
    def kv_snapshot(self, name: MemberId, epoch: int, seq: int, blocks: bytes) -> None:
        self.state.apply(KvSnapshot(name, epoch, seq, (BlocksStored(None, blocks),)), self.now)

    @rule(name=encoder_names, epoch=st.integers(0, 3), seq=st.integers(-1, 9), stored=items, full=st.booleans())
    def feature_events(self, name: MemberId, epoch: int, seq: int, stored: tuple[MmHash, ...], full: bool) -> None:
        self.state.apply(FeatureEvents(name, epoch, seq, stored, is_snapshot=full), self.now)

    @rule(name=st.sampled_from(WORKERS + ENCODERS), seconds=st.sampled_from([0.1, 5.0]))
    def exclude(self, name: MemberId, seconds: float) -> None:
        self.state.exclude(name, self.now + seconds)
        if name in self.members:
            self.excluded[name] = max(self.excluded.get(name, 0.0), self.now + seconds)

    @rule(is_text=st.booleans())
    def dispatch(self, is_text: bool) -> None:
        self.num_attempts += 1
        name = f"r{self.num_attempts}"
        request = query(200, attempt=name) if is_text else query(*_parts(), attempt=name)
        barred = {member for member, until in self.excluded.items() if until > self.now}
        try:
            plan = self.state.plan(request, self.now)
        except NoCapacity:
            usable = self.members - barred
            assert not usable & set(WORKERS) or (not is_text and not usable & set(ENCODERS))
            return
        assert plan.worker_id in self.members - barred
        assert {each.encoder_id for each in plan.assignments} <= self.members - barred
        assert plan.lower_bound_s <= plan.predicted_ttft_s
        self.state.note_dispatched(request, plan, self.now)
        self.open[name] = request, plan

    @precondition(lambda self: bool(getattr(self, "open", None)))
    @rule(number=st.integers(0, 99), seconds=st.sampled_from([0.0, 1e-3, 5.0]))
    def answer(self, number: int, seconds: float) -> None:
        name = sorted(self.open)[number % len(self.open)]
        request, plan = self.open[name]
        for encoder_id in {each.encoder_id for each in plan.assignments}:
            times = StageTimes(seconds, seconds, seconds, seconds, 1, 256)
            results = tuple(ItemResult(e.item_index, times) for e in plan.assignments if e.encoder_id == encoder_id)
            self.state.observe_encode(plan, EncodeResult(encoder_id, results), self.now)
        result = GenerateResult(plan.worker_id, (), request.token_count, 16, seconds, seconds, seconds, seconds)
        self.state.observe_generate(plan, result, self.now)

    @precondition(lambda self: bool(getattr(self, "open", None)))
    @rule(number=st.integers(0, 99))
    def first_token(self, number: int) -> None:
        name = sorted(self.open)[number % len(self.open)]
        self.state.note_first_token(self.open[name][0].attempt_id, self.now)

    @precondition(lambda self: bool(getattr(self, "open", None)))
    @rule(number=st.integers(0, 99))
    def end(self, number: int) -> None:
        name = sorted(self.open)[number % len(self.open)]
        self.state.note_ended(self.open.pop(name)[0].attempt_id, self.now)

    @invariant()
    def load_is_what_is_open(self) -> None:
        if not hasattr(self, "state"):
            return
        self.state.check_invariants()
        self.peer.check_invariants()
        workers = self.state.columns(self.now).workers
        for slot, num in enumerate(workers.num_awaited.astype(int)):
            assert (np.diff(workers.awaited[:num, slot]) >= 0.0).all()
            assert (workers.awaited[MAX_AWAITED : MAX_AWAITED + num, slot] > 0.0).all()
        views = views_of(self.state, LONG, self.now).workers
        assert sum(view.num_open for view in views) <= len(self.open)

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        for request, _ in self.open.values():
            self.state.note_ended(request.attempt_id, self.now + 1000.0)
        self._end_all_at_the_other_router()
        late = views_of(self.state, LONG, self.now + 1000.0)
        assert all((view.num_open, view.pending_tokens) == (0, 0) for view in late.workers)
        pending = self.state.columns(self.now).encoders.pending_profiles
        assert not pending.any()
        assert all(each.num_open.sum() == each.open_units.sum() == 0 for each in self.state.columns(self.now)[:2])
        assert not self.state.columns(self.now).workers.num_awaited.any()

    def _end_all_at_the_other_router(self) -> None:
        """A later dispatch tells the other router that it has missed news, or that there are no more."""
        self.peer.take_news(RouterNews(ROUTER.member_id, 1 << 30), self.now)
        for columns in self.peer.columns(self.now)[:2]:
            assert columns.num_open.sum() == columns.num_pending.sum() == 0
            assert np.allclose(columns.pending_units, 0.0)
        assert not self.peer.columns(self.now).encoders.pending_profiles.any()


def _parts() -> tuple[int | MediaItem, ...]:
    return 40, image(0, digit="a"), 300, image(1, digit="b"), 60


AnyOrder.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestAnyOrder = AnyOrder.TestCase
