"""Keys and values in pages, and which rows of a step belong where. What every attention backend shares.

Knows nothing of models, requests or how attention is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from llm_workers.scheduling.plan import NO_BLOCK


class Rows(NamedTuple):
    """One sequence's tokens of a step: rows `[at, at + num_tokens)` of the packed input hold its positions
    `[start, start + num_tokens)`; `block_ids` covers everything up to the last of them. `copied_from`: the block whose
    content the block of `start` begins with."""

    at: int
    start: int
    num_tokens: int
    block_ids: npt.NDArray[np.int64]
    copied_from: int = NO_BLOCK

    @property
    def context(self) -> int:
        """Positions that the last of these tokens sees, itself included."""
        return self.start + self.num_tokens


class PagedKV:
    """Keys and values of one worker: per layer a flat `(num_blocks * block_size, num_kv_heads, head_dim)` view of
    pages. Zeroed at birth, so that what is masked out is at least finite."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        heads: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`heads` is (num_kv_heads, head_dim)."""
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_layers, 2, num_blocks * block_size, *heads)
        self._pages = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def device(self) -> torch.device:
        return self._pages.device

    @property
    def dtype(self) -> torch.dtype:
        return self._pages.dtype

    @property
    def num_bytes(self) -> int:
        return self._pages.numel() * self._pages.element_size()

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each `(num_blocks * block_size, num_kv_heads, head_dim)`, writable views."""
        pages = self._pages[layer]
        return pages[0], pages[1]

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """All at once: no target may be another's source."""
        copy_pages(self._pages.flatten(0, 1), self.block_size, sources, targets)

    def slots(self, block_ids: npt.NDArray[np.int64], start: int, end: int) -> npt.NDArray[np.int64]:
        """Where positions `[start, end)` of a sequence lie: int64 `(end - start,)`."""
        at = np.arange(start, end, dtype=np.int64)
        return block_ids[at // self.block_size] * self.block_size + at % self.block_size


def write_slots(kv: PagedKV, rows: Sequence[Rows]) -> torch.Tensor:
    """Slots of all tokens of the step in packed order: int64 `(num_tokens,)` on the KV's device."""
    slots = [kv.slots(row.block_ids, row.start, row.context) for row in rows]
    return torch.from_numpy(np.concatenate(slots)).to(kv.device)


def copied_blocks(rows: Sequence[Rows], block_size: int) -> tuple[list[int], list[int]]:
    """Blocks to copy before the step, and the blocks to copy each into."""
    copies = [row for row in rows if row.copied_from != NO_BLOCK]
    return [row.copied_from for row in copies], [int(row.block_ids[row.start // block_size]) for row in copies]


def copy_blocks(kv: PagedKV, rows: Sequence[Rows]) -> None:
    """Before a step's forward. Doing it again changes nothing: a source is not written to in the step."""
    sources, targets = copied_blocks(rows, kv.block_size)
    if sources:
        kv.copy_blocks(sources, targets)


def copy_pages(pages: torch.Tensor, block_size: int, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Of `pages` `(n, num_blocks * block_size, ...)`."""
    blocks = pages.unflatten(1, (-1, block_size))
    from_blocks, to_blocks = (torch.tensor(list(ids), device=pages.device) for ids in (sources, targets))
    blocks.index_copy_(1, to_blocks, blocks.index_select(1, from_blocks))
