"""Names the transformers classes of Qwen2-VL. It knows nothing of requests."""

from __future__ import annotations

from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel, Qwen2VLTextModel

from modalities.qwen_vl.checkpoint import Checkpoint

CHECKPOINT = Checkpoint(
    config=Qwen2VLConfig,
    tower=Qwen2VisionTransformerPretrainedModel,
    text_model=Qwen2VLTextModel,
)
