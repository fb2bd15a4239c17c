"""Qwen3-Omni's transformers classes."""

from __future__ import annotations

from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeThinkerConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeThinkerTextModel,
    Qwen3OmniMoeVisionEncoder,
)

from modalities.qwen_vl.checkpoint import Checkpoint

CHECKPOINT = Checkpoint(
    config=Qwen3OmniMoeThinkerConfig,
    tower=Qwen3OmniMoeVisionEncoder,
    text_model=Qwen3OmniMoeThinkerTextModel,
    whole_config=Qwen3OmniMoeConfig,
    has_experts=True,
)
