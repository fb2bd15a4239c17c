"""Tests that log-mel spectrograms equal transformers' WhisperFeatureExtractor, for sounds of any length and kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sound_files import Samples, noise, tone, write_preprocessor
from transformers import WhisperFeatureExtractor
from transformers.audio_utils import mel_filter_bank

from fabric.contracts import ConfigError
from modalities.families.audio_towers.sound_plans import read_mel_options
from modalities.media import MelOptions, log_mel, mel_filters, num_mel_frames

pytestmark = pytest.mark.torch

RATE = 16000
OPTIONS = MelOptions(num_bins=128, rate=RATE, hop=160, window=400, chunk_samples=2 * RATE)
EXTRACTOR = WhisperFeatureExtractor(feature_size=128, chunk_length=2)
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


def reference(samples: Samples, padded: bool) -> np.ndarray:
    """Returns `(num_frames, num_bins)`: the frames that the mask keeps, with the arguments that the families'
    processors pass."""
    made = EXTRACTOR(
        samples,
        sampling_rate=RATE,
        padding="max_length" if padded else True,
        truncation=False,
        return_attention_mask=True,
        return_tensors="np",
    )
    return made["input_features"][0][:, made["attention_mask"][0].astype(bool)].T


def check(samples: Samples, padded: bool) -> None:
    padded_to = OPTIONS.chunk_samples if padded else 0
    found, expected = log_mel(samples, OPTIONS, padded_to), reference(samples, padded)
    assert found.shape == expected.shape == (num_mel_frames(len(samples), OPTIONS, padded_to), 128)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, **TOLERANCE)


@settings(deadline=None, max_examples=40)
@given(num_samples=st.integers(1, 3 * RATE), seed=st.integers(0, 999), padded=st.booleans())
def test_any_length(num_samples: int, seed: int, padded: bool) -> None:
    """The lengths include sounds shorter than a window, and sounds longer than the length to which shorter ones are
    padded."""
    if not padded and num_samples <= OPTIONS.window // 2:
        assert num_mel_frames(num_samples, OPTIONS) == 0  # The reference cannot reflect such a sound.
        assert log_mel(noise(num_samples), OPTIONS).shape == (0, 128)
        return
    check(noise(num_samples, seed), padded)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("num_samples", [201, 319, 320, 321, RATE, 2 * RATE - 1, 2 * RATE, 2 * RATE + 1, 48123])
@pytest.mark.parametrize("kind", ["silence", "tone", "click at the end", "very quiet", "very loud"])
def test_kinds_of_sound(kind: str, num_samples: int, padded: bool) -> None:
    samples = {
        "silence": np.zeros(num_samples, dtype=np.float32),
        "tone": tone(4, RATE, 700)[0, :num_samples],
        "click at the end": np.eye(1, num_samples, num_samples - 1, dtype=np.float32)[0],
        "very quiet": noise(num_samples, level=1e-7),
        "very loud": noise(num_samples, level=1e3),
    }[kind]
    check(samples, padded)


def test_longer_than_a_block() -> None:
    check(noise(42 * RATE), padded=False)


def test_silence_behind_the_sound() -> None:
    """The extra frames are those that a padded sound has after its last frame, up to the end of the padding."""
    samples = noise(20000)
    made = EXTRACTOR(samples, sampling_rate=RATE, return_tensors="np")["input_features"][0].T
    for num_extra in (0, 1, 2, 9, 200):
        found = log_mel(samples, OPTIONS, OPTIONS.chunk_samples, num_extra)
        assert len(found) == min(125 + num_extra, 200)
        np.testing.assert_allclose(found, made[: len(found)], **TOLERANCE)


@pytest.mark.parametrize(("num_bins", "window", "rate"), [(80, 400, RATE), (128, 400, RATE), (80, 512, 24000)])
def test_filters(num_bins: int, window: int, rate: int) -> None:
    options = MelOptions(num_bins, rate, 160, window, rate)
    expected = mel_filter_bank(1 + window // 2, num_bins, 0.0, 8000.0, rate, norm="slaney", mel_scale="slaney")
    np.testing.assert_allclose(mel_filters(options), expected, atol=1e-12)


def test_options_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"hop_length": 80, "n_fft": 600, "chunk_length": 7, "sampling_rate": 24000}
    for index, found in enumerate((changes, {})):
        directory = write_preprocessor(tmp_path / str(index), **found)
        options, extractor = read_mel_options(directory), WhisperFeatureExtractor.from_pretrained(directory)
        assert options == MelOptions(
            extractor.feature_size, extractor.sampling_rate, extractor.hop_length, extractor.n_fft, extractor.n_samples
        )
    nested = {"feature_extractor": {"feature_size": 20}, "image_processor": {}}
    (directory / "processor_config.json").write_text(json.dumps(nested))
    assert read_mel_options(directory).num_bins == 20


@pytest.mark.parametrize(
    "changes",
    [
        {"feature_extractor_type": "SeamlessM4TFeatureExtractor"},
        {"dither": 0.1},
        {"padding_value": 1.0},
        {"hop_length": "x"},
        {"hop_length": 0},
        {"n_fft": 1},
        {"feature_size": None},
    ],
)
def test_extractors_that_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        read_mel_options(write_preprocessor(tmp_path, **changes))
