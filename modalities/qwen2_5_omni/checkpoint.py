"""Qwen2.5-Omni's transformers classes."""

from __future__ import annotations

from transformers import Qwen2_5OmniConfig, Qwen2_5OmniThinkerConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniThinkerTextModel,
    Qwen2_5OmniVisionEncoder,
)

from modalities.qwen_vl.checkpoint import Checkpoint

CHECKPOINT = Checkpoint(
    config=Qwen2_5OmniThinkerConfig,
    tower=Qwen2_5OmniVisionEncoder,
    text_model=Qwen2_5OmniThinkerTextModel,
    whole_config=Qwen2_5OmniConfig,
)
