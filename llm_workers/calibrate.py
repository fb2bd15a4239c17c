"""What a step costs on this machine, before the first request: a few steps on made-up tokens.

Runs before the scheduler owns any block, so it may write anywhere in the KV pages.
"""

from __future__ import annotations

import numpy as np

from fabric.clock import Clock
from fabric.ids import RequestId, SequenceId
from fabric.messages import SamplingParams
from llm_workers.config import WorkerConfig
from llm_workers.runner import Runner
from llm_workers.scheduling.plan import Chunk, StepPlan
from llm_workers.step_costs import StepCosts
from modalities.family import Family

SIZES = (1, 16, 128)
NUM_RUNS = 2


def calibrate(runner: Runner, family: Family, config: WorkerConfig, costs: StepCosts, clock: Clock) -> None:
    """Observes a few steps of each size that fits; the first of a size warms up and is not counted."""
    most = min(config.max_step_tokens, config.num_blocks * config.block_size, family.shape.max_model_len)
    for size in sorted({min(size, most) for size in SIZES}):
        plan = StepPlan(0, (_chunk(family, config.block_size, size),))
        runner.execute(plan)
        for _ in range(NUM_RUNS):
            started_s = clock.now()
            runner.execute(plan)
            costs.observe(size, clock.now() - started_s)


def _chunk(family: Family, block_size: int, num_tokens: int) -> Chunk:
    token_ids = np.zeros(num_tokens, dtype=np.int64)
    return Chunk(
        sequence_id=SequenceId(RequestId("calibration"), 0, 0),
        start=0,
        num_tokens=num_tokens,
        token_ids=token_ids,
        positions=family.positions(token_ids.tolist(), (), ()).ids,
        block_ids=np.arange(-(-num_tokens // block_size), dtype=np.int64),
        splices=(),
        sampling=SamplingParams(temperature=0.0),
    )
