"""Spectrograms made in batches by torch are those that numpy makes of each sound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sound_files import noise

from modalities.mel import MelOptions, log_mel
from modalities.mel_device import DeviceMel, resampled

pytestmark = pytest.mark.torch

OPTIONS = MelOptions(num_bins=80, rate=16000, hop=160, window=400, chunk_samples=32000)
MEL = DeviceMel(OPTIONS, "cpu")


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 40000), max_size=5),
    seed=st.integers(0, 99),
    padded_to=st.sampled_from([0, OPTIONS.chunk_samples]),
    num_extra=st.integers(0, 3),
)
def test_batches_of_any_lengths(sizes: list[int], seed: int, padded_to: int, num_extra: int) -> None:
    """Quiet sounds beside loud ones, too short ones beside long ones."""
    sounds = [noise(size, seed + index, level=10.0 ** -(index % 4)) for index, size in enumerate(sizes)]
    made = MEL.log_mels(sounds, padded_to, num_extra)
    assert len(made) == len(sounds)
    for rows, samples in zip(made, sounds, strict=True):
        expected = log_mel(samples, OPTIONS, padded_to, num_extra)
        assert rows.dtype == torch.float32
        assert rows.shape == expected.shape
        np.testing.assert_allclose(rows.numpy(), expected, atol=1e-4, rtol=1e-4)


def test_a_rate_that_fits_needs_no_resampling() -> None:
    samples = torch.from_numpy(noise(100))[None]
    assert resampled(samples, 16000, 16000) is samples
