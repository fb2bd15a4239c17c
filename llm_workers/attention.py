"""Paged attention under transformers' own modules.

A model's attention calls the registered function with the keyword `weft`, an `AttentionStep`: the function writes
the step's keys and values into the paged KV and attends to each sequence's own context there. Everything that
depends on the step alone (slots, masks, buckets) is built once per step by a backend, never per layer.

Knows nothing of requests, models or scheduling: only of blocks, rows and lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from fabric.errors import ConfigError
from llm_workers.attention_sdpa import SdpaStep
from llm_workers.attention_varlen import VarlenStep, is_varlen_available
from llm_workers.paged_kv import PagedKV, Rows

ATTENTION_NAME = "weft_paged"


class AttentionStep(Protocol):
    """What travels in the keyword `weft`."""

    rows: Sequence[Rows]
    """What it was built for."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """Writes the step's keys and values, then attends. `q` `(num_tokens, num_heads, head_dim)`, `k` and `v`
        `(num_tokens, num_kv_heads, head_dim)`; returns `(num_tokens, num_heads, head_dim)`."""
        ...


class Backend(Protocol):
    """A way to attend over pages; called once per step."""

    def __call__(self, kv: PagedKV, rows: Sequence[Rows]) -> AttentionStep: ...


def select_backend(name: str, kv: PagedKV) -> Backend:
    """`sdpa` runs anywhere, `varlen` on CUDA in half precision; `auto` takes the best there is for these pages.
    Raises ConfigError otherwise."""
    if name in ("varlen", "auto") and is_varlen_available(kv):
        return VarlenStep
    if name in ("sdpa", "auto"):
        return SdpaStep
    raise ConfigError(f"attention backend {name!r} can't run on {kv.device} in {kv.dtype}; use `sdpa` or `auto`")


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    weft: AttentionStep | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers' attention modules call: `query` `(1, num_heads, num_tokens, head_dim)` ->
    `(1, num_tokens, num_heads, head_dim)`. The step's own causal rule replaces `attention_mask`."""
    if weft is None:
        raise ConfigError("the paged attention was called without its step: the model does not pass keywords through")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    return weft.attend(module.layer_idx, *packed, scale).unsqueeze(0), None


def register_attention(name: str = ATTENTION_NAME) -> str:
    """Makes the function known to transformers, for this process, under `name` (returned). Idempotent. No mask
    function is registered with it, so transformers builds no masks."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, attention_forward)
    return name
