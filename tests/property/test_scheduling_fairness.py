"""Checks that many requests of one tenant do not starve the few of another, for any sizes and arrival times, and that
the queue that decides whose prompt is next always gives the order that a full sort would give."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llm_workers.scheduling.prefill_queue import FairShare, PrefillQueue
from llm_workers.scheduling.standings import RankedList

STEP_TOKENS = 32
TENANTS = ("a", "b", "c")


@dataclass(eq=False)
class Prompt:
    """Holds the fields of a sequence that the queue reads."""

    tenant: str
    num_tokens: int
    age: int
    priority: int = 0
    num_computed: int = 0
    has_media: bool = False

    @property
    def claims_from(self) -> int:
        return self.num_computed

    @property
    def rank(self) -> tuple[int, int]:
        return (self.priority, self.age)


def in_turn(queue: PrefillQueue) -> Generator[Prompt, None, None]:
    """Yields the prompts of all groups in order."""
    for key in queue.groups:
        yield from queue.in_turn(key)


class Server:
    """Computes the prompts that the queue names, until the budget of a step is used up."""

    def __init__(self) -> None:
        self.queue = PrefillQueue(STEP_TOKENS)
        self._ages = itertools.count()

    def add(self, tenant: str, num_tokens: int) -> None:
        self.queue.put(Prompt(tenant, num_tokens, next(self._ages)), True)

    def step(self) -> dict[str, int]:
        """Runs a step and returns the tokens that each tenant got."""
        self.queue.begin_step()
        budget, chunks = STEP_TOKENS, []
        with closing(in_turn(self.queue)) as prompts:
            for prompt in prompts:
                num_tokens = min(budget, prompt.num_tokens - prompt.num_computed)
                chunks.append((prompt, prompt.num_computed + num_tokens))
                budget -= num_tokens
                if not budget:
                    break
        self.queue.end_step(chunks, {})
        given_tokens = dict.fromkeys(TENANTS, 0)
        for prompt, end in chunks:
            given_tokens[prompt.tenant] += end - prompt.num_computed
            prompt.num_computed = end
            if end == prompt.num_tokens:
                self.queue.discard(prompt)
        self.queue.check_invariants()
        return given_tokens

    def waiting(self) -> set[str]:
        return {prompt.tenant for prompt in in_turn(self.queue)}


arrivals = st.lists(
    st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 3 * STEP_TOKENS)), max_size=6), min_size=1, max_size=30
)


@settings(deadline=None, max_examples=300)
@example([[("a", 1), ("a", 1), ("b", 68)], [], [("a", 1)]])
@given(arrivals)
def test_who_waits_all_the_time_gets_as_much_as_anybody(steps: list[list[tuple[str, int]]]) -> None:
    """Over every stretch of steps after which two tenants both still have work, the difference is at most two steps'
    tokens. A tenant that got all that it asked for has no more to get."""
    server = Server()
    history: list[tuple[set[str], dict[str, int]]] = []
    for arriving in steps:
        for tenant, tokens in arriving:
            server.add(tenant, tokens)
        given_tokens = server.step()
        history.append((server.waiting(), given_tokens))
    for one, other in (("a", "b"), ("a", "c"), ("b", "c")):
        for start in range(len(history)):
            lead = 0
            for left, given_tokens in history[start:]:
                if not {one, other} <= left:
                    break
                lead += given_tokens[one] - given_tokens[other]
                assert abs(lead) <= 2 * STEP_TOKENS


def test_who_was_away_saves_nothing_up() -> None:
    server = Server()
    server.add("a", 1000)
    for _ in range(10):
        server.step()
    server.add("b", 1000)
    served = [server.step() for _ in range(4)]
    assert sum(step["b"] for step in served) == sum(step["a"] for step in served)


def test_who_gets_all_that_it_asks_for_saves_nothing_up() -> None:
    """A tenant that asks for one token in each step, and then for many, has no claim to the tokens that others got
    meanwhile."""
    server = Server()
    server.add("a", 1000)
    for _ in range(10):
        server.add("b", 1)
        server.step()
    server.add("b", 1000)
    served = [server.step() for _ in range(4)]
    assert abs(sum(step["b"] - step["a"] for step in served)) <= STEP_TOKENS


def test_so_does_one_that_asks_again_before_it_got_what_it_asked_for() -> None:
    """The next prompt comes between plan and commit, so that the tenant never leaves the queue."""
    queue, ages = PrefillQueue(STEP_TOKENS), itertools.count()
    queue.put(Prompt("a", 10_000, next(ages)), True)
    prompt = Prompt("b", 1, next(ages))
    for _ in range(10):
        queue.put(prompt, True)
        queue.begin_step()
        first, second = itertools.islice(in_turn(queue), 2)
        assert {first.tenant, second.tenant} == {"a", "b"}
        a = first if first.tenant == "a" else second
        queue.end_step([(prompt, 1), (a, a.num_computed + STEP_TOKENS)], {})
        a.num_computed += STEP_TOKENS
        following = Prompt("b", 1, next(ages))
        queue.put(following, True)
        queue.discard(prompt)
        prompt = following
    queue.begin_step()
    assert abs(queue._shares.served("a") - queue._shares.served("b")) <= STEP_TOKENS + 1


def test_a_tenant_is_charged_for_what_it_decodes() -> None:
    """A tenant with a sequence that decodes in addition to its prompt comes after one that waited as long without such
    a sequence."""
    queue, ages = PrefillQueue(STEP_TOKENS), itertools.count()
    for tenant in ("a", "b"):
        queue.put(Prompt(tenant, 10_000, next(ages)), True)
    queue.begin_step()
    queue.end_step([], {"a": 5})
    queue.begin_step()
    assert [prompt.tenant for prompt in in_turn(queue)] == ["b", "a"]
    assert queue._shares.served("a") - queue._shares.served("b") == 5


def test_a_debt_is_remembered_while_it_is_owed() -> None:
    shares = FairShare()
    shares.begin_waiting("a")
    shares.begin_waiting("b")
    shares.charge("a", 500)
    shares.end_waiting("a")
    shares.begin_step()
    shares.begin_waiting("a")
    assert shares.raised("a") - shares.raised("b") == 500


def test_debts_to_nobody_are_forgotten() -> None:
    shares = FairShare()
    shares.begin_waiting("a")
    shares.charge("a", 500)
    shares.end_waiting("a")
    assert shares.raised("a") == shares.raised("b")


def test_counts_of_tenants_that_left_do_not_pile_up() -> None:
    shares = FairShare()
    shares.begin_waiting("stays")
    for number in range(10_000):
        shares.begin_waiting(f"guest-{number}")
        shares.charge(f"guest-{number}", 1)
        shares.end_waiting(f"guest-{number}")
        shares.charge("stays", 2)
        shares.begin_step()
    assert len(shares._tenant_to_served) < 1000


class QueueMachine(RuleBasedStateMachine):
    """Checks the queue against a full sort: groups are ordered by priority and readiness; in each group the tenant that
    was served least comes first, with its oldest prompt first."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = PrefillQueue(STEP_TOKENS)
        self.is_ready: dict[Prompt, bool] = {}
        self.ages = itertools.count()

    @rule(
        tenant=st.sampled_from(TENANTS),
        num_tokens=st.integers(1, 80),
        priority=st.integers(-1, 1),
        is_ready=st.booleans(),
        is_old=st.booleans(),
    )
    def put(self, tenant: str, num_tokens: int, priority: int, is_ready: bool, is_old: bool) -> None:
        age = next(self.ages)
        prompt = Prompt(tenant, num_tokens, -age if is_old else age, priority)
        self.queue.put(prompt, is_ready)
        self.is_ready[prompt] = is_ready

    @precondition(lambda self: self.is_ready)
    @rule(data=st.data(), is_ready=st.booleans())
    def move(self, data: st.DataObject, is_ready: bool) -> None:
        prompt = data.draw(st.sampled_from(list(self.is_ready)))
        self.queue.put(prompt, is_ready)
        self.is_ready[prompt] = is_ready

    @precondition(lambda self: self.is_ready)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        prompt = data.draw(st.sampled_from(list(self.is_ready)))
        del self.is_ready[prompt]
        self.queue.discard(prompt)
        self.queue.discard(prompt)

    @rule(count=st.integers(0, 4))
    def step(self, count: int) -> None:
        self.queue.begin_step()
        with closing(in_turn(self.queue)) as prompts:
            chosen = list(itertools.islice(prompts, count))
        chunks = [(prompt, min(prompt.num_tokens, prompt.num_computed + STEP_TOKENS)) for prompt in chosen]
        self.queue.end_step(chunks, {})
        for prompt, end in chunks:
            prompt.num_computed = end
            if end == prompt.num_tokens:
                del self.is_ready[prompt]
                self.queue.discard(prompt)

    @invariant()
    def order_is_as_sorted(self) -> None:
        self.queue.check_invariants()
        shown = list(in_turn(self.queue))
        assert set(shown) == self.is_ready.keys()
        assert len(shown) == len(self.is_ready)
        groups = [(prompt.priority, not self.is_ready[prompt]) for prompt in shown]
        assert groups == sorted(groups)
        for key in set(groups):
            members = [prompt for prompt, group in zip(shown, groups, strict=True) if group == key]
            for tenant in TENANTS:
                own = [prompt.age for prompt in members if prompt.tenant == tenant]
                assert own == sorted(own)
            if not key[1]:
                self._check_turns(members)
        assert self.queue.first_by_rank(3) == sorted(self.is_ready, key=lambda prompt: prompt.rank)[:3]

    def _check_turns(self, members: Sequence[Prompt]) -> None:
        """Checks that each prompt comes from the tenant with the least count, including the prompts before it in this
        pass."""
        counts = {tenant: self.queue._shares.raised(tenant) for tenant in TENANTS}
        left = list(members)
        for prompt in members:
            first = min(left, key=lambda one: (counts[one.tenant], one.age))
            assert counts[prompt.tenant] == counts[first.tenant]
            counts[prompt.tenant] += min(prompt.num_tokens - prompt.num_computed, STEP_TOKENS)
            left.remove(prompt)


QueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestQueueMachine = QueueMachine.TestCase


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=80), st.integers(-1, 13))
def test_a_ranked_list_is_a_sorted_set(changes: list[tuple[int, bool]], other: int) -> None:
    ranked, items = RankedList(lambda item: -item), set()
    for item, is_added in changes:
        (ranked.add if is_added else ranked.discard)(item)
        (items.add if is_added else items.discard)(item)
        assert list(ranked) == sorted(items, reverse=True)
        assert len(ranked) == len(items)
    assert ranked.below(other) == sorted((item for item in items if item < other), reverse=True)
    assert ranked.has_below(other) == any(item < other for item in items)
    assert all(item in ranked for item in items)
