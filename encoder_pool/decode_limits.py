"""Holds the limits of decoding: for one item in its decode process, and for all items together. These are settings
only; `decode_process`, `decode` and the pipeline enforce them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fabric.errors import ConfigError

MODALITY_TO_CPU_S = {"image": 8.0, "audio": 16.0, "video": 48.0}
"""Limits the processor time of decoding one item of each modality, in seconds. The limit is four fifths of the time
that a router waits for an encoding. The largest picture, RGBA, takes about five seconds."""
MODALITY_TO_TIMEOUT_S = {"image": 9.0, "audio": 18.0, "video": 54.0}
"""Limits the wall time of decoding one item of each modality, in seconds from its beginning. The limit is nine tenths
of the time that a router waits, so that a stopped process is replaced, and an item goes to another encoder, before the
time of the whole call is over (`EncodeRequest.time_left_s`)."""
OTHER_CPU_S = 48.0
OTHER_TIMEOUT_S = 54.0


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Holds the limits of decoding. Where items are decoded in threads only `total_bytes` applies, because a thread
    can't be ended. Raises ConfigError if a limit is not positive."""

    modality_to_cpu_s: Mapping[str, float]
    """Limits the processor time of the process; an item that takes more is refused."""
    modality_to_timeout_s: Mapping[str, float]
    """Limits wall time. An item that exceeds it with processor time left is on a machine that is too busy."""
    memory_bytes: int = 4 * 2**30
    """Limits the data memory of the process as Linux counts it, including the interpreter's own. An item that needs
    more is refused."""
    total_bytes: int = 4 * 2**30
    """Limits the memory of all items that are decoded at once, as estimated from their headers
    (`MediaItem.decode_bytes`). Further items wait, and an item that alone takes more is refused."""

    def __post_init__(self) -> None:
        limits = (*self.modality_to_cpu_s.values(), *self.modality_to_timeout_s.values())
        if min(*limits, self.memory_bytes, self.total_bytes) <= 0:
            raise ConfigError("encoder: limits of decoding must be positive")

    def cpu_s(self, modality: str) -> float:
        return self.modality_to_cpu_s.get(modality, OTHER_CPU_S)

    def timeout_s(self, modality: str) -> float:
        return self.modality_to_timeout_s.get(modality, OTHER_TIMEOUT_S)


DEFAULT_LIMITS = DecodeLimits(MODALITY_TO_CPU_S, MODALITY_TO_TIMEOUT_S)
