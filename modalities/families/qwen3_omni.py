"""Implements Qwen3-Omni's thinker: it takes text, images, videos and sounds and returns text.

Speech is not supported yet. A checkpoint may hold the thinker alone or the whole model that contains it.
`modalities.families.qwen_vl` holds what the related families share, and `modalities.families.audio_towers` encodes the
sounds.

Only `_checkpoint` and `_load_sound` import torch or transformers. The module knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modalities.families.audio_towers.sound_plans import qwen3_omni_sound
from modalities.families.qwen_vl.layout import AUDIO, VISION, Control, Layout, QwenVLConfig, SharedTime, SoundLayout
from modalities.families.qwen_vl.layout import read_config as read_with_layout
from modalities.families.qwen_vl.patches import SizeRange, VideoDefaults
from modalities.families.qwen_vl.qwen_vl_family import QwenVLFamily
from modalities.family import EncoderModel, Family

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from modalities.families.qwen_vl.towers import Checkpoint

ARCHITECTURES = ("Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration")


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


def load(model_dir: Path) -> Family:
    """Returns the family of the checkpoint in `model_dir`. Raises ConfigError if Weft can't use its config files."""
    return Qwen3OmniFamily(model_dir)


class Qwen3OmniFamily(QwenVLFamily):
    """A `Qwen3OmniFamily` stands for one checkpoint directory. It is immutable and thread-safe."""

    def __init__(self, model_dir: Path) -> None:
        """Reads only config files. Raises ConfigError if Weft can't use them."""
        super().__init__(LAYOUT, model_dir, _checkpoint)


def read_config(model_dir: Path) -> QwenVLConfig:
    """Returns the config. Raises ConfigError for missing or broken files and for a model that Weft can't run."""
    return read_with_layout(model_dir, LAYOUT)


def _load_sound(model_dir: Path, audio: PreTrainedConfig, config: QwenVLConfig, place: tuple[str, str]) -> EncoderModel:
    from modalities.families.audio_towers import qwen3_omni_tower

    assert config.sound is not None
    return qwen3_omni_tower.load_encoder(model_dir, audio, config.sound, place)


def _checkpoint() -> Checkpoint:
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeThinkerConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
        Qwen3OmniMoeThinkerTextModel,
        Qwen3OmniMoeVisionEncoder,
    )

    from modalities.families.qwen_vl.towers import Checkpoint

    return Checkpoint(
        config=Qwen3OmniMoeThinkerConfig,
        tower=Qwen3OmniMoeVisionEncoder,
        text_model=Qwen3OmniMoeThinkerTextModel,
        whole_config=Qwen3OmniMoeConfig,
        has_experts=True,
        load_sound=_load_sound,
    )
