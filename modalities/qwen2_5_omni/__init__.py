"""Qwen2.5-Omni (thinker): text and images in, text out. Video, audio and speech are not declared yet.

Torch: `checkpoint`. What its siblings share stands in `modalities.qwen_vl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from modalities.family import Family
from modalities.qwen_vl.config import Layout

if TYPE_CHECKING:
    from modalities.qwen_vl.checkpoint import Checkpoint

_WHOLE = ("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel")
ARCHITECTURES = ("Qwen2_5OmniThinkerForConditionalGeneration", *_WHOLE)

LAYOUT = Layout(
    name="qwen2_5_omni",
    image_placeholder="<|IMAGE|>",
    text_defaults={
        "vocab_size": 152064,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 28,
    },
    vision_defaults={
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 3584,
    },
    image_token_key="image_token_index",
    whole_architectures=_WHOLE,
)


def load(model_dir: Path) -> Family:
    """Raises ConfigError."""
    from modalities.qwen_vl.family import QwenVLFamily

    return QwenVLFamily(LAYOUT, model_dir, _checkpoint)


def _checkpoint() -> Checkpoint:
    from modalities.qwen2_5_omni.checkpoint import CHECKPOINT

    return CHECKPOINT
