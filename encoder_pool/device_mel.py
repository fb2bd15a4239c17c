"""Loads and tests the part of a family that turns sounds into units on the encoder's device. It knows nothing of
requests.

Sounds with more mel frames than a batch may cost stay with the decode processes, because work on the device can't be
stopped and nothing else is encoded meanwhile.
"""

from __future__ import annotations

from encoder_pool.config import EncoderConfig
from encoder_pool.decode_process import check_inputs
from encoder_pool.samples import SAMPLE_RATE, audio_sample, sample_item
from fabric.errors import ConfigError, WeftError
from modalities.family import Family
from modalities.waveform import MelOnDevice, Spectrograms

RATES = (SAMPLE_RATE, 48_000)
"""Lists the sample rates of the test sounds: one needs no resampling, and one does."""


def load_spectrograms(config: EncoderConfig, family: Family) -> Spectrograms | None:
    """Loads the spectrograms of the family. Returns None if the config names no device for them, if no sounds are
    encoded here, or if the family supports only `preprocess`."""
    if not config.mel_device or "audio" not in config.modalities or not isinstance(family, MelOnDevice):
        return None
    return family.load_spectrograms(config.mel_device)


def try_spectrograms(family: Family, spectrograms: Spectrograms) -> None:
    """Makes units of two short sounds in one batch, so that the device's libraries allocate and compile before the
    first request. Blocks. Raises ConfigError if the units differ from the plan."""
    assert isinstance(family, MelOnDevice)
    samples = [audio_sample(2, rate) for rate in RATES]
    items = [sample_item(family, sample, "audio") for sample in samples]
    waveforms = [family.decode_waveform(sample.data, item) for sample, item in zip(samples, items, strict=True)]
    try:
        for inputs, item in zip(spectrograms.units(waveforms), items, strict=True):
            check_inputs(inputs, item)
    except WeftError as error:
        raise ConfigError(f"spectrograms on the device: {error.message}") from error
