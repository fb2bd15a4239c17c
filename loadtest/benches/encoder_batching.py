"""What the encoders' own batcher makes of 64 waiting pictures, against one by one: it learns what forwards take, and
fuses where that gains. Measured with fresh costs and with worn ones: after many pictures of one size alone, which tell
nothing about the price of a forward. Knows no model: it is handed what runs so many pictures and says how long that
took."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

from encoder_pool.config import EncoderConfig
from encoder_pool.planning.batcher import QueuedUnit, choose_batch
from encoder_pool.planning.cost import ForwardCosts
from encoder_pool.planning.turns import Turn
from fabric.ids import MmHash, UnitKey

NUM_PICTURES = 64
NUM_ROUNDS = 5
WORN = (0, 6, 480)
"""Forwards of one picture that went before, with nothing waiting."""
NUM_TIMED = 6
"""Of these are run; their times stand for the others."""
COST = 1024
"""Patches of a picture of 448 x 448."""


class BatchingGain(NamedTuple):
    num_worn: int
    gain: float
    """Pictures per second, batched over one by one: the median over the rounds but the first, which only learns."""
    first_sizes: list[int]
    """Pictures in each forward of the first round, with costs as they were worn."""
    last_sizes: list[int]


def batching_gains(forward_s: Callable[[int], float]) -> list[BatchingGain]:
    """For each wear of the costs. `forward_s` runs a forward of so many pictures."""
    return [batching_gain(forward_s, num_worn) for num_worn in WORN]


def batching_gain(forward_s: Callable[[int], float], num_worn: int) -> BatchingGain:
    """Rounds of both kinds take turns; the costs are worn again before each."""
    costs = ForwardCosts()
    for num_items in (1, 2):
        costs.observe("image", num_items * COST, forward_s(num_items))
    gains, rounds = [], []
    for number in range(NUM_ROUNDS):
        _wear(costs, forward_s, num_worn)
        one_by_one_s = sum(forward_s(1) for _ in range(NUM_PICTURES))
        batched_s, sizes = _batched(forward_s, costs)
        rounds.append(sizes)
        if number:
            gains.append(one_by_one_s / batched_s)
    return BatchingGain(num_worn, statistics.median(gains), rounds[0], rounds[-1])


def _wear(costs: ForwardCosts, forward_s: Callable[[int], float], num_forwards: int) -> None:
    timed_s = [forward_s(1) for _ in range(min(num_forwards, NUM_TIMED))]
    for number in range(num_forwards):
        costs.observe("image", COST, timed_s[number % len(timed_s)])


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
        batch = choose_batch(queue, EncoderConfig(("image",), num_decode_processes=0).max_batch_cost, costs.estimate)
        seconds = forward_s(len(batch))
        costs.observe("image", len(batch) * COST, seconds)
        total_s += seconds
        sizes.append(len(batch))
        queue = [unit for unit in queue if unit not in batch]
    return total_s, sizes
