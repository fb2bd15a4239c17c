"""What decoding may take: one item in its decode process, and all of them together. Settings alone: `decode_process`,
`decode` and the pipeline keep them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fabric.errors import ConfigError

MODALITY_TO_CPU_S = {"image": 8.0, "audio": 16.0, "video": 48.0}
"""Processor time: four fifths of what a router waits for an encoding. The largest picture, RGBA, takes about five."""
MODALITY_TO_TIMEOUT_S = {"image": 9.0, "audio": 18.0, "video": 54.0}
"""By the clock, from its begin: nine tenths of it, so that a process that is stopped is replaced, and an item goes
elsewhere, before the time of the whole call is over (`EncodeRequest.time_left_s`)."""
OTHER_CPU_S = 48.0
OTHER_TIMEOUT_S = 54.0


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """A thread has none of them: it can't be ended. Raises ConfigError."""

    modality_to_cpu_s: Mapping[str, float]
    """Processor time of the process; an item that takes more is refused."""
    modality_to_timeout_s: Mapping[str, float]
    """By the clock. An item that is late with processor time left met a machine that is too busy."""
    memory_bytes: int = 4 * 2**30
    """Of the process, as Linux counts its data; the interpreter's own is a part of it. What is more is refused."""
    total_bytes: int = 4 * 2**30
    """Of all items together that are decoded at once, by their headers (`MediaItem.decode_bytes`): others wait, and one
    that takes more alone is refused."""

    def __post_init__(self) -> None:
        limits = (*self.modality_to_cpu_s.values(), *self.modality_to_timeout_s.values())
        if min(*limits, self.memory_bytes, self.total_bytes) <= 0:
            raise ConfigError("encoder: limits of decoding must be positive")

    def cpu_s(self, modality: str) -> float:
        return self.modality_to_cpu_s.get(modality, OTHER_CPU_S)

    def timeout_s(self, modality: str) -> float:
        return self.modality_to_timeout_s.get(modality, OTHER_TIMEOUT_S)


DEFAULT_LIMITS = DecodeLimits(MODALITY_TO_CPU_S, MODALITY_TO_TIMEOUT_S)
