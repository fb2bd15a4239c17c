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
from fabric.messages import SamplingParams
from llm_workers.attention import Backend
from llm_workers.logprobs import token_logprobs
from llm_workers.masks import Guided, apply_masks
from llm_workers.paged_kv import PagedKV, Rows
from llm_workers.penalties import Penalised, apply_logit_bias, apply_penalties, bar_tokens
from llm_workers.sampling import sample
from llm_workers.scheduling.plan import BROKEN_GRAMMAR_TOKEN, Chunk, Splice, StepPlan, StepResult
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
        """Computes the plan's chunks; writes their KV. Draws a token for each chunk that has `sampling`; it is
        negative where the logits are not finite or the grammar is broken. The plan must have chunks."""
        device = self._model.device
        starts = np.cumsum([0, *(chunk.num_tokens for chunk in plan.chunks)])
        token_ids = torch.from_numpy(np.concatenate([chunk.token_ids for chunk in plan.chunks])).to(device)
        positions = torch.from_numpy(np.concatenate([chunk.positions for chunk in plan.chunks], axis=1)).to(device)
        step = self._backend(self._kv, _rows(plan.chunks, starts))
        embeddings = self._model.embed(token_ids)
        feature_rows, feature_levels = self._splice(embeddings, list(_placed(plan.chunks, starts)))
        with self._side.storing(plan.chunks, starts) if self._side else nullcontext():
            hidden = self._model.forward(embeddings, positions, step, feature_rows, feature_levels)
        return self._draw(hidden, plan.chunks, starts)

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

    def _draw(self, hidden: torch.Tensor, chunks: Sequence[Chunk], starts: np.ndarray) -> StepResult:
        places = [place for place, chunk in enumerate(chunks) if chunk.sampling is not None]
        if not places:
            return StepResult({})
        last_rows = torch.from_numpy(starts[1:][places] - 1).to(hidden.device)
        logits = self._model.logits(hidden.index_select(0, last_rows)).contiguous()
        drawn = [(chunk, chunk.sampling) for chunk in chunks if chunk.sampling is not None]
        scored = [row for row, (_, params) in enumerate(drawn) if params.num_top_logprobs is not None]
        raw = logits[scored].log_softmax(dim=-1) if scored else None
        broken = _constrain(logits, drawn)
        tokens = sample(logits, [(params, chunk.sequence_id.choice, chunk.draw_index) for chunk, params in drawn])
        for row in broken:
            tokens[row] = BROKEN_GRAMMAR_TOKEN
        result = StepResult({chunk.sequence_id: token for (chunk, _), token in zip(drawn, tokens, strict=True)})
        if raw is not None:
            num_top = [drawn[row][1].num_top_logprobs or 0 for row in scored]
            scores = token_logprobs(raw, [tokens[row] for row in scored], num_top)
            result.logprobs.update({drawn[row][0].sequence_id: each for row, each in zip(scored, scores, strict=True)})
        return result


def _constrain(logits: torch.Tensor, drawn: Sequence[tuple[Chunk, SamplingParams]]) -> list[int]:
    """Changes the logits of every drawn row as its request asks, in place. Returns rows whose grammar is broken."""
    changes = [Penalised(row, params, chunk.counts) for row, (chunk, params) in enumerate(drawn)]
    apply_penalties(logits, changes)
    apply_logit_bias(logits, changes)
    bar_tokens(logits, [(row, chunk.barred) for row, (chunk, _) in enumerate(drawn)])
    guided = [Guided(row, chunk.guide) for row, (chunk, _) in enumerate(drawn) if chunk.guide is not None]
    return apply_masks(logits, guided)


def _rows(chunks: Sequence[Chunk], starts: np.ndarray) -> list[Rows]:
    return [
        Rows(int(at), chunk.start, chunk.num_tokens, chunk.block_ids) for at, chunk in zip(starts, chunks, strict=False)
    ]


def _placed(chunks: Sequence[Chunk], starts: np.ndarray) -> Iterator[PlacedSplice]:
    """In ascending order of row: chunks are packed in order, splices of a chunk are sorted by position."""
    for base, chunk in zip(starts, chunks, strict=False):
        for splice in sorted(chunk.splices, key=lambda splice: splice.at):
            yield PlacedSplice(int(base) + splice.at, splice)
