"""Defines language models without media as rows of the family table."""

from __future__ import annotations

from typing import Any

from family_row import FamilyRow, spread
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

TINY: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

LLAMA = FamilyRow("llama", lambda: spread(LlamaForCausalLM(LlamaConfig(**TINY, rope_parameters=LLAMA3_ROPE))))
QWEN2 = FamilyRow("qwen2", lambda: spread(Qwen2ForCausalLM(Qwen2Config(**TINY, tie_word_embeddings=True))))
QWEN3 = FamilyRow("qwen3", lambda: spread(Qwen3ForCausalLM(Qwen3Config(**TINY, head_dim=16))))
