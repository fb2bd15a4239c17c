"""Defines the reports that workers and encoders send to routers, and the metrics that routers make of them.

A report is sent several times a second and on change, and a router keeps the newest one. Times are in seconds and
memory is in bytes. `seq` only grows within one `epoch`, the member's life.

A number that operators see declares its metric in its field: `gauge` or `counter` gives the kind, the name and the help
text (`fabric.contracts.reported_metrics`). Routers export what `metrics_of` finds, so no other file names the metric.
The numbers of one part of a member are a struct of their own (`EngineStats`, `FeatureStats`, `ItemStats`,
`DeviceStats`, `ArenaStats`). The part counts in such a struct, and a copy of it travels in the report. So a new counter
is a field here and the line that counts. Fields are only appended to each struct.

This module knows nothing of Prometheus, of how a number comes about, and of what a router does with a report.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from fabric.contracts.calls import PlaneWire, Wire
from fabric.contracts.encoder_queue import EMPTY_PROFILE
from fabric.contracts.identity import AttemptId, MemberId
from fabric.contracts.reported_metrics import LABELLED_AS_MEMBER, ProcessStats, counter, gauge

# ---------------------------------------------------------------- workers


class EngineStats(msgspec.Struct, array_like=True):
    """Holds the numbers of a worker's engine. The engine counts in one `EngineStats` and hands out copies."""

    num_running: Annotated[
        int, gauge("weft_worker_num_running", "Sequences that have begun, including those that wait for a feature.")
    ] = 0
    num_waiting: Annotated[
        int, gauge("weft_worker_num_waiting", "Sequences that have not begun; they hold no KV blocks.")
    ] = 0
    num_at_doorstep: Annotated[
        int,
        gauge(
            "weft_worker_num_waiting_for_features",
            "Sequences that can't continue until the feature of their next placeholder arrives.",
        ),
    ] = 0
    queued_tokens: Annotated[
        int,
        gauge(
            "weft_worker_queued_tokens",
            "Tokens of admitted requests that could be computed now and are not yet. Tokens behind a missing feature, "
            "tokens that a choice takes over from another choice, and the next token of a sequence that decodes do not "
            "count.",
        ),
    ] = 0
    queued_weighted_tokens: Annotated[
        float,
        gauge(
            "weft_worker_queued_weighted_tokens",
            "The tokens of `weft_worker_queued_tokens`, weighted by their contexts: the number of tokens without a "
            "context that would take as long.",
        ),
    ] = 0.0
    num_decoding: Annotated[
        int, gauge("weft_worker_num_decoding", "Sequences of which only the next token is to be computed.")
    ] = 0
    kv_blocks_used: Annotated[
        int,
        gauge("weft_worker_kv_used_blocks", "KV blocks that sequences use; blocks that are only cached do not count."),
    ] = 0
    kv_blocks_total: Annotated[int, gauge("weft_worker_kv_capacity_blocks", "KV blocks of the worker.")] = 0
    num_features: Annotated[int, gauge("weft_worker_num_features", "Features that the engine can read.")] = 0
    steps: Annotated[int, counter("weft_worker_steps", "Steps that were computed.")] = 0
    tokens_generated: Annotated[int, counter("weft_worker_tokens_generated", "Generated tokens.")] = 0
    prompt_tokens_computed: Annotated[
        int,
        counter(
            "weft_worker_prompt_tokens_computed",
            "Prompt tokens that were computed; those that are computed again after a preemption count again.",
        ),
    ] = 0
    prefix_hit_tokens: Annotated[
        int, counter("weft_worker_prefix_hit_tokens", "Prompt tokens that were found in the prefix cache.")
    ] = 0
    prefix_query_tokens: Annotated[
        int,
        counter(
            "weft_worker_prefix_query_tokens",
            "Prompt tokens of all sequences that have begun. `weft_worker_prefix_hit_tokens_total` counts those of "
            "them that were found in the prefix cache.",
        ),
    ] = 0
    num_preemptions: Annotated[
        int,
        counter(
            "weft_worker_preemptions",
            "Preemptions: a sequence gave up its KV blocks to a sequence of higher rank and had to begin again.",
        ),
    ] = 0
    drafts_proposed: Annotated[
        int,
        counter(
            "weft_worker_drafts_proposed",
            "Guessed tokens that were computed. `weft_worker_drafts_accepted_total` counts those of them that were "
            "right.",
        ),
    ] = 0
    drafts_accepted: Annotated[
        int, counter("weft_worker_drafts_accepted", "Guessed tokens that were right and were sent.")
    ] = 0
    behind_tokens: Annotated[
        int,
        gauge(
            "weft_worker_behind_tokens",
            "Tokens of admitted requests that can't be computed yet because a feature ahead of them has not arrived.",
        ),
    ] = 0
    behind_weighted_tokens: Annotated[
        float,
        gauge(
            "weft_worker_behind_weighted_tokens",
            "The tokens of `weft_worker_behind_tokens`, weighted by their contexts.",
        ),
    ] = 0.0
    step_s: Annotated[float, counter("weft_worker_step_seconds", "Time of the steps that were computed.")] = 0.0


