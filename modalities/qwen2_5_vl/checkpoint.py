"""Names the transformers classes of Qwen2.5-VL. It knows nothing of requests."""

from __future__ import annotations

from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLTextModel,
)

from modalities.qwen_vl.checkpoint import Checkpoint

CHECKPOINT = Checkpoint(
    config=Qwen2_5_VLConfig,
    tower=Qwen2_5_VisionTransformerPretrainedModel,
    text_model=Qwen2_5_VLTextModel,
)
