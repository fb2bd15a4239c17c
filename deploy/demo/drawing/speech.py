"""Makes spoken words with espeak-ng, for training and measuring alone, and only where it is installed. It knows no
model."""

from __future__ import annotations

import io
import shutil
import subprocess
import wave
from functools import lru_cache

import numpy as np

from deploy.demo.drawing.facts import SAMPLE_RATE, pick
from deploy.demo.drawing.figures import Rng
from deploy.demo.drawing.sounds import Samples, finished, silence

VOICES = ("en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-us-nyc", "en-029")
VARIANTS = ("", "+f1", "+f2", "+f3", "+f4", "+m1", "+m2", "+m3", "+m4", "+m5", "+m7")
# There are few speeds and pitches, so that espeak-ng speaks each word once in each voice and the result is cached;
# every sound is stretched by a random factor of its own.
_SPEEDS = (135, 165)
_PITCHES = (35, 65)


def has_speech() -> bool:
    return shutil.which("espeak-ng") is not None


def spoken(rng: Rng, word: str) -> Samples:
    """Returns the word in a voice drawn at random, stretched a little, over faint noise."""
    voice = pick(rng, VOICES) + pick(rng, VARIANTS)
    said = _say(word, voice, int(rng.choice(_SPEEDS)), int(rng.choice(_PITCHES)))
    num_samples = int(len(said) * rng.uniform(0.88, 1.12))
    stretched = np.interp(np.linspace(0, len(said) - 1, num_samples), np.arange(len(said)), said).astype(np.float32)
    return finished(rng, [silence(rng.uniform(0.0, 0.3)), stretched, silence(rng.uniform(0.0, 0.3))])


@lru_cache(20_000)
def _say(word: str, voice: str, words_per_minute: int, pitch: int) -> Samples:
    """Returns the spoken word at 16 kHz, without the silence around it."""
    command = ["espeak-ng", "-v", voice, "-s", str(words_per_minute), "-p", str(pitch), "--stdout", word]
    data = subprocess.run(command, check=True, capture_output=True).stdout
    with wave.open(io.BytesIO(data)) as file:
        rate = file.getframerate()
        said = np.frombuffer(file.readframes(2**30), np.int16).astype(np.float32) / 2**15
    loud = np.nonzero(np.abs(said) > 0.01)[0]
    said = said[loud[0] : loud[-1] + 1]
    # A moving average keeps frequencies above 8 kHz from folding back below 8 kHz.
    said = np.convolve(said, np.ones(2, np.float32) / 2, "same")
    num_samples = int(len(said) * SAMPLE_RATE / rate)
    return np.interp(np.linspace(0, len(said) - 1, num_samples), np.arange(len(said)), said).astype(np.float32)
