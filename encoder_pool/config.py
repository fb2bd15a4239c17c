"""Settings of one encoder replica. Arguments only: nothing here reads the environment."""

from __future__ import annotations

from dataclasses import dataclass

from encoder_pool.decode_limits import DEFAULT_LIMITS, DecodeLimits
from fabric.errors import ConfigError

PASSED_SHARE = 0.1
"""Of what an item may take, by the clock."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Costs are in patches, or mel frames of sounds, as in `MediaItem.cost`. Raises ConfigError for settings that
    contradict each other."""

    modalities: tuple[str, ...]
    """What this replica loads; items of others are refused."""
    max_batch_cost: int = 16 * 1024
    """Most patches of one forward (one unit alone may be more): 16 pictures of 448 x 448 at patches of 14."""
    max_items_in_flight: int = 32
    """Items decoded, or being decoded, that wait for their forward (seed 000: 32 per encoder); more wait as files."""
    max_queue_cost: int = 512 * 1024
    """Most patches accepted and not yet encoded; a call that would pass it is refused."""
    max_decoded_cost: int = 64 * 1024
    """Most patches lying decoded before the forward: bounds host memory (a patch is a few KiB of float32). Others
    count by their bytes."""
    lease_s: float = 60.0
    """How long a feature that was announced is held for its worker."""
    report_interval_s: float = 0.2
    mel_device: str = ""
    """Where sounds are resampled and transformed, as torch names it: the encoder's device, or empty for the decode
    processes."""
    max_forward_s: float = 300.0
    """No batch takes as long on the device: then it hangs, and the encoder is to be replaced."""
    encode_delay_s: float = 0.0
    """Fault injection for tests: the forward thread sleeps this long before each forward."""
    num_decode_processes: int = 2
    """0 decodes in a thread of this process (tests, one-process mode)."""
    decode_limits: DecodeLimits = DEFAULT_LIMITS
    """Of one item in its decode process, and of all together."""
    model_dir: str = ""
    """Where decode processes load the family from; needed if there are any."""
    patience: float = 4.0
    """A request is overtaken only by ones that come within `patience` times its own encoding time."""

    @property
    def passed_s(self) -> float:
        """How long others pass what finds no room: a part of the time that the shortest-lived item has, so that what
        must wait for room has most of its time left when room is kept for it."""
        return PASSED_SHARE * min(self.decode_limits.timeout_s(modality) for modality in self.modalities)

    def __post_init__(self) -> None:
        if not self.modalities:
            raise ConfigError("an encoder needs at least one modality")
        if self.num_decode_processes > 0 and not self.model_dir:
            raise ConfigError("decode processes need model_dir; set it, or num_decode_processes to 0")
        positive = (
            "max_batch_cost",
            "max_items_in_flight",
            "max_queue_cost",
            "max_decoded_cost",
            "lease_s",
            "report_interval_s",
            "max_forward_s",
        )
        for name in positive:
            if getattr(self, name) <= 0:
                raise ConfigError(f"encoder: {name} must be positive, not {getattr(self, name)}")
        for name in ("encode_delay_s", "num_decode_processes", "patience"):
            if getattr(self, name) < 0:
                raise ConfigError(f"encoder: {name} can't be negative")
