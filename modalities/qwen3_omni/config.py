"""Reads Qwen3-Omni's config files, of the thinker alone or of the whole model that contains it.

It knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modalities.audio_towers.halves import qwen3_omni_sound
from modalities.qwen_vl.config import AUDIO, VISION, Control, Layout, QwenVLConfig, SoundLayout
from modalities.qwen_vl.config import read_config as read_with_layout
from modalities.qwen_vl.image_options import ImageOptions
from modalities.qwen_vl.video_options import SizeRange, VideoDefaults
from modalities.qwen_vl.video_time import SharedTime

__all__ = ["LAYOUT", "ImageOptions", "read_config"]


def _video_time(model: Mapping[str, Any]) -> SharedTime:
    return SharedTime(int(model.get("position_id_per_seconds", 25)), is_rounded_up=True, chunk=0)


LAYOUT = Layout(
    name="qwen3_omni",
    modality_to_placeholder={**VISION, AUDIO: Control("audio_token_id", 151646, "<|audio_pad|>")},
    video_time=_video_time,
    video=VideoDefaults("Qwen2VLVideoProcessor", SizeRange(128 * 32 * 32, 768 * 32 * 32)),
    sound=SoundLayout(
        read=qwen3_omni_sound,
        start=Control("audio_start_token_id", 151647),
        end=Control("audio_end_token_id"),  # transformers' config lacks this field, but published checkpoints have it.
    ),
    text_defaults={
        "vocab_size": 3584,
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    },
    vision_defaults={
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 3584,
        "deepstack_visual_indexes": (8, 16, 24),
    },
    whole_architectures=("Qwen3OmniMoeForConditionalGeneration",),
)


def read_config(model_dir: Path) -> QwenVLConfig:
    """Returns the config. Raises ConfigError for missing or broken files and for a model that Weft can't run."""
    return read_with_layout(model_dir, LAYOUT)
