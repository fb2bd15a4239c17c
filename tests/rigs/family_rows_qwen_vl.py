"""Defines Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen2.5-Omni's thinker as rows of the family table."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from family_row import FILM, FamilyRow, Markup, spread
from family_rows_qwen3_omni import MEDIA_SIZES
from family_videos import SoundRules, VideoRules, features, process
from modalities_files import PREPROCESSOR, VIDEO_PREPROCESSOR
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

START, IMAGE, END, VIDEO, AUDIO, AUDIO_START, AUDIO_END = range(101, 108)
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
TEXT = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
}
TEXT3 = {key: value for key, value in TEXT.items() if key not in ("bos_token_id", "eos_token_id")} | {
    "head_dim": 24,  # This is not hidden_size / num_attention_heads.
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 3, 3],
        "mrope_interleaved": True,
    },
}
VISION2 = {
    "depth": 3,
    "embed_dim": 32,
    "hidden_size": 64,
    "mlp_ratio": 2,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
VISION25 = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 56,  # A window is two merged patches wide and high.
    "fullatt_block_indexes": [1],
}
VISION3 = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 2],
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
AUDIO25 = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "output_dim": 64,
    "num_mel_bins": 16,
}
SIZE14 = {"patch_size": 14, "size": {"shortest_edge": 56 * 56, "longest_edge": 252 * 252}}
PREPROCESSOR14 = PREPROCESSOR | SIZE14


def build_qwen2_vl() -> Any:
    config = Qwen2VLConfig(text_config=dict(TEXT), vision_config=dict(VISION2), **TOKENS)
    return spread(Qwen2VLForConditionalGeneration(config))


def build_qwen2_5_vl() -> Any:
    config = Qwen2_5_VLConfig(text_config=dict(TEXT), vision_config=dict(VISION25), **TOKENS)
    return spread(Qwen2_5_VLForConditionalGeneration(config))


def build_qwen3_vl() -> Any:
    """Builds a tiny model that ties the head to the embeddings, as the small models of this family do."""
    config = Qwen3VLConfig(text_config=dict(TEXT3), vision_config=dict(VISION3), tie_word_embeddings=True, **TOKENS)
    return spread(Qwen3VLForConditionalGeneration(config))


def build_qwen2_5_omni() -> Any:
    config = Qwen2_5OmniThinkerConfig(
        text_config=dict(TEXT),
        vision_config=dict(VISION25),
        audio_config=dict(AUDIO25),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        audio_token_index=AUDIO,
        audio_start_token_id=AUDIO_START,
        audio_end_token_id=AUDIO_END,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    return spread(Qwen2_5OmniThinkerForConditionalGeneration(config))


def sound_lengths(input_lengths: torch.Tensor) -> torch.Tensor:
    """Counts the rows of sounds as the reference's processor does. The environment of vLLM has a version of
    transformers without this function, and uses no row with sounds."""
    from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import _get_feat_extract_output_lengths

    return _get_feat_extract_output_lengths(input_lengths)


def token_types(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Marks the positions of pictures and videos, as the reference's processor does."""
    return {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}


SIGHT = {"image": Markup((START,), IMAGE, (END,)), "video": Markup((START,), VIDEO, (END,))}
FILES14 = {
    "preprocessor_config.json": PREPROCESSOR14,
    "video_preprocessor_config.json": VIDEO_PREPROCESSOR | SIZE14,
}
SIZES14 = ((160, 96), (96, 96), (70, 200), (252, 252))
VIDEOS14 = ((112, 56), (56, 84), (84, 84))


def seen(video_rules: VideoRules) -> Any:
    return partial(process, video_rules=video_rules)


QWEN2_VL = FamilyRow(
    "qwen2_vl",
    build_qwen2_vl,
    FILES14,
    SIGHT,
    seen(VideoRules()),
    features,
    inputs_of_ids=token_types,
    sizes=SIZES14,
    kind_to_sizes={"video": VIDEOS14},
)
QWEN2_5_VL = FamilyRow(
    "qwen2_5_vl",
    build_qwen2_5_vl,
    FILES14,
    SIGHT,
    seen(VideoRules(seconds_key="second_per_grid_ts", is_measured=True)),
    features,
    inputs_of_ids=token_types,
    sizes=SIZES14,
    kind_to_sizes={"video": VIDEOS14},
)
QWEN3_VL = FamilyRow(
    "qwen3_vl",
    build_qwen3_vl,
    {
        "preprocessor_config.json": PREPROCESSOR,
        "video_preprocessor_config.json": VIDEO_PREPROCESSOR
        | {"video_processor_type": "Qwen3VLVideoProcessor", "size": {"shortest_edge": 4096, "longest_edge": 2**18}},
    },
    SIGHT,
    seen(VideoRules("Qwen3VLVideoProcessor")),
    features,
    inputs_of_ids=token_types,
    kind_to_sizes={"video": MEDIA_SIZES["video"]},
)
QWEN2_5_OMNI = FamilyRow(
    "qwen2_5_omni",
    build_qwen2_5_omni,
    FILES14 | {"preprocessor_config.json": PREPROCESSOR14 | {"chunk_length": 5}},
    SIGHT | {"audio": Markup((AUDIO_START,), AUDIO, (AUDIO_END,)), FILM: SIGHT["video"]},
    seen(VideoRules(seconds_key="video_second_per_grid", sound_rules=SoundRules("max_length", sound_lengths))),
    features,
    sizes=SIZES14,
    kind_to_sizes=MEDIA_SIZES | {"video": VIDEOS14, FILM: VIDEOS14},
)
