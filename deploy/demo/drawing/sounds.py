"""Draws sounds at 16 kHz: beeps, tones and sweeps. It knows no questions and no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deploy.demo.drawing.facts import SAMPLE_RATE
from deploy.demo.drawing.figures import Rng

Samples = npt.NDArray[np.float32]
LOW_HERTZ = (140.0, 380.0)
HIGH_HERTZ = (1200.0, 3400.0)
LEAST_SECONDS = 1.05
_FADE_S = 0.015


def tone(rng: Rng, start_hertz: float, end_hertz: float, seconds: float) -> Samples:
    """Returns one tone that glides between two pitches, with up to two overtones that are multiples of its pitch."""
    num_samples = int(seconds * SAMPLE_RATE)
    hertz = np.geomspace(start_hertz, end_hertz, num_samples)
    phase = 2 * np.pi * np.cumsum(hertz) / SAMPLE_RATE
    wave = np.sin(phase)
    for overtone in (2, 3):
        wave += rng.uniform(0, 0.3) * np.sin(overtone * phase) * (hertz * overtone < SAMPLE_RATE / 2)
    fade = np.minimum(1, np.arange(num_samples) / (_FADE_S * SAMPLE_RATE))
    return (wave * fade * fade[::-1]).astype(np.float32)


def silence(seconds: float) -> Samples:
    return np.zeros(int(seconds * SAMPLE_RATE), np.float32)


def beeps(rng: Rng, count: int, hertz: float) -> Samples:
    """Returns beeps of one pitch and length, with pauses between them and a little silence before and after."""
    length, pause = rng.uniform(0.1, 0.2), rng.uniform(0.15, 0.25)
    parts = [silence(rng.uniform(0.02, 0.3))]
    for _ in range(count):
        parts += [tone(rng, hertz, hertz, length), silence(pause)]
    return finished(rng, [*parts, silence(rng.uniform(0, 0.3))])


def steady(rng: Rng, hertz: float) -> Samples:
    """Returns one tone of half a second to a second and a half."""
    return finished(rng, [silence(rng.uniform(0, 0.2)), tone(rng, hertz, hertz, rng.uniform(0.5, 1.5)), silence(0.05)])


def sweep(rng: Rng, is_rising: bool) -> Samples:
    """Returns a tone that ends one to two octaves above or below where it began."""
    low = rng.uniform(200, 700)
    ends = (low, low * 2 ** rng.uniform(1, 2))
    start, end = ends if is_rising else ends[::-1]
    return finished(rng, [silence(rng.uniform(0, 0.2)), tone(rng, start, end, rng.uniform(0.6, 1.5)), silence(0.05)])


def finished(rng: Rng, parts: Sequence[Samples]) -> Samples:
    """Joins parts into a sound with a random loudness, over faint noise; the sound lasts at least a second."""
    wave = np.concatenate(parts)
    # The audio tower rounds a sound shorter than one window differently when it is batched with longer ones.
    wave = np.pad(wave, (0, max(0, int(LEAST_SECONDS * SAMPLE_RATE) - len(wave))))
    wave *= np.float32(rng.uniform(0.15, 0.8) / max(1e-6, np.abs(wave).max()))
    noise = rng.standard_normal(len(wave), dtype=np.float32) * np.float32(10 ** rng.uniform(-4, -2.2))
    return np.clip(wave + noise, -1, 1)


def any_pitch(rng: Rng) -> float:
    return float(np.exp(rng.uniform(np.log(250), np.log(2500))))
