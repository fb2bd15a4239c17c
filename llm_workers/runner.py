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
from llm_workers.drawing import draw, rows_to_finish
from llm_workers.paged_kv import DecodeRows, PagedKV, Rows, StepRows, copy_blocks, write_slots
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
    rows: StepRows
    """Where the pages are read and written."""


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
        token_ids, positions, starts, step, rows = self.prepare(plan)
        inputs_s = time.perf_counter()
        embeddings = self._model.embed(token_ids)
        embedded_s = time.perf_counter()
        feature_rows, feature_levels = splice_features(embeddings, list(_placed(plan.others, starts)), self._features)
        spliced_s = time.perf_counter()
        wanted = _wanted_rows(plan, starts, self._model.device)
        # A hidden layer that is asked for is stored whole, and may be the last.
        is_whole = any(chunk.side_names for chunk in plan.others)
        with self._side.storing(plan.others, starts) if self._side else nullcontext():
            early = None if is_whole else wanted
            hidden = self._model.forward(embeddings, positions, step, feature_rows, feature_levels, early)
        spoiled = self._spoiled_rows(hidden, rows, is_whole=is_whole)
        if is_whole and wanted is not None:
            hidden = hidden.index_select(0, wanted)
        if spoiled is not None:
            hidden = _without_numbers(hidden, spoiled, plan, starts)
        forward_s = time.perf_counter()
        result = draw(self._model, hidden, plan)
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
            rows,
        )

    def _spoiled_rows(self, hidden: torch.Tensor, rows: StepRows, *, is_whole: bool) -> torch.Tensor | None:
        """Rows of the step, bool `(num_tokens,)`, that have stored what is not finite, which may not show in the last
        row of their chunk; None where it always does. A side tensor of the last layer lies behind all attention. An
        infinite key has a weight of zero in its own row, which stays finite; a later query meets it, and only half
        precision overflows so."""
        spoiled = ~hidden.sum(dim=-1, dtype=torch.float32).isfinite() if is_whole else None
        if self._kv.dtype is torch.float16:
            stored = self._kv.are_spoiled(write_slots(self._kv, rows))
            spoiled = stored if spoiled is None else spoiled | stored
        return spoiled


def _without_numbers(
    hidden: torch.Tensor, spoiled: torch.Tensor, plan: StepPlan, starts: npt.NDArray[np.int64]
) -> torch.Tensor:
    """The hidden states that `draw` is given, all NaN in those of a sequence with a spoiled row."""
    num_tokens = np.diff(starts, prepend=0)[1:]
    owners = np.repeat(np.arange(plan.num_sequences), [*[1] * plan.num_decodes, *num_tokens])
    finished = np.arange(len(owners)) if len(hidden) == len(owners) else rows_to_finish(plan, starts)
    owner_of_row = torch.from_numpy(owners).to(hidden.device)
    flags = torch.zeros(plan.num_sequences, device=hidden.device).index_add_(0, owner_of_row, spoiled.float())
    of_hidden = owner_of_row.index_select(0, torch.from_numpy(finished).to(hidden.device))
    return hidden.masked_fill((flags > 0).index_select(0, of_hidden)[:, None], torch.nan)


def _wanted_rows(plan: StepPlan, starts: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor | None:
    """Those whose last hidden states are needed; None for all of them."""
    rows = rows_to_finish(plan, starts)
    return torch.from_numpy(rows).to(device) if len(rows) < starts[-1] else None


def _placed(chunks: Sequence[Chunk], starts: np.ndarray) -> Iterator[PlacedSplice]:
    """In ascending order of row: chunks are packed in order, splices of a chunk are sorted by position."""
    for base, chunk in zip(starts, chunks, strict=False):
        for splice in sorted(chunk.splices, key=lambda splice: splice.at):
            yield PlacedSplice(int(base) + splice.at, splice)
