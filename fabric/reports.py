"""What members tell routers about themselves, several times a second and on change. A router keeps the newest.

Times in seconds, memory in bytes. `seq` only grows within one `epoch`, the member's life.
"""

from __future__ import annotations

from fabric.ids import AttemptId, MemberId
from fabric.wire import PlaneWire, Wire


class WorkerReport(PlaneWire, frozen=True):
    """Worker -> router, several times a second and on change. Gauges; `seq` only grows."""

    worker_id: MemberId
    epoch: int
    seq: int
    acknowledged: tuple[AttemptId, ...]
    """Attempts that these numbers already contain: the router stops adding them locally."""
    num_running: int
    num_waiting: int
    num_at_doorstep: int
    queued_tokens: int
    """Tokens admitted, that could be computed now and are not yet: neither those behind a missing feature, nor those
    of choices that take over a sibling's, nor the next token of a sequence that decodes."""
    num_decoding: int
    kv_blocks_used: int
    """Blocks referenced by a sequence; cached free blocks do not count."""
    kv_blocks_total: int
    inbox_bytes_used: int
    inbox_bytes_total: int
    num_features: int
    num_quarantined: int
    steps: int
    tokens_generated: int
    prompt_tokens_computed: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    num_preemptions: int
    prefill_s_per_token: float
    """Measured at boot and corrected online; 0 until known."""
    step_overhead_s: float
    kept_bytes_used: int = 0
    """Of host memory, by features that were kept after prefill."""
    num_kept_hits: int = 0
    """Features that were kept and used again, so that nobody had to send them."""
    drafts_proposed: int = 0
    """Tokens that were guessed and computed, and those of them that were right."""
    drafts_accepted: int = 0
    queued_flat_tokens: float = 0.0
    """`queued_tokens`, weighed by their contexts (`fabric.flat_tokens`)."""
    decode_s_per_sequence: float = 0.0
    """What a sequence that decodes adds to a step. A step takes `step_overhead_s`, this for each of those, and
    `prefill_s_per_token` for each flat token of the others."""
    residence_s: float = 0.0
    """From a sequence's first step to its end, of late; 0 until one ended."""
    max_step_tokens: int = 0
    """Limits of one step; 0 if unknown."""
    max_sequences: int = 0
    is_lost: bool = False
    """The engine has died: the worker ends what it had and takes nothing any more."""


class EncodeCost(Wire, frozen=True):
    """What a forward over one modality takes: `overhead_s + seconds_per_cost * cost`."""

    modality: str
    seconds_per_cost: float
    overhead_s: float


class EncoderReport(PlaneWire, frozen=True):
    """Encoder -> router. Costs in patches, or mel frames of sounds. What is called a sum only grows."""

    encoder_id: MemberId
    epoch: int
    seq: int
    acknowledged: tuple[AttemptId, ...]
    num_queued: int
    queued_cost: int
    num_encoding: int
    arena_bytes_used: int
    """Leased or being written; cached bytes that may be evicted are `arena_bytes_cached`."""
    arena_bytes_cached: int
    arena_bytes_total: int
    num_leases: int
    items_encoded: int
    batches: int
    cache_hits: int
    encode_s_per_cost: float
    """Measured at boot and corrected online, over all modalities; 0 until known."""
    batch_overhead_s: float
    costs: tuple[EncodeCost, ...] = ()
    """The same for each modality."""
    num_items_queued: int = 0
    """Items that are not in the forward with their last unit."""
    queued_s: float = 0.0
    """What `queued_cost` is predicted to add to forwards."""
    num_items_pending: int = 0
    """Items of open calls, without a result."""
    num_in_flight: int = 0
    """Items being decoded, decoded or in the forward."""
    max_in_flight: int = 0
    """How many may be decoded or wait so; those in the forward come on top."""
    num_decoding: int = 0
    busy_fraction: float = 0.0
    """Of the last second or so, by the forward."""
    num_features_encoding: int = 0
    num_features_cached: int = 0
    num_features_staged: int = 0
    arena_bytes_encoding: int = 0
    """Of `arena_bytes_used`: being written."""
    items_received: int = 0
    """A sum, as are all that follow."""
    items_failed: int = 0
    items_decoded: int = 0
    decode_s: float = 0.0
    forward_s: float = 0.0
    batch_units: int = 0
    """Units in `batches`."""
    batch_cost: int = 0
    """Of `batches`."""
    transfers: int = 0
    """Units that a worker has let go of, having read them."""
    transfer_s: float = 0.0
    """From their announcement until then."""
    cache_hit_bytes: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    preprocess_s: float = 0.0
    """From pixels or samples to what the encoder takes."""
