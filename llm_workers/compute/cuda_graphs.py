"""Runs decode steps as CUDA graphs: a step with a given number of rows is recorded once and then replayed, so that the
device never waits for Python between its kernels.

A graph reads its inputs at the addresses of the recording. For this reason embeddings, positions, slots, block tables
and lengths live in buffers that every step fills again. Only a few step sizes are recorded. A smaller step is padded
with copies of its first row, which write the same values as that row. Only steps that read whole pages in place can be
recorded (`varlen_attention` with a block table). Every other step, and every step with a sequence that has several
tokens, runs without a graph. Graphs are off unless the config turns them on. The graphs take their memory when they are
recorded: at boot, before the largest step is measured (`boot_measurements.record_decodes`). This module knows nothing
of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from llm_workers.compute.paged_kv import PagedKV, SequenceRows
from llm_workers.compute.varlen_attention import has_block_tables, is_varlen_available
from llm_workers.scheduling import PAGE_TOKENS_MULTIPLE
from modalities.family import LanguageModel

_LOG = logging.getLogger(__name__)
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Lists the row counts of the graphs; a step with more rows than the last one is not recorded."""
NUM_WARM_UPS = 2
"""Sets the number of runs before the recording, because libraries choose their kernels and workspaces in the first
runs."""


def with_graphs(model: LanguageModel, kv: PagedKV, max_model_len: int) -> LanguageModel:
    """Returns `model` wrapped so that its decode steps are recorded, or `model` itself if this device, this torch or
    these pages do not allow it."""
    if not is_varlen_available(kv) or not has_block_tables() or kv.block_size % PAGE_TOKENS_MULTIPLE:
        return model
    return GraphedModel(model, kv, -(-max_model_len // kv.block_size))


class GraphedModel:
    """A `GraphedModel` is a LanguageModel that replays its decode steps. The result of a replay is valid until the next
    replay."""

    def __init__(self, model: LanguageModel, kv: PagedKV, max_blocks: int) -> None:
        self._model, self._kv, self._max_blocks = model, kv, max_blocks
        self.dtype, self.device = model.dtype, model.device
        self._graphs: dict[int, _Recorded] = {}
        self._is_refused = False

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._model.embed(token_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)

    def forward(
        self,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        attention: Any,
        feature_rows: torch.Tensor | None,
        feature_levels: torch.Tensor | None,
        wanted_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        size = graph_size(attention.rows)
        if size is None or feature_rows is not None or wanted_rows is not None or self._is_refused:
            return self._model.forward(embeddings, positions, attention, feature_rows, feature_levels, wanted_rows)
        if size not in self._graphs:
            try:
                self._graphs[size] = self._record(size, embeddings, positions, attention.rows)
            except RuntimeError:
                # A model that waits for the device inside its forward pass can't be recorded.
                _LOG.exception("decode steps can't be recorded as CUDA graphs, so they run without them")
                self._is_refused = True
                return self._model.forward(embeddings, positions, attention, None, None)
        return self._graphs[size].replay(embeddings, positions, attention.rows)

    def _record(
        self, size: int, embeddings: torch.Tensor, positions: torch.Tensor, rows: Sequence[SequenceRows]
    ) -> _Recorded:
        recorded = _Recorded(
            DecodeInputs(self._kv, size, self._max_blocks),
            embeddings.new_zeros((size, embeddings.shape[1])),
            positions.new_zeros((positions.shape[0], size)),
        )
        recorded.record(self._model, embeddings, positions, rows)
        return recorded


def graph_size(rows: Sequence[SequenceRows]) -> int | None:
    """Returns the number of rows of the graph for this step. Returns None if a row has several tokens or the step is
    too large."""
    if any(row.num_tokens != 1 for row in rows):
        return None
    return next((size for size in SIZES if size >= len(rows)), None)


class _Recorded:
    """Holds one graph and its buffers."""

    def __init__(self, inputs: DecodeInputs, embeddings: torch.Tensor, positions: torch.Tensor) -> None:
        self._inputs, self._embeddings, self._positions = inputs, embeddings, positions
        self._graph = torch.cuda.CUDAGraph()
        self._hidden = embeddings

    def record(
        self, model: LanguageModel, embeddings: torch.Tensor, positions: torch.Tensor, rows: Sequence[SequenceRows]
    ) -> None:
        """Warms up on a separate stream, then records. The replay that follows writes the step's keys and values
        again."""
        self._load(embeddings, positions, rows)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                model.forward(self._embeddings, self._positions, self._inputs, None, None)
        torch.cuda.current_stream().wait_stream(stream)
        # Other threads of this process may allocate memory during the recording. With `thread_local`, only the calls of
        # this thread can break the recording.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._hidden = model.forward(self._embeddings, self._positions, self._inputs, None, None)

    def replay(self, embeddings: torch.Tensor, positions: torch.Tensor, rows: Sequence[SequenceRows]) -> torch.Tensor:
        self._load(embeddings, positions, rows)
        self._graph.replay()
        return self._hidden[: len(rows)]

    def _load(self, embeddings: torch.Tensor, positions: torch.Tensor, rows: Sequence[SequenceRows]) -> None:
        num_rows = len(rows)
        self._inputs.load(rows)
        self._embeddings[:num_rows] = embeddings
        self._embeddings[num_rows:] = embeddings[0]
        self._positions[:, :num_rows] = positions
        self._positions[:, num_rows:] = positions[:, :1]


class DecodeInputs:
    """Holds the static buffers of one size; it is an `AttentionStep` of `size` decoding rows."""

    def __init__(self, kv: PagedKV, size: int, max_blocks: int) -> None:
        """Allocates the buffers. `max_blocks` is the largest number of blocks of one sequence."""
        self._kv, self.size = kv, size
        self.rows: Sequence[SequenceRows] = ()
        device = kv.device
        self.write = torch.zeros(size, dtype=torch.int64, device=device)
        self.tails = torch.zeros(size * kv.block_size, dtype=torch.int64, device=device)
        self.table = torch.zeros((size, max_blocks), dtype=torch.int32, device=device)
        self.contexts = torch.ones(size, dtype=torch.int32, device=device)
        self._cu_q = torch.arange(size + 1, dtype=torch.int32, device=device)

    def load(self, rows: Sequence[SequenceRows]) -> None:
        """Fills the buffers for at most `size` rows of one token each. The block tables of the rows must fit into the
        buffer."""
        self.rows = rows
        block_size, padded = self._kv.block_size, [*rows, *[rows[0]] * (self.size - len(rows))]
        contexts = np.array([row.context for row in padded])
        table = np.empty((self.size, self.table.shape[1]), dtype=np.int32)
        for index, row in enumerate(padded):
            table[index] = row.block_ids[0]
            table[index, : len(row.block_ids)] = row.block_ids
        at = contexts - 1
        write = table[np.arange(self.size), at // block_size].astype(np.int64) * block_size + at % block_size
        # The tails reach to the end of the last page. Entries beyond that end repeat the row's own slot, which the step
        # writes after the tails are zeroed.
        steps = np.arange(block_size)
        tails = write[:, None] + np.where(steps < block_size - at[:, None] % block_size, steps, 0)
        for buffer, values in (
            (self.write, write),
            (self.tails, tails.reshape(-1)),
            (self.table, table),
            (self.contexts, contexts.astype(np.int32)),
        ):
            buffer.copy_(torch.from_numpy(values))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """Writes the step's keys and values, then attends. The unwritten slots of the last pages are zeroed first,
        because a NaN in them would pass through the mask."""
        from torch.nn.attention.varlen import varlen_attn

        pages = self._kv.layer(layer)
        for each, new in zip(pages, (k, v), strict=True):
            each.index_fill_(0, self.tails, 0)
            each.index_copy_(0, self.write, new)
        keys, values = (each.view(-1, self._kv.block_size, *each.shape[1:]) for each in pages)
        lengths = (self._cu_q, None, 1, self.table.shape[1] * self._kv.block_size)
        attended = varlen_attn(
            q.contiguous(),
            keys,
            values,
            *lengths,
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=q.shape[1] != k.shape[1],
            seqused_k=self.contexts,
            block_table=self.table,
            num_splits=1,
        )
        assert isinstance(attended, torch.Tensor)  # It is a tuple only if further results are wanted.
        return attended
