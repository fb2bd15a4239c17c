"""Implements Qwen3-VL (the dense models): it takes text, images and videos and returns text.

Its vision tower returns DeepStack levels: in addition to its last features, those of some of its middle layers.

Only `_checkpoint` imports transformers. `modalities.families.qwen_vl` holds what the related families share.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from modalities.families.qwen_vl.layout import VISION, Layout, WrittenTime
from modalities.families.qwen_vl.patches import VideoDefaults
from modalities.family import Family

if TYPE_CHECKING:
    from modalities.families.qwen_vl.towers import Checkpoint

ARCHITECTURES = ("Qwen3VLForConditionalGeneration",)

LAYOUT = Layout(
    name="qwen3_vl",
    modality_to_placeholder=VISION,
    video_time=lambda model: WrittenTime(),
    video=VideoDefaults("Qwen3VLVideoProcessor"),
    text_defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 128000,
    },
    vision_defaults={
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 3584,
        "deepstack_visual_indexes": (8, 16, 24),
    },
)


def load(model_dir: Path) -> Family:
    """Returns the family of the checkpoint in `model_dir`. Raises ConfigError if Weft can't use its config files."""
    from modalities.families.qwen_vl.qwen_vl_family import QwenVLFamily

    return QwenVLFamily(LAYOUT, model_dir, _checkpoint)


def _checkpoint() -> Checkpoint:
    from transformers import Qwen3VLConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel, Qwen3VLVisionModel

    from modalities.families.qwen_vl.towers import Checkpoint

    return Checkpoint(config=Qwen3VLConfig, tower=Qwen3VLVisionModel, text_model=Qwen3VLTextModel)
