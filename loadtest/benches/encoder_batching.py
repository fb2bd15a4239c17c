"""Measures how much faster the encoder's own batcher encodes 64 waiting pictures than passes over one picture each.

The batcher learns how long forward passes take, and fuses pictures where that gains time. `batching_gains` measures the
gain with fresh cost estimates and with worn ones; estimates are worn after many pictures of one size alone, which say
nothing about the overhead of a pass. It knows no model: it receives a function that runs a number of pictures and
returns how long that took. It knows nothing of encoder services or devices either.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

from encoder_pool.encoder_config import EncoderConfig
from encoder_pool.planning import ForwardCosts, QueuedUnit, choose_batch
from fabric.contracts import CallTurn, MmHash, UnitKey

NUM_PICTURES = 64
NUM_ROUNDS = 5
WORN = (0, 6, 480)
"""Holds the numbers of forward passes of one picture that precede the measurement, with nothing waiting."""
NUM_TIMED = 6
"""The bench runs at most this many of the passes of `WORN`; their times stand for those of the others."""
COST = 1024
"""A picture of 448 x 448 has this many patches."""


class BatchingGain(NamedTuple):
    num_worn: int
    gain: float
    """Holds the ratio of pictures per second, batched to one by one: the median over all rounds but the first, in which
    the batcher only learns."""
    first_sizes: list[int]
    """Holds the number of pictures in each forward pass of the first round, which uses the worn estimates."""
    last_sizes: list[int]


def batching_gains(forward_s: Callable[[int], float]) -> list[BatchingGain]:
    """Returns the gain for each number of preceding passes. `forward_s` runs a forward pass of the given number of
    pictures."""
    return [batching_gain(forward_s, num_worn) for num_worn in WORN]


def batching_gain(forward_s: Callable[[int], float], num_worn: int) -> BatchingGain:
    """Measures in rounds. Each round wears the estimates again, then runs the pictures one by one, and then batched."""
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
    """Returns the seconds in forward passes until all pictures are done, and how many pictures went into each pass."""
    queue = [
        QueuedUnit(
            CallTurn(number, (0.0, f"{number:02}"), 0.0).rank(costs.work_s("image", COST), 4.0, 0),
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
