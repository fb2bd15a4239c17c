"""Defines the families that cut pictures into square tiles, as rows of the family table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from family_row import FamilyRow, Markup, Processed, pictures, spread
from family_rows_text import TINY
from reference_videos import decoded, normalised, processor_class
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
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

IMAGE, VIDEO, START, END = 100, 101, 103, 104
PATCH, TILE = 7, 28
CANVASES = [[height * TILE, width * TILE] for height in (1, 2, 3) for width in (1, 2, 3)]
MAX_TILES = 4
FRAMES = {"video": ((TILE, TILE),) * 3}
"""These frames need no scaling. All videos have the same number of frames, because the reference requires it."""
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
    # In LlavaProcessor, the strategy `default` drops the class token again.
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
    """Does what InternVLProcessor does: it puts tiles of pictures and frames of videos into one tensor, in the order of
    the prompt."""
    processor = GotOcr2ImageProcessorPil.from_pretrained(directory)
    tiles = []
    for kind, data in media:
        if kind == "video":
            frames, fps = decoded(data)
            metadata = VideoMetadata(total_num_frames=len(frames), fps=fps)
            shift = SimpleNamespace(num_frames=None, initial_shift=True)
            indices = processor_class("InternVLVideoProcessor").sample_frames(shift, metadata, fps=2.0).tolist()
            tiles.append(normalised(frames[indices], processor.image_mean, processor.image_std))
        else:
            made = processor(pictures([(kind, data)]), crop_to_patches=True, return_tensors="pt")
            tiles.append(made["pixel_values"])
    num_tokens = [len(part) * (TILE // PATCH // 2) ** 2 for part in tiles]
    return Processed({"pixel_values": torch.cat(tiles)}, num_tokens, [part.numpy() for part in tiles])


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
            "added_tokens_decoder": {
                str(START): {"content": "<img>"},
                str(END): {"content": "</img>"},
                str(VIDEO): {"content": "<video>"},
            }
        },
    },
    markup={"image": Markup((), IMAGE, (5,)), "video": Markup((), VIDEO, (5,))},
    process=process_internvl,
    features=features_internvl,
    kind_to_sizes=FRAMES,
)


def build_onevision() -> Any:
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**VISION, vision_use_head=False),
        text_config=Qwen2Config(**TINY),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=CANVASES,
        vision_aspect_ratio=f"anyres_max_{MAX_TILES}",
    )
    return spread(LlavaOnevisionForConditionalGeneration(config))


def process_onevision(directory: Path, media: Sequence[tuple[str, bytes]]) -> Processed:
    """Does what LlavaOnevisionProcessor does."""
    processor = LlavaOnevisionImageProcessorPil.from_pretrained(directory)
    inputs: dict[str, torch.Tensor] = {}
    kind_to_made: dict[str, list[tuple[int, np.ndarray]]] = {}
    if seen := pictures(media):
        made = processor(seen, return_tensors="pt")
        inputs |= dict(made)
        whole = SimpleNamespace(
            image_processor=processor,
            num_image_tokens=(TILE // PATCH) ** 2,
            vision_aspect_ratio=f"anyres_max_{MAX_TILES}",
        )
        whole._get_unpadded_features = partial(LlavaOnevisionProcessor._get_unpadded_features, whole)
        sizes = made["image_sizes"].tolist()
        counts = [LlavaOnevisionProcessor._get_number_of_features(whole, *size, TILE, TILE) for size in sizes]
        # The processor pads all pictures to the largest number of tiles. Only the tiles that a picture has alone count.
        alone = [processor([picture], return_tensors="np")["pixel_values"][0] for picture in seen]
        kind_to_made["image"] = list(zip(counts, alone, strict=True))
    if files := [data for kind, data in media if kind == "video"]:
        videos = torch.stack([frames_onevision(data) for data in files])
        inputs["pixel_values_videos"] = videos
        whole = SimpleNamespace(num_image_tokens=(TILE // PATCH) ** 2, video_token="v")
        texts = [
            LlavaOnevisionProcessor.replace_video_token(whole, {"pixel_values_videos": videos}, index)
            for index in range(len(videos))
        ]
        kind_to_made["video"] = [(len(text), video.numpy()) for text, video in zip(texts, videos, strict=True)]
    waiting = {kind: iter(made) for kind, made in kind_to_made.items()}
    in_order = [next(waiting[kind]) for kind, _ in media]
    order = tuple(kind for kind, _ in media)
    return Processed(inputs, [num for num, _ in in_order], [values for _, values in in_order], modalities=order)


def frames_onevision(data: bytes) -> torch.Tensor:
    frames, fps = decoded(data)
    metadata = VideoMetadata(total_num_frames=len(frames), fps=fps)
    return normalised(frames[default_sample_indices_fn(metadata, fps=2.0)])


def features_onevision(model: Any, processed: Processed) -> list[torch.Tensor]:
    inputs, found = processed.inputs, {}
    if "pixel_values" in inputs:
        made = model.get_image_features(inputs["pixel_values"], image_sizes=inputs["image_sizes"], return_dict=True)
        found["image"] = iter(made.pooler_output)
    if "pixel_values_videos" in inputs:
        found["video"] = iter(model.get_video_features(inputs["pixel_values_videos"], return_dict=True).pooler_output)
    return [next(found[kind])[None] for kind in processed.modalities]


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
    markup={"image": Markup((), IMAGE, (5,)), "video": Markup((), VIDEO, (5,))},
    process=process_onevision,
    features=features_onevision,
    kind_to_sizes=FRAMES,
    # The sizes are wide, square and scaled down, and narrow. Each has newlines, and padding above and below or on the
    # sides.
    sizes=((200, 80), (150, 140), (70, 190)),
)
