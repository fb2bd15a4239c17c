"""Computes how much memory a worker's pools take, and whether they can hold the largest request that the limits allow.

`shortfalls` compares the largest media with the pools, `worker_bytes` adds up what one replica holds, `fitting_blocks`
says how many KV blocks a device has room for, and `kv_heads` says how many KV heads the pages of one of several ranks
hold. This is arithmetic on a model's shape and a config: it allocates nothing and loads nothing. It asks no device and
knows nothing of weights, and expects that the ranks divide the KV heads evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fabric.contracts import DTYPE_TO_BYTES, feature_nbytes
from fabric.transport import ALIGNMENT_BYTES, HEADER_BYTES
from llm_workers.scheduling.prompt_reader import SCORED_AT_ONCE
from llm_workers.worker_config import WorkerConfig
from modalities.family import ModelShape

# ---------------------------------------------------------------- the largest request

MIN_TEXT_TOKENS = 64
"""Leaves room for a chat template around one medium, a short question and the first tokens of an answer."""


class LargestItem(NamedTuple):
    """A `LargestItem` is the largest medium of one modality that passes the limits."""

    modality: str
    num_tokens: int
    max_unit_tokens: int
    """Counts the tokens of the medium's largest unit; units are transferred one by one."""
    cost: int
    """Counts the medium's patches or, for a sound, its mel frames."""
    max_unit_cost: int = 0
    """Holds the `cost` of the largest unit, which one forward pass must hold."""
    num_levels: int = 0
    """Counts the levels of the medium's features, as `MediaItem.num_levels` does; 0 means as many as the model has."""


def shortfalls(
    shape: ModelShape,
    config: WorkerConfig,
    inbox_bytes: int,
    dtype: str,
    largest: Sequence[LargestItem],
    path: str = "workers",
) -> list[str]:
    """Returns the reasons why a request with one of these media could never be served, one sentence each, which name
    the section `path` of the config; the list is empty when all can be served. No request asks for a medium that is
    longer than the model's context, so no room beyond the context is demanded."""
    found = []
    capacity = config.num_blocks * config.block_size
    for item in largest:
        needed_tokens = min(item.num_tokens + MIN_TEXT_TOKENS, shape.max_model_len - 1)
        if needed_tokens > capacity:
            found.append(
                f"{path}: num_blocks x block_size is {capacity} tokens, but the largest {item.modality} takes "
                f"{item.num_tokens} tokens, and {needed_tokens} with its text; num_blocks must be at least "
                f"{-(-needed_tokens // config.block_size)}"
            )
        found += arena_shortfall(f"{path}: inbox_bytes", shape, inbox_bytes, dtype, item)
    return found


def arena_shortfall(name: str, shape: ModelShape, arena_bytes: int, dtype: str, item: LargestItem) -> list[str]:
    """Returns one sentence that says why the arena of that name could never hold the item's largest unit, or an empty
    list if it can."""
    num_tokens = min(item.max_unit_tokens, shape.max_model_len - 1)
    needed_bytes = slot_bytes(feature_bytes(shape, num_tokens, dtype, item.num_levels))
    if arena_bytes - arena_bytes % ALIGNMENT_BYTES >= needed_bytes:
        return []
    return [f"{name} is {arena_bytes}, but one feature of the largest {item.modality} takes {needed_bytes} bytes"]


def arena_room(arena_bytes: int, unit_bytes: int) -> int:
    """Returns how many units of that payload an empty arena holds."""
    return arena_bytes // slot_bytes(unit_bytes)


