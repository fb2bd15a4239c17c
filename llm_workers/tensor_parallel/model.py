"""Presents the text half of a model on several ranks to rank 0 as one `LanguageModel`. It knows nothing of requests and
sampling.
"""

from __future__ import annotations

from typing import Any

import torch

from llm_workers.tensor_parallel.group import RankGroup
from llm_workers.tensor_parallel.process_group import StepTensors, send_step
from llm_workers.tensor_parallel.wire import step_header
from modalities.family import LanguageModel


class ParallelLanguageModel:
    """Implements `modalities.family.LanguageModel`; rank 0 alone has the embeddings and the head. One forward pass runs
    at a time."""

    def __init__(self, share: LanguageModel, ranks: RankGroup) -> None:
        self._share, self._ranks = share, ranks
        self.dtype: torch.dtype = share.dtype
        self.device: torch.device = share.device

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Maps int64 token ids `(num_tokens,)` to embeddings `(num_tokens, hidden)`."""
        return self._share.embed(token_ids)

    def forward(
        self,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        attention: Any,
        feature_rows: torch.Tensor | None,
        feature_levels: torch.Tensor | None,
        wanted_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the forward pass that the contract describes, on all ranks. `attention` must have `rows`. Raises
        WorkerLost when a rank is gone, too late or broken, and at every later call."""
        features = None
        if feature_rows is not None and feature_levels is not None:
            features = (feature_levels.shape[0], feature_levels.shape[1])
        header = step_header(attention.rows, (embeddings.shape[0], embeddings.shape[1]), positions.shape[0], features)
        with self._ranks.step(header):
            send_step(StepTensors(embeddings, positions, feature_rows, feature_levels))
            return self._share.forward(embeddings, positions, attention, feature_rows, feature_levels, wanted_rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden states `(n, hidden)` to float32 logits `(n, vocab)`."""
        return self._share.logits(hidden)
