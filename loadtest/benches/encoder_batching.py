"""What the encoders' own batcher makes of 32 waiting pictures, against one by one: it learns what forwards take, and
fuses where that gains. Knows no model: it is handed what runs so many pictures and says how long that took."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

from encoder_pool.config import EncoderConfig
from encoder_pool.planning.batcher import QueuedUnit, choose_batch
from encoder_pool.planning.cost import ForwardCosts
from encoder_pool.planning.turns import Turn
from fabric.ids import MmHash, UnitKey

NUM_PICTURES = 32
NUM_ROUNDS = 5
COST = 1024
"""Patches of a picture of 448 x 448."""


class BatchingGain(NamedTuple):
    gain: float
    """Pictures per second, batched over one by one: the median over the rounds but the first, which only learns."""
    batch_sizes: list[int]
    """Of the last round."""


def batching_gain(forward_s: Callable[[int], float]) -> BatchingGain:
    """`forward_s` runs a forward of so many pictures. Rounds of both kinds take turns."""
    costs = ForwardCosts()
    for num_items in (1, 2):
        costs.observe("image", num_items * COST, forward_s(num_items))
    gains, sizes = [], []
    for number in range(NUM_ROUNDS):
        one_by_one_s = sum(forward_s(1) for _ in range(NUM_PICTURES))
        batched_s, sizes = _batched(forward_s, costs)
        if number:
            gains.append(one_by_one_s / batched_s)
    return BatchingGain(statistics.median(gains), sizes)


def _batched(forward_s: Callable[[int], float], costs: ForwardCosts) -> tuple[float, list[int]]:
    """Seconds in forwards until all pictures are done, and how many went into each."""
    queue = [
        QueuedUnit(
            Turn(number, (0.0, f"{number:02}"), 0.0).rank(costs.work_s("image", COST), 4.0, 0),
            UnitKey(MmHash(f"{number:02}"), 0),
            "image",
            COST,
            COST,
        )
        for number in range(NUM_PICTURES)
    ]
    total_s, sizes = 0.0, []
    while queue:
        batch = choose_batch(queue, EncoderConfig(num_decode_processes=0).max_batch_cost, costs.estimate)
        seconds = forward_s(len(batch))
        costs.observe("image", len(batch) * COST, seconds)
        total_s += seconds
        sizes.append(len(batch))
        queue = [unit for unit in queue if unit not in batch]
    return total_s, sizes
