"""Describes the dashboards of encoders, of workers and of the transfers between them.

Every panel says what it shows and what a bad value means. The module knows nothing of Grafana's form.
"""

from __future__ import annotations

from deploy.grafana.panels import Board, BoardRow, Panel, Query
from deploy.grafana.queries import RATE, of_each, per_second, quantiles, ratio

BYTES_BY_STATE = Panel(
    "Features by state",
    "Bytes of features in the encoders' arenas and at the workers. `staged` that stays high means that workers do not "
    "fetch; an arena that is full of `cached` is well used.",
    "bytes",
    [
        Query("sum(weft_encoder_arena_encoding_bytes{@})", "encoding"),
        Query(
            "sum(weft_encoder_arena_used_bytes{@}) - sum(weft_encoder_arena_encoding_bytes{@})", "staged for workers"
        ),
        Query("sum(weft_encoder_arena_cached_bytes{@})", "cached at encoders"),
        Query("sum(weft_worker_inbox_used_bytes{@})", "in inboxes"),
        Query("sum(weft_worker_kept_bytes{@})", "kept by workers"),
    ],
    kind="bars",
    width=6,
)

ENCODERS = Board(
    "weft-encoders",
    "Weft encoders",
    "Load, batches, caches and costs of the encoder pool.",
    [
        BoardRow(
            "Load",
            [
                Panel(
                    "Utilisation",
                    "Share of the time in which a forward pass ran, by encoder. All near 1 with queues: add encoders. "
                    "One at 0 while others are full: it is excluded or lost.",
                    "percentunit",
                    [per_second("weft_encoder_forward_seconds_total", "encoder", "{{encoder}}")],
                    [(0.8, "yellow"), (0.95, "red")],
                    most=1,
                ),
                Panel(
                    "Queue in seconds of work",
                    "Predicted time of forward passes for what waits. New pictures wait about this long.",
                    "s",
                    [of_each("weft_encoder_queue_seconds", "encoder")],
                    [(2, "yellow"), (10, "red")],
                ),
                Panel(
                    "Decode queue in seconds of work",
                    "Predicted time of decoding for what waits, over all decode processes. If it is longer than the "
                    "other queue, raise `encoders.decode_processes`.",
                    "s",
                    [of_each("weft_encoder_decode_queue_seconds", "encoder")],
                    [(2, "yellow"), (10, "red")],
                ),
                Panel(
                    "Items in the pipeline",
                    "Items of open calls, items in decoding or decoded, and items whose last unit is not yet in a "
                    "forward pass. What only grows shows the stage that is too slow.",
                    "short",
                    [
                        Query("sum(weft_encoder_num_items_pending{@})", "pending"),
                        Query("sum(weft_encoder_num_in_flight{@})", "in flight"),
                        Query("sum(weft_encoder_num_items_queued{@})", "queued"),
                        Query("sum(weft_encoder_num_decoding{@})", "decoding"),
                    ],
                ),
                Panel(
                    "Items per second",
                    "Items that were asked for, found in the cache, encoded, and failed. Failures need a look at the "
                    "logs.",
                    "ops",
                    [
                        Query(f"sum(rate(weft_encoder_items_received_total{{@}}{RATE}))", "received"),
                        Query(f"sum(rate(weft_encoder_cache_hits_total{{@}}{RATE}))", "cache hits"),
                        Query(f"sum(rate(weft_encoder_items_encoded_total{{@}}{RATE}))", "encoded"),
                        Query(f"sum(rate(weft_encoder_items_failed_total{{@}}{RATE}))", "failed"),
                    ],
                    red="^failed$",
                ),
                Panel(
                    "Time of decoding and preparation per item",
                    "Processor time of an item before its forward pass. Large files and long videos raise it.",
                    "s",
                    [
                        Query(
                            f"sum(rate(weft_encoder_decode_seconds_total{{@}}{RATE}))"
                            f" / sum(rate(weft_encoder_items_decoded_total{{@}}{RATE}))",
                            "decoding",
                        ),
                        Query(
                            f"sum(rate(weft_encoder_preprocess_seconds_total{{@}}{RATE}))"
                            f" / sum(rate(weft_encoder_items_decoded_total{{@}}{RATE}))",
                            "preparation",
                        ),
                    ],
                ),
            ],
        ),
        BoardRow(
            "Batches",
            [
                Panel(
                    "Units per forward pass",
                    "Mean size of batches. Above 1 the device is shared well; at 1 under load, units are too large or "
                    "too different.",
                    "short",
                    [ratio("weft_encoder_batch_units_total", "weft_encoder_batches_total", "encoder", "{{encoder}}")],
                ),
                Panel(
                    "Cost per forward pass",
                    "Mean patches or mel frames of a batch; `encoders.max_batch_cost` limits it. Near that limit, "
                    "batches are full.",
                    "short",
                    [ratio("weft_encoder_batch_cost_total", "weft_encoder_batches_total", "encoder", "{{encoder}}")],
                ),
                Panel(
                    "Time per forward pass",
                    "Mean time of a batch. If it rises while the cost does not, something else uses the device.",
                    "s",
                    [
                        ratio(
                            "weft_encoder_forward_seconds_total", "weft_encoder_batches_total", "encoder", "{{encoder}}"
                        )
                    ],
                ),
                Panel(
                    "Cost per second of forward passes",
                    "Patches or mel frames per second of a device while it computes. Encoders on equal devices should "
                    "be alike.",
                    "short",
                    [
                        ratio(
                            "weft_encoder_batch_cost_total",
                            "weft_encoder_forward_seconds_total",
                            "encoder",
                            "{{encoder}}",
                        )
                    ],
                ),
                Panel(
                    "Learned time per cost",
                    "Time that a unit of cost adds to a forward pass, by modality, as routers predict it. If it rises "
                    "for one modality only, its media have changed.",
                    "s",
                    [Query("avg by (modality) (weft_encoder_modality_seconds_per_cost{@})", "{{modality}}")],
                ),
                Panel(
                    "Learned fixed time",
                    "Time of a forward pass that does not depend on its cost, by modality. Batches share it.",
                    "s",
                    [Query("avg by (modality) (weft_encoder_modality_overhead_seconds{@})", "{{modality}}")],
                ),
            ],
        ),
        BoardRow(
            "Arena and cache",
            [
                BYTES_BY_STATE,
                Panel(
                    "Arena in use",
                    "Share of the arena that is being written or leased to workers. Near 1, units wait for room: raise "
                    "`encoders.arena_bytes`, or look at workers that do not fetch.",
                    "percentunit",
                    [
                        Query(
                            "sum by (encoder) (weft_encoder_arena_used_bytes{@})"
                            " / sum by (encoder) (weft_encoder_arena_capacity_bytes{@})",
                            "{{encoder}}",
                        )
                    ],
                    [(0.7, "yellow"), (0.9, "red")],
                    most=1,
                    width=6,
                ),
                Panel(
                    "Cache hit rate",
                    "Items whose features were still there, as a share of those that an encoder was asked for. It is "
                    "low if media do not come back, or if the arena is too small for those that do.",
                    "percentunit",
                    [
                        ratio(
                            "weft_encoder_cache_hits_total",
                            "weft_encoder_items_received_total",
                            "encoder",
                            "{{encoder}}",
                        )
                    ],
                    most=1,
                    width=6,
                ),
                Panel(
                    "Evictions per second",
                    "Cached features that made room for others. Many of them with a low hit rate: raise "
                    "`encoders.arena_bytes`.",
                    "ops",
                    [per_second("weft_encoder_evictions_total", "encoder", "{{encoder}}")],
                    width=6,
                    least=1,
                ),
            ],
        ),
    ],
)

