"""Implements Qwen2.5-VL: it takes text, images and videos and returns text.

Its vision tower attends within windows, and in some layers within a whole picture or temporal patch.

Only `_checkpoint` imports transformers. `modalities.families.qwen_vl` holds what the related families share.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from modalities.families.qwen_vl.layout import VISION, Layout, MeasuredTime
from modalities.families.qwen_vl.patches import VideoDefaults
from modalities.family import Family

if TYPE_CHECKING:
    from modalities.families.qwen_vl.towers import Checkpoint

ARCHITECTURES = ("Qwen2_5_VLForConditionalGeneration",)

LAYOUT = Layout(
    name="qwen2_5_vl",
    modality_to_placeholder=VISION,
    video=VideoDefaults("Qwen2VLVideoProcessor"),
    video_time=lambda model: MeasuredTime(model["vision_config"].get("tokens_per_second", 4)),
    text_defaults={
        "vocab_size": 152064,
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 80,
    },
    vision_defaults={
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 3584,
    },
    is_text_flat=True,
)


def load(model_dir: Path) -> Family:
    """Returns the family of the checkpoint in `model_dir`. Raises ConfigError if Weft can't use its config files."""
    from modalities.families.qwen_vl.qwen_vl_family import QwenVLFamily

    return QwenVLFamily(LAYOUT, model_dir, _checkpoint)


def _checkpoint() -> Checkpoint:
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
        Qwen2_5_VisionTransformerPretrainedModel,
        Qwen2_5_VLTextModel,
    )

    from modalities.families.qwen_vl.towers import Checkpoint

    return Checkpoint(
        config=Qwen2_5_VLConfig,
        tower=Qwen2_5_VisionTransformerPretrainedModel,
        text_model=Qwen2_5_VLTextModel,
    )
