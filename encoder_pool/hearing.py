"""Whether sounds become units on the encoder's device, and that it works there. Knows nothing of requests.

Sounds of more mel frames than a batch may cost stay with the decode processes: what is on the device can't be stopped,
and nothing else is encoded meanwhile.
"""

from __future__ import annotations

from encoder_pool.config import EncoderConfig
from encoder_pool.decode_process import check_inputs
from encoder_pool.samples import SAMPLE_RATE, audio_sample, sample_item
from fabric.errors import ConfigError, WeftError
from modalities.family import Family
from modalities.waveform import HearsOnDevice, Spectrograms

RATES = (SAMPLE_RATE, 48_000)
"""Of the sounds that are tried: one that needs no resampling, and one that does."""


def load_spectrograms(config: EncoderConfig, family: Family) -> Spectrograms | None:
    """None if the config says so, no sounds are encoded here, or the family has no other way than its `preprocess`."""
    if not config.mel_device or "audio" not in config.modalities or not isinstance(family, HearsOnDevice):
        return None
    return family.load_spectrograms(config.mel_device)


def try_spectrograms(family: Family, spectrograms: Spectrograms) -> None:
    """Two short sounds in a batch: what a device's libraries allocate and compile is done before the first request.
    Blocks. Raises ConfigError if they do not become what was planned."""
    assert isinstance(family, HearsOnDevice)
    samples = [audio_sample(2, rate) for rate in RATES]
    items = [sample_item(family, sample, "audio") for sample in samples]
    waveforms = [family.decode_waveform(sample.data, item) for sample, item in zip(samples, items, strict=True)]
    try:
        for inputs, item in zip(spectrograms.units(waveforms), items, strict=True):
            check_inputs(inputs, item)
    except WeftError as error:
        raise ConfigError(f"spectrograms on the device: {error.message}") from error
