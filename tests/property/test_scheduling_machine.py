"""Checks the scheduler against a deterministic model over simulated paged KV: arrivals, landings, losses, aborts,
failing steps, tiny pools, shared prefixes, several choices, migration. The oracles are those of `scheduling_world`."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from paged_fake import EOS
from scheduling_prompts import BEGINNINGS, PICTURES, TEXTS, Segment, build, segments
from scheduling_world import World

from fabric.contracts import GenerateRequest, MemberId, PromptOutputs, RequestId, SamplingParams, StopConditions
from llm_workers.worker_config import Speculation, WorkerConfig


def tiny(
    block_size: int,
    num_tokens: int,
    num_tokens_step: int,
    num_sequences: int,
    is_cached: bool,
    num_drafts: int,
    is_overlap_enabled: bool = True,
    media_chunk_tokens: int | None = None,
) -> WorkerConfig:
    """Returns a config whose budgets are so small that few sequences fit at once, and whose pools are so small that
    sequences preempt each other."""
    return WorkerConfig(
        block_size=block_size,
        num_blocks=max(1, num_tokens // block_size),
        max_step_tokens=num_tokens_step,
        max_sequences=num_sequences,
        is_prefix_cache_enabled=is_cached,
        side_layers=(("talker", 0), ("other", 1)),
        speculation=Speculation(num_drafts, 1, 3),
        is_overlap_enabled=is_overlap_enabled,
        media_chunk_tokens=media_chunk_tokens,
    )


configs = st.builds(
    tiny,
    st.sampled_from((1, 4, 5)),
    st.integers(20, 90),
    st.integers(1, 40),
    st.integers(1, 6),
    st.sampled_from((True, True, True, False)),
    st.sampled_from((0, 0, 1, 4)),
    st.sampled_from((True, True, False)),
    st.sampled_from((None, None, 0, 1, 3)),
)


NOTHING = PromptOutputs()
OUTPUTS = (
    PromptOutputs("last"),
    PromptOutputs("mean"),
    PromptOutputs("mean", is_normalised=False),
    PromptOutputs(num_top_logprobs=2),
    PromptOutputs(num_top_logprobs=0),
    PromptOutputs("last", num_top_logprobs=1),
)


def make_request(
    name: str,
    parts: tuple[Segment, ...],
    age: int,
    num_choices: int,
    max_tokens: int,
    seed: int,
    salt: str,
    priority: int,
    side_names: tuple[str, ...] = (),
    outputs: PromptOutputs = NOTHING,
) -> GenerateRequest:
    """Returns a request. An embedding allows no tokens and no second choice, and a request without outputs has
    tokens."""
    token_ids, runs, media = build(parts)
    if outputs.pooling or not max_tokens:
        max_tokens, num_choices = (0, 1) if outputs != NOTHING else (1, num_choices)
    return GenerateRequest(
        request_id=RequestId(name),
        attempt=1,
        router_id=MemberId("router"),
        router_address="local://router",
        token_ids=token_ids,
        placeholders=runs,
        media=media,
        sampling=SamplingParams(seed=seed),
        stop=StopConditions(max_tokens=max_tokens, eos_token_ids=(EOS,)),
        age=(float(age), name),
        num_choices=num_choices,
        cache_salt=salt,
        priority=priority,
        side_names=side_names,
        prompt_outputs=outputs,
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(config=configs)
    def start(self, config: WorkerConfig) -> None:
        self.world = World(config)
        self.serial = itertools.count()

    @rule(
        parts=segments,
        age=st.integers(0, 40),
        num_choices=st.sampled_from((1, 1, 2, 3)),
        max_tokens=st.integers(0, 20),
        seed=st.integers(0, 3),
        salt=st.sampled_from(("", "", "tenant")),
        priority=st.sampled_from((0, 0, 1)),
        side_names=st.sampled_from(((), (), ("talker",), ("talker", "other"))),
        outputs=st.just(NOTHING) | st.sampled_from(OUTPUTS),
        num_emitted=st.none() | st.lists(st.integers(0, 20), min_size=3, max_size=3),
    )
    def add(
        self,
        parts: tuple[Segment, ...],
        age: int,
        num_choices: int,
        max_tokens: int,
        seed: int,
        salt: str,
        priority: int,
        side_names: tuple[str, ...],
        outputs: PromptOutputs,
        num_emitted: list[int] | None,
    ) -> None:
        name = f"r{next(self.serial)}"
        request = make_request(name, parts, age, num_choices, max_tokens, seed, salt, priority, side_names, outputs)
        self.world.add(request, num_emitted)

    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        if awaited := self.world.awaited():
            self.world.land(data.draw(st.sampled_from(awaited)))

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        if here := sorted(self.world.fake.features):
            self.world.lose(data.draw(st.sampled_from(here)))

    @rule()
    def make_inbox_room(self) -> None:
        self.world.make_inbox_room()

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), is_whole=st.booleans())
    def abort(self, data: st.DataObject, is_whole: bool) -> None:
        self.world.abort(data.draw(st.sampled_from(sorted(self.world.live))), is_whole)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule(number=st.integers(0, 5), is_whole=st.booleans())
    def step_with_abort_in_flight(self, number: int, is_whole: bool) -> None:
        self.world.step_with_abort_in_flight(number, is_whole)

    @rule(num_done=st.integers(0, 6))
    def failing_step(self, num_done: int) -> None:
        self.world.failing_step(num_done)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


@given(config=configs, seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_a_crowd_in_a_small_pool(config: WorkerConfig, seed: int) -> None:
    """Sends many requests at once, mostly with steps between them: such long stretches under pressure are rare in
    hypothesis's search over rules."""
    rng = random.Random(seed)
    world = World(config)
    for turn in range(120):
        if rng.random() < 0.3:
            parts = (*rng.choice(BEGINNINGS), *rng.choices((*TEXTS, *PICTURES), k=rng.randrange(3)))
            choices, tokens = rng.choice((1, 1, 2, 3)), rng.randint(1, 25)
            emitted = [rng.randrange(20) for _ in range(3)] if rng.random() < 0.2 else None
            outputs = rng.choice(OUTPUTS) if rng.random() < 0.3 else NOTHING
            age, salt, priority = turn - rng.choice((0, 0, 50)), rng.choice(("", "", "x")), rng.choice((0, 0, 1))
            request = make_request(
                f"r{turn}", parts, age, choices, tokens, rng.randrange(3), salt, priority, (), outputs
            )
            world.add(request, emitted)
        for unit in world.awaited():
            if rng.random() < 0.3:
                world.land(unit)
        _disturb(world, rng)
        world.step()
        world.check()
    world.finish()


def _disturb(world: World, rng: random.Random) -> None:
    roll = rng.random()
    if roll < 0.05 and world.live:
        world.abort(rng.choice(sorted(world.live)), rng.random() < 0.5)
    elif roll < 0.10:
        world.failing_step(rng.randrange(4))
    elif roll < 0.15:
        world.make_inbox_room()
    elif roll < 0.25:
        world.step_with_abort_in_flight(rng.randrange(6), rng.random() < 0.5)
    elif roll < 0.30 and world.fake.features:
        world.lose(rng.choice(sorted(world.fake.features)))