WORKERS = Board(
    "weft-workers",
    "Weft workers and KV",
    "Sequences, KV caches, tokens and features of the workers.",
    [
        BoardRow(
            "Sequences and KV",
            [
                Panel(
                    "Sequences",
                    "Running sequences, those of them at their doorstep (they wait for a feature), and those that have "
                    "not begun. Many that wait: workers are short.",
                    "short",
                    [
                        Query("sum(weft_worker_num_running{@})", "running"),
                        Query("sum(weft_worker_num_waiting_for_features{@})", "at the doorstep"),
                        Query("sum(weft_worker_num_waiting{@})", "waiting"),
                        Query("sum(weft_worker_num_decoding{@})", "decoding"),
                    ],
                ),
                Panel(
                    "KV blocks in use",
                    "Share of the KV blocks that running sequences use, by worker. Near 1, requests wait and sequences "
                    "are preempted.",
                    "percentunit",
                    [
                        Query(
                            "sum by (worker) (weft_worker_kv_used_blocks{@})"
                            " / sum by (worker) (weft_worker_kv_capacity_blocks{@})",
                            "{{worker}}",
                        )
                    ],
                    [(0.8, "yellow"), (0.95, "red")],
                    most=1,
                ),
                Panel(
                    "Preemptions per second",
                    "Sequences that gave up their blocks and begin again. Their work is done twice.",
                    "ops",
                    [per_second("weft_worker_preemptions_total", "worker", "{{worker}}")],
                    [(0.02, "yellow"), (0.1, "red")],
                    least=0.1,
                ),
                Panel(
                    "Prefix hit rate",
                    "Share of the prompt tokens that a worker found in its cache. Workers that are far below the "
                    "others get the wrong requests, or their caches are too small.",
                    "percentunit",
                    [
                        ratio(
                            "weft_worker_prefix_hit_tokens_total",
                            "weft_worker_prefix_query_tokens_total",
                            "worker",
                            "{{worker}}",
                        )
                    ],
                    most=1,
                ),
                Panel(
                    "Queued work",
                    "Predicted seconds of prefill that could be computed now, by worker. If one is far above the "
                    "others, routing or that worker is at fault.",
                    "s",
                    [
                        Query(
                            "sum by (worker) (weft_worker_queued_weighted_tokens{@}"
                            " * weft_worker_prefill_seconds_per_token{@})",
                            "{{worker}}",
                        )
                    ],
                    [(2, "yellow"), (10, "red")],
                ),
                Panel(
                    "Residence",
                    "Recent average of the time from a sequence's first step to its end. Blocks come back after it.",
                    "s",
                    [of_each("weft_worker_residence_seconds", "worker")],
                ),
            ],
        ),
        BoardRow(
            "Tokens and steps",
            [
                Panel(
                    "Tokens per second",
                    "Prompt tokens that were computed, and generated tokens. A fall under the same load means slower "
                    "steps.",
                    "short",
                    [
                        Query(f"sum(rate(weft_worker_prompt_tokens_computed_total{{@}}{RATE}))", "prompt"),
                        Query(f"sum(rate(weft_worker_tokens_generated_total{{@}}{RATE}))", "generated"),
                    ],
                ),
                Panel(
                    "Tokens per step",
                    "Generated tokens of a step: how many sequences share it. At 1 under load, sequences wait for "
                    "something else than the device.",
                    "short",
                    [ratio("weft_worker_tokens_generated_total", "weft_worker_steps_total", "worker", "{{worker}}")],
                ),
                Panel(
                    "Work of steps",
                    "Seconds of work per second, by the learned costs, without the fixed part of steps. Near 1 a "
                    "worker is full.",
                    "percentunit",
                    [per_second("weft_worker_work_seconds_total", "worker", "{{worker}}")],
                    [(0.7, "yellow"), (0.9, "red")],
                ),
                Panel(
                    "Learned costs",
                    "Time of a token of a prompt, of a decoding sequence, and of a step without work. If they rise at "
                    "once, something else uses the devices.",
                    "s",
                    [
                        Query("avg(weft_worker_prefill_seconds_per_token{@})", "per prompt token"),
                        Query("avg(weft_worker_decode_seconds_per_sequence{@})", "per decoding sequence"),
                        Query("avg(weft_worker_step_overhead_seconds{@})", "per step"),
                    ],
                    right="^per step$",
                ),
                Panel(
                    "Drafts that were right",
                    "Accepted drafts as a share of those that were computed. Below 0.3, speculation costs more than it "
                    "gains. Empty without speculation.",
                    "percentunit",
                    [
                        ratio(
                            "weft_worker_drafts_accepted_total",
                            "weft_worker_drafts_proposed_total",
                            "worker",
                            "{{worker}}",
                        )
                    ],
                    [(0.3, "yellow"), (0.5, "green")],
                    most=1,
                ),
                Panel(
                    "Time between tokens",
                    "As the routers see it. It rises with the number of sequences in a step, and with prefill beside "
                    "them.",
                    "s",
                    quantiles("weft_router_inter_token_latency_seconds"),
                    [(0.1, "yellow"), (0.25, "red")],
                ),
            ],
        ),
        BoardRow(
            "Features",
            [
                Panel(
                    "Prefill held at the doorstep",
                    "Seconds per second in which sequences waited for features. It is the price of slow encoders or "
                    "links.",
                    "s",
                    [per_second("weft_worker_doorstep_wait_seconds_total", "worker", "{{worker}}")],
                ),
                Panel(
                    "Inbox in use",
                    "Share of the inbox that holds features or waits for a transfer. Near 1, pulls wait.",
                    "percentunit",
                    [
                        Query(
                            "sum by (worker) (weft_worker_inbox_used_bytes{@})"
                            " / sum by (worker) (weft_worker_inbox_capacity_bytes{@})",
                            "{{worker}}",
                        )
                    ],
                    [(0.7, "yellow"), (0.9, "red")],
                    most=1,
                ),
                Panel(
                    "Kept features that were used again",
                    "Features per second that a worker had kept, so that no encoder had to send them. If it is 0 "
                    "while conversations come back to their pictures, raise `workers.kept_bytes`.",
                    "ops",
                    [per_second("weft_worker_kept_hits_total", "worker", "{{worker}}")],
                    least=1,
                ),
            ],
        ),
    ],
)

