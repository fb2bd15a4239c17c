"""Makes tiny vision-language models with which any engine can be compared with transformers: prompts as a router makes
them, features as an encoder makes them, and the reference's greedy answers.

The heads are wide enough for vLLM's attention on CPUs, which the models of the family table are not."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from chat_media import picture, png
from family_row import FamilyRow
from family_rows_qwen_vl import QWEN2_5_VL, QWEN3_VL
from media_corpus import Clip, encode_video
from served_family import served_family

from fabric.contracts import MediaItem, PlaceholderRange, UnitKey
from modalities.family import EncoderInput
from modalities.media import plan_media
from modalities.registry import REGISTRY
from modalities.text import TextCodec

HEAD_DIM = 32
FOLDER = Path(tempfile.gettempdir()) / "contract-models"


@dataclass(frozen=True, eq=False)
class ContractPrompt:
    """Holds a prompt as a worker receives it, with the encoder inputs of its media: one per unit."""

    token_ids: tuple[int, ...]
    placeholders: tuple[PlaceholderRange, ...]
    media: tuple[MediaItem, ...]
    inputs: tuple[EncoderInput, ...]
    units: tuple[UnitKey, ...]


class Film(NamedTuple):
    """Is a part of a prompt: a short video, which has several units."""

    seed: int


class ContractModel:
    """Holds a tiny checkpoint in float32, its encoder, and the reference."""

    def __init__(self, row: FamilyRow) -> None:
        torch.manual_seed(0)
        self.name = row.name
        self.directory = FOLDER / row.name
        self.directory.mkdir(parents=True)
        video = row.files["video_preprocessor_config.json"]
        large = row.files | {
            "video_preprocessor_config.json": video | {"size": video["size"] | {"longest_edge": 2**21}}
        }
        wide = replace(row, build=functools.partial(_build_wide, row), files=large)
        served = served_family(wide, self.directory)
        self.reference = served.reference.eval()
        self.family = REGISTRY.load_family(self.directory)
        self.codec = TextCodec.load(self.directory)
        self.encoder = self.family.load_encoder(self.directory, "cpu", "float32", ("image", "video"))

    def prompt(self, *parts: str | int | Film | Sequence[int], size: tuple[int, int] = (160, 96)) -> ContractPrompt:
        """Builds a prompt. `parts` holds texts, token ids, seeds of pictures, or videos."""
        ids: list[int] = []
        media: list[MediaItem] = []
        plans: list[Any] = []
        inputs: list[EncoderInput] = []
        for part in parts:
            if isinstance(part, str):
                ids += self.codec.encode(part)
            elif isinstance(part, int | Film):
                modality = "video" if isinstance(part, Film) else "image"
                ids += self._framed(modality)
                data = film(part.seed) if isinstance(part, Film) else png(picture(part, *size))
                header = REGISTRY.modality(modality).probe(data, "part")
                media.append(plan_media(self.family, data, header, len(media), f"part.{len(media)}").item)
                plans.append(self.family.plan(header))
                inputs += self.family.preprocess(data, media[-1])
            else:
                ids += part
        expanded = self.family.expand(ids, plans, self.codec.encode_inside)
        units = [unit for item in media for unit in item.unit_keys()]
        return ContractPrompt(
            tuple(expanded.token_ids), tuple(expanded.placeholders), tuple(media), tuple(inputs), tuple(units)
        )

    def _framed(self, modality: str) -> list[int]:
        marks = ("<|vision_start|>", self.family.placeholder_text(modality), "<|vision_end|>")
        return [self.codec.token_id(mark) for mark in marks]

    def text(self, num_tokens: int, first: int = 5) -> tuple[int, ...]:
        """Returns this many ids of text; those of another `first` begin differently."""
        return tuple(first + index % 50 for index in range(num_tokens))

    @functools.cache  # noqa: B019 - the model lives as long as the run
    def feature(self, of: ContractPrompt, index: int) -> torch.Tensor:
        with torch.inference_mode():
            return self.encoder.encode([of.inputs[index]])[0]

    @functools.cache  # noqa: B019
    def answer(self, of: ContractPrompt, num_tokens: int) -> list[int]:
        """Returns the reference's greedy tokens."""
        return self.generate(of, num_tokens).sequences[0, len(of.token_ids) :].tolist()

    def generate(self, of: ContractPrompt, num_tokens: int) -> Any:
        ids = torch.tensor([of.token_ids])
        media: dict[str, torch.Tensor] = {}
        for modality, key in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            items = [item for item in of.media if item.modality == modality]
            if items:
                units = [each for each in of.inputs if each.modality == modality]
                media[key] = torch.cat([torch.from_numpy(each.pixels) for each in units])
                media[f"{modality}_grid_thw"] = torch.tensor([item.grid for item in items])
                if modality == "video" and self.name == "qwen2_5_vl":
                    media["second_per_grid_ts"] = torch.tensor([item.row_seconds for item in items])
        if of.media:
            placeholders = [self._framed(modality)[1] for modality in ("image", "video")]
            media["mm_token_type_ids"] = (ids == placeholders[0]).int() + 2 * (ids == placeholders[1]).int()
        with torch.inference_mode():
            return self.reference.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_tokens,
                output_logits=True,
                return_dict_in_generate=True,
                **media,
            )


@functools.cache
def film(seed: int) -> bytes:
    """Returns a video of 24 frames in which a picture moves sideways."""
    ground = np.asarray(picture(seed).resize((252, 252)))
    frames = [np.ascontiguousarray(np.roll(ground, 9 * index, axis=1)) for index in range(24)]
    return encode_video(frames, Clip(width=252, height=252, num_frames=24, fps=4))


def _build_wide(row: FamilyRow) -> Any:
    """Returns the row's model with two query heads and one KV head."""
    config = row.build().config
    text = config.text_config
    text.num_attention_heads, text.num_key_value_heads = 2, 1
    if getattr(text, "head_dim", None) is not None:
        text.head_dim = HEAD_DIM
    text.rope_parameters = text.rope_parameters | {"mrope_section": [4, 6, 6]}
    return type(row.build())(config)


@functools.cache
def contract_model(name: str) -> ContractModel:
    """Returns the model `qwen2_5_vl` or `qwen3_vl`."""
    return ContractModel({row.name: row for row in (QWEN2_5_VL, QWEN3_VL)}[name])


def remove_contract_models() -> None:
    """Removes the checkpoints at the end of the run, because all tests share them."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    contract_model.cache_clear()
