"""Implements paged attention inside the unchanged model code of transformers.

A model's attention calls the registered function with the keyword `weft`, which holds an `AttentionStep`. The function
writes the step's keys and values into the paged KV and attends to each sequence's own context there. A backend builds
everything that depends on the step alone (slots, masks, buckets) once per step, never once per layer.

This module knows nothing of requests, models or scheduling; it knows blocks, rows and lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from fabric.errors import ConfigError
from llm_workers.attention_sdpa import SdpaStep
from llm_workers.attention_varlen import VarlenStep, is_varlen_available
from llm_workers.paged_kv import PagedKV, SequenceRows

ATTENTION_NAME = "weft_paged"


class AttentionStep(Protocol):
    """An `AttentionStep` is the object that the keyword `weft` carries to every attention layer of a forward pass."""

    @property
    def rows(self) -> Sequence[SequenceRows]:
        """Returns the rows for which the step was built."""
        ...

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """Writes the step's keys and values, then attends. `q` has shape `(num_tokens, num_heads, head_dim)`; `k` and
        `v` have shape `(num_tokens, num_kv_heads, head_dim)`. The result has shape
        `(num_tokens, num_heads, head_dim)`."""
        ...


class Backend(Protocol):
    """A `Backend` is one implementation of attention over pages. The runner calls it once per step."""

    def __call__(self, kv: PagedKV, rows: Sequence[SequenceRows]) -> AttentionStep: ...


def select_backend(name: str, kv: PagedKV) -> Backend:
    """Returns the backend called `name`. `sdpa` runs on any device, `varlen` runs on CUDA in half precision, and `auto`
    selects the best backend that can run on these pages. Raises ConfigError if there is no such backend or if it can't
    run on these pages."""
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
    """Computes the attention of one layer; the attention modules of transformers call it. `query` has shape
    `(1, num_heads, num_tokens, head_dim)`; the result has shape `(1, num_tokens, num_heads, head_dim)`. The causal rule
    of the step replaces `attention_mask`. Raises ConfigError if the model did not pass the keyword `weft`."""
    if weft is None:
        raise ConfigError("the paged attention was called without its step: the model does not pass keywords through")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return weft.attend(module.layer_idx, q, k, v, scale).unsqueeze(0), None


def register_attention(name: str = ATTENTION_NAME) -> str:
    """Registers `attention_forward` with transformers under `name`, for this process, and returns `name`. The call is
    idempotent. It registers no mask function, so transformers builds no masks."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, attention_forward)
    return name
