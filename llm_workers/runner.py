"""Executes a StepPlan on the model: flat inputs, splice of features, paged attention, logits of sampled rows.

Stateless but for the KV pages: executing a plan again writes the same values, so a failed step can be retried.
Knows nothing of requests, queues or where features come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple, Protocol

import numpy as np
import torch

from fabric.ids import UnitKey
from llm_workers.attention import Backend
from llm_workers.drawing import draw
from llm_workers.paged_kv import PagedKV, Rows, copy_blocks
from llm_workers.scheduling.plan import Chunk, Splice, StepPlan, StepResult
from llm_workers.side_rows import SideRows
from modalities.family import LanguageModel


class FeatureReader(Protocol):
    def feature(self, unit: UnitKey) -> torch.Tensor:
        """Of a landed unit: `(num_levels, num_tokens, hidden)`, valid during the step."""
        ...


class PlacedSplice(NamedTuple):
    """A splice at its row of the packed input."""

    at: int
    splice: Splice


class Runner:
    """One model on one device."""

    def __init__(
        self,
        model: LanguageModel,
        kv: PagedKV,
        features: FeatureReader,
        backend: Backend,
        side: SideRows | None = None,
    ) -> None:
        """`side` stores rows of hidden layers for chunks that ask for them."""
        self._model, self._kv, self._features, self._backend = model, kv, features, backend
        self._side = side

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Computes the plan's chunks; copies the blocks that they name and writes their KV. Draws a token for each
        chunk that has `sampling`, and one more for each of its drafts that is right; it is negative where the logits
        are not finite or the grammar is broken. The plan must have chunks."""
        device = self._model.device
        starts = np.cumsum([0, *(chunk.num_tokens for chunk in plan.chunks)])
        token_ids = torch.from_numpy(np.concatenate([chunk.token_ids for chunk in plan.chunks])).to(device)
        positions = torch.from_numpy(np.concatenate([chunk.positions for chunk in plan.chunks], axis=1)).to(device)
        rows = _rows(plan.chunks, starts)
        copy_blocks(self._kv, rows)
        if self._side:
            self._side.copy_blocks(rows)
        step = self._backend(self._kv, rows)
        embeddings = self._model.embed(token_ids)
        feature_rows, feature_levels = self._splice(embeddings, list(_placed(plan.chunks, starts)))
        with self._side.storing(plan.chunks, starts) if self._side else nullcontext():
            hidden = self._model.forward(embeddings, positions, step, feature_rows, feature_levels)
        return draw(self._model, hidden, plan.chunks, starts)

    def _splice(
        self, embeddings: torch.Tensor, placed: Sequence[PlacedSplice]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Copies level 0 of the features into `embeddings`; returns the rows and the DeepStack levels there."""
        if not placed:
            return None, None
        taken = []
        for _, splice in placed:
            feature = self._features.feature(splice.unit)[:, splice.row : splice.row + splice.length]
            taken.append(feature.to(device=embeddings.device, dtype=embeddings.dtype))
        levels = torch.cat(taken, dim=1)
        rows = np.concatenate([np.arange(at, at + splice.length) for at, splice in placed])
        feature_rows = torch.from_numpy(rows).to(embeddings.device)
        embeddings.index_copy_(0, feature_rows, levels[0])
        return feature_rows, levels[1:]


def _rows(chunks: Sequence[Chunk], starts: np.ndarray) -> list[Rows]:
    return [
        Rows(int(at), chunk.start, chunk.num_tokens, chunk.block_ids, chunk.copied_from)
        for at, chunk in zip(starts, chunks, strict=False)
    ]


def _placed(chunks: Sequence[Chunk], starts: np.ndarray) -> Iterator[PlacedSplice]:
    """In ascending order of row: chunks are packed in order, splices of a chunk are sorted by position."""
    for base, chunk in zip(starts, chunks, strict=False):
        for splice in sorted(chunk.splices, key=lambda splice: splice.at):
            yield PlacedSplice(int(base) + splice.at, splice)
