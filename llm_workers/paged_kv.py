"""Keys and values in pages, and which rows of a step belong where. What every attention backend shares.

Knows nothing of models, requests or how attention is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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


class DecodeRows(NamedTuple):
    """The first rows of a packed input, one token of a sequence each, as arrays."""

    starts: npt.NDArray[np.int64]
    """`(n,)`: positions of the tokens."""
    tables: npt.NDArray[np.int64]
    """`(n, width)`: block tables, padded with their own first block."""
    num_blocks: npt.NDArray[np.int64]
    """`(n,)`, of each table."""


class SingleRows(NamedTuple):
    """All rows of a step that are one token each, as arrays."""

    at: npt.NDArray[np.int64]
    """`(n,)`, ascending."""
    contexts: npt.NDArray[np.int64]
    """`(n,)`."""
    tables: npt.NDArray[np.int64]
    """`(n, width)`, padded with their own first block."""


class StepRows(Sequence[Rows]):
    """All rows of a step: `decodes` as arrays, and behind them the `others`. A sequence of `Rows` to those who want
    each as an object."""

    def __init__(self, others: Sequence[Rows], decodes: DecodeRows | None = None) -> None:
        self.others, self.decodes = others, decodes
        self._rows: list[Rows] | None = None

    @classmethod
    def of(cls, rows: Sequence[Rows]) -> StepRows:
        return rows if isinstance(rows, StepRows) else cls(rows)

    def __len__(self) -> int:
        return len(self.others) + (0 if self.decodes is None else len(self.decodes.starts))

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __iter__(self) -> Iterator[Rows]:
        return iter(self._all())

    def singles(self) -> SingleRows:
        """Those of one token each."""
        rows = [row for row in self.others if row.num_tokens == 1]
        if self.decodes is not None and not rows:
            starts, tables, _ = self.decodes
            return SingleRows(np.arange(len(starts)), starts + 1, tables)
        at = np.array([row.at for row in rows], dtype=np.int64)
        contexts = np.array([row.context for row in rows], dtype=np.int64)
        tables = padded_tables([row.block_ids for row in rows])
        if self.decodes is None:
            return SingleRows(at, contexts, tables)
        starts, decoding, _ = self.decodes
        joined = np.zeros((len(starts) + len(rows), max(tables.shape[1], decoding.shape[1])), dtype=np.int64)
        joined[: len(starts), : decoding.shape[1]] = decoding
        joined[len(starts) :, : tables.shape[1]] = tables
        return SingleRows(np.concatenate([np.arange(len(starts)), at]), np.concatenate([starts + 1, contexts]), joined)

    def _all(self) -> list[Rows]:
        if self._rows is None:
            self._rows = list(self.others)
            if self.decodes is not None:
                rows = zip(self.decodes.starts.tolist(), self.decodes.tables, self.decodes.num_blocks, strict=True)
                self._rows[:0] = [Rows(at, start, 1, table[:count]) for at, (start, table, count) in enumerate(rows)]
        return self._rows


def padded_tables(tables: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """`(len(tables), longest)`, each padded with its own first block."""
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int64)
    for row, table in enumerate(tables):
        padded[row] = table[0]
        padded[row, : len(table)] = table
    return padded


_SLOTS_AT_ONCE = 512


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

    def are_spoiled(self, slots: torch.Tensor) -> torch.Tensor:
        """Whether a slot holds a number that is not finite, in any layer: bool `(len(slots),)` on the device. Reads
        every layer of the slots once, a few of them at a time."""
        pages = (self._pages.index_select(2, some) for some in slots.split(_SLOTS_AT_ONCE))
        # What is not finite stays so in a sum; sums of half precision are far from the largest float32.
        return ~torch.cat([page.sum(dim=(0, 1, 3, 4), dtype=torch.float32) for page in pages]).isfinite()

    def slots(self, block_ids: npt.NDArray[np.int64], start: int, end: int) -> npt.NDArray[np.int64]:
        """Where positions `[start, end)` of a sequence lie: int64 `(end - start,)`."""
        at = np.arange(start, end, dtype=np.int64)
        return block_ids[at // self.block_size] * self.block_size + at % self.block_size


def write_slots(kv: PagedKV, rows: Sequence[Rows]) -> torch.Tensor:
    """Slots of all tokens of the step in packed order: int64 `(num_tokens,)` on the KV's device."""
    step = StepRows.of(rows)
    slots = [kv.slots(row.block_ids, row.start, row.context) for row in step.others]
    if step.decodes is not None:
        starts, tables, _ = step.decodes
        blocks, places = np.divmod(starts, kv.block_size)
        slots.insert(0, tables[np.arange(len(starts)), blocks] * kv.block_size + places)
    return torch.from_numpy(np.concatenate(slots)).to(kv.device)


def copied_blocks(rows: Sequence[Rows], block_size: int) -> tuple[list[int], list[int]]:
    """Blocks to copy before the step, and the blocks to copy each into."""
    copies = [row for row in StepRows.of(rows).others if row.copied_from != NO_BLOCK]
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
