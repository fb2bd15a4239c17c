"""Holds the weights of a talker and computes with them: input rows, the forward pass over packed rows, and codes.

The layers are those of transformers' `Qwen3OmniMoeTalkerModel`, fused and on paged attention in the same way as the
thinker's (`modalities.families.causal_lm`). Text becomes rows through the thinker's table of embeddings and a
projection, and media through a projection of the thinker's hidden states. The module knows nothing of requests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from llm_workers.speech.code_predictor import Choose, CodePredictor
from llm_workers.speech.row_ids import NONE, Ints
from modalities.families.causal_lm.fused_layers import fused
from modalities.families.causal_lm.language_model import TextModel


class RowInputs(NamedTuple):
    """Holds what the packed input rows of a step are made of. Each row is the sum of its parts."""

    text_ids: Ints
    """Holds the thinker's token id of each row or NONE. Has shape `(num_rows,)`."""
    head_codes: Ints
    """Holds the codec's special id of each row or NONE. Has shape `(num_rows,)`."""
    hidden: torch.Tensor
    """Holds hidden states of the thinker. Has shape `(num_hidden, thinker_hidden)`."""
    hidden_rows: Ints
    """Holds the row of each of them. Has shape `(num_hidden,)`."""
    frames: Ints
    """Holds the codes of the frames that rows continue, in order. Has shape `(num_frames, num_groups)`."""
    frame_rows: Ints
    """Holds the row of each of these frames. Has shape `(num_frames,)`."""


class TalkerNetwork:
    """A `TalkerNetwork` holds the weights of one talker on one device. Only one thread may use it."""

    def __init__(self, part: Any, text_embeddings: torch.Tensor) -> None:
        """Takes a loaded `Qwen3OmniMoeTalkerForConditionalGeneration`, whose attention is Weft's, and the thinker's
        embeddings `(vocab, thinker_hidden)` on the same device."""
        self._backbone = TextModel(fused(TalkerBackbone(part)))
        self._codec_embedding = part.model.codec_embedding
        self._text_projection, self._hidden_projection = part.text_projection, part.hidden_projection
        self._text_embeddings = text_embeddings
        self._predictor = CodePredictor(part.code_predictor)
        self.device, self.dtype = self._backbone.device, self._backbone.dtype
        text_config = part.config.text_config
        self.num_layers: int = text_config.num_hidden_layers
        self.num_groups: int = part.config.num_code_groups
        self.vocab_size: int = text_config.vocab_size
        self.text_vocab_size, self.thinker_width = text_embeddings.shape
        attention = part.model.layers[0]
        self.kv_heads: tuple[int, int] = _kv_heads(attention, text_config)

    @torch.inference_mode()
    def rows(self, inputs: RowInputs) -> torch.Tensor:
        """Returns the input rows `(num_rows, hidden)`."""
        ids, places = np.unique(inputs.text_ids[inputs.text_ids != NONE], return_inverse=True)
        texts: torch.Tensor = self._text_projection(functional.embedding(self._put(ids), self._text_embeddings))
        hidden = texts.new_empty((len(inputs.text_ids), texts.shape[1]))
        hidden.index_copy_(0, self._rows_where(inputs.text_ids != NONE), texts.index_select(0, self._put(places)))
        if len(inputs.hidden):
            media = self._hidden_projection(inputs.hidden.to(self.device, self.dtype))
            hidden.index_copy_(0, self._put(inputs.hidden_rows), media)
        is_head = inputs.head_codes != NONE
        if is_head.any():
            heads = self._codec_embedding(self._put(inputs.head_codes[is_head]))
            hidden.index_add_(0, self._rows_where(is_head), heads)
        if len(inputs.frames):
            codes = self._put(inputs.frames)
            frames = self._codec_embedding(codes[:, 0]) + self._predictor.embed(codes[:, 1:])
            hidden.index_add_(0, self._put(inputs.frame_rows), frames)
        return hidden

    @torch.inference_mode()
    def forward(self, rows: torch.Tensor, positions: Ints, attention: Any, wanted: Ints) -> torch.Tensor:
        """Runs the layers over packed rows at positions `(3, num_rows)` and writes their keys and values. Returns the
        last hidden states of the rows `wanted`, `(len(wanted), hidden)`."""
        at = self._put(wanted) if len(wanted) < len(rows) else None
        return self._backbone.forward(rows, self._put(positions), attention, None, None, at)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the float32 logits of the first code, `(n, vocab)`."""
        return self._backbone.logits(hidden)

    @torch.inference_mode()
    def other_codes(self, hidden: torch.Tensor, first: torch.Tensor, choose: Choose) -> torch.Tensor:
        """Returns the codes behind the first of each frame, int64 `(n, num_groups - 1)`. `hidden` holds the last hidden
        states `(n, hidden)`, and `first` the first codes `(n,)`."""
        return self._predictor.predict(hidden, self._codec_embedding(first), choose)

    def _put(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)

    def _rows_where(self, is_chosen: np.ndarray) -> torch.Tensor:
        return self._put(np.flatnonzero(is_chosen))


class TalkerBackbone(nn.Module):
    """A `TalkerBackbone` gives a talker's layers and head the names that a text half has."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.model, self.lm_head = part.model, part.codec_head
        self.dtype, self.device = part.dtype, part.device


def _kv_heads(layer: Any, config: Any) -> tuple[int, int]:
    """Returns the number of KV heads and the head's size, which the config may leave to its defaults."""
    default = config.hidden_size // config.num_attention_heads
    return config.num_key_value_heads, int(getattr(config, "head_dim", None) or default)
