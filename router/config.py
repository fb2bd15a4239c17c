"""The router's settings: limits, budgets and periods. Read from nowhere here; `deploy` fills them in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from modalities.family import DEFAULT_OPTIONS, MediaOptions
from modalities.plugin import MediaLimits
from router.planning.cluster import PlannerSettings

MIB = 2**20
Policy = Literal["error", "reduce", "text_only"]
"""What becomes of a request whose medium can't be encoded: see `router.ladder`."""
MODALITY_TO_ENCODE_TIMEOUT_MS = {"image": 10_000, "audio": 20_000, "video": 60_000}
OTHER_ENCODE_TIMEOUT_MS = 60_000


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Frozen; one per router process."""

    model_name: str
    """The name clients ask for."""
    capacity_wait_s: float
    """How long a request waits in all for workers, and for encoders of its media, that are not there."""
    block_size: int
    """Tokens per KV block; the workers' own, or no prefix is ever found."""
    feature_itemsize: int = 4
    """Bytes of one number of a feature, for the planner's estimate of transfers."""
    max_body_bytes: int = 32 * MIB
    max_bodies_bytes: int = 1024 * MIB
    """Bodies (and the media cut from them) of all requests in flight together."""
    max_in_flight: int = 256
    max_num_choices: int = 8
    min_priority: int = -(2**31)
    """Most urgent that a request may be: a lower number is served first, always."""
    max_stop_strings: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 64
    max_media_items: int = 64
    max_messages: int = 4096
    media_limits: MediaLimits = field(default_factory=MediaLimits)
    max_items_per_prompt: Mapping[str, int] = field(default_factory=dict)
    """Modality -> most items of a request, where it is less than what the family takes; 0 refuses the modality."""
    video_options: MediaOptions = DEFAULT_OPTIONS
    """How videos are sampled where a request does not say; `max_tokens` is for all of a request's together."""
    answer_tokens: int = 512
    """What videos leave of the context for an answer of no stated length, at most an eighth of the context."""
    on_encode_failure: Policy = "error"
    """For requests that do not say."""
    encode_timeout_ms: Mapping[str, int] = field(default_factory=lambda: dict(MODALITY_TO_ENCODE_TIMEOUT_MS))
    """Modality -> how long the encoding of an item may take, its wait at the encoder included. The items of a call have
    theirs together. It travels with the call; an encoder that is too busy says so before it is over."""
    encode_grace_s: float = 5.0
    """How much later the answer of an encoder may come: its media have to get there. Then it is taken for silent."""
    heartbeat_s: float = 0.5
    lease_s: float = 5.0
    dispatch_timeout_s: float = 600.0
    """One attempt, from dispatch to its terminal event."""
    max_attempts: int = 3
    max_encodes_per_item: int = 8
    """Encodings of one item within one attempt: evictions and lost encoders may ask for more than one. Refusals of busy
    encoders are counted apart, up to the same number."""
    exclusion_s: float = 7.0
    """How long nothing is planned onto a member that was gone or lost. Longer than the directory takes to notice."""
    gap_timeout_s: float = 2.0
    """How long token frames may trail the terminal event; then the attempt is made again."""
    settle_timeout_s: float = 2.0
    """How long a worker may take to answer an abort with its terminal event."""
    write_timeout_s: float = 120.0
    """A reader that takes nothing for so long has left."""
    retry_after_s: float = 1.0
    """What Retry-After says when nobody knows better."""
    planner: PlannerSettings = field(default_factory=PlannerSettings)
    max_traces: int = 256
    max_trace_events: int = 512

    def encode_timeout_s(self, modality: str) -> float:
        return self.encode_timeout_ms.get(modality, OTHER_ENCODE_TIMEOUT_MS) / 1000
