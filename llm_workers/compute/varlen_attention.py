"""Computes attention with torch's variable-length flash kernel: on CUDA, in half precision, all sequences of a step in
one call.

If torch's `varlen_attn` takes a block table (since torch 2.13), the kernel reads the pages in place; with an older
torch, or with a block size that the kernel can't read, the contexts are gathered first. `num_splits=1` makes a
sequence's result independent of its batch. This module knows nothing of requests, models or scheduling.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from llm_workers.compute.paged_kv import PagedKV, SequenceRows, write_slots
from llm_workers.scheduling import PAGE_TOKENS_MULTIPLE


def is_varlen_available(kv: PagedKV) -> bool:
    """Returns whether this torch has the kernel and the kernel can read these pages."""
    return kv.device.type == "cuda" and kv.dtype in (torch.float16, torch.bfloat16) and bool(_varlen_parameters())


def has_block_tables() -> bool:
    """Returns whether the kernel reads pages in place (since torch 2.13)."""
    return "block_table" in _varlen_parameters()


def _varlen_parameters() -> frozenset[str]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


class VarlenStep:
    """A `VarlenStep` is an `AttentionStep` for CUDA in float16 or bfloat16."""

    def __init__(self, kv: PagedKV, rows: Sequence[SequenceRows]) -> None:
        self._kv, self.rows = kv, rows
        self._write = write_slots(kv, rows)
        contexts = [row.context for row in rows]
        self._max_q, self._max_k = max(row.num_tokens for row in rows), max(contexts)
        self._cu_q = _cumulative([row.num_tokens for row in rows], kv.device)
        self._cu_k = _cumulative(contexts, kv.device)
        parameters = _varlen_parameters()
        self._options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
        if "num_splits" in parameters:
            self._options["num_splits"] = 1
        self._has_gqa = "enable_gqa" in parameters
        self._slots: torch.Tensor | None = None
        self._tail: torch.Tensor | None = None
        if "block_table" in parameters and kv.block_size % PAGE_TOKENS_MULTIPLE == 0:
            self._options["block_table"] = _block_table(rows, kv.device)
            self._options["seqused_k"] = torch.tensor(contexts, dtype=torch.int32, device=kv.device)
            self._tail = _tail_slots(kv, rows)
        else:
            gathered = np.concatenate([kv.slots(row.block_ids, 0, row.context) for row in rows])
            self._slots = torch.from_numpy(gathered).to(kv.device)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        keys, values = self._kv.layer(layer)
        keys.index_copy_(0, self._write, k)
        values.index_copy_(0, self._write, v)
        if self._slots is not None:
            keys, values = keys.index_select(0, self._slots), values.index_select(0, self._slots)
        else:
            assert self._tail is not None
            for pages in (keys, values):
                pages.index_fill_(0, self._tail, 0)
            paged = (-1, self._kv.block_size, *keys.shape[1:])
            keys, values = keys.view(paged), values.view(paged)
        num_groups = q.shape[1] // keys.shape[-2]
        options = dict(self._options)
        if num_groups > 1 and self._has_gqa:
            options["enable_gqa"] = True
        elif num_groups > 1:
            keys, values = (tensor.repeat_interleave(num_groups, dim=-2) for tensor in (keys, values))
        cu_k = None if self._slots is None else self._cu_k
        lengths = (self._cu_q, cu_k, self._max_q, self._max_k)
        attended = varlen_attn(q.contiguous(), keys, values, *lengths, scale=scaling, **options)
        assert isinstance(attended, torch.Tensor)  # It is a tuple only if further results are wanted.
        return attended


def _cumulative(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device)


def _block_table(rows: Sequence[SequenceRows], device: torch.device) -> torch.Tensor:
    """Returns the block tables as one int32 tensor with shape `(num_rows, longest)`. Short tables are padded with their
    own first block."""
    table = np.empty((len(rows), max(len(row.block_ids) for row in rows)), dtype=np.int32)
    for index, row in enumerate(rows):
        table[index] = row.block_ids[0]
        table[index, : len(row.block_ids)] = row.block_ids
    return torch.from_numpy(table).to(device)


def _tail_slots(kv: PagedKV, rows: Sequence[SequenceRows]) -> torch.Tensor:
    """Returns the unwritten slots of each sequence's last block. They are zeroed before the kernel reads whole pages: a
    NaN that an earlier sequence left there would pass through the mask (0 * NaN is NaN)."""
    tails = [kv.slots(row.block_ids, row.context, -(-row.context // kv.block_size) * kv.block_size) for row in rows]
    return torch.from_numpy(np.concatenate(tails)).to(kv.device)
