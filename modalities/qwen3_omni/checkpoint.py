"""Names the transformers classes of Qwen3-Omni. It knows nothing of requests."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig, Qwen3OmniMoeConfig, Qwen3OmniMoeThinkerConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeThinkerTextModel,
    Qwen3OmniMoeVisionEncoder,
)

from modalities.audio_towers import qwen3_omni
from modalities.family import EncoderModel
from modalities.qwen_vl.checkpoint import Checkpoint
from modalities.qwen_vl.config import QwenVLConfig


def _load_sound(model_dir: Path, audio: PreTrainedConfig, config: QwenVLConfig, place: tuple[str, str]) -> EncoderModel:
    assert config.sound is not None
    return qwen3_omni.load_encoder(model_dir, audio, config.sound, place)


CHECKPOINT = Checkpoint(
    config=Qwen3OmniMoeThinkerConfig,
    tower=Qwen3OmniMoeVisionEncoder,
    text_model=Qwen3OmniMoeThinkerTextModel,
    whole_config=Qwen3OmniMoeConfig,
    has_experts=True,
    load_sound=_load_sound,
)
