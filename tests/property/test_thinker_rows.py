"""Checks what the thinker's outlet sends while requests arrive, share prefixes, preempt each other, fail, are aborted
and go on after another attempt: each token and each needed row once, in order, and each row with the right content."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from functools import partial
from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_fake import reference_tokens, reference_values
from scheduling_prompts import BEGINNINGS, PICTURES, TEXTS
from scheduling_world import World
from test_scheduling_machine import configs, make_request

from fabric.contracts import ErrorInfo, GenerateRequest, MemberId, SequenceId, StageRequest, StageTarget
from llm_workers.scheduling import AdmittedSequences, StepPlan, StepResult
from llm_workers.stages import StageOutput, ThinkerOutlet, media_positions
from llm_workers.worker_config import Speculation, WorkerConfig

TALKER = StageTarget(1, MemberId("talker-1"), "inbox-1", "shared_memory")
NAMES = ("talker",)


class SpokenWorld(World):
    """A `SpokenWorld` has an outlet beside its scheduler, as the engine has, and is the sender behind it."""

    def __init__(self, config: WorkerConfig, *, needs_all_rows: bool) -> None:
        super().__init__(config)
        self.needs_all_rows = needs_all_rows
        rows: Any = partial(self.fake.side_rows, NAMES[0])
        self.outlet = ThinkerOutlet(self, rows, needs_all_rows=needs_all_rows)
        self.sent: dict[str, list[StageOutput]] = defaultdict(list)
        self.num_aborted = 0
        self.num_spoken = 0

    # ------------------------------------------------------------ the sender

    def open(self, request: StageRequest) -> None:
        assert request.request_id not in self.sent
        self.sent[request.request_id] = []

    def save_async(self, output: StageOutput, request: StageRequest) -> None:
        outputs = self.sent[request.request_id]
        assert not (outputs and outputs[-1].is_finished), "something follows the last output"
        outputs.append(output)

    def abort(self, sequence_id: Any, is_whole: bool | ErrorInfo | None = None) -> None:
        """Is the sender's call for a request, and the world's for a sequence."""
        if isinstance(sequence_id, SequenceId):
            super().abort(sequence_id, bool(is_whole))
            self.outlet.abort(sequence_id.attempt_id)
        else:
            self.num_aborted += 1

    # ------------------------------------------------------------ the engine

    def speak(self, request: GenerateRequest, num_emitted: int) -> None:
        """Adds a request that is spoken, after which `num_emitted` tokens of an earlier attempt are known at most. The
        last token is always drawn again, as the router does it."""
        tokens = reference_tokens(request, 0, self.max_total)[0]
        spoken = msgspec.structs.replace(request, next_stage=TALKER)
        self.add(spoken, [min(num_emitted, len(tokens) - 1)])

    def _take_in(self, request: GenerateRequest, admission: AdmittedSequences) -> None:
        if request.next_stage is not None:
            self.outlet.begin(request, is_finished=bool(admission.finished))
        super()._take_in(request, admission)

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        self.clock.advance(0.01)
        events = self.scheduler.commit(plan, result)
        self.outlet.committed(plan, events)
        self._deliver(events)

    def _finish(self, sequence_id: SequenceId, reason: str, num_tokens: int) -> None:
        super()._finish(sequence_id, reason, num_tokens)
        request = self.requests[sequence_id.attempt_id]
        if request.next_stage is None:
            assert request.request_id not in self.sent
            return
        self.num_spoken += 1
        self._check_sent(request, self.tokens[sequence_id])

    def _check_sent(self, request: GenerateRequest, tokens: list[int]) -> None:
        outputs = self.sent[request.request_id]
        assert [output.is_finished for output in outputs] == [*[False] * (len(outputs) - 1), True]
        values: list[Any] = [output.values for output in outputs]
        sent_tokens: list[int] = []
        at: list[int] = []
        rows: list[int] = []
        for each in values:
            if "token_ids" in each:
                assert each["first_index"] == len(sent_tokens)
                sent_tokens += each["token_ids"].tolist()
            if "prompt_hidden" in each:
                assert len(each["prompt_hidden"]) == len(each["prompt_hidden_at"]) > 0
                at += each["prompt_hidden_at"].tolist()
                rows += each["prompt_hidden"][:, 0].tolist()
        assert sent_tokens == tokens
        known = len(request.token_ids) + len(tokens) - 1
        needed = range(known) if self.needs_all_rows else media_positions(request.placeholders).tolist()
        assert at == list(needed if request.side_names else ())
        expected = np.array(reference_values(request, tokens), dtype=np.uint64)
        assert rows == expected[at].tolist()


@given(config=configs, seed=st.integers(0, 2**32), needs_all_rows=st.booleans())
@settings(max_examples=60, deadline=None)
def test_each_row_and_token_goes_out_once_and_in_order(config: WorkerConfig, seed: int, needs_all_rows: bool) -> None:
    rng, serial = random.Random(seed), itertools.count()
    world = SpokenWorld(config, needs_all_rows=needs_all_rows)
    for turn in range(80):
        if rng.random() < 0.3:
            parts = (*rng.choice(BEGINNINGS), *rng.choices((*TEXTS, *PICTURES), k=rng.randrange(3)))
            is_spoken = rng.random() < 0.7
            names = NAMES if is_spoken and rng.random() < 0.8 else ()
            age = turn - rng.choice((0, 0, 50))
            request = make_request(
                f"r{next(serial)}", parts, age, 1, rng.randint(1, 25), rng.randrange(3), "", 0, names
            )
            if is_spoken:
                world.speak(request, rng.choice((0, 0, rng.randrange(20))))
            else:
                world.add(request)
        for unit in world.awaited():
            if rng.random() < 0.4:
                world.land(unit)
        roll = rng.random()
        if roll < 0.03 and world.live:
            world.abort(rng.choice(sorted(world.live)), is_whole=True)
        elif roll < 0.08:
            world.failing_step(rng.randrange(4))
        elif roll < 0.12:
            world.step_with_abort_in_flight(rng.randrange(6), is_whole=True)
        world.step()
    world.finish()
    assert len(world.outlet) == 0


def test_the_histories_have_what_they_are_about() -> None:
    """Rows of prefix hits, of preempted requests and of guessed tokens are all among what the test above sees."""
    config = WorkerConfig(
        block_size=4,
        num_blocks=24,
        max_step_tokens=30,
        max_sequences=4,
        side_layers=((NAMES[0], 0),),
        speculation=Speculation(4, 1, 3),
    )
    world = SpokenWorld(config, needs_all_rows=True)
    for number in range(16):
        parts = (0, number % 4, 3, 2)
        world.speak(make_request(f"r{number}", parts, -number, 1, 25, number % 3, "", 0, NAMES), number % 4)
        for _ in range(3):
            world.step()
    world.finish()
    stats = world.scheduler.stats()
    assert world.num_spoken == 16
    assert min(stats.num_preemptions, stats.prefix_hit_tokens, stats.drafts_accepted) > 0
    assert stats.drafts_accepted < stats.drafts_proposed
