"""Tests that what torch computes from batches of sounds equals what numpy and libswresample compute from each sound."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from audio_tower_rig import BUILDERS
from hypothesis import given, settings
from hypothesis import strategies as st
from sound_files import Samples, encoded, noise, tone

from fabric.contracts import MediaItem, MmHash
from modalities.families.audio_towers import device_spectrograms as mel_device
from modalities.families.audio_towers import device_spectrograms as resample_device
from modalities.families.audio_towers.device_spectrograms import DeviceMel, DeviceResampler, DeviceSounds, load_resample
from modalities.families.audio_towers.sound_plans import SoundHalf
from modalities.family import Waveform
from modalities.media import (
    MelOptions,
    Resampling,
    decode_samples,
    decode_waveform,
    log_mel,
    num_samples_at,
    probe_sound,
)

pytestmark = pytest.mark.torch

RATE = 16000
OPTIONS = MelOptions(num_bins=80, rate=RATE, hop=160, window=400, chunk_samples=32000)
MEL = DeviceMel(OPTIONS, "cpu")
RATES = [8000, 11025, 12000, 15900, 16000, 16100, 22050, 24000, 32000, 44100, 48000]


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 40000), max_size=5),
    seed=st.integers(0, 99),
    padded_to=st.sampled_from([0, OPTIONS.chunk_samples]),
    num_extra=st.integers(0, 3),
)
def test_batches_of_any_lengths(sizes: list[int], seed: int, padded_to: int, num_extra: int) -> None:
    """Batches contain quiet and loud sounds, and sounds that are too short together with long ones."""
    sounds = [noise(size, seed + index, level=10.0 ** -(index % 4)) for index, size in enumerate(sizes)]
    made = MEL.log_mels([torch.from_numpy(samples) for samples in sounds], padded_to, num_extra)
    assert len(made) == len(sounds)
    for rows, samples in zip(made, sounds, strict=True):
        expected = log_mel(samples, OPTIONS, padded_to, num_extra)
        assert rows.dtype == torch.float32
        assert rows.shape == expected.shape
        np.testing.assert_allclose(rows.numpy(), expected, atol=1e-4, rtol=1e-4)


def test_blocks_of_frames_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sounds = [torch.from_numpy(noise(size, size)) for size in (5000, 333, 12345)]
    whole = MEL.log_mels(sounds)
    monkeypatch.setattr(mel_device, "_BLOCK_FRAMES", 7)
    for rows, expected in zip(MEL.log_mels(sounds), whole, strict=True):
        torch.testing.assert_close(rows, expected, atol=1e-6, rtol=0)


@settings(deadline=None, max_examples=15)
@given(
    sounds=st.lists(st.tuples(st.sampled_from(RATES), st.integers(1200, 50000)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_resampling_is_the_hosts(sounds: list[tuple[int, int]], seed: int) -> None:
    """One batch has several rates, some of them twice. The comparison includes each end and the seams of the pieces."""
    files = [wav_float(noise(size, seed + index), rate) for index, (rate, size) in enumerate(sounds)]
    planned = [num_samples_at(probe_sound(data, "part"), RATE) for data in files]
    waveforms = [decode_waveform(data, RATE, size, "part") for data, size in zip(files, planned, strict=True)]
    assert [waveform.rate for waveform in waveforms] == [rate for rate, _ in sounds]
    for made, data, size in zip(DeviceResampler(RATE, "cpu").resampled(waveforms), files, planned, strict=True):
        assert made.dtype == torch.float32
        np.testing.assert_allclose(made.numpy(), decode_samples(data, RATE, size, "part"), atol=5e-6)


def wav_float(samples: Samples, rate: int) -> bytes:
    return encoded(samples[None], rate, "wav-float")


def test_pieces_are_resampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    waveform = Waveform(tone(3.5, 44100)[0], 44100, 56000)
    (whole,) = DeviceResampler(RATE, "cpu").resampled([waveform])
    monkeypatch.setattr(resample_device, "_BLOCK_S", 1)
    torch.testing.assert_close(DeviceResampler(RATE, "cpu").resampled([waveform])[0], whole)


@pytest.mark.parametrize("found", [8000, 44100])
def test_it_is_torchaudios_filter(found: int) -> None:
    """The test runs only where torchaudio can be imported."""
    pytest.importorskip("torchaudio", exc_type=(ImportError, OSError))
    filters, device = Resampling.between(found, RATE), torch.device("cpu")
    batch = torch.from_numpy(noise(2 * found)).double()[None]
    made = [load_resample(filters, device, with_torchaudio)(batch) for with_torchaudio in (True, False)]
    torch.testing.assert_close(*made, atol=1e-6, rtol=0)


def test_without_torchaudio(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import of torchaudio fails where it is linked against libraries that are missing."""
    monkeypatch.setitem(sys.modules, "torchaudio", None)
    monkeypatch.setitem(sys.modules, "torchaudio.transforms", None)
    resample = load_resample(Resampling.between(8000, RATE), torch.device("cpu"))
    assert resample(torch.ones(1, 8000, dtype=torch.float64)).shape == (1, RATE)


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_units_are_those_of_the_host(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One batch of each family has sounds of different rates, lengths and formats. One of them is decoded at the
    family's rate, because a device has no filter for its own rate."""
    half = BUILDERS[name](tmp_path_factory.mktemp(name)).sound
    sounds = [(44100, 3.3, "flac"), (8000, 0.4, "wav"), (16000, 5.0, "wav"), (44101, 1.0, "wav"), (48000, 2.0, "mp3")]
    files = [
        encoded(noise(round(seconds * rate), index, 0.05)[None], rate, muxer)
        for index, (rate, seconds, muxer) in enumerate(sounds)
    ]
    items = [item_of(half, data) for data in files]
    waveforms = [half.decode_waveform(data, item) for data, item in zip(files, items, strict=True)]
    assert [waveform.rate for waveform in waveforms] == [44100, 8000, 16000, RATE, 48000]
    made = DeviceSounds(half, "cpu").units(waveforms)
    for found, data, item in zip(made, files, items, strict=True):
        expected = half.preprocess(data, item)
        assert [unit.grid for unit in found] == [unit.grid for unit in expected]
        assert [unit.geometry for unit in found] == [unit.geometry for unit in expected]
        for unit, reference in zip(found, expected, strict=True):
            assert (unit.pixels.dtype, unit.pixels.flags.c_contiguous) == (np.float32, True)
            np.testing.assert_allclose(unit.pixels, reference.pixels, atol=1e-4)


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_features_of_the_units_are_transformers_of_the_whole(name: str, tmp_path: Path) -> None:
    tower = BUILDERS[name](tmp_path)
    sounds = [noise(size, size) for size in (5 * RATE, RATE // 2, 3 * RATE + 77)]
    waveforms = [Waveform(samples, RATE, len(samples)) for samples in sounds]
    for units, samples in zip(DeviceSounds(tower.sound, "cpu").units(waveforms), sounds, strict=True):
        rows = torch.cat([tower.encoder.encode([unit])[0] for unit in units], dim=1)[0]
        size = tower.sound.segment_samples or len(samples)  # The reference cuts off what is longer.
        whole = torch.cat(tower.expected([samples[at : at + size] for at in range(0, len(samples), size)]))
        torch.testing.assert_close(rows, whole, atol=1e-4, rtol=1e-4)


def item_of(half: SoundHalf, data: bytes) -> MediaItem:
    plan = half.plan(probe_sound(data, "part"))
    return MediaItem(0, "audio", MmHash("a"), plan.grid, plan.unit_tokens, plan.cost, "part")