TRANSFERS = Board(
    "weft-transfers",
    "Weft transfers",
    "Features on their way from encoders to workers.",
    [
        BoardRow(
            "By class of link",
            [
                Panel(
                    "Bytes per second",
                    "Features that workers pulled, by the class of the link. If `tcp` carries what `rdma` should, the "
                    "network is not set up right.",
                    "Bps",
                    [per_second("weft_worker_transfer_bytes_total", "link", "{{link}}")],
                    kind="bars",
                ),
                Panel(
                    "Rate of a transfer",
                    "Bytes, divided by the time of the transfers: what one transfer gets of a link. A fall at the same "
                    "load means a link that is worse than it was.",
                    "Bps",
                    [
                        ratio(
                            "weft_worker_transfer_bytes_total", "weft_worker_transfer_seconds_total", "link", "{{link}}"
                        )
                    ],
                ),
                Panel(
                    "Time of a transfer",
                    "Mean time of a pull, without the wait for room in the inbox. Above 0.1 s for a picture, the link "
                    "is slow or shared by too many.",
                    "s",
                    [ratio("weft_worker_transfer_seconds_total", "weft_worker_transfers_total", "link", "{{link}}")],
                    [(0.1, "yellow"), (1, "red")],
                ),
                Panel(
                    "Transfers per second",
                    "Units that workers pulled. If it falls while encoders work, workers have no room or links are "
                    "broken.",
                    "ops",
                    [per_second("weft_worker_transfers_total", "link", "{{link}}")],
                ),
                Panel(
                    "Failed transfers",
                    "Share of the pulls that brought nothing. Each is done again, so requests are late.",
                    "percentunit",
                    [
                        Query(
                            f"sum by (link) (rate(weft_worker_transfer_failures_total{{@}}{RATE}))"
                            f" / (sum by (link) (rate(weft_worker_transfer_failures_total{{@}}{RATE}))"
                            f" + sum by (link) (rate(weft_worker_transfers_total{{@}}{RATE})))",
                            "{{link}}",
                        )
                    ],
                    [(0.01, "yellow"), (0.05, "red")],
                    least=0.05,
                ),
                Panel(
                    "Slots in quarantine",
                    "Slots of inboxes whose transfer did not end. They come back when the encoder has left.",
                    "short",
                    [of_each("weft_worker_num_quarantined", "worker")],
                    [(1, "red")],
                    least=1,
                ),
            ],
        ),
        BoardRow(
            "From announcement to release",
            [
                Panel(
                    "Announcement to release",
                    "Mean time for which an encoder holds a finished unit for a worker. If it is much longer than a "
                    "transfer, workers have no room.",
                    "s",
                    [
                        ratio(
                            "weft_encoder_transfer_seconds_total",
                            "weft_encoder_transfers_total",
                            "encoder",
                            "{{encoder}}",
                        )
                    ],
                    [(1, "yellow"), (5, "red")],
                    width=6,
                ),
                Panel(
                    "Leases",
                    "Features under a lease, by encoder. If it only grows, workers do not release what they read.",
                    "short",
                    [of_each("weft_encoder_num_leases", "encoder")],
                    width=6,
                    least=1,
                ),
                BYTES_BY_STATE,
                Panel(
                    "Feature bytes that were made",
                    "Bytes of features that encoders made per second. Transfers can't be fewer for long, except for "
                    "requests that end early.",
                    "Bps",
                    [per_second("weft_encoder_feature_bytes_total", "encoder", "{{encoder}}")],
                    width=6,
                ),
            ],
        ),
    ],
)