def slot_bytes(payload_bytes: int) -> int:
    """Returns the bytes that a feature occupies in an arena, with its header and the padding
    (`fabric.transport.feature_channel`)."""
    return -(-(HEADER_BYTES + payload_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def feature_bytes(shape: ModelShape, num_tokens: int, dtype: str, num_levels: int = 0) -> int:
    """Returns the payload bytes of one unit of shape `(num_levels, num_tokens, hidden_size)`. A `num_levels` of 0 means
    as many levels as the model has."""
    return feature_nbytes((num_levels or shape.num_levels, num_tokens, shape.hidden_size), dtype)


# ---------------------------------------------------------------- the memory of a worker

NUM_HIDDEN_WIDTHS = 16
"""Counts the hidden-sized values per token that a decoder layer keeps alive at once: the residual and its norm, q, k, v
and the attention's output (6), and the gate, up and product of an MLP of three to four hidden sizes (10)."""


class WorkerBytes(NamedTuple):
    """Holds byte counts: `workspace` is an estimate, and the others are what the worker allocates."""

    kv: int
    inbox: int
    workspace: int


def worker_bytes(
    shape: ModelShape, config: WorkerConfig, inbox_bytes: int, dtype: str, *, is_in_place: bool = False
) -> WorkerBytes:
    """Returns the bytes of one replica, or of rank 0 of a replica with several ranks. `is_in_place` is the answer of
    `reads_in_place`."""
    num_kv_heads, head_dim = kv_heads(shape, config.num_ranks)
    per_layer = 2 * config.num_blocks * config.block_size * num_kv_heads * head_dim * DTYPE_TO_BYTES[dtype]
    step_rows = config.max_step_tokens * shape.hidden_size * DTYPE_TO_BYTES[dtype]
    rows = min(config.max_step_tokens, config.max_sequences * (1 + config.speculation.max_tokens))
    rows = max(rows, min(config.max_step_tokens, SCORED_AT_ONCE))
    logits = rows * shape.vocab_size * 4
    # The workspace is the sum of activations, the features of a step that consists of features alone (copied and
    # joined), logits with their sorted probabilities (of drawn tokens, or of a part of a prompt), the pages of one
    # layer gathered for attention, and the mask of a chunk at the end of the longest context.
    # Attention that reads pages in place needs neither the gathered pages nor the mask.
    mask = config.max_step_tokens * min(shape.max_model_len, config.num_blocks * config.block_size) * 4
    gathered = 0 if is_in_place else per_layer + mask
    workspace = step_rows * (NUM_HIDDEN_WIDTHS + 2 * shape.num_levels) + 3 * logits + gathered
    return WorkerBytes(shape.num_layers * per_layer, inbox_bytes, workspace)


def kv_heads(shape: ModelShape, num_ranks: int) -> tuple[int, int]:
    """Returns (number of KV heads of one rank, size of a head), which give the shape of each rank's pages."""
    return shape.num_kv_heads // num_ranks, shape.head_dim


PAGE_TOKENS_MULTIPLE = 256
"""The block size must be a multiple of this many tokens for the paged kernel of flash attention."""


def reads_in_place(device: str, dtype: str, block_size: int) -> bool:
    """Returns whether attention reads pages of this form where they lie, given a torch whose kernel takes block tables.
    Otherwise it gathers the contexts of a step in every layer."""
    return device == "cuda" and dtype in ("float16", "bfloat16") and block_size % PAGE_TOKENS_MULTIPLE == 0


# ---------------------------------------------------------------- the blocks that a device has room for

USABLE_SHARE = 0.9
"""Weft plans with this share of a device's memory, as vLLM does by default (docs/references.md); allocators leave gaps
in the rest, and CUDA graphs take some of it."""


class DeviceRoom(NamedTuple):
    """Says in bytes what a device has left, how large it is, and what the asking process takes of it already."""

    free_bytes: int
    total_bytes: int
    own_bytes: int


def fitting_blocks(room: DeviceRoom, device_share: float, workspace_bytes: int, bytes_per_block: int) -> int:
    """Returns how many KV blocks fit beside the workspace of the largest step; it is 0 if there is no room. A process
    that shares its device takes `device_share` of it in all, however much is free while the others still start."""
    own_share = int(room.total_bytes * device_share) - room.own_bytes
    usable_bytes = int(min(room.free_bytes, own_share) * USABLE_SHARE) - workspace_bytes
    return max(0, usable_bytes // bytes_per_block)


def block_bytes(shape: ModelShape, config: WorkerConfig, dtype: str, *, is_in_place: bool = True) -> int:
    """Returns the bytes of one KV block on one rank, in all layers, with the rows of side layers. Where attention can't
    read pages in place, the keys and values that it gathers of one layer, and their copy, count too."""
    num_kv_heads, head_dim = kv_heads(shape, config.num_ranks)
    num_layers = shape.num_layers + (0 if is_in_place else 2)
    per_token = 2 * num_layers * num_kv_heads * head_dim + len(config.side_layers) * shape.hidden_size
    return config.block_size * per_token * DTYPE_TO_BYTES[dtype]


def most_blocks(shape: ModelShape, config: WorkerConfig) -> int:
    """Returns the number of KV blocks that the most sequences of a step fill at most."""
    return max(2, -(-config.max_sequences * shape.max_model_len // config.block_size))
