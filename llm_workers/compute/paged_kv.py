"""Stores keys and values in pages, and maps the rows of a step to them.

`PagedKV` holds the pages. A step's `StepRows` say which rows of the packed input belong to which sequence and blocks,
and `write_slots` and `copy_blocks` say and do what a step writes; every attention backend uses them. `SideRows` store
side tensors: rows of named hidden layers, for chunks that ask for them. They stand here because their pages have the
same addresses (block, position) as the KV of their tokens, so a hit in the prefix cache also finds them.

This module knows nothing of requests, of the owners of blocks, or of how attention is computed. Of a model it knows
only that a layer has an output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fabric.contracts import ConfigError
from llm_workers.scheduling import NO_BLOCK, Chunk
from modalities.family import LanguageModel

_SLOTS_AT_ONCE = 512
"""Limits how many slots `PagedKV.are_spoiled` reads at a time."""


class PagedKV:
    """Holds the keys and values of one worker. For each layer it gives a flat view of the pages with shape
    `(num_blocks * block_size, num_kv_heads, head_dim)`. The pages are zeroed at creation, so that masked values are at
    least finite."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        heads: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates the pages. `heads` is (num_kv_heads, head_dim)."""
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_layers, 2, num_blocks * block_size, *heads)
        self._pages = torch.zeros(shape, dtype=dtype, device=device)

    @classmethod
    def of_one_layer(
        cls,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        heads: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> PagedKV:
        """Returns pages for `num_layers` layers that all lie in the memory of one, for measuring a step before the real
        pages are there. What a layer reads is then what the last layer wrote."""
        kv = cls(1, num_blocks, block_size, heads, dtype, device)
        kv._pages = kv._pages.expand(num_layers, *kv._pages.shape[1:])
        return kv

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
        """Returns keys and values of a layer as writable views. Each has shape
        `(num_blocks * block_size, num_kv_heads, head_dim)`."""
        pages = self._pages[layer]
        return pages[0], pages[1]

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies all blocks at once. No target may be the source of another copy."""
        copy_pages(self._pages.flatten(0, 1), self.block_size, sources, targets)

    def are_spoiled(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns for each slot whether it holds a value that is not finite in any layer, as bool `(len(slots),)` on
        the device. It reads every layer of the slots once, a limited number of slots at a time."""
        pages = (self._pages.index_select(2, some) for some in slots.split(_SLOTS_AT_ONCE))
        # A value that is not finite makes the sum not finite, and sums in half precision are far below the largest
        # float32.
        return ~torch.cat([page.sum(dim=(0, 1, 3, 4), dtype=torch.float32) for page in pages]).isfinite()

    def slots(self, block_ids: npt.NDArray[np.int64], start: int, end: int) -> npt.NDArray[np.int64]:
        """Returns the slots of the positions `[start, end)` of a sequence as int64 `(end - start,)`."""
        at = np.arange(start, end, dtype=np.int64)
        return block_ids[at // self.block_size] * self.block_size + at % self.block_size


# ---------------------------------------------------------------- the rows of a step


class SequenceRows(NamedTuple):
    """Describes one sequence's tokens of a step. The rows `[at, at + num_tokens)` of the packed input hold the
    positions `[start, start + num_tokens)` of the sequence. `block_ids` covers all positions up to the last of these
    tokens. The content of block `copied_from`, if there is one, is copied before the step into the block that contains
    `start`."""

    at: int
    start: int
    num_tokens: int
    block_ids: npt.NDArray[np.int64]
    copied_from: int = NO_BLOCK

    @property
    def context(self) -> int:
        """Returns the number of positions that the last of these tokens sees, including itself."""
        return self.start + self.num_tokens


class DecodeRows(NamedTuple):
    """Describes the first rows of a packed input as arrays; each of these rows is one token of one sequence."""

    starts: npt.NDArray[np.int64]
    """Holds the positions of the tokens. Has shape `(n,)`."""
    tables: npt.NDArray[np.int64]
    """Holds the block tables, padded with their own first block. Has shape `(n, width)`."""
    num_blocks: npt.NDArray[np.int64]
    """Holds the number of blocks of each table. Has shape `(n,)`."""


class SingleRows(NamedTuple):
    """Describes all rows of a step that are one token each, as arrays."""

    at: npt.NDArray[np.int64]
    """Holds the rows in the packed input in ascending order. Has shape `(n,)`."""
    contexts: npt.NDArray[np.int64]
    """Holds the context length of each row. Has shape `(n,)`."""
    tables: npt.NDArray[np.int64]
    """Holds the block tables, padded with valid block ids: their own first block or block 0. Has shape
    `(n, width)`."""


class StepRows(Sequence[SequenceRows]):
    """Holds all rows of a step: `decodes` as arrays, followed by the `others`. It also acts as a sequence of
    `SequenceRows` for code that needs one object per sequence."""

    def __init__(self, others: Sequence[SequenceRows], decodes: DecodeRows | None = None) -> None:
        self.others, self.decodes = others, decodes
        self._rows: list[SequenceRows] | None = None

    @classmethod
    def of(cls, rows: Sequence[SequenceRows]) -> StepRows:
        return rows if isinstance(rows, StepRows) else cls(rows)

    def __len__(self) -> int:
        return len(self.others) + (0 if self.decodes is None else len(self.decodes.starts))

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __iter__(self) -> Iterator[SequenceRows]:
        return iter(self._all())

    def singles(self) -> SingleRows:
        """Returns the rows of one token each."""
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

    def _all(self) -> list[SequenceRows]:
        if self._rows is None:
            self._rows = list(self.others)
            if self.decodes is not None:
                rows = zip(self.decodes.starts.tolist(), self.decodes.tables, self.decodes.num_blocks, strict=True)
                self._rows[:0] = [
                    SequenceRows(at, start, 1, table[:count]) for at, (start, table, count) in enumerate(rows)
                ]
        return self._rows


def padded_tables(tables: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Returns the tables as one array with shape `(len(tables), longest)`. Each table is padded with its own first
    block."""
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int64)
    for row, table in enumerate(tables):
        padded[row] = table[0]
        padded[row, : len(table)] = table
    return padded


# ---------------------------------------------------------------- what a step writes


def write_slots(kv: PagedKV, rows: Sequence[SequenceRows]) -> torch.Tensor:
    """Returns the slots of all tokens of the step in packed order, as int64 `(num_tokens,)` on the KV's device."""
    step = StepRows.of(rows)
    slots = [kv.slots(row.block_ids, row.start, row.context) for row in step.others]
    if step.decodes is not None:
        starts, tables, _ = step.decodes
        blocks, places = np.divmod(starts, kv.block_size)
        slots.insert(0, tables[np.arange(len(starts)), blocks] * kv.block_size + places)
    return torch.from_numpy(np.concatenate(slots)).to(kv.device)


def copy_blocks(kv: PagedKV, rows: Sequence[SequenceRows]) -> None:
    """Copies the blocks that the rows name. It must run before the step's forward pass. A repeated call changes
    nothing, because the step does not write to a source block."""
    sources, targets = copied_blocks(rows, kv.block_size)
    if sources:
        kv.copy_blocks(sources, targets)


def copied_blocks(rows: Sequence[SequenceRows], block_size: int) -> tuple[list[int], list[int]]:
    """Returns the blocks to copy before the step, and for each of them its target block."""
    copies = [row for row in StepRows.of(rows).others if row.copied_from != NO_BLOCK]
    return [row.copied_from for row in copies], [int(row.block_ids[row.start // block_size]) for row in copies]


def copy_pages(pages: torch.Tensor, block_size: int, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copies blocks within `pages`, which has shape `(n, num_blocks * block_size, ...)`."""
    blocks = pages.unflatten(1, (-1, block_size))
    from_blocks, to_blocks = (torch.tensor(list(ids), device=pages.device) for ids in (sources, targets))
    blocks.index_copy_(1, to_blocks, blocks.index_select(1, from_blocks))


# ---------------------------------------------------------------- side tensors


def make_side_rows(model: LanguageModel, kv: PagedKV, layers: Sequence[tuple[str, int]]) -> SideRows | None:
    """Returns the store for `layers`, or None without layers. Raises ConfigError for a layer that the model does not
    have."""
    if not layers:
        return None
    layered = cast(LayeredModel, model)
    try:
        return SideRows({name: layered.layer(index) for name, index in layers}, kv)
    except (AttributeError, IndexError) as error:
        raise ConfigError(f"side_layers names layers that the model does not have: {list(layers)}") from error


class SideRows:
    """Holds for each name the pages with shape `(num_blocks * block_size, hidden)` in the KV's dtype. They are
    allocated when the layer first gives its width. A step in which no chunk asks for rows costs nothing, and without
    configured names there is no store."""

    def __init__(self, name_to_layer: Mapping[str, nn.Module], kv: PagedKV) -> None:
        self._name_to_layer, self._kv = name_to_layer, kv
        self._name_to_pages: dict[str, torch.Tensor] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the side tensors."""
        return tuple(self._name_to_layer)

    @contextmanager
    def storing(self, chunks: Sequence[Chunk], starts: npt.NDArray[np.int64]) -> Iterator[None]:
        """Stores the requested rows while a forward pass runs over the packed chunks; the i-th chunk starts at row
        `starts[i]`."""
        hooks = []
        for name in sorted(frozenset().union(*(chunk.side_names for chunk in chunks))):
            asking = [(int(at), chunk) for at, chunk in zip(starts, chunks, strict=False) if name in chunk.side_names]
            rows = np.concatenate([np.arange(at, at + chunk.num_tokens) for at, chunk in asking])
            slots = np.concatenate([self._kv.slots(chunk.block_ids, chunk.start, chunk.end) for _, chunk in asking])
            hooks.append(self._name_to_layer[name].register_forward_hook(self._keeper(name, rows, slots)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def copy_blocks(self, rows: Sequence[SequenceRows]) -> None:
        """Copies the same blocks that the function `copy_blocks` copies in the KV, in every side tensor."""
        sources, targets = copied_blocks(rows, self._kv.block_size)
        for pages in self._name_to_pages.values() if sources else ():
            copy_pages(pages[None], self._kv.block_size, sources, targets)

    def rows(self, name: str, block_ids: npt.NDArray[np.int64], start: int, end: int) -> torch.Tensor:
        """Returns the rows of positions `[start, end)` of a sequence with that block table. They have shape
        `(end - start, hidden)`. Raises KeyError for a name without stored rows."""
        slots = torch.from_numpy(self._kv.slots(block_ids, start, end)).to(self._kv.device)
        return self._name_to_pages[name].index_select(0, slots)

    def _keeper(self, name: str, rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]) -> Any:
        device = self._kv.device
        from_rows, to_slots = torch.from_numpy(rows).to(device), torch.from_numpy(slots).to(device)

        def keep(module: nn.Module, inputs: object, output: Any) -> None:
            hidden = (output[0] if isinstance(output, tuple) else output)[0]
            pages = self._pages(name, hidden.shape[1])
            pages.index_copy_(0, to_slots, hidden.index_select(0, from_rows).to(pages.dtype))

        return keep

    def _pages(self, name: str, width: int) -> torch.Tensor:
        if name not in self._name_to_pages:
            shape = (self._kv.num_blocks * self._kv.block_size, width)
            self._name_to_pages[name] = torch.zeros(shape, dtype=self._kv.dtype, device=self._kv.device)
        return self._name_to_pages[name]


class LayeredModel(Protocol):
    """Defines what a model must offer in addition to `LanguageModel` if rows of its layers are wanted."""

    def layer(self, index: int) -> nn.Module:
        """Returns a decoder layer. The output of the layer has shape `(1, num_tokens, hidden)`, either alone or as the
        first element of a tuple."""
        ...
