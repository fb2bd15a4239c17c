"""Checks sounds on a GPU: resampling and spectrograms equal those of the host, also through the encoder service."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from encoder_bench import running_bench
from sound_files import encoded, noise, wav

from deploy.demo.build import demo_checkpoint
from encoder_pool.encoder_config import EncoderConfig
from modalities.families.audio_towers.device_spectrograms import DeviceMel, DeviceResampler, load_resample
from modalities.media import MelOptions, Resampling, decode_samples, decode_waveform, log_mel
from modalities.registry import REGISTRY

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

RATE = 16000
OPTIONS = MelOptions(num_bins=128, rate=RATE, hop=160, window=400, chunk_samples=30 * RATE)


@pytest.mark.parametrize("padded_to", [0, 30 * RATE])
def test_spectrograms(padded_to: int) -> None:
    sounds = [noise(size, index) for index, size in enumerate((RATE, 7 * RATE + 3, 30 * RATE, 201, 41 * RATE))]
    made = DeviceMel(OPTIONS, "cuda").log_mels([torch.from_numpy(samples).cuda() for samples in sounds], padded_to)
    for rows, samples in zip(made, sounds, strict=True):
        expected = log_mel(samples, OPTIONS, padded_to)
        np.testing.assert_allclose(rows.cpu().numpy(), expected, atol=1e-4, rtol=1e-4)


def test_resampling() -> None:
    """Compares the resampling, which uses torchaudio where it is installed."""
    files = [wav(noise(round(seconds * rate), rate), rate) for rate in (8000, 44100, 48000) for seconds in (0.5, 3.3)]
    planned = [-(-round(seconds * rate) * RATE // rate) for rate in (8000, 44100, 48000) for seconds in (0.5, 3.3)]
    waveforms = [decode_waveform(data, RATE, size, "part") for data, size in zip(files, planned, strict=True)]
    for made, data, size in zip(DeviceResampler(RATE, "cuda").resampled(waveforms), files, planned, strict=True):
        np.testing.assert_allclose(made.cpu().numpy(), decode_samples(data, RATE, size, "part"), atol=5e-6)


@pytest.mark.parametrize("found", [8000, 44100])
def test_torchaudios_filter_is_ours(found: int) -> None:
    pytest.importorskip("torchaudio", exc_type=(ImportError, OSError))
    batch = torch.from_numpy(noise(2 * found)).double()[None].cuda()
    filters = Resampling.between(found, RATE)
    made = [load_resample(filters, batch.device, with_torchaudio)(batch) for with_torchaudio in (True, False)]
    torch.testing.assert_close(*made, atol=1e-6, rtol=0)


async def test_features_through_the_service_are_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # it applies to the tower's own convolutions
    family = REGISTRY.load_family(demo_checkpoint())
    encoder = family.load_encoder(demo_checkpoint(), "cuda", "float32", ("audio",))
    config = EncoderConfig(modalities=("audio",), num_decode_processes=0, mel_device="cuda")
    async with running_bench(family, encoder, config) as bench:
        kinds = [(16000, 1.0, "wav"), (44100, 11.3, "flac"), (48000, 9.0, "ogg-opus"), (44101, 2.0, "wav")]
        files = [
            encoded(noise(round(seconds * rate), index, 0.05)[None], rate, name)
            for index, (rate, seconds, name) in enumerate(kinds)
        ]
        items = [bench.item(data, index, modality="audio") for index, data in enumerate(files)]
        result = await bench.service.encode(bench.request(files, items), files)
        assert [one.error for one in result.items] == [None] * len(files)
        unit_to_message = {message.unit: message for message in bench.ready}
        inputs = [unit for pair in zip(files, items, strict=True) for unit in family.preprocess(*pair)]
        for key, unit in zip([key for item in items for key in item.unit_keys()], inputs, strict=True):
            found = np.frombuffer(await bench.pull(unit_to_message[key]), np.float32)
            expected = encoder.encode([unit])[0].cpu().numpy().reshape(-1)
            np.testing.assert_allclose(found, expected, atol=1e-4)
        await bench.is_idle()
