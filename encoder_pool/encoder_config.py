"""Holds the settings of one encoder replica: `EncoderConfig`, and in it `DecodeLimits`, the limits of decoding for one
item in its decode process and for all items together.

They are settings only, and arguments only: nothing here reads the environment. The decode processes, `DecodePool` and
the pipeline enforce them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fabric.contracts import ConfigError

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
        if (lowest := min(*limits, self.memory_bytes, self.total_bytes)) <= 0:
            raise ConfigError(f"encoder: every limit of decoding must be positive, but one is {lowest}")

    def cpu_s(self, modality: str) -> float:
        return self.modality_to_cpu_s.get(modality, OTHER_CPU_S)

    def timeout_s(self, modality: str) -> float:
        return self.modality_to_timeout_s.get(modality, OTHER_TIMEOUT_S)


DEFAULT_LIMITS = DecodeLimits(MODALITY_TO_CPU_S, MODALITY_TO_TIMEOUT_S)


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
    device: str = "cpu"
    """Names the device on which the encoder's model lies, as torch names it."""
    mel_device: str = ""
    """Names the device that resamples and transforms sounds. It is `device`, or empty if the decode processes do this
    work."""
    max_forward_s: float = 300.0
    """No batch takes this long on a device that works. A longer pass means that the device hangs and the encoder must
    be replaced."""
    encode_delay_s: float = 0.0
    """Makes each forward pass take at least this long, plus `encode_delay_s_per_cost` for each patch in it. The forward
    thread computes and then waits for the rest of that time. So tests and benches give a small model on a CPU the times
    of a large one on a device of its own, whose work takes no processor."""
    encode_delay_s_per_cost: float = 0.0
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

    def least_forward_s(self, cost: int) -> float:
        """Returns the time that a forward pass over `cost` patches takes at least."""
        return self.encode_delay_s + self.encode_delay_s_per_cost * cost

    def __post_init__(self) -> None:
        if not self.modalities:
            raise ConfigError("encoder: modalities must name at least one modality")
        if self.num_decode_processes > 0 and not self.model_dir:
            raise ConfigError(
                f"encoder: num_decode_processes is {self.num_decode_processes}, but model_dir is empty; set "
                "model_dir, or set num_decode_processes to 0"
            )
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
        for name in ("encode_delay_s", "encode_delay_s_per_cost", "num_decode_processes", "patience"):
            if getattr(self, name) < 0:
                raise ConfigError(f"encoder: {name} must be at least 0, not {getattr(self, name)}")
