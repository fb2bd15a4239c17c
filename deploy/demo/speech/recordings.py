"""Makes recordings of the demo's two voices with espeak-ng, which must be installed. It knows no model.

Nothing of espeak-ng is shipped; its recordings are what the talker and code2wav learn from.
"""

from __future__ import annotations

import io
import subprocess
import wave
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from deploy.demo.speech.speech_data import Ints
from deploy.demo.speech.word_times import Voice, word_starts
from deploy.demo.speech_config import FRAME_SAMPLES, SAMPLE_RATE

Samples = npt.NDArray[np.float32]
TRAINING_SPEED = 150
"""Gives the words per minute of all recordings of training."""
JUDGES_SPEED = 170
"""Gives the words per minute of the recordings with which the judges compare."""
LEAD_SAMPLES = 480
WORD_PAUSE, SENTENCE_PAUSE = 1920, 4800
"""A recording ends with at least so many samples of silence."""
LOUDNESS = 0.08
"""Gives the root of the mean square of a recording without its silence; the loudest sample is then near 0.5."""
_SILENT = 0.004


NAME_TO_VOICE: Mapping[str, Voice] = {"ethan": Voice("en-us", 45), "chelsie": Voice("en-us+f3", 55)}


def recording(text: str, voice: str, speed: int = TRAINING_SPEED) -> Samples:
    """Returns the spoken text at 24 kHz: a whole number of codec frames, with a short silence at both ends."""
    said, _ = _say(text, NAME_TO_VOICE[voice], speed)
    pause = SENTENCE_PAUSE if text.endswith((".", "!", "?")) else WORD_PAUSE
    num_frames = -(-(LEAD_SAMPLES + len(said) + pause) // FRAME_SAMPLES)
    samples = np.zeros(num_frames * FRAME_SAMPLES, np.float32)
    samples[LEAD_SAMPLES : LEAD_SAMPLES + len(said)] = said
    return samples


def word_at_frames(text: str, voice: str) -> Ints:
    """Returns which word of `text.split()` each codec frame of the recording says at its middle. Silence counts to the
    word before it."""
    _, first_second = _say(text, NAME_TO_VOICE[voice], TRAINING_SPEED)
    starts = np.array(word_starts(text, NAME_TO_VOICE[voice], TRAINING_SPEED)) - first_second
    num_frames = len(recording(text, voice)) // FRAME_SAMPLES
    middles = ((np.arange(num_frames) + 0.5) * FRAME_SAMPLES - LEAD_SAMPLES) / SAMPLE_RATE
    return np.asarray(np.maximum(np.searchsorted(starts, middles, side="right") - 1, 0), np.int64)


@lru_cache(10_000)
def _say(text: str, voice: Voice, speed: int) -> tuple[Samples, float]:
    """Returns what espeak-ng says without the silence at both ends, and how long the silence at the beginning was, in
    seconds."""
    command = ["espeak-ng", "-v", voice.espeak, "-s", str(speed), "-p", str(voice.pitch), "--stdout", text]
    data = subprocess.run(command, check=True, capture_output=True).stdout
    with wave.open(io.BytesIO(data)) as file:
        rate = file.getframerate()
        said = np.frombuffer(file.readframes(2**30), np.int16).astype(np.float32) / 2**15
    loud = np.nonzero(np.abs(said) > _SILENT)[0]
    loud_part: Samples = resampled(said[loud[0] : loud[-1] + 1].astype(np.float32), rate, SAMPLE_RATE)
    gain = LOUDNESS / np.sqrt(np.mean(loud_part**2))
    return np.asarray(np.clip(loud_part * gain, -0.98, 0.98), np.float32), float(loud[0]) / rate


def resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """Returns the samples at another rate, through their whole spectrum; frequencies above half of the lower rate are
    cut off."""
    divisor = int(np.gcd(rate, wanted))
    block = rate // divisor
    num_blocks = -(-(len(samples) + block) // block)
    padded = np.pad(samples, (0, num_blocks * block - len(samples)))
    length = num_blocks * (wanted // divisor)
    spectrum = np.fft.rfft(padded)
    bins = length // 2 + 1
    spectrum = np.pad(spectrum[:bins], (0, max(0, bins - len(spectrum))))
    result = np.fft.irfft(spectrum, length) * (wanted / rate)
    return np.asarray(result[: len(samples) * wanted // rate], np.float32)
