"""Runs the text half of a model of any family on Weft's attention: it maps embeddings to hidden states, and these to
logits.

The module knows nothing of sequences: it gets packed tokens, and metadata for the attention function that it passes on
unread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fabric.errors import ConfigError
from modalities.causal_lm.checkpoint import load_text_half
from modalities.causal_lm.fused_layers import (
    AddedLevels,
    can_end_early,
    fused,
    is_fused,
    is_packed,
    run_layers,
    run_unfused,
)
from modalities.causal_lm.last_rows import LastRows
from modalities.causal_lm.step_sizes import pad_step


class TextModel:
    """Implements `modalities.family.LanguageModel`. A family's differences are data of a step: the number of axes of
    its positions (three for M-RoPE), and its DeepStack levels. Only one forward pass may run at a time: the class is
    not thread-safe."""

    def __init__(self, part: Any) -> None:
        """Takes a part of transformers that has `model` and `lm_head`."""
        self._part = part
        self.dtype: torch.dtype = part.dtype
        self.device: torch.device = part.device
        self._is_padded = is_packed(part)
        self._run = run_layers if is_fused(part) else run_unfused

    def layer(self, index: int) -> torch.nn.Module:
        """Returns a decoder layer, whose output is the residual stream `(1, num_tokens, hidden)`."""
        return self._part.model.layers[index]

    @torch.no_grad()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Maps int64 token ids `(num_tokens,)` to embeddings `(num_tokens, hidden)`."""
        embeddings: torch.Tensor = self._part.model.embed_tokens(token_ids)
        return embeddings

    @torch.no_grad()
    def forward(
        self,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        attention: Any,
        feature_rows: torch.Tensor | None,
        feature_levels: torch.Tensor | None,
        wanted_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps embeddings `(num_tokens, hidden)` and positions `(num_axes, num_tokens)` to the last hidden states
        `(num_tokens, hidden)`, normed. Returns only `wanted_rows` if given. `feature_levels[i]` is added after layer i
        at `feature_rows` (DeepStack)."""
        num_tokens = len(embeddings)
        if self._is_padded:
            embeddings, positions = pad_step(embeddings, positions)
        is_early = can_end_early(self._part)
        added = None
        if feature_rows is not None and feature_levels is not None and len(feature_rows) and len(feature_levels):
            added = AddedLevels(feature_rows, feature_levels)
            # The last layer can end early only if it gets no features.
            is_early = is_early and len(feature_levels) < len(self._part.model.layers)
        rows = LastRows(wanted_rows, len(embeddings), is_padded=self._is_padded, can_end_early=is_early)
        hidden = self._run(self._part.model, embeddings, positions, attention, rows.finished, added)
        return rows.of(hidden, num_tokens)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden states `(n, hidden)` to float32 logits `(n, vocab)`."""
        logits: torch.Tensor = self._part.lm_head(hidden)
        return logits.float()


def load_text_model(load: Callable[[str], PreTrainedModel], attention_name: str) -> TextModel:
    """Loads a text half with fused layers. `load` takes the name of the attention and returns the part. Raises
    ConfigError if a weight is missing, or if `attention_name` is not a registered attention function without a mask
    function: with one, transformers would build masks over the packed tokens of a step."""
    if attention_name not in ALL_ATTENTION_FUNCTIONS:
        raise ConfigError(f"attention {attention_name!r} is not registered")
    if attention_name in ALL_MASK_ATTENTION_FUNCTIONS:
        raise ConfigError(f"attention {attention_name!r} has a mask function; Weft's own takes none")
    return TextModel(fused(load(attention_name)))


def load_causal_lm(model_dir: Path, device: str, dtype: str, attention_name: str) -> TextModel:
    """Loads a plain causal language model, alone or as the text half of a larger checkpoint. Raises ConfigError as
    `load_text_model` does."""
    return load_text_model(partial(load_text_half, model_dir, device, dtype), attention_name)
