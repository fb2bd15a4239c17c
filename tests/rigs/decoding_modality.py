"""Adds modalities whose files are decoded when they are probed, so that a probe pool does the work of an encoder's
decode process.

A refused file raises InvalidMedia. A defect of the decoder returns a header whose format begins with `DEFECT`.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Mapping

import numpy as np

from fabric.contracts import InvalidMedia
from modalities.family import AudioHeader, ImageHeader, MediaHeader, MediaOptions, VideoHeader
from modalities.media import MediaLimits, decode_frames, decode_image, decode_samples, num_samples_at, sample_frames
from modalities.registry import Registry, builtin_registry

LIMITS = MediaLimits()
RATE = 16000
DEFECT = "DEFECT"


class DecodingPlugin:
    """Probes a file of a modality and decodes it. It is called `decoded-image` for `image`, and so on."""

    needs_process = True

    def __init__(self, name: str, registry: Registry, decode: Callable[[bytes, MediaHeader, str], None]) -> None:
        self.modality = f"decoded-{name}"
        self.part_types = (f"decoded_{name}",)
        self._plugin = registry.modality(name)
        self._decode = decode

    def parse(self, part: Mapping[str, object], param: str, limits: MediaLimits) -> bytes:
        raise AssertionError("it is only probed")

    def probe(self, data: bytes, param: str) -> MediaHeader:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow warns about what it repairs.
                header = self._plugin.probe(data, param)
                self._plugin.validate(header, LIMITS, param)
                self._decode(data, header, param)
        except (InvalidMedia, MemoryError):
            raise
        except Exception:
            return ImageHeader(f"{DEFECT}: {traceback.format_exc()}", 1, 1, "")
        return header

    def validate(self, header: MediaHeader, limits: MediaLimits, param: str) -> None:
        raise AssertionError("it is only probed")


def decode_picture(data: bytes, header: MediaHeader, param: str) -> None:
    image, found = decode_image(data, param)
    assert found == header
    assert np.asarray(image.convert("RGB")).shape == (found.height, found.width, 3)


def decode_video(data: bytes, header: MediaHeader, param: str) -> None:
    """Decodes eight frames, and the sound track if it is not longer than the limit."""
    assert isinstance(header, VideoHeader)
    indices = sample_frames(header.num_frames, header.seconds, MediaOptions("uniform", max_frames=8))
    frames = list(decode_frames(data, indices, header, param))
    assert [frame.shape for frame in frames] == [(header.height, header.width, 3)] * len(indices)
    if header.sound is not None and header.sound.seconds <= LIMITS.max_audio_seconds:
        decode_sound(data, header.sound, param)


def decode_sound(data: bytes, header: MediaHeader, param: str) -> None:
    assert isinstance(header, AudioHeader)
    num_samples = num_samples_at(header, RATE)
    samples = decode_samples(data, RATE, num_samples, param)
    assert samples.shape == (num_samples,)
    assert np.isfinite(samples).all()


def decoding_registry() -> Registry:
    registry = builtin_registry()
    for name, decode in (("image", decode_picture), ("video", decode_video), ("audio", decode_sound)):
        registry.register_modality(DecodingPlugin(name, registry, decode))
    return registry
