"""Tests an encoder whose forward passes take a given time at least, in place of those of a large model on a GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from encoder_pool.encoder_config import EncoderConfig
from encoder_pool.forward import SlowedEncoder
from encoder_pool.planning import ForwardCosts
from fabric.contracts import ConfigError
from modalities.family import EncoderInput

pytestmark = pytest.mark.torch


class CountingEncoder:
    """Returns, for each input, its number of patches."""

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        return [torch.tensor(each.num_patches) for each in inputs]


def picture(num_patches: int) -> EncoderInput:
    return EncoderInput("image", np.zeros((num_patches, 3), np.float32), (1, 1, num_patches))


def config(**settings: float) -> EncoderConfig:
    return EncoderConfig(("image",), num_decode_processes=0, **settings)


def test_a_pass_takes_its_own_time_and_that_of_all_its_patches() -> None:
    settings = config(encode_delay_s=0.01, encode_delay_s_per_cost=0.001)
    encoder = SlowedEncoder(CountingEncoder(), settings.least_forward_s)
    started_s = time.perf_counter()
    features = encoder.encode([picture(4), picture(6)])
    assert time.perf_counter() - started_s >= 0.02
    assert [int(each) for each in features] == [4, 6]


def test_the_costs_that_an_encoder_measures_are_those_of_the_config() -> None:
    settings, costs = config(encode_delay_s=0.02, encode_delay_s_per_cost=0.003), ForwardCosts()
    for cost in (10, 40):
        costs.observe("image", cost, settings.least_forward_s(cost))
    estimate = costs.estimate("image")
    assert estimate.overhead_s == pytest.approx(0.02, rel=0.05)
    assert estimate.seconds_per_cost == pytest.approx(0.003, rel=0.05)


@pytest.mark.parametrize("key", ["encode_delay_s", "encode_delay_s_per_cost"])
def test_no_time_is_negative(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be at least 0, not -1"):
        config(**{key: -1})