class FeatureStats(msgspec.Struct, array_like=True):
    """Holds the numbers of a worker's inbox and of the features that it keeps. The worker's feature store counts in one
    `FeatureStats` and hands out copies."""

    inbox_bytes_used: Annotated[
        int,
        gauge(
            "weft_worker_inbox_used_bytes", "Bytes of the inbox that hold features or wait for the end of a transfer."
        ),
    ] = 0
    inbox_bytes_total: Annotated[int, gauge("weft_worker_inbox_capacity_bytes", "Size of the inbox in bytes.")] = 0
    num_quarantined: Annotated[
        int,
        gauge(
            "weft_worker_num_quarantined",
            "Slots of the inbox whose transfer did not end. They stay unused, because bytes of a frozen encoder may "
            "still arrive there.",
        ),
    ] = 0
    kept_bytes_used: Annotated[
        int,
        gauge("weft_worker_kept_bytes", "Bytes of host memory that hold features which are kept after prefill."),
    ] = 0
    num_kept_hits: Annotated[
        int,
        counter(
            "weft_worker_kept_hits", "Features that were kept and used again, so that no encoder had to send them."
        ),
    ] = 0


class LinkStats(msgspec.Struct, array_like=True):
    """Holds the sums over the pulls of a worker on links of one class."""

    link: str
    """Names the class, such as `rdma`; it is `unknown` for an encoder that has left."""
    num_pulls: Annotated[
        int, counter("weft_worker_transfers", "Units that a worker has pulled from encoders, by the class of the link.")
    ] = 0
    pulled_bytes: Annotated[
        int,
        counter("weft_worker_transfer_bytes", "Bytes of the units of `weft_worker_transfers_total`."),
    ] = 0
    pull_s: Annotated[
        float,
        counter(
            "weft_worker_transfer_seconds",
            "Time of the pulls of `weft_worker_transfers_total`, without the wait for room in the inbox. Pulls at the "
            "same time count each.",
        ),
    ] = 0.0
    num_failed: Annotated[
        int,
        counter(
            "weft_worker_transfer_failures",
            "Pulls that brought nothing: the encoder had given the slot to another feature, did not answer in time, or "
            "has left.",
        ),
    ] = 0
    num_staged: Annotated[
        int, counter("weft_worker_transfers_staged", "Transfers through pinned memory of the host to a GPU.")
    ] = 0
    bytes_per_s: Annotated[
        float,
        gauge(
            "weft_worker_transfer_bytes_per_second",
            "Rate of the latest reads of units, where larger ones count for more; 0 until a unit was read.",
        ),
    ] = 0.0


