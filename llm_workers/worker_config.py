"""Defines the settings that a worker gets at its start. They are plain numbers and strings; this module knows no model
and reads no environment.
"""

from __future__ import annotations

from dataclasses import dataclass

from fabric.contracts import ConfigError


@dataclass(frozen=True, slots=True)
class Speculation:
    """Configures speculation by prompt lookup. Each step drafts up to `max_tokens` tokens per sequence (0 turns it
    off). The drafts are copied from the tokens that follow an earlier occurrence of the sequence's last tokens. The
    lookup tries matches of `max_ngram` down to `min_ngram` tokens and uses the longest match. Raises ConfigError for
    numbers out of range."""

    max_tokens: int = 0
    min_ngram: int = 2
    max_ngram: int = 4

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise ConfigError(f"worker: speculation.max_tokens must be at least 0, not {self.max_tokens}")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ConfigError(
                f"worker: speculation needs 1 <= min_ngram <= max_ngram, not {self.min_ngram} and {self.max_ngram}"
            )


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Holds the settings of one worker. Raises ConfigError for settings that allow no step, contradict each other, or
    have no meaning."""

    block_size: int = 16
    """Sets the number of tokens per KV block."""
    num_blocks: int = 1024
    are_blocks_fitted: bool = False
    """Says whether the device's memory decides how many KV blocks there are, in place of `num_blocks`, when the weights
    are loaded (`compute.fit_blocks`)."""
    device_share: float = 1.0
    """Holds the share of its device that the worker may take; others share the rest."""
    max_step_tokens: int = 512
    """Limits the tokens computed in one step, over all sequences."""
    media_chunk_tokens: int | None = None
    """Limits the tokens that all prompts compute in one step while a request without media is here, and for a moment
    after, by limiting those with media: so they make no step long in which a text arrives, begins or decodes. With
    None, the limit is what nine in ten steps compute of texts (see `step_planner`); 0 means that only `max_step_tokens`
    limits them."""
    max_sequences: int = 64
    """Limits the sequences in one step."""
    is_prefix_cache_enabled: bool = True
    pull_timeout_s: float = 30.0
    report_interval_s: float = 0.2
    unclaimed_unit_ttl_s: float = 30.0
    """Limits how long the worker keeps an announced unit (one separately encoded part of a media item) whose request
    has not arrived."""
    unit_wait_s: float = 10.0
    """Sets how long the worker waits for the announcement of a unit before it asks the router again, because the
    announcement or the worker's own message may be lost."""
    num_ranks: int = 1
    """Sets the number of processes that share each layer's weights and KV heads."""
    keep_features: str = "auto"
    """Selects what happens to a feature after prefill: `auto`, `always` or `never` (see `features.host_cache`)."""
    kept_bytes: int = 64 * 2**20
    """Limits the host memory for features that are kept, in bytes."""
    grammar_bytes: int = 256 * 2**20
    """Limits the memory of compiled grammars as `sampling.grammar` estimates it, in bytes."""
    side_layers: tuple[tuple[str, int], ...] = ()
    """Lists pairs (name, layer). The rows of these hidden layers are stored with the KV for requests that ask for
    them."""
    needs_all_rows: bool = False
    """Says whether the next stage needs the rows of the side layer at all positions, those of generated tokens
    included, or at those of media alone."""
    speculation: Speculation = Speculation()
    cuda_graphs: str = "off"
    """Selects CUDA graphs: with `auto`, decode steps are recorded where device, torch and block size allow it (see the
    module `compute.cuda_graphs`); `off` records none."""
    is_workspace_measured: bool = False
    """Says whether the largest step runs once at boot. The worker then refuses to start if the device has no room for
    that step."""
    is_overlap_enabled: bool = True
    """Says whether a sequence computes up to its doorstep, the first placeholder whose feature has not landed. If not,
    it begins when every feature that it needs is here, so the inbox must have room for all of them."""
    step_delay_s: float = 0.0
    """Makes each step take at least this long, plus the two shares below for the work in it. The engine's thread
    computes and then waits for the rest of that time. So tests and benches give a small model on a CPU the times of a
    large one on a device of its own, whose work takes no processor."""
    step_delay_s_per_token: float = 0.0
    """Counts for each weighted token (`fabric.contracts.learned_cost`) that is not a decode."""
    step_delay_s_per_decode: float = 0.0
    """Counts for each sequence that decodes."""

    def least_step_s(self, num_decodes: int, weighted_tokens: float) -> float:
        """Returns the time that a step takes at least."""
        return (
            self.step_delay_s
            + self.step_delay_s_per_decode * num_decodes
            + self.step_delay_s_per_token * weighted_tokens
        )

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_step_tokens", "max_sequences", "num_ranks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"worker: {name} must be at least 1, not {getattr(self, name)}")
        for name in ("media_chunk_tokens", "step_delay_s", "step_delay_s_per_token", "step_delay_s_per_decode"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"worker: {name} must be at least 0, not {getattr(self, name)}")
        if not 0 < self.device_share <= 1:
            raise ConfigError(f"worker: device_share must be above 0 and at most 1, not {self.device_share}")
        if self.cuda_graphs not in ("off", "auto"):
            raise ConfigError(f"worker: cuda_graphs must be `off` or `auto`, not {self.cuda_graphs!r}")
        if self.side_layers and self.num_ranks > 1:
            raise ConfigError(f"worker: side_layers needs a worker of one rank, but num_ranks is {self.num_ranks}")
