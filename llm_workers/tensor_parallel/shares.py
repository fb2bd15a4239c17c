"""Computes what one rank of a worker holds. The module is pure and knows nothing of devices."""

from __future__ import annotations

from fabric.errors import ConfigError
from modalities.family import ModelShape


def check_shares(shape: ModelShape, num_ranks: int) -> None:
    """Raises ConfigError if the KV heads can't be divided evenly among the ranks: a head is never split or kept
    twice."""
    if shape.num_kv_heads % num_ranks:
        raise ConfigError(
            f"workers.tensor_parallel is {num_ranks}, which does not divide the model's {shape.num_kv_heads} KV heads"
        )


def kv_heads(shape: ModelShape, num_ranks: int) -> tuple[int, int]:
    """Returns (number of KV heads of one rank, size of a head), which give the shape of each rank's pages."""
    return shape.num_kv_heads // num_ranks, shape.head_dim
