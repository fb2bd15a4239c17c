"""Many requests of one tenant do not starve another's few, whatever their sizes and however they come."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from llm_workers.scheduling.fairness import Claim, FairShare

STEP_TOKENS = 32
TENANTS = ("a", "b", "c")


def serve(shares: FairShare, queues: dict[str, list[int]], budget: int) -> dict[str, int]:
    """One step of a server that computes whatever the order says, until the budget is used up."""
    waiting = [tenant for tenant, queue in queues.items() if queue]
    shares.begin_step(waiting)
    owners = [(tenant, place) for tenant in waiting for place in range(len(queues[tenant]))]
    claims = [Claim(0, tenant, min(queues[tenant][place], budget)) for tenant, place in owners]
    order = shares.order(claims)
    assert sorted(order) == list(range(len(claims)))
    given_tokens = dict.fromkeys(TENANTS, 0)
    for index in order:
        tenant, place = owners[index]
        tokens = min(budget, queues[tenant][place])
        queues[tenant][place] -= tokens
        given_tokens[tenant] += tokens
        budget -= tokens
    for tenant in TENANTS:
        queues[tenant] = [left for left in queues[tenant] if left]
        shares.charge(tenant, given_tokens[tenant])
    shares.end_step([tenant for tenant, queue in queues.items() if queue])
    return given_tokens


arrivals = st.lists(
    st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 3 * STEP_TOKENS)), max_size=6), min_size=1, max_size=30
)


@settings(deadline=None, max_examples=300)
@example([[("a", 1), ("a", 1), ("b", 68)], [], [("a", 1)]])
@given(arrivals)
def test_who_waits_all_the_time_gets_as_much_as_anybody(steps):
    """Over every stretch of steps that leave two tenants both with something to do: the difference is at most two
    steps' tokens. Who got all that it asked for has no more to get."""
    shares = FairShare()
    queues: dict[str, list[int]] = {tenant: [] for tenant in TENANTS}
    history: list[tuple[frozenset[str], dict[str, int]]] = []
    for arriving in steps:
        for tenant, tokens in arriving:
            queues[tenant].append(tokens)
        given_tokens = serve(shares, queues, STEP_TOKENS)
        history.append((frozenset(tenant for tenant, queue in queues.items() if queue), given_tokens))
    for one, other in (("a", "b"), ("a", "c"), ("b", "c")):
        for start in range(len(history)):
            lead = 0
            for left, given_tokens in history[start:]:
                if not {one, other} <= left:
                    break
                lead += given_tokens[one] - given_tokens[other]
                assert abs(lead) <= 2 * STEP_TOKENS


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(TENANTS), st.integers(1, 40)), max_size=20))
def test_rank_comes_first_and_a_tenants_own_order_stays(made):
    claims = [Claim(*one) for one in sorted(made, key=lambda one: one[0])]
    order = FairShare().order(claims)
    assert [claims[index].rank for index in order] == [claim.rank for claim in claims]
    for tenant in TENANTS:
        own = [index for index in order if claims[index].tenant == tenant]
        assert own == sorted(own, key=lambda index: (claims[index].rank, index))


def test_who_was_away_saves_nothing_up():
    shares = FairShare()
    queues = {"a": [1000], "b": [], "c": []}
    for _ in range(10):
        serve(shares, queues, STEP_TOKENS)
    queues["b"] = [1000]
    served = [serve(shares, queues, STEP_TOKENS) for _ in range(4)]
    assert sum(step["b"] for step in served) == sum(step["a"] for step in served)


def test_who_gets_all_that_it_asks_for_saves_nothing_up():
    """One that asks for a token in each step, and then for much, has no claim to what others got meanwhile."""
    shares = FairShare()
    queues = {"a": [1000], "b": [], "c": []}
    for _ in range(10):
        queues["b"].append(1)
        serve(shares, queues, STEP_TOKENS)
    assert sum(queues["b"]) <= 1
    queues["b"] = [1000]
    served = [serve(shares, queues, STEP_TOKENS) for _ in range(4)]
    assert abs(sum(step["b"] - step["a"] for step in served)) <= STEP_TOKENS


def test_a_debt_is_remembered_while_it_is_owed():
    shares = FairShare()
    shares.begin_step({"a", "b"})
    shares.charge("a", 500)
    shares.begin_step({"b"})
    shares.begin_step({"a", "b"})
    claims = [Claim(0, "a", 10), Claim(0, "b", 10), Claim(0, "b", 10)]
    assert shares.order(claims) == [1, 2, 0]
