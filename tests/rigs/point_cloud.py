"""Adds a modality and a model that Weft does not contain: clouds of points, and a family that takes them.

It consists of what an external author writes: a plugin, a family, and three registrations (`register`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deploy.demo.build import demo_checkpoint
from encoder_pool.calibration import MODALITY_TO_SAMPLES, CalibrationSample
from fabric.contracts import InvalidMedia, MediaItem, PlaceholderRange
from modalities.families.qwen3_omni import Qwen3OmniFamily
from modalities.family import (
    DEFAULT_OPTIONS,
    EncoderInput,
    ExpandedPrompt,
    ItemPlan,
    MediaOptions,
    Positions,
    Tokenize,
    expand_placeholders,
)
from modalities.media import MediaLimits
from modalities.registry import Registry

POINTS = "points"
ARCHITECTURE = "PointCloudForConditionalGeneration"
POINTS_PER_ROW = 8
MAX_POINTS = 4096


@dataclass(frozen=True, slots=True)
class PointHeader:
    num_points: int


class PointPlugin:
    """Reads points from `point_cloud` parts: `{"type": "point_cloud", "points": [[x, y, z], ...]}`."""

    modality = POINTS
    part_types = ("point_cloud",)
    needs_process = False

    def parse(self, part: Mapping[str, object], param: str, limits: MediaLimits) -> bytes:
        try:
            points = np.asarray(part.get("points"), dtype=np.float32)
        except (TypeError, ValueError):
            points = np.zeros(0, np.float32)
        if points.ndim != 2 or points.shape[1] != 3:
            raise InvalidMedia(f"{param}: `points` must be a list of [x, y, z]", param=param)
        return points.tobytes()

    def probe(self, data: bytes, param: str) -> Any:
        return PointHeader(len(data) // 12)

    def validate(self, header: Any, limits: MediaLimits, param: str) -> None:
        if not 1 <= header.num_points <= MAX_POINTS:
            raise InvalidMedia(f"{param}: a cloud has 1 to {MAX_POINTS} points", param=param)


class PointEncoder:
    """Computes each row of features as a fixed projection of the mean of eight points."""

    def __init__(self, num_levels: int, hidden_size: int, device: str, dtype: str) -> None:
        weights = torch.randn(3, hidden_size, generator=torch.Generator().manual_seed(5))
        self._weights = weights.to(device, getattr(torch, dtype))
        self._num_levels = num_levels

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        return [self._rows(torch.from_numpy(each.pixels)) for each in inputs]

    def _rows(self, points: torch.Tensor) -> torch.Tensor:
        means = torch.stack([piece.mean(0) for piece in points.split(POINTS_PER_ROW)]).to(self._weights)
        return (means @ self._weights).expand(self._num_levels, -1, -1).contiguous()


class PointFamily:
    """Combines the demo model's language model with points in place of pictures."""

    name = "point_cloud"

    def __init__(self, model_dir: Path) -> None:
        self._text = Qwen3OmniFamily(demo_checkpoint())
        self.model_id = f"points-{self._text.model_id}"
        self.shape = self._text.shape
        self.max_items = {POINTS: 2}

    def plan(self, header: Any, options: MediaOptions = DEFAULT_OPTIONS) -> ItemPlan:
        num_rows = math.ceil(header.num_points / POINTS_PER_ROW)
        return ItemPlan(POINTS, (1, 1, num_rows), (num_rows,), header.num_points, (header.num_points,))

    def placeholder_text(self, modality: str) -> str:
        return self._text.placeholder_text("image")

    def expand(
        self,
        token_ids: Sequence[int],
        plans: Sequence[ItemPlan],
        tokenize: Tokenize | None = None,
    ) -> ExpandedPrompt:
        return expand_placeholders(token_ids, {POINTS: self._text.config.modality_to_token["image"]}, plans)

    def positions(
        self, token_ids: Sequence[int], placeholders: Sequence[PlaceholderRange], media: Sequence[MediaItem]
    ) -> Positions:
        return self._text.positions(token_ids, (), ())

    def options(self, modality: str) -> str:
        return "{}"

    def preprocess(self, data: bytes, item: MediaItem) -> list[EncoderInput]:
        return [EncoderInput(POINTS, np.frombuffer(data, np.float32).reshape(-1, 3).copy(), item.grid)]

    def load_encoder(self, model_dir: Path, device: str, dtype: str, modalities: Sequence[str]) -> PointEncoder:
        return PointEncoder(self.shape.num_levels, self.shape.hidden_size, device, dtype)

    def load_language_model(self, model_dir: Path, device: str, dtype: str, attention_name: str) -> Any:
        return self._text.load_language_model(demo_checkpoint(), device, dtype, attention_name)


def register(registry: Registry) -> None:
    """Registers the plugin, the family and its samples. Nothing more is necessary."""
    registry.register_modality(PointPlugin())
    registry.register_family((ARCHITECTURE,), PointFamily)
    MODALITY_TO_SAMPLES[POINTS] = (_sample, (64, 1024))


def _sample(num_points: int) -> CalibrationSample:
    return CalibrationSample(PointHeader(num_points), np.zeros((num_points, 3), np.float32).tobytes())
