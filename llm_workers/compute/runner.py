"""Executes a StepPlan on the model: it builds flat inputs, splices features in, runs paged attention, and draws tokens
from the logits of the sampled rows.

`Runner.execute` does this for one step. The features of the step's images, sounds and video frames are copied into the
input embeddings by `splice_features`, with one copy per span, and read through a `FeatureReader`: in production, that
is `ReferencedFeatures` over the references that the engine holds.

The runner has no state except the KV pages. A second execution of a plan writes the same values, so a failed step can
be retried. This module knows nothing of requests, queues or the origin of features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fabric.contracts import UnitKey
from llm_workers.compute.attention import AttentionStep, Backend
from llm_workers.compute.paged_kv import DecodeRows, PagedKV, SequenceRows, SideRows, StepRows, copy_blocks, write_slots
from llm_workers.sampling import needs_all_rows, read_prompts, rows_to_finish, sample_step
from llm_workers.scheduling import Chunk, FeatureReferences, Splice, StepPlan, StepResult
from modalities.family import LanguageModel
from modalities.slot_tensors import slot_tensor
from modalities.torch_dtypes import torch_dtype


class Runner:
    """A `Runner` executes steps of one model on one device."""

    def __init__(
        self,
        model: LanguageModel,
        kv: PagedKV,
        features: FeatureReader,
        backend: Backend,
        side: SideRows | None = None,
        least_s: Callable[[StepPlan], float] | None = None,
    ) -> None:
        """Creates a runner. `side` stores rows of hidden layers for chunks that ask for them. With `least_s`, each step
        takes at least so many seconds; the rest of that time passes in sleep, which takes no processor."""
        self._model, self._kv, self._features, self._backend = model, kv, features, backend
        self._side = side
        self._least_s = least_s
        self.times = RunTimes()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Computes the plan's chunks: copies the blocks that they name and writes their KV. Draws a token for each
        chunk that has `sampling`, and one more for each of its drafts that is right. A token is negative where the
        logits are not finite or the grammar is broken. Also reads what chunks with a `reading` want of their prompts.
        The plan must have chunks."""
        times = self.times
        begun_s = time.perf_counter()
        token_ids, positions, starts, step, rows = self.prepare(plan)
        inputs_s = time.perf_counter()
        embeddings = self._model.embed(token_ids)
        embedded_s = time.perf_counter()
        feature_rows, feature_levels = splice_features(embeddings, list(_placed(plan.others, starts)), self._features)
        spliced_s = time.perf_counter()
        wanted = _wanted_rows(plan, starts, self._model.device)
        # A side layer is stored with all its rows, and it may be the last layer; an embedding or the scores of a prompt
        # may need all its rows. So the model must then finish all rows of the last layer; the runner checks them all
        # for numbers that are not finite, and then selects the wanted rows itself.
        is_read = any(chunk.reading is not None for chunk in plan.others)
        is_whole = any(chunk.side_names for chunk in plan.others) or (is_read and needs_all_rows(plan))
        storing = self._side.storing(plan.others, starts) if self._side else nullcontext()
        with ended_reads(None if feature_rows is None else embeddings), storing:
            early = None if is_whole else wanted
            hidden = self._model.forward(embeddings, positions, step, feature_rows, feature_levels, early)
        spoiled = self._spoiled_rows(hidden, rows, is_whole=is_whole)
        whole = hidden if is_whole else None
        if is_whole and wanted is not None:
            hidden = hidden.index_select(0, wanted)
        if spoiled is not None:
            hidden = _without_numbers(hidden, spoiled, plan, starts)
        if self._least_s is not None:
            time.sleep(max(0.0, begun_s + self._least_s(plan) - time.perf_counter()))
        forward_s = time.perf_counter()
        result = sample_step(self._model, hidden, plan)
        if is_read:
            result.readings.update(read_prompts(self._model, whole, hidden, plan, starts))
        times.inputs_s += inputs_s - begun_s
        times.splice_s += spliced_s - embedded_s
        times.forward_s += embedded_s - inputs_s + forward_s - spliced_s
        times.sample_s += time.perf_counter() - forward_s
        return result

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Returns everything that a step needs except the model, on the model's device. Copies the blocks that the plan
        names."""
        device, decodes = self._model.device, plan.decodes
        starts = np.cumsum([plan.num_decodes, *(chunk.num_tokens for chunk in plan.others)])
        token_ids = [chunk.token_ids for chunk in plan.others]
        positions = [chunk.positions for chunk in plan.others]
        if decodes is not None:
            token_ids.insert(0, decodes.token_ids)
            positions.insert(0, decodes.positions)
        rows = StepRows(
            [
                SequenceRows(int(at), chunk.start, chunk.num_tokens, chunk.block_ids, chunk.copied_from)
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
        """Returns the rows of the step that have stored values that are not finite although the last row of their chunk
        may not show it, as bool `(num_tokens,)`. Returns None if the last row always shows it.

        There are two such cases. A side tensor of the last layer is stored after all attention, so no other row
        attends to it. In half precision (float16) a key can overflow to infinity: it has a weight of zero in its own
        row, which stays finite, but a later query meets it."""
        spoiled = ~hidden.sum(dim=-1, dtype=torch.float32).isfinite() if is_whole else None
        if self._kv.dtype is torch.float16:
            stored = self._kv.are_spoiled(write_slots(self._kv, rows))
            spoiled = stored if spoiled is None else spoiled | stored
        return spoiled


class StepInputs(NamedTuple):
    """Holds the inputs of a packed step. The plan's `decodes` come first with one row each, then its `others`."""

    token_ids: torch.Tensor
    """Holds the token ids. Has shape `(num_tokens,)`."""
    positions: torch.Tensor
    """Holds the positions. Has shape `(num_axes, num_tokens)`."""
    starts: npt.NDArray[np.int64]
    """Holds the first row of each of the others, followed by the total number of rows."""
    attention: AttentionStep
    rows: StepRows
    """Says where the pages are read and written."""