class PullTime(Wire, frozen=True):
    """A `PullTime` says how long a worker read from an encoder. Times are seconds since the window's beginning, without
    the wait for room in the inbox."""

    source: str
    """Names the encoder's transfer agent."""
    num_bytes: int
    start_s: float
    end_s: float


class PullWindow(Wire, frozen=True):
    """A `PullWindow` is a time in which a worker pulled features without a pause. It lists everything that the worker
    read in that time, so a reader knows which pulls shared a link."""

    pulls: tuple[PullTime, ...]


class WorkerReport(PlaneWire, frozen=True):
    """The worker sends this to routers: its load, its costs and its counters."""

    worker_id: MemberId
    epoch: int
    seq: int
    acknowledged: tuple[AttemptId, ...]
    """Lists the attempts of the receiving router that the numbers now contain, so the router stops adding them locally.
    Reports repeat an attempt until the router confirms one of them (`RouterHeartbeat.taken_seq`)."""
    engine: EngineStats
    features: FeatureStats
    prefill_s_per_token: Annotated[
        float,
        gauge(
            "weft_worker_prefill_seconds_per_token",
            "Seconds that a weighted token adds to a step, measured at the start and corrected by every step; 0 until "
            "known.",
        ),
    ] = 0.0
    step_overhead_s: Annotated[
        float,
        gauge(
            "weft_worker_step_overhead_seconds",
            "Time of a step that does not depend on its tokens, measured at the start and corrected by every step.",
        ),
    ] = 0.0
    decode_s_per_sequence: Annotated[
        float,
        gauge(
            "weft_worker_decode_seconds_per_sequence",
            "Time that a decoding sequence adds to a step. A step takes `weft_worker_step_overhead_seconds`, this time "
            "for each decoding sequence, and `weft_worker_prefill_seconds_per_token` for each weighted token of the "
            "other sequences.",
        ),
    ] = 0.0
    residence_s: Annotated[
        float,
        gauge(
            "weft_worker_residence_seconds",
            "Recent average of the time from a sequence's first step to its end; 0 until a sequence has ended.",
        ),
    ] = 0.0
    max_step_tokens: Annotated[
        int, gauge("weft_worker_max_step_tokens", "Most tokens that one step may compute; 0 if unknown.")
    ] = 0
    max_sequences: Annotated[
        int, gauge("weft_worker_max_sequences", "Most sequences that one step may compute; 0 if unknown.")
    ] = 0
    is_lost: bool = False
    """This says that the engine has died: the worker ends its requests and takes no more."""
    pulls: tuple[PullWindow, ...] = ()
    """Holds the windows that have ended since the last report."""
    held_s: Annotated[
        float,
        gauge(
            "weft_worker_held_seconds",
            "Recent average of the time for which a sequence waits for features at its doorstep, over the sequences "
            "that lacked features when they were admitted.",
        ),
    ] = 0.0
    step_weighted_tokens: Annotated[
        float,
        gauge(
            "weft_worker_step_weighted_tokens",
            "Part of `weft_worker_queued_weighted_tokens` that the running step computes; 0 between steps and in steps "
            "that only decode.",
        ),
    ] = 0.0
    step_left_s: Annotated[
        float,
        gauge(
            "weft_worker_step_left_seconds",
            "Predicted time until the running step ends; 0 between steps and in steps that only decode.",
        ),
    ] = 0.0
    at_s: float = 0.0
    """Holds when the report was made, on the worker's own clock; it is 0 if the worker does not say it."""
    engine_age_s: Annotated[
        float,
        gauge(
            "weft_worker_engine_age_seconds",
            "Time since the last change of the numbers of steps, sequences and blocks in this report.",
        ),
    ] = 0.0
    work_s: Annotated[
        float,
        counter(
            "weft_worker_work_seconds",
            "Time that the tokens of steps have added to them, by the predicted costs of both kinds of tokens; "
            "the fixed part of steps, `weft_worker_step_overhead_seconds`, does not count.",
        ),
    ] = 0.0
    doorstep_wait_s: Annotated[
        float,
        counter(
            "weft_worker_doorstep_wait_seconds",
            "Time for which sequences that have ended waited for features at their doorstep, with prefill held.",
        ),
    ] = 0.0
    process: Annotated[ProcessStats, LABELLED_AS_MEMBER] = msgspec.field(default_factory=ProcessStats)
    links: tuple[LinkStats, ...] = ()
    """Holds the sums over pulls for each class of links."""


