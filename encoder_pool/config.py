"""Holds the settings of one encoder replica. They are arguments only: nothing here reads the environment."""

from __future__ import annotations

from dataclasses import dataclass

from encoder_pool.decode_limits import DEFAULT_LIMITS, DecodeLimits
from fabric.errors import ConfigError

PASSED_SHARE = 0.1
"""Others may pass an item that finds no room for this share of an item's time limit."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Holds the settings of one encoder replica. Costs are in patches, or in mel frames for sounds, as in
    `MediaItem.cost`. Raises ConfigError for settings that contradict each other."""

    modalities: tuple[str, ...]
    """Lists the modalities that this replica loads; items of others are refused."""
    max_batch_cost: int = 16 * 1024
    """Limits the patches of one forward pass (a single unit may have more). The default is 16 pictures of 448 x 448 at
    patches of 14."""
    max_items_in_flight: int = 32
    """Limits the items that are decoded, or are being decoded, and wait for their forward pass. Further items wait as
    files. The default of 32 per encoder is a figure of the OmniConnector article (docs/references.md)."""
    max_queue_cost: int = 512 * 1024
    """Limits the patches that are accepted and not yet encoded; a call that would exceed the limit is refused."""
    max_decoded_cost: int = 64 * 1024
    """Limits the patches that are decoded and wait for the forward pass, which bounds host memory (a patch is a few KiB
    of float32). Other inputs count by their bytes."""
    lease_s: float = 60.0
    """An announced feature is held for its worker for this long."""
    report_interval_s: float = 0.2
    mel_device: str = ""
    """Names the device that resamples and transforms sounds, as torch names it. It is the encoder's device, or empty if
    the decode processes do this work."""
    max_forward_s: float = 300.0
    """No batch takes this long on a device that works. A longer pass means that the device hangs and the encoder must
    be replaced."""
    encode_delay_s: float = 0.0
    """Injects a fault for tests: the forward thread sleeps this long before each forward pass."""
    num_decode_processes: int = 2
    """Sets the number of decode processes; 0 decodes in a thread of this process (tests, one-process mode)."""
    decode_limits: DecodeLimits = DEFAULT_LIMITS
    """Limits the decoding of one item in its decode process, and of all items together."""
    model_dir: str = ""
    """Names the directory from which decode processes load the family; it is required if there are decode processes."""
    patience: float = 4.0
    """A request is overtaken only by requests that arrive within `patience` times its own encoding time."""

    @property
    def passed_s(self) -> float:
        """Returns how long others may pass an item that finds no room. It is a share of the shortest time limit of any
        modality, so that an item that must wait for room has most of its time left when room is kept for it."""
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
