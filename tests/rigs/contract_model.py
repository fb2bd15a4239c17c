"""Makes tiny models that see, and one that hears as well, with which any engine can be compared with transformers:
prompts as a router makes them, features as an encoder makes them, and the reference's greedy answers.

The heads are wide enough for vLLM's attention on CPUs, which the models of the family table are not."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from chat_media import picture, png
from family_row import FILM, FamilyRow
from family_rows_qwen3_omni import QWEN3_OMNI
from family_rows_qwen_vl import QWEN2_5_VL, QWEN3_VL
from lossless_files import RATE, mkv, wav
from media_corpus import Clip, encode_video
from served_family import served_family
from sound_files import noise

from deploy.demo.build import demo_checkpoint
from fabric.contracts import MediaItem, PlaceholderRange, UnitKey
from modalities.family import EncoderInput, VideoHeader
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
    files: tuple[tuple[str, bytes], ...] = ()
    """Holds the media by their kind in the family table, for the reference's own processor."""


class Film(NamedTuple):
    """Is a part of a prompt: a short video, which has several units."""

    seed: int
    has_sound: bool = False
    """Says that the video has a sound track, which is an item of its own, whose rows stand among those of the video."""


class Recording(NamedTuple):
    """Is a part of a prompt: a sound. The reference's features of a sound shorter than a second depend on its
    neighbours."""

    seed: int
    seconds: float = 2.33


class ContractModel:
    """Holds a tiny checkpoint in float32, its encoder, and the reference."""

    def __init__(self, row: FamilyRow) -> None:
        torch.manual_seed(0)
        self.name, self.row = row.name, row
        self.directory = FOLDER / row.name
        self.directory.mkdir(parents=True)
        video = row.files["video_preprocessor_config.json"]
        large = row.files | {
            "video_preprocessor_config.json": video | {"size": video["size"] | {"longest_edge": 2**21}}
        }
        if row is QWEN3_OMNI:  # vLLM looks for the classes of the processors, which published checkpoints name.
            for name, key, kind in (
                ("preprocessor_config.json", "feature_extractor_type", "WhisperFeatureExtractor"),
                ("video_preprocessor_config.json", "video_processor_type", "Qwen2VLVideoProcessor"),
            ):
                large[name] = large[name] | {key: kind}
        wide = replace(row, build=functools.partial(_build_wide, row), files=large)
        served = served_family(wide, self.directory)
        self.reference = served.reference.eval()
        self.family = REGISTRY.load_family(self.directory)
        self.codec = TextCodec.load(self.directory)
        self.encoder = self.family.load_encoder(self.directory, "cpu", "float32", tuple(self.family.max_items))

    def prompt(
        self, *parts: str | int | Film | Recording | Sequence[int], size: tuple[int, int] = (160, 96)
    ) -> ContractPrompt:
        """Builds a prompt. `parts` holds texts, token ids, seeds of pictures, videos, or sounds."""
        ids: list[int] = []
        media: list[MediaItem] = []
        plans: list[Any] = []
        inputs: list[EncoderInput] = []
        files: list[tuple[str, bytes]] = []
        for part in parts:
            if isinstance(part, str):
                ids += self.codec.encode(part)
            elif isinstance(part, int | Film | Recording):
                modality, kind, data = _file(part, size)
                ids += self._framed(modality)
                files.append((kind, data))
                header = REGISTRY.modality(modality).probe(data, "part")
                anchored = [(header, -1)]
                if kind == FILM:
                    assert isinstance(header, VideoHeader)
                    assert header.sound is not None
                    anchored.append((header.sound, len(media)))
                for each, anchor in anchored:
                    index = len(media)
                    plan, item = plan_media(self.family, data, each, index, f"part.{index}", anchor=anchor)
                    media.append(item)
                    plans.append(plan)
                    inputs += self.family.preprocess(data, item)
            else:
                ids += part
        expanded = self.family.expand(ids, plans, self.codec.encode_inside)
        units = [unit for item in media for unit in item.unit_keys()]
        return ContractPrompt(
            tuple(expanded.token_ids),
            tuple(expanded.placeholders),
            tuple(media),
            tuple(inputs),
            tuple(units),
            tuple(files),
        )

    def _framed(self, modality: str) -> list[int]:
        sense = "audio" if modality == "audio" else "vision"
        marks = (f"<|{sense}_start|>", self.family.placeholder_text(modality), f"<|{sense}_end|>")
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
        media: dict[str, Any] = {}
        if self.row is QWEN3_OMNI:
            assert self.row.process is not None
            media = self.row.process(self.directory, of.files).inputs if of.files else {}
        elif of.media:
            media = self._seen(of, ids)
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

    def _seen(self, of: ContractPrompt, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the pictures and videos as arguments of the reference's `generate`."""
        media: dict[str, torch.Tensor] = {}
        for modality, key in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            items = [item for item in of.media if item.modality == modality]
            if items:
                units = [each for each in of.inputs if each.modality == modality]
                media[key] = torch.cat([torch.from_numpy(each.pixels) for each in units])
                media[f"{modality}_grid_thw"] = torch.tensor([item.grid for item in items])
                if modality == "video" and self.name == "qwen2_5_vl":
                    media["second_per_grid_ts"] = torch.tensor([item.row_seconds for item in items])
        placeholders = [self._framed(modality)[1] for modality in ("image", "video")]
        media["mm_token_type_ids"] = (ids == placeholders[0]).int() + 2 * (ids == placeholders[1]).int()
        return media


@functools.cache
def film(seed: int, has_sound: bool = False) -> bytes:
    """Returns a video of 24 frames in which a picture moves sideways."""
    ground = np.asarray(picture(seed).resize((252, 252)))
    frames = [np.ascontiguousarray(np.roll(ground, 9 * index, axis=1)) for index in range(24)]
    if has_sound:
        return mkv(np.stack(frames), 4, noise(6 * RATE, seed))
    return encode_video(frames, Clip(width=252, height=252, num_frames=24, fps=4))


def _file(part: int | Film | Recording, size: tuple[int, int]) -> tuple[str, str, bytes]:
    """Returns the modality of a medium, its kind in the family table, and its file."""
    if isinstance(part, Film):
        return "video", FILM if part.has_sound else "video", film(part.seed, part.has_sound)
    if isinstance(part, Recording):
        return "audio", "audio", wav(noise(round(part.seconds * RATE), part.seed))
    return "image", "image", png(picture(part, *size))


def _build_wide(row: FamilyRow) -> Any:
    """Returns the row's model with two query heads and one KV head."""
    config = row.build().config
    text = config.text_config
    text.num_attention_heads, text.num_key_value_heads = 2, 1
    if getattr(text, "head_dim", None) is not None:
        text.head_dim = HEAD_DIM
    text.rope_parameters = text.rope_parameters | {"mrope_section": [4, 6, 6]}
    tokens = json.loads((demo_checkpoint() / "config.json").read_text())["thinker_config"]
    for key in ("audio_token_id", "audio_start_token_id", "audio_end_token_id"):
        if "audio" in row.modalities:
            setattr(config, key, tokens[key])
    return type(row.build())(config)


@functools.cache
def contract_model(name: str) -> ContractModel:
    """Returns the model `qwen2_5_vl`, `qwen3_vl` or `qwen3_omni`."""
    return ContractModel({row.name: row for row in (QWEN2_5_VL, QWEN3_VL, QWEN3_OMNI)}[name])


def remove_contract_models() -> None:
    """Removes the checkpoints at the end of the run, because all tests share them."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    contract_model.cache_clear()
