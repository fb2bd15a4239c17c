"""Implements the LanguageModel contract with a tiny, randomly initialised Qwen3-Omni thinker text model, for tests of
the runner that need neither a checkpoint nor a family."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3OmniMoeTextConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextModel

from llm_workers.compute import register_attention

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 3, 4, 2, 16, 48, 97


def tiny_config() -> Qwen3OmniMoeTextConfig:
    return Qwen3OmniMoeTextConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
    )


class TinyModel:
    """Implements LanguageModel. `reference` has the same weights with transformers' own attention."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(7)
        config = tiny_config()
        config._attn_implementation = "sdpa"
        self.reference = Qwen3OmniMoeThinkerTextModel(config).to(dtype).eval()
        self._spread(self.reference)
        paged = tiny_config()
        paged._attn_implementation = register_attention()
        self._model = Qwen3OmniMoeThinkerTextModel(paged).to(dtype).eval()
        self._model.load_state_dict(self.reference.state_dict())
        self.head = torch.randn(VOCAB, HIDDEN, dtype=dtype)
        self.dtype, self.device = dtype, torch.device("cpu")

    @staticmethod
    def _spread(model: torch.nn.Module) -> None:
        """Sets weights large enough that a wrong position or neighbour changes the result visibly."""
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.25)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._model.embed_tokens(token_ids)

    def forward(
        self,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        attention: Any,
        feature_rows: torch.Tensor | None,
        feature_levels: torch.Tensor | None,
        wanted_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        mask, levels = None, None
        if feature_rows is not None:
            mask = torch.zeros(1, len(embeddings), dtype=torch.bool)
            mask[0, feature_rows] = True
            levels = list(feature_levels)
        hidden = self._model(
            inputs_embeds=embeddings[None],
            position_ids=positions[:, None],
            use_cache=False,
            weft=attention,
            visual_pos_masks=mask,
            deepstack_visual_embeds=levels,
        ).last_hidden_state[0]
        return hidden if wanted_rows is None else hidden[wanted_rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden @ self.head.T).float()

    def whole(
        self, token_ids: torch.Tensor, positions: torch.Tensor, features: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """Returns the logits of every position from one plain transformers forward pass. `features` maps offset ->
        (levels, n, hidden)."""
        with torch.inference_mode():
            embeddings = self.reference.embed_tokens(token_ids)
            mask = torch.zeros(1, len(token_ids), dtype=torch.bool)
            for offset, feature in features.items():
                embeddings[offset : offset + feature.shape[1]] = feature[0]
                mask[0, offset : offset + feature.shape[1]] = True
            levels = list(torch.cat(list(features.values()), dim=1)[1:]) if features else None
            hidden = self.reference(
                inputs_embeds=embeddings[None],
                position_ids=positions[:, None],
                use_cache=False,
                visual_pos_masks=mask if features else None,
                deepstack_visual_embeds=levels,
            ).last_hidden_state[0]
            return self.logits(hidden)