# ---------------------------------------------------------------- encoders


class ItemStats(msgspec.Struct, array_like=True):
    """Holds the sums over the items of an encoder. The encoder's pipeline counts in one `ItemStats`; a report contains
    a copy."""

    num_received: Annotated[
        int,
        counter(
            "weft_encoder_items_received",
            "Items that routers asked for; a content that occurs several times in one call counts once.",
        ),
    ] = 0
    num_failed: Annotated[
        int,
        counter(
            "weft_encoder_items_failed",
            "Items that failed or were refused, counted once for each call that asked for them.",
        ),
    ] = 0
    num_decoded: Annotated[int, counter("weft_encoder_items_decoded", "Items that were decoded.")] = 0
    num_encoded: Annotated[int, counter("weft_encoder_items_encoded", "Items that were encoded.")] = 0
    num_cache_hits: Annotated[
        int,
        counter(
            "weft_encoder_cache_hits",
            "Items whose features were still in the arena, so that nothing had to be encoded.",
        ),
    ] = 0
    cache_hit_bytes: Annotated[
        int, counter("weft_encoder_cache_hit_bytes", "Bytes of the features of `weft_encoder_cache_hits_total`.")
    ] = 0
    decode_s: Annotated[
        float, counter("weft_encoder_decode_seconds", "Time of decoding files to pixels or samples.")
    ] = 0.0
    preprocess_s: Annotated[
        float,
        counter(
            "weft_encoder_preprocess_seconds",
            "Time of turning pixels or samples into the encoder's input, in helper processes and on the device.",
        ),
    ] = 0.0


class DeviceStats(msgspec.Struct, array_like=True):
    """Holds the sums over the forward passes of an encoder's device. The device queue counts in one `DeviceStats`; a
    report contains a copy."""

    num_batches: Annotated[int, counter("weft_encoder_batches", "Forward passes.")] = 0
    num_units: Annotated[
        int, counter("weft_encoder_batch_units", "Units in the forward passes of `weft_encoder_batches_total`.")
    ] = 0
    encoded_cost: Annotated[
        int, counter("weft_encoder_batch_cost", "Cost of the units in `weft_encoder_batch_units_total`.")
    ] = 0
    forward_s: Annotated[float, counter("weft_encoder_forward_seconds", "Time of forward passes.")] = 0.0

    def batch_ended(self, num_units: int, cost: int, seconds: float) -> None:
        """Counts a forward pass that has ended."""
        self.num_batches += 1
        self.num_units += num_units
        self.encoded_cost += cost
        self.forward_s += seconds


