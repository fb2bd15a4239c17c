"""What one rank of a worker holds. Pure."""

from __future__ import annotations

from fabric.errors import ConfigError
from modalities.family import ModelShape


def check_shares(shape: ModelShape, num_ranks: int) -> None:
    """Raises ConfigError if the KV heads can't be shared out evenly: a head is never split or kept twice."""
    if shape.num_kv_heads % num_ranks:
        raise ConfigError(
            f"workers.tensor_parallel is {num_ranks}, which does not divide the model's {shape.num_kv_heads} KV heads"
        )


def kv_heads(shape: ModelShape, num_ranks: int) -> tuple[int, int]:
    """(KV heads of one rank, their size): what each rank's pages are made of."""
    return shape.num_kv_heads // num_ranks, shape.head_dim
