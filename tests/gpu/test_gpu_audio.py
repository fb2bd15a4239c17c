"""Sounds on a GPU: spectrograms and resampling there are those of the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sound_files import noise, tone

from modalities.mel import MelOptions, log_mel
from modalities.mel_device import DeviceMel, resampled

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

RATE = 16000
OPTIONS = MelOptions(num_bins=128, rate=RATE, hop=160, window=400, chunk_samples=30 * RATE)


@pytest.mark.parametrize("padded_to", [0, 30 * RATE])
def test_spectrograms(padded_to: int) -> None:
    sounds = [noise(size, index) for index, size in enumerate((RATE, 7 * RATE + 3, 30 * RATE, 201, 41 * RATE))]
    made = DeviceMel(OPTIONS, "cuda").log_mels(sounds, padded_to)
    for rows, samples in zip(made, sounds, strict=True):
        expected = log_mel(samples, OPTIONS, padded_to)
        np.testing.assert_allclose(rows.cpu().numpy(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("found", [8000, 44100, 48000])
def test_resampling(found: int) -> None:
    pytest.importorskip("torchaudio")
    made = resampled(torch.from_numpy(tone(1.0, found, 1000.0)).cuda(), found, RATE)[0].cpu().numpy()
    expected = tone(1.0, RATE, 1000.0)[0]
    assert len(made) == len(expected)
    np.testing.assert_allclose(made[400:-400], expected[400:-400], atol=1e-3)
