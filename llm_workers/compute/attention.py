"""Implements paged attention inside the unchanged model code of transformers.

A model's attention calls the registered function with the keyword `weft`, which holds an `AttentionStep`. The function
writes the step's keys and values into the paged KV and attends to each sequence's own context there. A backend builds
everything that depends on the step alone (slots, masks, buckets) once per step, never once per layer.
`select_backend` chooses between `VarlenStep` (`varlen_attention`) and `SdpaStep`, which stands here because it runs on
any device: over gathered pages with torch's scaled_dot_product_attention, or on a CPU with the C code of
`native_attention` where that can be used.

This module knows nothing of requests, models or scheduling; it knows blocks, rows and lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from fabric.contracts import ConfigError
from llm_workers.compute.native_attention import NativeChunks, NativeDecode, is_native, is_native_for_chunks
from llm_workers.compute.paged_kv import PagedKV, SequenceRows, StepRows, write_slots
from llm_workers.compute.varlen_attention import VarlenStep, is_varlen_available

# ---------------------------------------------------------------- the interface to transformers

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
    raise ConfigError(f"the attention backend {name!r} can't run on {kv.device} in {kv.dtype}; use `sdpa` or `auto`")


def register_attention(name: str = ATTENTION_NAME) -> str:
    """Registers `attention_forward` with transformers under `name`, for this process, and returns `name`. The call is
    idempotent. It registers no mask function, so transformers builds no masks."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, attention_forward)
    return name


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
        raise ConfigError("the model does not pass the keyword `weft` to its attention, which needs it")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return weft.attend(module.layer_idx, q, k, v, scale).unsqueeze(0), None


# ---------------------------------------------------------------- attention on any device

MIN_BUCKET_TOKENS = 64
"""Limits the contexts that share one batch regardless of their ratio. Below this length, a separate call costs more
time than the padding."""
GROUP_BYTES = 2**20
"""Limits the keys and values of one group per thread, on a CPU, to half of a small L2 cache. In measurements, groups of
0.3 to 1.2 MB are equally fast, and an undivided batch of 32 contexts of 300 tokens takes twice as long."""


