"""Stores side tensors: rows of named hidden layers, in pages that are addressed like the pages of the KV, for chunks
that ask for them.

The rows of a layer have the same address (block, position) as the KV of their tokens, so a hit in the prefix cache also
finds the rows. A step in which no chunk asks for rows costs nothing, and without configured names there is no store.
This module knows nothing of requests or of the owners of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fabric.errors import ConfigError
from llm_workers.paged_kv import PagedKV, SequenceRows, copied_blocks, copy_pages
from llm_workers.scheduling.plan import Chunk
from modalities.family import LanguageModel


class LayeredModel(Protocol):
    """Defines what a model must offer in addition to `LanguageModel` if rows of its layers are wanted."""

    def layer(self, index: int) -> nn.Module:
        """Returns a decoder layer. The output of the layer has shape `(1, num_tokens, hidden)`, either alone or as the
        first element of a tuple."""
        ...


class SideRows:
    """Holds for each name the pages with shape `(num_blocks * block_size, hidden)` in the KV's dtype. They are
    allocated when the layer first gives its width."""

    def __init__(self, name_to_layer: Mapping[str, nn.Module], kv: PagedKV) -> None:
        self._name_to_layer, self._kv = name_to_layer, kv
        self._name_to_pages: dict[str, torch.Tensor] = {}

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
        """Copies the same blocks that `paged_kv.copy_blocks` copies in the KV, in every side tensor."""
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


def make_side_rows(model: LanguageModel, kv: PagedKV, layers: Sequence[tuple[str, int]]) -> SideRows | None:
    """Returns the store for `layers`, or None without layers. Raises ConfigError for a layer that the model does not
    have."""
    if not layers:
        return None
    layered = cast(LayeredModel, model)
    try:
        return SideRows({name: layered.layer(index) for name, index in layers}, kv)
    except (AttributeError, IndexError) as error:
        raise ConfigError(f"side_layers {list(layers)}: the model has no such layers") from error
