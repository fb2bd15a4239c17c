"""A short synthetic forward at start: what features look like, and what a forward costs until real ones say better.

Knows nothing of requests. The pictures it makes pass the family's own plan and preprocessing, so nothing is assumed
about patches.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import torch
from PIL import Image

from encoder_pool.forward import dtype_name
from encoder_pool.planning.cost import ForwardCost
from encoder_pool.planning.features import FeatureSpec
from fabric.errors import ConfigError
from fabric.ids import MmHash
from fabric.messages import MediaItem
from modalities.family import EncoderInput, EncoderModel, Family, ImageHeader, MediaHeader

SIZES = (64, 448)
"""Edges in pixels: one small and one ordinary picture, far enough apart for slope and overhead."""
NUM_RUNS = 2


def calibrate(family: Family, model: EncoderModel, modality: str, cost: ForwardCost, delay_s: float) -> FeatureSpec:
    """Runs `model` on two sizes and puts what they took into `cost`. Blocks for a few forwards.

    `delay_s` is the injected pause, which each real forward will take too. Raises ConfigError if the model's features
    are not of the family's shape, or nothing can be made to calibrate `modality` with.
    """
    if modality not in MODALITY_TO_SAMPLE:
        raise ConfigError(f"no sample to calibrate the modality {modality!r} with")
    spec: FeatureSpec | None = None
    for size in SIZES:
        header, data = MODALITY_TO_SAMPLE[modality](size)
        plan = family.plan(header)
        item = MediaItem(0, modality, MmHash("calibration"), plan.grid, plan.unit_tokens, plan.cost, "calibration")
        inputs = family.preprocess(data, item)
        feature = _forward(model, inputs)[0][0]  # the first run of a size pays for compiling and allocating
        spec = FeatureSpec(
            family.shape.num_levels, family.shape.hidden_size, dtype_name(feature), feature.element_size()
        )
        if tuple(feature.shape) != spec.shape(plan.unit_tokens[0]):
            raise ConfigError(f"features are {tuple(feature.shape)}, the family says {spec.shape(plan.unit_tokens[0])}")
        for _ in range(NUM_RUNS):
            cost.observe(plan.cost, _forward(model, inputs)[1] + delay_s)
    assert spec is not None
    return spec


def _forward(model: EncoderModel, inputs: list[EncoderInput]) -> tuple[list[torch.Tensor], float]:
    started_s = time.perf_counter()
    with torch.inference_mode():
        features = model.encode(inputs)
        features[0].cpu()  # waits for the device
    return features, time.perf_counter() - started_s


def _sample_image(edge: int) -> tuple[MediaHeader, bytes]:
    buffer = io.BytesIO()
    Image.new("RGB", (edge, edge), (127, 127, 127)).save(buffer, "PNG")
    return ImageHeader("PNG", edge, edge, "RGB"), buffer.getvalue()


MODALITY_TO_SAMPLE: dict[str, Callable[[int], tuple[MediaHeader, bytes]]] = {"image": _sample_image}
