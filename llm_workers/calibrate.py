"""Measures what a step costs on this machine, before the first request, with a few steps on made-up tokens.

It runs before the scheduler owns any block, so it may write anywhere in the KV pages. This module knows nothing of
requests.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from fabric.clock import Clock
from fabric.errors import ConfigError
from fabric.ids import RequestId, SequenceId
from fabric.messages import SamplingParams
from fabric.weighted_tokens import context_scale_tokens
from llm_workers.config import WorkerConfig
from llm_workers.runner import Runner
from llm_workers.scheduling.plan import NOT_FINITE_TOKEN, Chunk, StepPlan
from llm_workers.step_costs import StepCosts
from modalities.family import Family

SIZES = (16, 128)
"""Lists the prompt lengths in tokens that are measured."""
DECODES = (1, 8)
"""Lists the numbers of decoding sequences that are measured; each sequence has one token."""
NUM_RUNS = 3


def calibrate(runner: Runner, family: Family, config: WorkerConfig, costs: StepCosts, clock: Clock) -> None:
    """Fits `costs` to a few steps of each kind that fits into the limits of the worker. The first run of each kind
    warms up, and the fastest of the later runs counts, because a pause is not a property of the step.

    Raises ConfigError if the logits of a made-up prompt are not finite. A worker with such weights would be lost with
    its first request, and its replacement would fail in the same way.
    """
    most = min(config.max_step_tokens, config.num_blocks * config.block_size, family.shape.max_model_len)
    sizes = sorted({min(size, most) for size in SIZES})
    # The decoded tokens stand at this position, after tokens of a prompt that an earlier plan has computed.
    at = min(config.block_size, most - 1)
    numbers = sorted({min(number, most, config.max_sequences) for number in DECODES}) if at else []
    plans = [StepPlan(0, (_chunk(family, config.block_size, 0, 0, size),)) for size in sizes]
    for plan in plans:
        result = runner.execute(plan)
        if result.not_finite or NOT_FINITE_TOKEN in chain.from_iterable(result.token_ids.values()):
            raise ConfigError("logits of a made-up prompt are not finite: the weights can't be used in this dtype")
    plans += [
        StepPlan(0, tuple(_chunk(family, config.block_size, row, at, 1) for row in range(number))) for number in numbers
    ]
    scale = context_scale_tokens(family.shape.hidden_size)
    costs.fit([(plan.work(scale), _seconds(runner, plan, clock)) for plan in plans])


def _seconds(runner: Runner, plan: StepPlan, clock: Clock) -> float:
    runner.execute(plan)
    seconds = []
    for _ in range(NUM_RUNS):
        started_s = clock.now()
        runner.execute(plan)
        seconds.append(clock.now() - started_s)
    return min(seconds)


def _chunk(family: Family, block_size: int, row: int, start: int, num_tokens: int) -> Chunk:
    """Returns a chunk for row `row`. The chunks of all rows lie in the same blocks."""
    token_ids = np.zeros(start + num_tokens, dtype=np.int64)
    return Chunk(
        sequence_id=SequenceId(RequestId("calibration"), 0, row),
        start=start,
        num_tokens=num_tokens,
        token_ids=token_ids[start:],
        positions=family.positions(token_ids.tolist(), (), ()).ids[:, start:],
        block_ids=np.arange(-(-(start + num_tokens) // block_size), dtype=np.int64),
        splices=(),
        sampling=SamplingParams(temperature=0.0),
    )
