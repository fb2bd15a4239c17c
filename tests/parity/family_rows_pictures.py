"""Families whose pictures become square tiles, as rows of the family table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from family_row import FamilyRow, Markup, Processed, pictures, spread
from family_rows_text import TINY
from transformers import (
    CLIPVisionConfig,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

IMAGE, START, END = 100, 103, 104
PATCH, TILE = 7, 28
CANVASES = [[height * TILE, width * TILE] for height in (1, 2, 3) for width in (1, 2, 3)]
MAX_TILES = 4
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": TILE,
    "patch_size": PATCH,
}


def build_llava() -> Any:
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION), text_config=LlamaConfig(**TINY), image_token_index=IMAGE
    )
    return spread(LlavaForConditionalGeneration(config))


def process_llava(directory: Path, media: Sequence[tuple[str, bytes]]) -> Processed:
    made = CLIPImageProcessorPil.from_pretrained(directory)(pictures(media), return_tensors="pt")
    height, width = made["pixel_values"].shape[-2:]
    # LlavaProcessor: `default` drops the class token again
    num_tokens = (height // PATCH) * (width // PATCH) + 1 - 1
    return Processed(dict(made), [num_tokens] * len(media), list(made["pixel_values"].numpy()))


def features_llava(model: Any, processed: Processed) -> list[torch.Tensor]:
    made = model.get_image_features(processed.inputs["pixel_values"], return_dict=True)
    return [rows[None] for rows in made.pooler_output]


LLAVA = FamilyRow(
    name="llava",
    build=build_llava,
    files={
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": TILE},
            "crop_size": {"height": TILE, "width": TILE},
        }
    },
    markup={"image": Markup((), IMAGE, (5,))},
    process=process_llava,
    features=features_llava,
)


def build_internvl() -> Any:
    config = InternVLConfig(
        vision_config=InternVLVisionConfig(**VISION),
        text_config=Qwen2Config(**TINY),
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    return spread(InternVLForConditionalGeneration(config))


def process_internvl(directory: Path, media: Sequence[tuple[str, bytes]]) -> Processed:
    processor = GotOcr2ImageProcessorPil.from_pretrained(directory)
    made = processor(pictures(media), crop_to_patches=True, return_tensors="pt")
    num_tiles = made["num_patches"].tolist()
    num_tokens = [tiles * (TILE // PATCH // 2) ** 2 for tiles in num_tiles]
    tiles = [part.numpy() for part in made["pixel_values"].split(num_tiles)]
    return Processed({"pixel_values": made["pixel_values"]}, num_tokens, tiles)


def features_internvl(model: Any, processed: Processed) -> list[torch.Tensor]:
    made = model.get_image_features(processed.inputs["pixel_values"], return_dict=True)
    num_tiles = [len(tiles) for tiles in processed.pixels]
    return [rows.flatten(0, 1)[None] for rows in made.pooler_output.split(num_tiles)]


INTERNVL = FamilyRow(
    name="internvl",
    build=build_internvl,
    files={
        "preprocessor_config.json": {
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "size": {"height": TILE, "width": TILE},
            "crop_to_patches": False,
            "max_patches": 7,
            "image_mean": [0.5, 0.4, 0.3],
            "image_std": [0.25, 0.2, 0.3],
        },
        "tokenizer_config.json": {
            "added_tokens_decoder": {str(START): {"content": "<img>"}, str(END): {"content": "</img>"}}
        },
    },
    markup={"image": Markup((), IMAGE, (5,))},
    process=process_internvl,
    features=features_internvl,
)


def build_onevision() -> Any:
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**VISION, vision_use_head=False),
        text_config=Qwen2Config(**TINY),
        image_token_index=IMAGE,
        video_token_index=IMAGE + 1,
        image_grid_pinpoints=CANVASES,
        vision_aspect_ratio=f"anyres_max_{MAX_TILES}",
    )
    return spread(LlavaOnevisionForConditionalGeneration(config))


def process_onevision(directory: Path, media: Sequence[tuple[str, bytes]]) -> Processed:
    processor = LlavaOnevisionImageProcessorPil.from_pretrained(directory)
    made = processor(pictures(media), return_tensors="pt")
    whole = SimpleNamespace(
        image_processor=processor, num_image_tokens=(TILE // PATCH) ** 2, vision_aspect_ratio=f"anyres_max_{MAX_TILES}"
    )
    whole._get_unpadded_features = partial(LlavaOnevisionProcessor._get_unpadded_features, whole)
    sizes = made["image_sizes"].tolist()
    num_tokens = [LlavaOnevisionProcessor._get_number_of_features(whole, *size, TILE, TILE) for size in sizes]
    # Padded to the picture with most tiles; what a picture alone has is what counts.
    alone = [processor([picture], return_tensors="np")["pixel_values"][0] for picture in pictures(media)]
    return Processed(dict(made), num_tokens, alone)


def features_onevision(model: Any, processed: Processed) -> list[torch.Tensor]:
    inputs = processed.inputs
    made = model.get_image_features(inputs["pixel_values"], image_sizes=inputs["image_sizes"], return_dict=True)
    return [rows[None] for rows in made.pooler_output]


LLAVA_ONEVISION = FamilyRow(
    name="llava_onevision",
    build=build_onevision,
    files={
        "preprocessor_config.json": {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": TILE, "width": TILE},
            "image_grid_pinpoints": CANVASES,
        }
    },
    markup={"image": Markup((), IMAGE, (5,))},
    process=process_onevision,
    features=features_onevision,
    # Wide, square and scaled down, narrow: newlines in each, padding above and below, or on the sides.
    sizes=((200, 80), (150, 140), (70, 190)),
)
