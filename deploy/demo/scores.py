"""Defines what a measurement is: a task, a number of samples, and how many of them are right. It knows no model."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from deploy.demo.catalogue import Task
from deploy.demo.media import Sample

GOAL = 0.97
SCALE_SHARES = (0.6, 0.25, 0.15)
"""Gives the share of each scale of picture sizes in a measurement. With these shares 40 % of the pictures are larger
than most pictures of training."""
_KEY = 0x5EED


class Score(NamedTuple):
    task: Task
    num_samples: int
    num_right: int

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_samples


def fresh_samples(task: Task, num_samples: int, seed: int) -> Iterator[Sample]:
    """Yields samples that are the same for the same arguments. No seed gives samples of training, because these streams
    have another key."""
    rng = np.random.default_rng((_KEY, seed, zlib.crc32(task.name.encode())))
    for _ in range(num_samples):
        yield task.draw(rng, int(rng.choice(3, p=SCALE_SHARES)))
