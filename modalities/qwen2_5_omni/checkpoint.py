"""Names the transformers classes of Qwen2.5-Omni. It knows nothing of requests."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig, Qwen2_5OmniConfig, Qwen2_5OmniThinkerConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniThinkerTextModel,
    Qwen2_5OmniVisionEncoder,
)

from modalities.audio_towers import qwen2_5_omni
from modalities.family import EncoderModel
from modalities.qwen_vl.checkpoint import Checkpoint
from modalities.qwen_vl.config import QwenVLConfig


def _load_sound(model_dir: Path, audio: PreTrainedConfig, config: QwenVLConfig, place: tuple[str, str]) -> EncoderModel:
    return qwen2_5_omni.load_encoder(model_dir, audio, place)


CHECKPOINT = Checkpoint(
    config=Qwen2_5OmniThinkerConfig,
    tower=Qwen2_5OmniVisionEncoder,
    text_model=Qwen2_5OmniThinkerTextModel,
    whole_config=Qwen2_5OmniConfig,
    load_sound=_load_sound,
)
