"""Defines Qwen3-Omni's thinker as a row of the family table."""

from __future__ import annotations

from functools import partial
from typing import Any

from family_row import FILM, FamilyRow, Markup, spread
from family_videos import SoundRules, VideoRules, features, process
from modalities_files import AUDIO_CONFIG, PREPROCESSOR, TEXT_CONFIG, TOKENS, VIDEO_PREPROCESSOR, VISION_CONFIG
from transformers import Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

SIGHT = (TOKENS["vision_start_token_id"],), (TOKENS["vision_end_token_id"],)
SOUND_MARKS = (TOKENS["audio_start_token_id"],), (TOKENS["audio_end_token_id"],)
VIDEO = Markup(SIGHT[0], TOKENS["video_token_id"], SIGHT[1])
MEDIA_SIZES = {
    "video": ((96, 64), (64, 96), (64, 64)),
    FILM: ((64, 64), (96, 64), (64, 64)),
    # These are milliseconds. The reference's features of a sound shorter than a second depend on its neighbours.
    "audio": ((1000, 0), (1700, 0), (2330, 0)),
}


def build() -> Any:
    config = Qwen3OmniMoeThinkerConfig(
        text_config=dict(TEXT_CONFIG),
        vision_config=dict(VISION_CONFIG),
        audio_config=dict(AUDIO_CONFIG),
        position_id_per_seconds=13,
        **TOKENS,
    )
    return spread(Qwen3OmniMoeThinkerForConditionalGeneration(config))


QWEN3_OMNI = FamilyRow(
    name="qwen3_omni",
    build=build,
    files={"preprocessor_config.json": PREPROCESSOR, "video_preprocessor_config.json": VIDEO_PREPROCESSOR},
    markup={
        "image": Markup(SIGHT[0], TOKENS["image_token_id"], SIGHT[1]),
        "video": VIDEO,
        "audio": Markup(SOUND_MARKS[0], TOKENS["audio_token_id"], SOUND_MARKS[1]),
        FILM: VIDEO,
    },
    process=partial(
        process,
        video_rules=VideoRules(
            seconds_key="video_second_per_grid", sound_rules=SoundRules(True, _get_feat_extract_output_lengths)
        ),
    ),
    features=features,
    kind_to_sizes=MEDIA_SIZES,
)
