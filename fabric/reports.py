"""Defines the reports of members to routers, sent several times a second and on change. A router keeps the
newest report.

Times are in seconds and memory is in bytes. `seq` only grows within one `epoch`, the member's life. The module knows
nothing of how a router uses the numbers.
"""

from __future__ import annotations

from fabric.ids import AttemptId, MemberId
from fabric.wire import PlaneWire, Wire


class WorkerReport(PlaneWire, frozen=True):
    """The worker sends this to routers, several times a second and on change. The fields are gauges; `seq` only
    grows."""

    worker_id: MemberId
    epoch: int
    seq: int
    acknowledged: tuple[AttemptId, ...]
    """Lists the attempts that the numbers already contain; the router stops adding them locally."""
    num_running: int
    """Counts the sequences that have begun, including those at their doorstep."""
    num_waiting: int
    """Counts the sequences that have not begun; they hold no blocks."""
    num_at_doorstep: int
    """Counts the sequences that can't continue until the feature of their next placeholder arrives."""
    queued_tokens: int
    """Counts the admitted tokens that could be computed now and are not yet. It leaves out the tokens behind a missing
    feature, those of choices that take over a sibling's, and the next token of a sequence that decodes."""
    num_decoding: int
    """Counts the sequences of which only the next token is to be computed."""
    kv_blocks_used: int
    """Counts the blocks that a sequence references; cached free blocks do not count."""
    kv_blocks_total: int
    """Counts the KV blocks of the worker."""
    inbox_bytes_used: int
    """Counts the bytes of the inbox that hold features or wait for a transfer to end."""
    inbox_bytes_total: int
    """Holds the size of the inbox."""
    num_features: int
    """Counts the features that lie in the inbox."""
    num_quarantined: int
    """Counts the slots of the inbox whose transfer did not end. They stay unused, because bytes of a frozen encoder may
    still arrive there."""
    steps: int
    """Counts the steps that were computed."""
    tokens_generated: int
    """Counts the generated tokens."""
    prompt_tokens_computed: int
    """Counts the computed prompt tokens; tokens that are computed again after a preemption count again."""
    prefix_hit_tokens: int
    """Counts the prompt tokens that were found in the prefix cache."""
    prefix_query_tokens: int
    """Counts the prompt tokens of all sequences that have begun, which is what `prefix_hit_tokens` is a part of."""
    num_preemptions: int
    """Counts the sequences that had to give up their blocks to a sequence of higher rank and begin again."""
    prefill_s_per_token: float
    """Holds the seconds per weighted token, measured at boot and corrected online; it is 0 until known."""
    step_overhead_s: float
    """Holds the time of a step that does not depend on its tokens, measured at boot and corrected online."""
    kept_bytes_used: int = 0
    """Counts the bytes of host memory that hold features which were kept after prefill."""
    num_kept_hits: int = 0
    """Counts the features that were kept and used again, so that no encoder had to send them."""
    drafts_proposed: int = 0
    """Counts the tokens that were guessed and computed; `drafts_accepted` counts those of them that were right."""
    drafts_accepted: int = 0
    """Counts the guessed tokens that were right and were sent."""
    queued_flat_tokens: float = 0.0
    """Counts `queued_tokens`, weighted by their contexts (`fabric.weighted_tokens`)."""
    decode_s_per_sequence: float = 0.0
    """Holds the time that a decoding sequence adds to a step. A step takes `step_overhead_s`, this time for each
    decoding sequence, and `prefill_s_per_token` for each weighted token of the other sequences."""
    residence_s: float = 0.0
    """Holds the time from a sequence's first step to its end, as recently measured; it is 0 until a sequence has
    ended."""
    max_step_tokens: int = 0
    """Holds the limit of tokens in one step; 0 means unknown."""
    max_sequences: int = 0
    """Holds the limit of sequences in one step; 0 means unknown."""
    is_lost: bool = False
    """This says that the engine has died: the worker ends its requests and takes no more."""


