"""Predicts the remaining codes of a frame from its first code, for a batch of requests.

The predictor is a small transformer over the groups of one frame: it reads the talker's last hidden state and the first
code, and then writes one code after the other. `CodePredictor.predict` runs all requests of a step together, with a
cache of keys and values that has a fixed size and lives for one call. It replaces the `generate` of transformers, which
takes a call of its own for each step of each request. The layers are transformers' own, fused as the thinker's are
(`modalities.families.causal_lm`). The module knows nothing of requests; how a code is drawn is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from fabric.contracts import ConfigError
from modalities.families.causal_lm.fused_layers import FusedLayer, RowNorm
from modalities.families.causal_lm.projection import project

Choose = Callable[[torch.Tensor, int], torch.Tensor]
"""Draws one code of each row from float32 logits `(n, vocab)` for a group, counted from 0: int64 `(n,)`."""


class CodePredictor:
    """A `CodePredictor` holds the weights of one code predictor on one device."""

    def __init__(self, part: Any) -> None:
        """Takes a loaded `Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration`. Raises ConfigError if its
        attention has a window that is shorter than a frame."""
        config, model = part.config, part.model
        self.num_groups: int = config.num_code_groups
        if config.sliding_window is not None and config.sliding_window <= self.num_groups:
            raise ConfigError("the code predictor's sliding window is shorter than a frame, which Weft can't run")
        self._layers = [FusedLayer(layer, config.hidden_act) for layer in model.layers]
        self._norm, self._heads = RowNorm(model.norm), [project(head) for head in part.lm_head]
        self._embeddings = model.codec_embedding
        probe = torch.zeros((1, 1, 1), dtype=part.dtype, device=part.device)
        self._table = model.rotary_emb(probe, torch.arange(self.num_groups, device=part.device)[None])
        self._cache_shape = (self.num_groups, config.num_key_value_heads, config.head_dim)

    def embed(self, codes: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the embeddings of a frame's codes after the first: `(n, hidden)` for codes
        `(n, num_groups - 1)`."""
        return torch.stack([table(codes[:, group]) for group, table in enumerate(self._embeddings)]).sum(0)

    def predict(self, hidden: torch.Tensor, first: torch.Tensor, choose: Choose) -> torch.Tensor:
        """Returns the codes of all groups but the first as int64 `(n, num_groups - 1)`. `hidden` holds the talker's
        last hidden states and `first` the talker's embeddings of the first codes, `(n, hidden)` each."""
        caches = hidden.new_empty((len(self._layers), 2, len(hidden), *self._cache_shape))
        rows, start, codes = torch.stack([hidden, first], dim=1).flatten(0, 1), 0, []
        for group, (head, embedding) in enumerate(zip(self._heads, self._embeddings, strict=True)):
            step = _FrameStep(caches, start, len(rows) // len(hidden))
            table = tuple(part[:, start : step.end].repeat(1, len(hidden), 1) for part in self._table)
            for layer in self._layers:
                rows = layer(rows[None], table, step)[0]
            logits = head(self._norm(rows.unflatten(0, (len(hidden), -1))[:, -1].contiguous()))
            codes.append(choose(logits.float(), group + 1))
            rows, start = embedding(codes[-1]), step.end
        return torch.stack(codes, dim=1)


class _FrameStep:
    """A `_FrameStep` is the attention of one step of the predictor: all requests have the same number of rows, at the
    same positions."""

    def __init__(self, caches: torch.Tensor, start: int, num_rows: int) -> None:
        """Takes caches `(num_layers, 2, n, num_groups, num_kv_heads, head_dim)` with `start` positions filled."""
        self._caches, self._start, self._num_rows = caches, start, num_rows
        self.end = start + num_rows

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """Keeps keys and values, and attends. All have shape `(n * num_rows, heads, head_dim)`."""
        shape = (-1, self._num_rows)
        cache = self._caches[layer]
        cache[0, :, self._start : self.end] = k.unflatten(0, shape)
        cache[1, :, self._start : self.end] = v.unflatten(0, shape)
        keys, values = cache[:, :, : self.end].transpose(2, 3)
        queries = q.unflatten(0, shape).transpose(1, 2)
        attended = scaled_dot_product_attention(
            queries,
            keys,
            values,
            is_causal=self._num_rows > 1,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return attended.transpose(1, 2).flatten(0, 1)
