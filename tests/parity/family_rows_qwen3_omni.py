"""Qwen3-Omni's thinker as a row of the family table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from family_row import FamilyRow, Markup, Processed, pictures, spread
from modalities_files import AUDIO_CONFIG, PREPROCESSOR, TEXT_CONFIG, TOKENS, VISION_CONFIG
from transformers import Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


def build() -> Any:
    config = Qwen3OmniMoeThinkerConfig(
        text_config=dict(TEXT_CONFIG), vision_config=dict(VISION_CONFIG), audio_config=dict(AUDIO_CONFIG), **TOKENS
    )
    return spread(Qwen3OmniMoeThinkerForConditionalGeneration(config))


def process(directory: Path, media: Sequence[tuple[str, bytes]]) -> Processed:
    processor = Qwen2VLImageProcessorPil.from_pretrained(directory)
    made = processor(pictures(media), return_tensors="pt")
    num_patches = made["image_grid_thw"].prod(-1)
    pixels = [part.numpy() for part in made["pixel_values"].split(num_patches.tolist())]
    return Processed(dict(made), (num_patches // processor.merge_size**2).tolist(), pixels)


def features(model: Any, processed: Processed) -> list[torch.Tensor]:
    inputs = processed.inputs
    made = model.get_image_features(inputs["pixel_values"], image_grid_thw=inputs["image_grid_thw"], return_dict=True)
    per_medium = zip(made.pooler_output, *made.deepstack_features, strict=True)
    return [torch.stack(levels) for levels in per_medium]


QWEN3_OMNI = FamilyRow(
    name="qwen3_omni",
    build=build,
    files={"preprocessor_config.json": PREPROCESSOR},
    markup={
        "image": Markup((TOKENS["vision_start_token_id"],), TOKENS["image_token_id"], (TOKENS["vision_end_token_id"],))
    },
    process=process,
    features=features,
)
