"""A short synthetic forward at start: what features look like, and what a forward costs until real ones say better.

Two sizes of a modality tell a forward's overhead from the price of a patch. A model with fixed tiles makes one size of
everything, so there a forward over two units stands for the second size. Knows nothing of requests. The media it uses
pass the family's own plan and preprocessing, so nothing is assumed about patches.
"""

from __future__ import annotations

import time

import torch

from encoder_pool.forward import dtype_name
from encoder_pool.planning.cost import ForwardCosts
from encoder_pool.planning.features import FeatureSpec
from encoder_pool.samples import MODALITY_TO_SAMPLES, sample_item
from fabric.errors import ConfigError
from modalities.family import EncoderInput, EncoderModel, Family

NUM_RUNS = 2


def calibrate(family: Family, model: EncoderModel, modality: str, costs: ForwardCosts, delay_s: float) -> FeatureSpec:
    """Runs `model` on two sizes of one modality and puts what they took into `costs`. Blocks for a few forwards.

    `delay_s` is the injected pause, which each real forward will take too. Raises ConfigError if the model's features
    are not of the family's shape or not finite, or nothing can be made to calibrate `modality` with.
    """
    if modality not in MODALITY_TO_SAMPLES:
        raise ConfigError(f"no sample to calibrate the modality {modality!r} with")
    make, sizes = MODALITY_TO_SAMPLES[modality]
    spec: FeatureSpec | None = None
    for size in sizes:
        sample = make(size)
        item = sample_item(family, sample, modality)
        inputs = family.preprocess(sample.data, item)
        feature = _forward(model, inputs)[0][0]  # the first run of a size pays for compiling and allocating
        spec = FeatureSpec(
            family.shape.num_levels, family.shape.hidden_size, dtype_name(feature), feature.element_size()
        )
        expected = spec.shape(item.unit_tokens[0], item.num_levels)
        if tuple(feature.shape) != expected:
            raise ConfigError(f"{modality} features are {tuple(feature.shape)}, the family says {expected}")
        if not bool(feature.isfinite().all()):
            raise ConfigError(f"{modality} features of a sample are not finite: the encoder's weights can't be used")
        for _ in range(NUM_RUNS):
            costs.observe(modality, item.cost, _forward(model, inputs)[1] + delay_s)
    if not costs.has_spread(modality):
        _forward(model, [*inputs, *inputs])
        for _ in range(NUM_RUNS):
            costs.observe(modality, 2 * item.cost, _forward(model, [*inputs, *inputs])[1] + delay_s)
    assert spec is not None
    return spec


def probe_inputs(family: Family, modality: str) -> list[EncoderInput]:
    """The smallest sample of a modality, ready for a forward that nothing of a request can spoil."""
    make, sizes = MODALITY_TO_SAMPLES[modality]
    sample = make(min(sizes))
    return family.preprocess(sample.data, sample_item(family, sample, modality))


def _forward(model: EncoderModel, inputs: list[EncoderInput]) -> tuple[list[torch.Tensor], float]:
    started_s = time.perf_counter()
    with torch.inference_mode():
        features = model.encode(inputs)
        features[-1].cpu()  # waits for the device
    return features, time.perf_counter() - started_s
