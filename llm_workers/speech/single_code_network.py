"""Holds the weights of Qwen2.5-Omni's talker, which makes one code per frame.

It is a `SpeechNetwork` like that of Qwen3-Omni (`talker_network`): the layers are those of transformers, fused and on
paged attention. A row is the sum of a hidden state of the thinker, the thinker's embedding of a token, and the talker's
embedding of a code, and one projection maps it to the talker's width. There is no code predictor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from llm_workers.speech.code_predictor import Choose
from llm_workers.speech.row_ids import NONE, Ints
from llm_workers.speech.talker_network import RowInputs, TalkerBackbone
from modalities.families.causal_lm.fused_layers import fused
from modalities.families.causal_lm.language_model import TextModel


class SingleCodeNetwork:
    """A `SingleCodeNetwork` implements `SpeechNetwork` on one device. Only one thread may use it."""

    num_groups = 1

    def __init__(self, part: Any, text_embeddings: torch.Tensor, last_norm: tuple[torch.Tensor, float]) -> None:
        """Takes a loaded `Qwen2_5OmniTalkerForConditionalGeneration`, whose attention is Weft's, the thinker's
        embeddings `(vocab, thinker_hidden)`, and the weight and epsilon of its last norm, on the same device."""
        self._backbone = TextModel(fused(TalkerBackbone(part)))
        self._codec_embedding, self._projection = part.model.embed_tokens, part.thinker_to_talker_proj
        self._text_embeddings, self._last_norm = text_embeddings, last_norm
        self.device, self.dtype = self._backbone.device, self._backbone.dtype
        config = part.config
        self.num_layers: int = config.num_hidden_layers
        self.text_vocab_size, self.thinker_width = text_embeddings.shape
        self.kv_heads: tuple[int, int] = (config.num_key_value_heads, config.head_dim)

    @torch.inference_mode()
    def rows(self, inputs: RowInputs) -> torch.Tensor:
        """Returns the input rows `(num_rows, hidden)`. The hidden states are those behind the thinker's last layer,
        before its last norm."""
        has_text, has_code = inputs.text_ids != NONE, inputs.head_codes != NONE
        texts = self._put(inputs.text_ids.clip(min=0))
        summed = functional.embedding(texts, self._text_embeddings) * self._put(has_text)[:, None]
        if len(inputs.hidden):
            weight, epsilon = self._last_norm
            hidden = inputs.hidden.to(self.device, self.dtype)
            summed.index_add_(0, self._put(inputs.hidden_rows), _normed(hidden, weight, epsilon))
        summed += self._codec_embedding(self._put(inputs.head_codes.clip(min=0))) * self._put(has_code)[:, None]
        if len(inputs.frames):
            codes = self._codec_embedding(self._put(inputs.frames[:, 0].copy()))
            summed.index_add_(0, self._put(inputs.frame_rows), codes)
        projected: torch.Tensor = self._projection(summed)
        return projected

    @torch.inference_mode()
    def forward(self, rows: torch.Tensor, positions: Ints, attention: Any, wanted: Ints) -> torch.Tensor:
        """Does the same as `TalkerNetwork.forward`."""
        at = self._put(wanted) if len(wanted) < len(rows) else None
        return self._backbone.forward(rows, self._put(positions), attention, None, None, at)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the float32 logits of the code, `(n, vocab)`."""
        return self._backbone.logits(hidden)

    def other_codes(self, hidden: torch.Tensor, first: torch.Tensor, choose: Choose) -> torch.Tensor:
        """Returns no codes, `(n, 0)`, because a frame has one."""
        return first.new_empty((len(first), 0))

    def _put(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


def _normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Returns the RMS norm of `x` `(n, hidden)`, rounded where transformers rounds."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * normed.to(x.dtype)
