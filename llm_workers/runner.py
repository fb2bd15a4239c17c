"""Executes a StepPlan on the model: flat inputs, splice of features, paged attention, logits of sampled rows.

Stateless but for the KV pages: executing a plan again writes the same values, so a failed step can be retried.
Knows nothing of requests, queues or where features come from.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from llm_workers.attention import AttentionStep, Backend
from llm_workers.drawing import draw
from llm_workers.paged_kv import DecodeRows, PagedKV, Rows, StepRows, copy_blocks
from llm_workers.scheduling.plan import Chunk, StepPlan, StepResult
from llm_workers.side_rows import SideRows
from llm_workers.splice import FeatureReader, PlacedSplice, splice_features
from modalities.family import LanguageModel


@dataclass(slots=True)
class RunTimes:
    """Running sums since start, for benches. On a device that computes on its own, the time until its work is asked
    for, but for `sample_s`, which waits for it."""

    inputs_s: float = 0.0
    splice_s: float = 0.0
    forward_s: float = 0.0
    """Embedding of the tokens included."""
    sample_s: float = 0.0
    """Logits included."""


class StepInputs(NamedTuple):
    """Of a packed step: the plan's `decodes` first, a row each, then its `others`."""

    token_ids: torch.Tensor
    """`(num_tokens,)`."""
    positions: torch.Tensor
    """`(num_axes, num_tokens)`."""
    starts: npt.NDArray[np.int64]
    """First rows of the others, and the number of all rows."""
    attention: AttentionStep


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
        self.times = RunTimes()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Computes the plan's chunks; copies the blocks that they name and writes their KV. Draws a token for each
        chunk that has `sampling`, and one more for each of its drafts that is right; it is negative where the logits
        are not finite or the grammar is broken. The plan must have chunks."""
        times = self.times
        begun_s = time.perf_counter()
        token_ids, positions, starts, step = self.prepare(plan)
        inputs_s = time.perf_counter()
        embeddings = self._model.embed(token_ids)
        embedded_s = time.perf_counter()
        feature_rows, feature_levels = splice_features(embeddings, list(_placed(plan.others, starts)), self._features)
        spliced_s = time.perf_counter()
        with self._side.storing(plan.others, starts) if self._side else nullcontext():
            hidden = self._model.forward(embeddings, positions, step, feature_rows, feature_levels)
        forward_s = time.perf_counter()
        result = draw(self._model, hidden, plan, starts)
        times.inputs_s += inputs_s - begun_s
        times.splice_s += spliced_s - embedded_s
        times.forward_s += embedded_s - inputs_s + forward_s - spliced_s
        times.sample_s += time.perf_counter() - forward_s
        return result

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Everything that a step needs beside the model, on its device. Copies the blocks that the plan names."""
        device, decodes = self._model.device, plan.decodes
        starts = np.cumsum([plan.num_decodes, *(chunk.num_tokens for chunk in plan.others)])
        token_ids = [chunk.token_ids for chunk in plan.others]
        positions = [chunk.positions for chunk in plan.others]
        if decodes is not None:
            token_ids.insert(0, decodes.token_ids)
            positions.insert(0, decodes.positions)
        rows = StepRows(
            [
                Rows(int(at), chunk.start, chunk.num_tokens, chunk.block_ids, chunk.copied_from)
                for at, chunk in zip(starts, plan.others, strict=False)
            ],
            None if decodes is None else DecodeRows(decodes.starts, decodes.tables, decodes.num_blocks),
        )
        copy_blocks(self._kv, rows)
        if self._side:
            self._side.copy_blocks(rows)
        return StepInputs(
            torch.from_numpy(np.concatenate(token_ids)).to(device),
            torch.from_numpy(np.concatenate(positions, axis=1)).to(device),
            starts,
            self._backend(self._kv, rows),
        )


def _placed(chunks: Sequence[Chunk], starts: np.ndarray) -> Iterator[PlacedSplice]:
    """In ascending order of row: chunks are packed in order, splices of a chunk are sorted by position."""
    for base, chunk in zip(starts, chunks, strict=False):
        for splice in sorted(chunk.splices, key=lambda splice: splice.at):
            yield PlacedSplice(int(base) + splice.at, splice)
