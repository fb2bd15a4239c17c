"""Builds the encoders of the latency tables in the articles in docs/references.md, at the sizes of the real
architectures, with random weights, for speed only. Each encodes a number of items at once and returns their rows,
projected to a language model's width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from modalities.families.qwen_vl.tower_tables import tower_tables
from modalities.families.qwen_vl.towers import fused_tower
from modalities.packed_attention import use_packed_attention

LM_WIDTH = 4096
HEAD_DIM = 64


class Place(NamedTuple):
    device: str
    dtype: torch.dtype
    scale: float
    """Scales depth and width; 1 is the real size."""


Run = Callable[[int], torch.Tensor]
"""Maps a number of items to rows `(num_items, num_tokens, width)`."""


def siglip_l(edge: int) -> Callable[[Place], Run]:
    """Builds SigLIP-L/14 for square pictures."""

    def build(place: Place) -> Run:
        from transformers import SiglipVisionConfig, SiglipVisionModel

        config = SiglipVisionConfig(image_size=edge, patch_size=14, vision_use_head=False, **_sizes(place, 24, 1024))
        return _pictures(SiglipVisionModel(config), config.hidden_size, edge, place)

    return build


def clip_l(edge: int) -> Callable[[Place], Run]:
    """Builds CLIP's ViT-L/14 (from the article on multimodal routing in Dynamo)."""

    def build(place: Place) -> Run:
        from transformers import CLIPVisionConfig, CLIPVisionModel

        config = CLIPVisionConfig(image_size=edge, patch_size=14, **_sizes(place, 24, 1024))
        return _pictures(CLIPVisionModel(config), config.hidden_size, edge, place, num_first=1)

    return build


def internvit(num_frames: int, num_pooled: int) -> Callable[[Place], Run]:
    """Builds InternViT-300M for frames of 256 x 256 at patches of 16; it averages over `num_pooled` consecutive
    frames."""

    def build(place: Place) -> Run:
        from transformers import InternVLVisionConfig, InternVLVisionModel

        sizes = _sizes(place, 24, 1024)
        config = InternVLVisionConfig(image_size=[256, 256], patch_size=[16, 16], **sizes)
        frames = _pictures(InternVLVisionModel(config), config.hidden_size, 256, place, num_first=1)

        def run(num_items: int) -> torch.Tensor:
            rows = frames(num_items * num_frames)
            groups = rows.unflatten(0, (num_items, num_frames)).split(num_pooled, dim=1)
            return torch.cat([group.mean(dim=1) for group in groups], dim=1)

        return run

    return build


def qwen2_5_vl_tower(place: Place) -> Any:
    """Builds Qwen2.5-VL's vision tower of transformers: with windows, four full layers, and rows of 2 x 2 patches."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    depth = max(1, round(32 * place.scale))
    num_heads = max(1, round(16 * place.scale))
    config = Qwen2_5_VLVisionConfig(
        depth=depth,
        hidden_size=80 * num_heads,
        num_heads=num_heads,
        intermediate_size=max(64, round(3420 * place.scale)),
        out_hidden_size=max(64, round(3584 * place.scale)),
        fullatt_block_indexes=list(range(7, depth, 8)),
    )
    return _placed(Qwen2_5_VisionTransformerPretrainedModel(config), place)


def qwen2_5_vl(edge: int) -> Callable[[Place], Run]:
    """Builds Qwen2.5-VL's vision tower as Weft runs it: packed, with Weft's own blocks."""

    def build(place: Place) -> Run:
        tower = qwen2_5_vl_tower(place)
        use_packed_attention(tower)
        tower = fused_tower(tower)
        config = tower.config
        side = edge // config.patch_size // 2 * 2
        width = config.in_channels * config.temporal_patch_size * config.patch_size**2

        def run(num_items: int) -> torch.Tensor:
            pixels = torch.randn(num_items * side * side, width, device=place.device, dtype=place.dtype)
            grids = [(1, side, side)] * num_items
            tables = tower_tables(tower, grids)
            rows: torch.Tensor = tower(pixels, grid_thw=torch.tensor(grids), **tables).pooler_output
            per_item: torch.Tensor = rows.unflatten(0, (num_items, -1))
            return per_item

        return run

    return build


def whisper(size: str, num_chunks: int, num_pooled: int) -> Callable[[Place], Run]:
    """Builds Whisper's encoder (`large` or `small`) for chunks of 30 s; it averages over `num_pooled` consecutive
    rows."""

    def build(place: Place) -> Run:
        from transformers import WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        num_layers, width, num_mels = {"large": (32, 1280, 128), "small": (12, 768, 80)}[size]
        sizes = _sizes(place, num_layers, width)
        config = WhisperConfig(
            d_model=sizes["hidden_size"],
            encoder_layers=sizes["num_hidden_layers"],
            encoder_attention_heads=sizes["num_attention_heads"],
            encoder_ffn_dim=sizes["intermediate_size"],
            num_mel_bins=num_mels,
        )
        tower = _placed(WhisperEncoder(config), place)
        project = _placed(nn.Linear(config.d_model, _lm_width(place)), place)

        def run(num_items: int) -> torch.Tensor:
            mel = torch.randn(num_items * num_chunks, num_mels, 3000, device=place.device, dtype=place.dtype)
            rows = tower(mel).last_hidden_state
            rows = rows.unflatten(1, (-1, num_pooled)).mean(dim=2)
            projected: torch.Tensor = project(rows.reshape(num_items, -1, rows.shape[-1]))
            return projected

        return run

    return build


def _pictures(tower: nn.Module, width: int, edge: int, place: Place, num_first: int = 0) -> Run:
    """Returns the run function of a tower that outputs `num_first` rows before those of the patches."""
    tower = _placed(tower, place)
    project = _placed(nn.Linear(width, _lm_width(place)), place)

    def run(num_items: int) -> torch.Tensor:
        pixels = torch.randn(num_items, 3, edge, edge, device=place.device, dtype=place.dtype)
        projected: torch.Tensor = project(tower(pixel_values=pixels).last_hidden_state[:, num_first:])
        return projected

    return run


def _sizes(place: Place, num_layers: int, width: int) -> dict[str, Any]:
    num_heads = max(1, round(width * place.scale / HEAD_DIM))
    return {
        "num_hidden_layers": max(1, round(num_layers * place.scale)),
        "hidden_size": num_heads * HEAD_DIM,
        "num_attention_heads": num_heads,
        "intermediate_size": 4 * num_heads * HEAD_DIM,
    }


def _lm_width(place: Place) -> int:
    return max(HEAD_DIM, round(LM_WIDTH * place.scale))


def _placed(module: nn.Module, place: Place) -> nn.Module:
    return module.to(place.device, place.dtype).eval().requires_grad_(False)