class EncodeCost(Wire, frozen=True):
    """Holds what a forward pass over one modality takes: `overhead_s + seconds_per_cost * cost`."""

    modality: str
    seconds_per_cost: float
    overhead_s: float


class EncoderReport(PlaneWire, frozen=True):
    """The encoder sends this to routers. Costs are in patches, or in mel frames for sounds. A field that is called a
    sum only grows."""

    encoder_id: MemberId
    epoch: int
    seq: int
    acknowledged: tuple[AttemptId, ...]
    num_queued: int
    """Counts the units that are not yet in a forward pass."""
    queued_cost: int
    """Sums the cost of the units that are not yet in a forward pass."""
    num_encoding: int
    """Counts the units in the present forward pass."""
    arena_bytes_used: int
    """Counts the bytes that are leased or being written; `arena_bytes_cached` counts the cached bytes that may be
    evicted."""
    arena_bytes_cached: int
    """Counts the bytes of complete features without a lease, which may be evicted."""
    arena_bytes_total: int
    """Holds the size of the arena."""
    num_leases: int
    """Counts the leases under which workers read features."""
    items_encoded: int
    """Counts the items that were encoded."""
    batches: int
    """Counts the forward passes."""
    cache_hits: int
    """Counts the items whose features were still in the arena, so that nothing had to be encoded."""
    encode_s_per_cost: float
    """Holds the seconds per unit of cost over all modalities, measured at boot and corrected online; it is 0 until
    known."""
    batch_overhead_s: float
    """Holds the time of a forward pass that does not depend on its cost, over all modalities."""
    costs: tuple[EncodeCost, ...] = ()
    """Holds the same costs for each modality."""
    num_items_queued: int = 0
    """Counts the items whose last unit is not in the forward pass."""
    queued_s: float = 0.0
    """Predicts the time that `queued_cost` adds to forward passes."""
    num_items_pending: int = 0
    """Counts the items of open calls that have no result."""
    num_in_flight: int = 0
    """Counts the items that are being decoded, are decoded, or are in the forward pass."""
    max_in_flight: int = 0
    """Limits how many items may be in decoding, or decoded and waiting for the forward pass; items in the forward pass
    come in addition."""
    num_decoding: int = 0
    """Counts the items that are being decoded."""
    busy_fraction: float = 0.0
    """Holds the fraction of the last second or so in which a forward pass was running."""
    num_features_encoding: int = 0
    """Counts the features that are being written."""
    num_features_cached: int = 0
    """Counts the features that are complete and have no lease."""
    num_features_staged: int = 0
    """Counts the features that are leased to a worker."""
    arena_bytes_encoding: int = 0
    """Counts the part of `arena_bytes_used` that is being written."""
    items_received: int = 0
    """Counts the items that routers asked for; a content that occurs several times in one call counts once. This field
    is a running sum since the start, and so are all fields below."""
    items_failed: int = 0
    """Counts the items that failed or were refused, once for each call that asked for them."""
    items_decoded: int = 0
    """Counts the items that were decoded."""
    decode_s: float = 0.0
    """Sums the time of decoding files to pixels or samples."""
    forward_s: float = 0.0
    """Sums the time of forward passes."""
    batch_units: int = 0
    """Counts the units in `batches`."""
    batch_cost: int = 0
    """Sums the cost of `batches`."""
    transfers: int = 0
    """Counts the units that a worker has read and then released."""
    transfer_s: float = 0.0
    """Sums the time from the announcement of units to their release by the worker."""
    cache_hit_bytes: int = 0
    """Counts the bytes of the features that were still in the arena when an item asked for them."""
    evictions: int = 0
    """Counts the cached features that were evicted to make room."""
    evicted_bytes: int = 0
    """Counts the bytes of the cached features that were evicted."""
    preprocess_s: float = 0.0
    """Sums the time from pixels or samples to what the encoder takes as input."""