class ArenaStats(msgspec.Struct, array_like=True):
    """Holds the numbers of an encoder's arena and of the features in it. The encoder's feature table counts in one
    `ArenaStats` and hands out copies."""

    used_bytes: Annotated[
        int,
        gauge("weft_encoder_arena_used_bytes", "Bytes of features that are being written or are leased to workers."),
    ] = 0
    cached_bytes: Annotated[
        int,
        gauge("weft_encoder_arena_cached_bytes", "Bytes of complete features without a lease, which may be evicted."),
    ] = 0
    total_bytes: Annotated[int, gauge("weft_encoder_arena_capacity_bytes", "Size of the arena in bytes.")] = 0
    encoding_bytes: Annotated[
        int,
        gauge("weft_encoder_arena_encoding_bytes", "Part of `weft_encoder_arena_used_bytes` that is being written."),
    ] = 0
    num_leases: Annotated[int, gauge("weft_encoder_num_leases", "Leases under which workers may read features.")] = 0
    num_encoding: Annotated[int, gauge("weft_encoder_num_features_encoding", "Features that are being written.")] = 0
    num_cached: Annotated[
        int, gauge("weft_encoder_num_features_cached", "Features that are complete and have no lease.")
    ] = 0
    num_staged: Annotated[
        int, gauge("weft_encoder_num_features_staged", "Features that are complete and leased to a worker.")
    ] = 0
    num_transfers: Annotated[
        int,
        counter(
            "weft_encoder_transfers",
            "Units that a worker has released, because it has read them or does not need them.",
        ),
    ] = 0
    transfer_s: Annotated[
        float,
        counter(
            "weft_encoder_transfer_seconds",
            "Time from the announcement of a unit to its release, summed over `weft_encoder_transfers_total`.",
        ),
    ] = 0.0
    num_evictions: Annotated[
        int, counter("weft_encoder_evictions", "Cached features that were evicted to make room.")
    ] = 0
    evicted_bytes: Annotated[
        int, counter("weft_encoder_evicted_bytes", "Bytes of the features of `weft_encoder_evictions_total`.")
    ] = 0
    encoded_bytes: Annotated[int, counter("weft_encoder_feature_bytes", "Bytes of the features that were encoded.")] = 0


class EncodeCost(Wire, frozen=True):
    """Holds what the stages of an encoder take for one modality, each as a line `overhead_s + seconds_per_cost * cost`:
    a forward pass, the decoding of an item, and its preparation on the device. A line is 0 until the stage was
    measured."""

    modality: str
    seconds_per_cost: Annotated[
        float,
        gauge(
            "weft_encoder_modality_seconds_per_cost", "Time that a unit of cost adds to a forward pass, by modality."
        ),
    ]
    overhead_s: Annotated[
        float,
        gauge(
            "weft_encoder_modality_overhead_seconds",
            "Time of a forward pass that does not depend on its cost, by modality.",
        ),
    ]
    decode_s_per_cost: Annotated[
        float,
        gauge(
            "weft_encoder_modality_decode_seconds_per_cost",
            "Time that a unit of cost adds to the decoding and preprocessing of an item, by modality.",
        ),
    ] = 0.0
    decode_overhead_s: Annotated[
        float,
        gauge(
            "weft_encoder_modality_decode_overhead_seconds",
            "Time of decoding and preprocessing an item that does not depend on its cost, by modality.",
        ),
    ] = 0.0
    device_prepare_s_per_cost: Annotated[
        float,
        gauge(
            "weft_encoder_modality_device_prepare_seconds_per_cost",
            "Time that a unit of cost adds to a batch of sounds whose spectrograms the device makes, by modality.",
        ),
    ] = 0.0
    device_prepare_overhead_s: Annotated[
        float,
        gauge(
            "weft_encoder_modality_device_prepare_overhead_seconds",
            "Time of a batch of sounds whose spectrograms the device makes that does not depend on its cost, by "
            "modality.",
        ),
    ] = 0.0


