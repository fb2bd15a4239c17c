"""Names the transformers classes of Qwen3-VL. It knows nothing of requests."""

from __future__ import annotations

from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel, Qwen3VLVisionModel

from modalities.qwen_vl.checkpoint import Checkpoint

CHECKPOINT = Checkpoint(config=Qwen3VLConfig, tower=Qwen3VLVisionModel, text_model=Qwen3VLTextModel)