class SdpaStep:
    """An `SdpaStep` is an `AttentionStep` that runs on any device.

    Rows of one token (decoding) are batched by context length, so that padding at most doubles the work. On a CPU the
    batches are also split into groups whose gathered pages stay in the cores' caches until attention reads them. Longer
    chunks are attended one sequence at a time. Padding repeats the sequence's own first slot, so that no value that
    another sequence wrote, even NaN, can reach this sequence through a mask. Where the C code can attend the rows or
    the chunks, it does so instead."""

    def __init__(self, kv: PagedKV, rows: Sequence[SequenceRows]) -> None:
        step = StepRows.of(rows)
        self._kv, self.rows = kv, step
        self._write = write_slots(kv, step)
        self._native: NativeDecode | None = None
        self._decodes: list[GatheredDecodes] = []
        if is_native(kv):
            singles = step.singles()
            self._native = NativeDecode(kv, singles) if len(singles.at) else None
            decoded = singles.at
        else:
            groups = _decode_groups(kv, [row for row in step if row.num_tokens == 1])
            self._decodes = _decode_batches(kv, groups)
            decoded = np.array([row.at for group in groups for row in group], dtype=np.int64)
        self._decoded = torch.from_numpy(decoded).to(kv.device)
        self._chunk_rows = [row for row in step.others if row.num_tokens > 1]
        self._chunks: NativeChunks | list[PrefillChunk] | None = None

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attends as `AttentionStep.attend` describes. If `q` has more rows than the step, the result is zero in the
        extra rows."""
        keys, values = self._kv.layer(layer)
        num_tokens = len(self._write)
        keys.index_copy_(0, self._write, k[:num_tokens])
        values.index_copy_(0, self._write, v[:num_tokens])
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        out[num_tokens:].zero_()
        if self._native:
            attended = self._native.attend(layer, q.index_select(0, self._decoded), scaling)
            out.index_copy_(0, self._decoded, attended)
        if self._decodes:
            queries = q.index_select(0, self._decoded)
            parts = [_attend_decode(batch, queries, (keys, values), scaling) for batch in self._decodes]
            out.index_copy_(0, self._decoded, torch.cat(parts))
        if self._chunks is None:
            self._chunks = self._prepare_chunks(q.shape[1])
        if isinstance(self._chunks, NativeChunks):
            self._chunks.attend(layer, q, out, scaling)
            return out
        for chunk in self._chunks:
            end = chunk.at + chunk.num_tokens
            out[chunk.at : end] = _attend_prefill(
                chunk, q[chunk.at : end], k[chunk.at : end], v[chunk.at : end], (keys, values), scaling
            )
        return out

    def _prepare_chunks(self, num_heads: int) -> NativeChunks | list[PrefillChunk]:
        if self._chunk_rows and is_native_for_chunks(self._kv, num_heads):
            return NativeChunks(self._kv, self._chunk_rows)
        return [_prefill_chunk(self._kv, row) for row in self._chunk_rows]


class GatheredDecodes(NamedTuple):
    """A `GatheredDecodes` is one batch of one-token rows with similar contexts: the rows `[first, last)` of the step's
    decoding rows in order of context. `slots` is int64 and has shape `((last - first) * width,)`. `mask` has shape
    `(last - first, 1, 1, width)` and the KV's dtype and is -inf where a row has no token; it is None when all contexts
    are equally long. `gathered` is the buffer that receives keys and values, each with shape
    `((last - first) * width, num_kv_heads, head_dim)`; the batches of a step share it."""

    first: int
    last: int
    slots: torch.Tensor
    width: int
    mask: torch.Tensor | None
    gathered: torch.Tensor


class PrefillChunk(NamedTuple):
    """A `PrefillChunk` is a chunk of one sequence. `slots` is int64 and has shape `(context,)`. `mask` has shape
    `(num_tokens, context)` and the KV's dtype and is -inf for each position that a token does not see; it is None for a
    chunk that starts at 0, whose attention is plainly causal."""

    at: int
    num_tokens: int
    slots: torch.Tensor
    mask: torch.Tensor | None


def _decode_groups(kv: PagedKV, rows: Sequence[SequenceRows]) -> list[list[SequenceRows]]:
    cut = buckets(rows)
    if kv.device.type != "cpu":
        return cut
    keys, _ = kv.layer(0)
    max_tokens = GROUP_BYTES * torch.get_num_threads() // (2 * keys[0].numel() * keys.element_size())
    return [group for bucket in cut for group in groups(bucket, max_tokens)]


def buckets(rows: Iterable[SequenceRows]) -> list[list[SequenceRows]]:
    """Groups the rows so that the longest context of a group is at most twice the shortest (or MIN_BUCKET_TOKENS)."""
    size_to_rows: dict[int, list[SequenceRows]] = {}
    for row in rows:
        size_to_rows.setdefault(max(row.context, MIN_BUCKET_TOKENS).bit_length(), []).append(row)
    return [size_to_rows[size] for size in sorted(size_to_rows)]


def groups(rows: Sequence[SequenceRows], max_tokens: int) -> list[list[SequenceRows]]:
    """Sorts the rows by context and cuts them into groups. With its padding a group has at most `max_tokens` tokens, or
    it has a single row."""
    cut: list[list[SequenceRows]] = []
    for row in sorted(rows, key=lambda row: row.context):
        if cut and (len(cut[-1]) + 1) * row.context <= max_tokens:
            cut[-1].append(row)
        else:
            cut.append([row])
    return cut


def _decode_batches(kv: PagedKV, cut: Sequence[Sequence[SequenceRows]]) -> list[GatheredDecodes]:
    most = max((len(group) * max(row.context for row in group) for group in cut), default=0)
    keys, _ = kv.layer(0)
    gathered = torch.empty((2, most, *keys.shape[1:]), dtype=kv.dtype, device=kv.device)
    batches: list[GatheredDecodes] = []
    for group in cut:
        batches.append(_decode_batch(kv, group, batches[-1].last if batches else 0, gathered))
    return batches


def _decode_batch(kv: PagedKV, rows: Sequence[SequenceRows], first: int, gathered: torch.Tensor) -> GatheredDecodes:
    contexts = np.array([row.context for row in rows])
    width = int(contexts.max())
    slots = np.empty((len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        slots[index, : row.context] = kv.slots(row.block_ids, 0, row.context)
        slots[index, row.context :] = slots[index, 0]
    mask = None
    if (contexts != width).any():
        mask = _mask(kv, (np.arange(width) < contexts[:, None])[:, None, None, :])
    flat = torch.from_numpy(slots.reshape(-1)).to(kv.device)
    return GatheredDecodes(first, first + len(rows), flat, width, mask, gathered[:, : len(flat)])


def _prefill_chunk(kv: PagedKV, row: SequenceRows) -> PrefillChunk:
    slots = torch.from_numpy(kv.slots(row.block_ids, 0, row.context)).to(kv.device)
    mask = None
    if row.start > 0:
        seen_until = np.arange(row.start, row.context)[:, None]
        mask = _mask(kv, np.arange(row.context) <= seen_until)
    return PrefillChunk(row.at, row.num_tokens, slots, mask)


def _mask(kv: PagedKV, is_seen: npt.NDArray[np.bool_]) -> torch.Tensor:
    """Returns the mask that is added to the scores. With a bool mask, torch would build this tensor again in every
    layer."""
    seen = torch.from_numpy(is_seen).to(kv.device)
    return torch.zeros(seen.shape, dtype=kv.dtype, device=kv.device).masked_fill_(~seen, float("-inf"))


def _attend_decode(
    batch: GatheredDecodes, queries: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], scaling: float
) -> torch.Tensor:
    """Attends one batch of decoding rows. `queries` has shape `(num_decoded, num_heads, head_dim)`; the result has
    shape `(last - first, num_heads, head_dim)`. The query heads that share one KV head are passed as several queries of
    that head, so keys and values are never repeated."""
    num_rows, (_, num_kv_heads, head_dim) = batch.last - batch.first, pages[0].shape
    grouped = queries[batch.first : batch.last].view(num_rows, num_kv_heads, -1, head_dim)
    for page, gathered in zip(pages, batch.gathered, strict=True):
        torch.index_select(page, 0, batch.slots, out=gathered)
    keys, values = batch.gathered.view(2, num_rows, batch.width, num_kv_heads, head_dim).transpose(2, 3)
    attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=batch.mask, scale=scaling)
    return attended.reshape(num_rows, -1, head_dim)


def _attend_prefill(
    chunk: PrefillChunk,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    scaling: float,
) -> torch.Tensor:
    """Attends one chunk of a prompt. A chunk that starts at 0 sees only itself, so it attends to `k` and `v` directly;
    a later chunk gathers its context from the pages."""
    if chunk.mask is not None:
        k, v = (tensor.index_select(0, chunk.slots) for tensor in pages)
    queries, keys, values = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    attended = scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return attended[0].transpose(0, 1)