class EncoderReport(PlaneWire, frozen=True):
    """The encoder sends this to routers: its load, its costs and its counters. Costs are in patches, or in mel frames
    for sounds."""

    encoder_id: MemberId
    epoch: int
    seq: int
    acknowledged: tuple[AttemptId, ...]
    """Lists the attempts of the receiving router that the numbers now contain, so the router stops adding them locally.
    Reports repeat an attempt until the router confirms one of them (`RouterHeartbeat.taken_seq`)."""
    items: ItemStats
    device: DeviceStats
    arena: ArenaStats
    num_queued: Annotated[int, gauge("weft_encoder_num_queued", "Units that are not yet in a forward pass.")] = 0
    queued_cost: Annotated[
        int, gauge("weft_encoder_queue_cost", "Cost of the units that are not yet in a forward pass.")
    ] = 0
    num_encoding: Annotated[int, gauge("weft_encoder_num_encoding", "Units in the present forward pass.")] = 0
    encode_s_per_cost: Annotated[
        float,
        gauge(
            "weft_encoder_encode_seconds_per_cost",
            "Time that a unit of cost adds to a forward pass, over all modalities, measured at the start and corrected "
            "by every pass; 0 until known.",
        ),
    ] = 0.0
    batch_overhead_s: Annotated[
        float,
        gauge(
            "weft_encoder_batch_overhead_seconds",
            "Time of a forward pass that does not depend on its cost, over all modalities.",
        ),
    ] = 0.0
    costs: tuple[EncodeCost, ...] = ()
    """Holds the same costs for each modality."""
    num_items_queued: Annotated[
        int, gauge("weft_encoder_num_items_queued", "Items whose last unit is not yet in a forward pass.")
    ] = 0
    queued_s: Annotated[
        float,
        gauge("weft_encoder_queue_seconds", "Predicted time of forward passes for `weft_encoder_queue_cost`."),
    ] = 0.0
    num_items_pending: Annotated[
        int, gauge("weft_encoder_num_items_pending", "Items of open calls that have no result yet.")
    ] = 0
    num_in_flight: Annotated[
        int,
        gauge("weft_encoder_num_in_flight", "Items that are being decoded, are decoded, or are in the forward pass."),
    ] = 0
    max_in_flight: Annotated[
        int,
        gauge(
            "weft_encoder_max_in_flight",
            "Most items that may be in decoding, or decoded and waiting for a forward pass. Items in the forward pass "
            "come in addition.",
        ),
    ] = 0
    num_decoding: Annotated[int, gauge("weft_encoder_num_decoding", "Items that are being decoded.")] = 0
    busy_fraction: Annotated[
        float,
        gauge(
            "weft_encoder_busy_ratio",
            "Fraction of the last second or so in which a forward pass was running, from 0 to 1.",
        ),
    ] = 0.0
    queue_profile: tuple[float, ...] = EMPTY_PROFILE
    """Holds the queue in front of the device without the running forward pass, for the predictions of
    `fabric.contracts.encoder_queue`, relative to the moment of the report."""
    unit_s: Annotated[
        float,
        gauge(
            "weft_encoder_unit_seconds",
            "Mean duration of the forward pass that runs at a random moment while the encoder works on its queue; 0 if "
            "nothing is queued.",
        ),
    ] = 0.0
    forward_left_s: Annotated[
        float,
        gauge(
            "weft_encoder_forward_left_seconds",
            "Predicted time until the running forward pass ends; 0 if none is running or it is overdue.",
        ),
    ] = 0.0
    patience: Annotated[
        float,
        gauge(
            "weft_encoder_patience_seconds",
            "Seconds of waiting that move a request up in the queue as far as one second less of encoding does.",
        ),
    ] = 4.0
    num_decode_processes: Annotated[
        int, gauge("weft_encoder_num_decode_processes", "Items that the encoder decodes at the same time at most.")
    ] = 0
    decode_queue_s: Annotated[
        float,
        gauge(
            "weft_encoder_decode_queue_seconds",
            "Predicted time of decoding and preprocessing the items that wait for it or are being decoded, summed over "
            "the decode processes.",
        ),
    ] = 0.0
    decode_short_s: Annotated[
        float,
        gauge(
            "weft_encoder_decode_short_seconds",
            "Part of `weft_encoder_decode_queue_seconds` that belongs to waiting items of one unit. Items of several "
            "units leave a decode process to them.",
        ),
    ] = 0.0
    decode_left_s: Annotated[
        float,
        gauge("weft_encoder_decode_left_seconds", "Predicted time until a decode process is free; 0 if one is free."),
    ] = 0.0
    at_s: float = 0.0
    """Holds when the report was made, on the encoder's own clock; it is 0 if the encoder does not say it."""
    process: Annotated[ProcessStats, LABELLED_AS_MEMBER] = msgspec.field(default_factory=ProcessStats)
