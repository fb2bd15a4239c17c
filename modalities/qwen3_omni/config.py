"""Qwen3-Omni's config files: the thinker alone, or as a part of the whole model."""

from __future__ import annotations

from pathlib import Path

from modalities.qwen_vl.config import Layout, QwenVLConfig
from modalities.qwen_vl.config import read_config as read_with_layout
from modalities.qwen_vl.image_options import ImageOptions

__all__ = ["LAYOUT", "ImageOptions", "read_config"]

LAYOUT = Layout(
    name="qwen3_omni",
    image_placeholder="<|image_pad|>",
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
    """Raises ConfigError for missing or broken files and for what Weft can't run."""
    return read_with_layout(model_dir, LAYOUT)
