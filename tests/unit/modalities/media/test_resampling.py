"""Tests that the filter's numbers match what libswresample does, and that files are decoded to what a device can
take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sound_files import encoded, noise, tone, wav

from fabric.contracts import InvalidMedia
from modalities.media import Resampling, decode_samples, decode_waveform
from modalities.media.plugin import AUDIO_S

RATE = 16000
PART = "part"


@settings(deadline=None, max_examples=40)
@given(found=st.sampled_from([8000, 11025, 15900, 16100, 22050, 24000, 44100, 48000]), extra=st.integers(0, 2000))
def test_the_number_of_samples_is_known(found: int, extra: int) -> None:
    """libswresample sometimes leaves out the last sample, and the decoder then puts a zero there."""
    filters = Resampling.between(found, RATE)
    num_samples = filters.least_samples + extra
    planned = -(-num_samples * RATE // found)
    assert planned - filters.num_made(num_samples) in (0, 1)
    steady = encoded(np.full((1, num_samples), 0.5, np.float32), found, "wav-float")
    made = decode_samples(steady, RATE, planned, PART)
    assert np.count_nonzero(made) == filters.num_made(num_samples)


def test_the_taps_end_on_whole_samples() -> None:
    for found, num_taps in ((8000, 128), (15500, 128), (22050, 182), (44100, 364), (48000, 396)):
        filters = Resampling.between(found, RATE)
        assert filters.num_taps == num_taps
        assert 0.95 < filters.rolloff <= 1.0
    assert (filters.step, filters.num_phases) == (3, 1)


@pytest.mark.parametrize(
    ("found", "is_for_devices"), [(8000, True), (44100, True), (48000, True), (96000, False), (44101, False)]
)
def test_rates_that_devices_resample(found: int, is_for_devices: bool) -> None:
    """A device does not resample from rates with a filter bank of gigabytes, nor from rates with many samples for each
    one that is left."""
    assert Resampling.between(found, RATE).is_for_devices == is_for_devices
    data = wav(tone(0.5, found)[0], found)
    waveform = decode_waveform(data, RATE, RATE // 2, PART)
    assert waveform.rate == (found if is_for_devices else RATE)
    assert (waveform.num_samples, waveform.samples.dtype) == (RATE // 2, np.float32)
    if is_for_devices:
        assert len(waveform.samples) == round(0.5 * found)
    else:
        np.testing.assert_array_equal(waveform.samples, decode_samples(data, RATE, RATE // 2, PART))


def test_a_sound_shorter_than_the_filter_is_resampled_where_it_is_decoded() -> None:
    least = Resampling.between(44100, RATE).least_samples
    for num_samples, rate in ((least, 44100), (least - 1, RATE)):
        planned = -(-num_samples * RATE // 44100)
        data = wav(noise(num_samples), 44100)
        waveform = decode_waveform(data, RATE, planned, PART)
        assert waveform.rate == rate
    made = decode_samples(data, RATE, planned, PART)
    np.testing.assert_array_equal(waveform.samples, made[: len(waveform.samples)])


def test_other_lengths_than_planned_are_refused_at_any_rate() -> None:
    data, slack = wav(tone(1.0, 44100)[0], 44100), round(AUDIO_S * RATE)
    for planned in (RATE - slack, RATE + slack):
        assert len(decode_waveform(data, RATE, planned, PART).samples) == 44100
    for planned in (RATE - slack - 1, RATE + slack + 1):
        with pytest.raises(InvalidMedia, match="than its header says"):
            decode_waveform(data, RATE, planned, PART)


def test_samples_that_are_no_numbers_are_refused_at_any_rate() -> None:
    data = encoded(np.full((1, 44100), np.nan, dtype=np.float32), 44100, "wav-float")
    with pytest.raises(InvalidMedia, match="samples that are not numbers"):
        decode_waveform(data, RATE, RATE, PART)
