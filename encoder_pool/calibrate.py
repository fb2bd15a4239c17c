"""Runs short synthetic forward passes at start, to learn the shape of features and a first estimate of the cost of a
pass.

Two sizes of a modality separate the overhead of a pass from the price of a patch. A model with fixed tiles makes one
size of every input, so a pass over two units stands for the second size there. The media go through the family's own
plan and preprocessing, so nothing is assumed about patches. The module knows nothing of requests.
"""

from __future__ import annotations

import time

import torch

from encoder_pool.planning.cost import ForwardCosts
from encoder_pool.planning.features import FeatureSpec
from encoder_pool.samples import MODALITY_TO_SAMPLES, sample_item
from fabric.dtypes import DTYPE_TO_BYTES
from fabric.errors import ConfigError
from modalities.family import EncoderInput, EncoderModel, Family
from modalities.torch_dtypes import dtype_name

NUM_RUNS = 2


def calibrate(family: Family, model: EncoderModel, modality: str, costs: ForwardCosts, delay_s: float) -> FeatureSpec:
    """Runs `model` on two sizes of one modality and records the times in `costs`. Blocks for a few forward passes.

    `delay_s` is the injected pause, which each real pass will take too. Raises ConfigError if the model's features do
    not have the family's shape or a known dtype, or are not finite, or if there is no sample for `modality`.
    """
    if modality not in MODALITY_TO_SAMPLES:
        raise ConfigError(f"no sample to calibrate the modality {modality!r} with")
    make, sizes = MODALITY_TO_SAMPLES[modality]
    spec: FeatureSpec | None = None
    for size in sizes:
        sample = make(size)
        item = sample_item(family, sample, modality)
        inputs = family.preprocess(sample.data, item)
        feature = _forward(model, inputs)[0][0]  # the first run of a size includes compiling and allocating
        spec = FeatureSpec(family.shape.num_levels, family.shape.hidden_size, dtype_name(feature.dtype))
        if spec.dtype not in DTYPE_TO_BYTES:
            raise ConfigError(f"{modality} features are {spec.dtype}; known dtypes: {', '.join(DTYPE_TO_BYTES)}")
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
    """Returns the smallest sample of a modality, ready for a forward pass that does not depend on the content of any
    request."""
    make, sizes = MODALITY_TO_SAMPLES[modality]
    sample = make(min(sizes))
    return family.preprocess(sample.data, sample_item(family, sample, modality))


def _forward(model: EncoderModel, inputs: list[EncoderInput]) -> tuple[list[torch.Tensor], float]:
    started_s = time.perf_counter()
    with torch.inference_mode():
        features = model.encode(inputs)
        features[-1].cpu()  # this waits for the device
    return features, time.perf_counter() - started_s
