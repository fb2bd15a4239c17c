"""What a worker is told at its start. Plain numbers; knows no model and reads no environment."""

from __future__ import annotations

from dataclasses import dataclass

from fabric.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Speculation:
    """Prompt lookup: up to `max_tokens` drafted tokens per sequence and step (0: off), taken from behind an earlier
    occurrence of its last `max_ngram` to `min_ngram` tokens, the longest that there is. Raises ConfigError."""

    max_tokens: int = 0
    min_ngram: int = 2
    max_ngram: int = 4

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise ConfigError(f"worker: speculation.max_tokens must not be negative, not {self.max_tokens}")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ConfigError(
                f"worker: speculation needs 1 <= min_ngram <= max_ngram, not {self.min_ngram} and {self.max_ngram}"
            )


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Raises ConfigError for numbers that no step could be made of."""

    block_size: int = 16
    """Tokens per KV block."""
    num_blocks: int = 1024
    max_step_tokens: int = 512
    """Most tokens computed in one step, over all sequences."""
    max_sequences: int = 64
    """Most sequences in one step."""
    is_prefix_cache_enabled: bool = True
    pull_timeout_s: float = 30.0
    report_interval_s: float = 0.2
    unclaimed_unit_ttl_s: float = 30.0
    """How long a unit that nobody asked for yet is kept."""
    unit_wait_s: float = 10.0
    """How long an announcement is awaited before the router is asked again: it, or the asking, may be lost."""
    num_ranks: int = 1
    """Processes that share each layer's weights and KV heads."""
    keep_features: str = "auto"
    """`auto`, `always` or `never`: what happens to a feature after prefill (`scheduling.keeping`)."""
    kept_bytes: int = 64 * 2**20
    """Of host memory, for features that are kept."""
    side_layers: tuple[tuple[str, int], ...] = ()
    """(name, layer): hidden layers whose rows are stored beside the KV for requests that ask for them."""
    is_chunked_media_enabled: bool = True
    """Whether a step may end inside a run of placeholders. Off for models whose media tokens see each other."""
    speculation: Speculation = Speculation()
    cuda_graphs: str = "off"
    """`auto`: decode steps are recorded where device, torch and block size allow it (`cuda_graphs`)."""
    is_workspace_measured: bool = False
    """Whether the largest step is run once at boot, which refuses the start if the device has no room for it."""

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_step_tokens", "max_sequences", "num_ranks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"worker: {name} must be at least 1, not {getattr(self, name)}")
        if self.cuda_graphs not in ("off", "auto"):
            raise ConfigError(f"worker: cuda_graphs must be `off` or `auto`, not {self.cuda_graphs!r}")
        if self.side_layers and self.num_ranks > 1:
            raise ConfigError("worker: side tensors are not kept by several ranks")
        if not self.is_chunked_media_enabled and self.max_step_tokens <= self.max_sequences:
            raise ConfigError("worker: media in one piece need max_step_tokens above max_sequences")

    @property
    def max_piece_tokens(self) -> int:
        """Longest run of placeholders that fits in a step beside a decode of every other sequence."""
        return self.max_step_tokens - self.max_sequences
