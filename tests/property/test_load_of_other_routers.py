"""Checks what dispatches of other routers do to a router's predictions."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from planning_samples import BLOCK_SIZE, SHAPE, query, worker_member, worker_report

from fabric.contracts import ComputedNews, DispatchNews, Member, MemberId, RequestId, RouterNews
from router.planning import ClusterState

ROUTER = Member(MemberId("r0"), "router", "address-r0", "h-0", 1)
dispatches = st.lists(
    st.tuples(st.sampled_from([0.0, 0.01, 0.3, 2.0]), st.integers(1, 3000), st.sampled_from([0.0, 0.001, 0.05])),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, max_examples=100)
@given(dispatches, st.integers(0, 4000), st.integers(0, 20), st.sampled_from([0, 512, 4096]))
def test_a_dispatch_of_another_router_never_makes_a_worker_look_less_busy(
    steps: list[tuple[float, int, float]], num_queued: int, num_decoding: int, max_step_tokens: int
) -> None:
    state, now, probe = ClusterState(SHAPE, BLOCK_SIZE, random.Random(1)), 10.0, query(64, attempt="probe")
    state.update_members([worker_member("w0"), ROUTER])
    costs = {"prefill_s_per_token": 1e-3, "step_overhead_s": 0.005, "max_step_tokens": max_step_tokens}
    queue = {"queued_tokens": num_queued, "queued_weighted_tokens": num_queued, "num_decoding": num_decoding}
    state.apply(worker_report("w0", 1, **costs, **queue), now)
    for number, (pause_s, num_tokens, age_s) in enumerate(steps, 1):
        now += pause_s
        before_s = state.plan(probe, now).predicted_ttft_s
        news = DispatchNews(RequestId(str(number)), 0, MemberId("w0"), age_s, float(num_tokens), 1)
        state.take_news(RouterNews(ROUTER.member_id, number, dispatched=(news,)), now)
        assert state.plan(probe, now).predicted_ttft_s >= before_s - age_s - 1e-9
        state.check_invariants()
    computed = tuple(ComputedNews(RequestId(str(number)), 0, 0.0) for number in range(1, len(steps) + 1))
    state.take_news(RouterNews(ROUTER.member_id, len(steps) + 1, computed=computed), now + 60.0)
    state.apply(worker_report("w0", 2, **costs), now + 60.0)
    assert state.columns(now + 60.0).workers.pending_units[0] == state.columns(now + 60.0).workers.queued_tokens[0] == 0
    state.check_invariants()
