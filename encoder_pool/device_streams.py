"""Queues an encoder's work on its device: vision on one stream, sounds on another.

On CUDA, a stream is a line of work that the device does in order; it may do work of different lines at the same time.
Work on the default stream would wait for both, and both for it. A CPU has no streams, so `HostStreams` does nothing.
This module has all calls of CUDA's interface that the encoder pool makes. It knows nothing of models, units and queues.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

SOUND = "audio"
"""Names the modality whose work has a stream of its own. All other modalities share one, because pictures and videos
share a tower."""


class DeviceStreams(Protocol):
    """A `DeviceStreams` is used in one thread."""

    def entered(self, modality: str) -> AbstractContextManager[None]:
        """Queues the device's work of the block on the stream of `modality`. A tensor that was made on one stream must
        not be used on another."""
        ...

    def release_memory(self) -> None:
        """Gives memory that torch keeps for later tensors back to the device."""
        ...


def open_streams(device: str) -> DeviceStreams:
    """Returns the streams of a device, as torch names it."""
    found = torch.device(device)
    return CudaStreams(found) if found.type == "cuda" else HostStreams()


class HostStreams:
    """Implements `DeviceStreams` for a CPU, which does all work at once."""

    def entered(self, modality: str) -> AbstractContextManager[None]:
        return nullcontext()

    def release_memory(self) -> None:
        pass


class CudaStreams:
    """Implements `DeviceStreams` for a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_sound_to_stream: dict[bool, torch.cuda.Stream] = {}

    @contextmanager
    def entered(self, modality: str) -> Iterator[None]:
        with torch.cuda.stream(self._stream(modality == SOUND)):
            yield

    def _stream(self, is_sound: bool) -> torch.cuda.Stream:
        """Returns the stream. A new stream begins when the default stream has done what it has: weights and tables were
        loaded there."""
        if is_sound not in self._is_sound_to_stream:
            stream = torch.cuda.Stream(self._device)
            stream.wait_stream(torch.cuda.default_stream(self._device))
            self._is_sound_to_stream[is_sound] = stream
        return self._is_sound_to_stream[is_sound]

    def release_memory(self) -> None:
        torch.cuda.empty_cache()
