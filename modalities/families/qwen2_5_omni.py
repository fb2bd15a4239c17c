"""Implements Qwen2.5-Omni's thinker: it takes text, images, videos and sounds and returns text.

Speech is not supported yet.

Only `_checkpoint` imports transformers. `modalities.families.qwen_vl` holds what the related families share.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modalities.families.audio_towers.sound_plans import qwen2_5_omni_sound
from modalities.families.qwen_vl.layout import (
    AUDIO,
    IMAGE,
    VIDEO,
    Control,
    Layout,
    QwenVLConfig,
    SharedTime,
    SoundLayout,
)
from modalities.families.qwen_vl.patches import SizeRange, VideoDefaults
from modalities.family import EncoderModel, Family

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from modalities.families.qwen_vl.towers import Checkpoint

_WHOLE = ("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel")
ARCHITECTURES = ("Qwen2_5OmniThinkerForConditionalGeneration", *_WHOLE)


def _video_time(model: Mapping[str, Any]) -> SharedTime:
    per_second = int(model.get("position_id_per_seconds", 25))
    return SharedTime(per_second, is_rounded_up=False, chunk=int(per_second * model.get("seconds_per_chunk", 2)))


LAYOUT = Layout(
    name="qwen2_5_omni",
    modality_to_placeholder={
        IMAGE: Control("image_token_index", 151655, "<|IMAGE|>"),
        VIDEO: Control("video_token_index", 151656, "<|VIDEO|>"),
        AUDIO: Control("audio_token_index", 151646, "<|AUDIO|>"),
    },
    video_time=_video_time,
    video=VideoDefaults("Qwen2VLVideoProcessor", SizeRange(128 * 28 * 28, 768 * 28 * 28)),
    sound=SoundLayout(
        read=qwen2_5_omni_sound,
        start=Control("audio_start_token_id", 151647),
        end=Control("audio_end_token_id", 151648),
        are_marks_paired=True,
    ),
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
    whole_architectures=_WHOLE,
)


def load(model_dir: Path) -> Family:
    """Returns the family of the checkpoint in `model_dir`. Raises ConfigError if Weft can't use its config files."""
    from modalities.families.qwen_vl.qwen_vl_family import QwenVLFamily

    return QwenVLFamily(LAYOUT, model_dir, _checkpoint)


def _load_sound(model_dir: Path, audio: PreTrainedConfig, config: QwenVLConfig, place: tuple[str, str]) -> EncoderModel:
    from modalities.families.audio_towers import qwen2_5_omni_tower

    return qwen2_5_omni_tower.load_encoder(model_dir, audio, place)


def _checkpoint() -> Checkpoint:
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniThinkerConfig
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
        Qwen2_5OmniThinkerTextModel,
        Qwen2_5OmniVisionEncoder,
    )

    from modalities.families.qwen_vl.towers import Checkpoint

    return Checkpoint(
        config=Qwen2_5OmniThinkerConfig,
        tower=Qwen2_5OmniVisionEncoder,
        text_model=Qwen2_5OmniThinkerTextModel,
        whole_config=Qwen2_5OmniConfig,
        load_sound=_load_sound,
    )