@dataclass(slots=True)
class RunTimes:
    """Holds running sums since the start, for benchmarks. On a device that computes asynchronously, a sum counts only
    the time until the work is queued; only `sample_s` waits for the device."""

    inputs_s: float = 0.0
    splice_s: float = 0.0
    forward_s: float = 0.0
    """Includes the embedding of the tokens."""
    sample_s: float = 0.0
    """Includes the computation of the logits."""


def _wanted_rows(plan: StepPlan, starts: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor | None:
    """Returns the rows whose last hidden states are needed, or None if all rows are needed."""
    rows = rows_to_finish(plan, starts)
    return torch.from_numpy(rows).to(device) if len(rows) < starts[-1] else None


def _without_numbers(
    hidden: torch.Tensor, spoiled: torch.Tensor, plan: StepPlan, starts: npt.NDArray[np.int64]
) -> torch.Tensor:
    """Returns the hidden states for `sample_step`, with NaN in all rows of a sequence that has a spoiled row."""
    num_tokens = np.diff(starts, prepend=0)[1:]
    owners = np.repeat(np.arange(plan.num_sequences), [*[1] * plan.num_decodes, *num_tokens])
    finished = np.arange(len(owners)) if len(hidden) == len(owners) else rows_to_finish(plan, starts)
    owner_of_row = torch.from_numpy(owners).to(hidden.device)
    flags = torch.zeros(plan.num_sequences, device=hidden.device).index_add_(0, owner_of_row, spoiled.float())
    of_hidden = owner_of_row.index_select(0, torch.from_numpy(finished).to(hidden.device))
    return hidden.masked_fill((flags > 0).index_select(0, of_hidden)[:, None], torch.nan)


# ---------------------------------------------------------------- features


def splice_features(
    embeddings: torch.Tensor, placed: Sequence[PlacedSplice], features: FeatureReader
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Copies level 0 of the features into `embeddings` with shape `(num_tokens, hidden)`, in ascending order of row.
    Returns the rows that have DeepStack levels, as int64, and these levels with shape
    `(num_levels - 1, num_rows, hidden)`. If no feature has such levels, returns all rows that were placed, with no
    levels. If nothing is placed, both are None."""
    if not placed:
        return None, None
    taken = [features.feature(splice.unit) for _, splice in placed]
    for (at, splice), feature in zip(placed, taken, strict=True):
        embeddings[at : at + splice.length].copy_(feature[0, splice.row : splice.row + splice.length])
    most_levels = max(len(feature) for feature in taken)
    spans = [
        (at, splice, feature)
        for (at, splice), feature in zip(placed, taken, strict=True)
        if len(feature) == most_levels
    ]
    rows = torch.from_numpy(np.concatenate([np.arange(at, at + splice.length) for at, splice, _ in spans]))
    if most_levels == 1:
        return rows.to(embeddings.device), embeddings.new_empty((0, len(rows), embeddings.shape[1]))
    levels = [
        feature[1:, splice.row : splice.row + splice.length].to(device=embeddings.device, dtype=embeddings.dtype)
        for _, splice, feature in spans
    ]
    return rows.to(embeddings.device), torch.cat(levels, dim=1)


@contextmanager
def ended_reads(embeddings: torch.Tensor | None) -> Iterator[None]:
    """Returns from the block, also after an error, only when the device has read the features that were spliced into
    `embeddings` before it. Features that lie on the device are read when it comes to them, and without this wait the
    next feature could land in their slots before. What the block queues is not waited for. None stands for no
    features."""
    if embeddings is None or not embeddings.is_cuda:
        yield
        return
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(embeddings.device))
    try:
        yield
    finally:
        event.synchronize()


class PlacedSplice(NamedTuple):
    """Describes a splice and its row in the packed input."""

    at: int
    splice: Splice


def _placed(chunks: Sequence[Chunk], starts: np.ndarray) -> Iterator[PlacedSplice]:
    """Yields the splices in ascending order of row: chunks are packed in order, and the splices of a chunk are sorted
    by position."""
    for base, chunk in zip(starts, chunks, strict=False):
        for splice in sorted(chunk.splices, key=lambda splice: splice.at):
            yield PlacedSplice(int(base) + splice.at, splice)


class FeatureReader(Protocol):
    """Gives the runner the features of a step. A unit is one separately encoded part of a media item."""

    def feature(self, unit: UnitKey) -> torch.Tensor:
        """Returns the feature of a landed unit with shape `(num_levels, num_tokens, hidden)`. It is valid during the
        step."""
        ...


class ReferencedFeatures:
    """Implements `FeatureReader` over the references that the engine holds, without a copy on the host. A feature that
    landed on the device stays there."""

    def __init__(self, references: FeatureReferences) -> None:
        self._references = references

    def feature(self, unit: UnitKey) -> torch.Tensor:
        """Returns a view of the feature of a readable unit, with shape `(num_levels, num_tokens, hidden)` and the dtype
        in which it was sent."""
        feature = self._references.feature(unit)
        return slot_tensor(feature.view).view(torch_dtype(feature.ticket.dtype)).view(feature.ticket.shape)
