"""Implements Qwen2-VL: it takes text, images and videos and returns text.

Only `_checkpoint` imports transformers. `modalities.families.qwen_vl` holds what the related families share.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from modalities.families.qwen_vl.layout import VISION, CountedTime, Layout
from modalities.families.qwen_vl.patches import VideoDefaults
from modalities.family import Family

if TYPE_CHECKING:
    from modalities.families.qwen_vl.towers import Checkpoint

ARCHITECTURES = ("Qwen2VLForConditionalGeneration",)

LAYOUT = Layout(
    name="qwen2_vl",
    modality_to_placeholder=VISION,
    video=VideoDefaults("Qwen2VLVideoProcessor"),
    video_time=lambda model: CountedTime(),
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
        "hidden_size": 3584,
    },
    feature_size_key="hidden_size",  # The config calls the tower's own width `embed_dim`.
    is_text_flat=True,
)


def load(model_dir: Path) -> Family:
    """Returns the family of the checkpoint in `model_dir`. Raises ConfigError if Weft can't use its config files."""
    from modalities.families.qwen_vl.qwen_vl_family import QwenVLFamily

    return QwenVLFamily(LAYOUT, model_dir, _checkpoint)


def _checkpoint() -> Checkpoint:
    from transformers import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel, Qwen2VLTextModel

    from modalities.families.qwen_vl.towers import Checkpoint

    return Checkpoint(
        config=Qwen2VLConfig,
        tower=Qwen2VisionTransformerPretrainedModel,
        text_model=Qwen2VLTextModel,
    )
