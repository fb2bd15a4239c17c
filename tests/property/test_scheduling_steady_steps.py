"""Many equal steps in one call leave the scheduler as the same steps do that are planned and committed one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.contracts import (
    AttemptId,
    GenerateRequest,
    ManualClock,
    MemberId,
    SamplingParams,
    SequenceId,
    StopConditions,
)
from llm_workers.scheduling import Scheduler, StepResult
from llm_workers.worker_config import WorkerConfig
from modalities.family import Positions

requests = st.lists(
    st.tuples(
        st.integers(1, 20),  # tokens of the prompt
        st.integers(1, 40),  # tokens of the output
        st.integers(0, 3),  # which of few beginnings
        st.integers(0, 12),  # turns until the next request
        st.sampled_from(("", "tenant")),
    ),
    min_size=1,
    max_size=8,
)


def draw(sequence_id: SequenceId, first: int, count: int) -> list[int]:
    return [1000 + 100 * int(sequence_id.request_id[1:]) + index for index in range(first, first + count)]


class DecodingWorker:
    """Runs a scheduler; `longest` limits how many steps one call advances (0 means that each is planned)."""

    def __init__(self, config: WorkerConfig, longest: int) -> None:
        self.longest = longest
        self.num_steps = self.num_skipped = 0
        self.scheduler = Scheduler(config, 200, ManualClock())
        self.tokens: dict[SequenceId, list[int]] = {}
        self.events: list[object] = []

    def add(self, number: int, prompt: tuple[int, ...], max_tokens: int, tenant: str) -> None:
        request = GenerateRequest(
            request_id=f"r{number}",
            attempt=0,
            router_id=MemberId("router"),
            router_address="",
            token_ids=prompt,
            placeholders=(),
            media=(),
            sampling=SamplingParams(),
            stop=StopConditions(max_tokens),
            age=(float(number), f"r{number}"),
            cache_salt=tenant,
        )
        positions = Positions(np.arange(len(prompt))[None], 0)
        self.scheduler.add(self.scheduler.prepare(request, positions))

    def run(self, num_steps: int) -> bool:
        """Advances by this many steps. Returns whether there was something to compute."""
        end = self.num_steps + num_steps
        while self.num_steps < end:
            steady = min(self.scheduler.num_steady_steps(), self.longest, end - self.num_steps)
            if steady:
                drawn = []
                for part in (1, steady - 1) if steady > 1 else (1,):  # The simulator may have to stop in between.
                    drawn += self.scheduler.run_steady_steps(part, draw)
                self.num_steps += steady
                self.num_skipped += steady
            else:
                plan = self.scheduler.plan_step()
                if not plan.num_sequences:
                    return False
                given = {one.sequence_id: one for one in plan.chunks if one.sampling is not None}
                result = StepResult({each: tuple(draw(each, one.draw_index, 1)) for each, one in given.items()})
                drawn = list(self.scheduler.commit(plan, result).tokens)
                self.num_steps += 1
            for each in drawn:
                self.tokens.setdefault(each.sequence_id, []).extend(each.token_ids)
            self.scheduler.check_invariants()
            self.events += self.scheduler.drain_kv_events()[1]
        return True


@settings(deadline=None)
@given(requests, st.sampled_from((2, 4, 16)), st.integers(8, 40), st.integers(1, 30), st.integers(2, 64))
def test_steady_steps_equal_single_steps(
    wanted: list[tuple[int, int, int, int, str]], block_size: int, num_blocks: int, longest: int, max_step_tokens: int
) -> None:
    config = WorkerConfig(
        block_size=block_size,
        num_blocks=max(num_blocks, 128 // block_size),
        max_step_tokens=max_step_tokens,
        max_sequences=6,
    )
    single, steady = DecodingWorker(config, 0), DecodingWorker(config, longest)
    for number, (num_prompt, max_tokens, beginning, pause, tenant) in enumerate(wanted):
        prompt = tuple(beginning + index for index in range(num_prompt))
        for worker in (single, steady):
            worker.add(number, prompt, max_tokens, tenant)
            worker.run(pause)
        assert single.scheduler.stats() == steady.scheduler.stats()
    while single.run(50):
        pass
    while steady.run(50):
        pass
    assert single.tokens == steady.tokens
    assert {each.request_id: len(tokens) for each, tokens in steady.tokens.items()} == {
        f"r{number}": one[1] for number, one in enumerate(wanted)
    }
    assert single.events == steady.events
    assert single.scheduler.stats() == steady.scheduler.stats()
    assert single.num_steps == steady.num_steps


def test_a_stretch_ends_before_the_last_token_of_a_sequence() -> None:
    worker = DecodingWorker(WorkerConfig(block_size=4, num_blocks=64), 0)
    worker.add(0, (1, 2, 3), 10, "")
    worker.add(1, (1, 2, 4), 30, "")
    assert worker.scheduler.num_steady_steps() == 0, "the prompts are not computed"
    worker.run(1)
    assert worker.scheduler.num_steady_steps() == 8
    worker.scheduler.run_steady_steps(8, draw)
    assert worker.scheduler.num_steady_steps() == 0, "the next token is the last one of the first request"
    worker.scheduler.abort(AttemptId("r0", 0))
    assert worker.scheduler.num_steady_steps() == 20
