"""Compares the value of every metric with what a load did to a real cluster in this process: a table has a check for
each metric that there is, so that no metric is without one.

Metrics that this load leaves untouched, because it needs another clock, another transport or a failure, stand in
`ELSEWHERE` with the test that asserts their values. Gauges of what is under way are 0 when the cluster is at rest;
`tests/unit/router/test_cluster_metrics.py` asserts that each of them shows the field that it stands for.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio
from metric_load import MetricLoad, send_load
from scraped_series import Scraped

from deploy.testing import in_process_cluster, small_config

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "hooks"))

from reference_tables import metric_rows  # noqa: E402 - the folder is no package

pytestmark = [pytest.mark.torch, pytest.mark.asyncio(loop_scope="module")]
NUM_BLOCKS, MODEL = 512, "weft-demo"


class Seen(NamedTuple):
    """A `Seen` is the load and the scrape after it."""

    load: MetricLoad
    now: Scraped


Check = Callable[[Seen], bool]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen() -> AsyncIterator[Seen]:
    async with in_process_cluster(small_config(workers={"num_blocks": NUM_BLOCKS})) as (cluster, client):
        load = await send_load(client, MODEL)
        for member in (*cluster.workers.services.values(), *cluster.encoders.services.values()):
            cluster.router.reports.put(member.report())
        yield Seen(load, Scraped((await client.get("/metrics")).text))


# ------------------------------------------------------------ checks


def equals(value: Callable[[MetricLoad], float], **labels: str) -> Callable[[str], Check]:
    """The sum of the series is exactly what the load did."""
    return lambda name: lambda seen: seen.now.sum(name, **labels) == pytest.approx(value(seen.load))


def by(label: str, value: Callable[[MetricLoad], dict[str, float]]) -> Callable[[str], Check]:
    """The sums by a label are exactly what the load did."""
    return lambda name: lambda seen: seen.now.active(label, name) == pytest.approx(value(seen.load))


def same(other: str) -> Callable[[str], Check]:
    """The sum equals that of another metric."""
    return lambda name: lambda seen: 0 < seen.now.sum(name) == pytest.approx(seen.now.sum(other))


def between(least: float, most: float) -> Callable[[str], Check]:
    return lambda name: lambda seen: seen.now.is_every(name, lambda value: least <= value <= most)


def histogram(count: Callable[[MetricLoad], float], **labels: str) -> Callable[[str], Check]:
    """The histogram has an observation for each of these, its largest bucket holds all, and their sum is positive."""

    def check(name: str) -> Check:
        return lambda seen: (
            seen.now.sum(f"{name}_count", **labels) == count(seen.load)
            and seen.now.sum(f"{name}_bucket", le="+Inf", **labels) == count(seen.load)
            and seen.now.sum(f"{name}_sum", **labels) > 0
        )

    return check


def classes(name: str) -> Check:
    """The histogram has an observation for each answer of each modality class."""
    return lambda seen: seen.now.active("modality", f"{name}_count") == dict(seen.load.classes)


def within_the_load(name: str) -> Check:
    """The sum of the times is positive, and no longer than the client waited for all its answers."""
    return lambda seen: 0 < seen.now.sum(name) <= seen.load.durations_s


def all_answers(load: MetricLoad) -> float:
    return load.num_answers


def generated(load: MetricLoad) -> float:
    return load.num_generated


at_rest, positive = between(0, 0), between(1e-9, float("inf"))
NUM_ENCODED = 5
"""Different media of the load: a picture, two more, a video and a sound."""
NUM_COVERED = 3
"""Media of the load that come a second time behind the same text."""
MEDIA_S = {"video": 8.0, "audio": 4.317875}
"""Lengths of the video and the sound, each sent twice."""

CHECKS: dict[str, Callable[[str], Check]] = {
    # What became of requests.
    "weft_build_info": equals(lambda load: 1, model=MODEL),
    "weft_router_requests_total": by("code", lambda load: dict(load.codes)),
    "weft_router_http_requests_total": lambda name: (
        lambda seen: all(
            seen.now.sum(name, endpoint=route, status=str(status)) == number
            for (route, status), number in seen.load.exchanges.items()
        )
    ),
    "weft_router_attempts_total": equals(all_answers, outcome="ok"),
    "weft_router_admissions_total": by(
        "outcome", lambda load: {code if code != "ok" else "dispatched": n for code, n in load.codes.items()}
    ),
    "weft_router_requests_in_flight": at_rest,
    "weft_router_requests_waiting": at_rest,
    "weft_router_bodies_bytes": at_rest,
    "weft_router_prompt_tokens_in_flight": at_rest,
    "weft_router_num_silent": at_rest,
    "weft_router_members": by("kind", lambda load: {"router": 1, "encoder": 1, "worker": 1}),
    "weft_router_members_expected": by("kind", lambda load: {"router": 1, "encoder": 1, "worker": 1}),
    "weft_router_members_refusing_config": at_rest,
    # Tokens and media.
    "weft_router_prompt_tokens_total": equals(lambda load: load.num_prompt),
    "weft_router_prefix_hit_tokens_total": equals(lambda load: load.num_cached),
    "weft_router_completion_tokens_total": equals(generated),
    "weft_router_covered_items_total": equals(lambda load: NUM_COVERED),
    "weft_router_requests_with_media_total": by("modality", lambda load: dict(load.with_media)),
    "weft_router_media_items_total": by("modality", lambda load: dict(load.items)),
    "weft_router_planned_media_tokens_total": lambda name: (
        lambda seen: (
            set(seen.now.by("modality", name)) == set(seen.load.items) and 0 < seen.now.sum(name) < seen.load.num_prompt
        )
    ),
    "weft_router_probe_seconds": lambda name: (
        lambda seen: seen.now.active("modality", f"{name}_count") == dict(seen.load.items)
    ),
    "weft_router_tenant_tokens_total": equals(lambda load: load.num_prompt - load.num_cached + load.num_generated),
    "weft_router_tenant_encoder_seconds_total": same("weft_encoder_forward_seconds_total"),
    "weft_router_usage_requests_total": equals(all_answers, tenant="anonymous", key="none"),
    "weft_router_usage_prompt_tokens_total": same("weft_router_prompt_tokens_total"),
    "weft_router_usage_cached_tokens_total": same("weft_router_prefix_hit_tokens_total"),
    "weft_router_usage_completion_tokens_total": same("weft_router_completion_tokens_total"),
    "weft_router_usage_media_seconds_total": by("modality", lambda load: MEDIA_S),
    "weft_router_usage_encoder_seconds_total": same("weft_encoder_forward_seconds_total"),
    # Times.
    "weft_router_time_to_first_token_seconds": classes,
    "weft_router_request_duration_seconds": lambda name: (
        lambda seen: classes(name)(seen) and within_the_load(f"{name}_sum")(seen)
    ),
    "weft_router_time_per_output_token_seconds": classes,
    "weft_router_inter_token_latency_seconds": histogram(lambda load: load.num_generated - load.num_choices),
    "weft_router_stage_seconds": lambda name: (
        lambda seen: all(histogram(all_answers, stage=stage)(name)(seen) for stage in ("prompt", "worker", "router"))
    ),
    "weft_router_predicted_ttft_seconds": histogram(all_answers),
    "weft_router_actual_ttft_seconds": lambda name: (
        lambda seen: (
            histogram(all_answers)(name)(seen)
            and seen.now.sum(f"{name}_sum") <= seen.now.sum("weft_router_time_to_first_token_seconds_sum")
        )
    ),
    "weft_router_ttft_ratio": histogram(all_answers),
    "weft_router_modality_ttft_ratio": classes,
    "weft_router_overlap_efficiency_ratio": histogram(all_answers),
    "weft_router_modality_overlap_efficiency_ratio": classes,
    "weft_router_stage_predicted_seconds_total": lambda name: (
        lambda seen: (
            {"queue", "prefill", "held", "first_token", "decode", "ready", "encode"}
            <= set(seen.now.by("stage", name, modality="image"))
        )
    ),
    "weft_router_stage_actual_seconds_total": lambda name: (
        lambda seen: (
            seen.now.by("stage", name)["encode"]
            == pytest.approx(seen.now.sum("weft_encoder_forward_seconds_total"), rel=0.5)
        )
    ),
    "weft_router_stage_error_seconds_total": lambda name: (
        lambda seen: all(
            error + 1e-9
            >= abs(
                seen.now.by("stage", "weft_router_stage_predicted_seconds_total")[stage]
                - seen.now.by("stage", "weft_router_stage_actual_seconds_total")[stage]
            )
            for stage, error in seen.now.by("stage", name).items()
        )
    ),
    # The worker.
    **dict.fromkeys(
        (
            "weft_worker_num_running",
            "weft_worker_num_waiting",
            "weft_worker_num_waiting_for_features",
            "weft_worker_queued_tokens",
            "weft_worker_queued_weighted_tokens",
            "weft_worker_num_decoding",
            "weft_worker_kv_used_blocks",
            "weft_worker_num_features",
            "weft_worker_behind_tokens",
            "weft_worker_behind_weighted_tokens",
            "weft_worker_inbox_used_bytes",
            "weft_worker_num_quarantined",
            "weft_worker_step_weighted_tokens",
            "weft_worker_step_left_seconds",
        ),
        at_rest,
    ),
    "weft_worker_kv_capacity_blocks": equals(lambda load: NUM_BLOCKS),
    "weft_worker_steps_total": lambda name: (
        lambda seen: seen.load.num_answers < seen.now.sum(name) <= generated(seen.load)
    ),
    "weft_worker_tokens_generated_total": equals(generated),
    "weft_worker_prompt_tokens_computed_total": lambda name: (
        lambda seen: (
            # The last token of a prompt that is cached whole is computed again, once for each choice.
            0 <= seen.now.sum(name) - (seen.load.num_prompt - seen.load.num_cached) <= seen.load.num_choices
        )
    ),
    "weft_worker_prefix_hit_tokens_total": equals(lambda load: load.num_cached),
    "weft_worker_prefix_query_tokens_total": equals(lambda load: load.num_prompt),
    "weft_worker_preemptions_total": at_rest,
    "weft_worker_drafts_proposed_total": at_rest,
    "weft_worker_drafts_accepted_total": at_rest,
    "weft_worker_inbox_capacity_bytes": between(2**20, 2**40),
    "weft_worker_kept_bytes": lambda name: (
        lambda seen: 0 <= seen.now.sum(name) <= seen.now.sum("weft_encoder_feature_bytes_total")
    ),
    "weft_worker_kept_hits_total": at_rest,
    "weft_worker_prefill_seconds_per_token": between(1e-9, 1e-2),
    "weft_worker_step_overhead_seconds": between(1e-6, 1.0),
    "weft_worker_decode_seconds_per_sequence": between(0.0, 1.0),
    "weft_worker_residence_seconds": lambda name: lambda seen: 0 < seen.now.sum(name) < seen.load.durations_s,
    "weft_worker_max_step_tokens": between(64, 65536),
    "weft_worker_max_sequences": between(1, 4096),
    "weft_worker_held_seconds": lambda name: (
        lambda seen: 0 < seen.now.sum(name) <= seen.now.sum("weft_worker_doorstep_wait_seconds_total")
    ),
    "weft_worker_engine_age_seconds": between(0.0, 60.0),
    "weft_worker_step_seconds_total": within_the_load,
    # No collector is named.
    "weft_router_spans_total": at_rest,
    "weft_router_sampled_requests_dropped_total": at_rest,
    "weft_worker_work_seconds_total": within_the_load,
    "weft_worker_doorstep_wait_seconds_total": lambda name: (
        lambda seen: (
            seen.now.sum(name) == pytest.approx(seen.now.sum("weft_router_stage_actual_seconds_total", stage="held"))
        )
    ),
    "weft_worker_transfers_total": equals(lambda load: NUM_ENCODED + 1, link="same_process"),
    "weft_worker_transfer_bytes_total": lambda name: (
        lambda seen: (
            seen.now.sum(name)
            == seen.now.sum("weft_encoder_feature_bytes_total") + seen.now.sum("weft_encoder_cache_hit_bytes_total")
        )
    ),
    "weft_worker_transfer_seconds_total": within_the_load,
    "weft_worker_transfer_failures_total": at_rest,
    "weft_worker_transfers_staged_total": at_rest,
    "weft_worker_transfer_bytes_per_second": lambda name: lambda seen: seen.now.sum(name, link="same_process") > 0,
    # The encoder.
    **dict.fromkeys(
        (
            "weft_encoder_items_failed_total",
            "weft_encoder_arena_used_bytes",
            "weft_encoder_arena_encoding_bytes",
            "weft_encoder_num_leases",
            "weft_encoder_num_features_encoding",
            "weft_encoder_num_features_staged",
            "weft_encoder_num_queued",
            "weft_encoder_queue_cost",
            "weft_encoder_num_encoding",
            "weft_encoder_num_items_queued",
            "weft_encoder_queue_seconds",
            "weft_encoder_num_items_pending",
            "weft_encoder_num_in_flight",
            "weft_encoder_num_decoding",
            "weft_encoder_unit_seconds",
            "weft_encoder_forward_left_seconds",
            "weft_encoder_decode_queue_seconds",
            "weft_encoder_decode_short_seconds",
            "weft_encoder_decode_left_seconds",
            "weft_encoder_evictions_total",
            "weft_encoder_evicted_bytes_total",
        ),
        at_rest,
    ),
    "weft_encoder_items_received_total": equals(lambda load: NUM_ENCODED + 1),
    "weft_encoder_items_decoded_total": equals(lambda load: NUM_ENCODED),
    "weft_encoder_items_encoded_total": equals(lambda load: NUM_ENCODED),
    "weft_encoder_cache_hits_total": equals(lambda load: 1),
    "weft_encoder_cache_hit_bytes_total": lambda name: (
        lambda seen: 0 < seen.now.sum(name) < seen.now.sum("weft_encoder_feature_bytes_total")
    ),
    "weft_encoder_decode_seconds_total": within_the_load,
    "weft_encoder_preprocess_seconds_total": within_the_load,
    "weft_encoder_batches_total": lambda name: (
        lambda seen: 1 <= seen.now.sum(name) <= seen.now.sum("weft_encoder_batch_units_total")
    ),
    "weft_encoder_batch_units_total": between(NUM_ENCODED, 100),
    "weft_encoder_batch_cost_total": lambda name: (
        lambda seen: seen.now.sum(name) >= seen.now.sum("weft_encoder_batch_units_total")
    ),
    "weft_encoder_forward_seconds_total": within_the_load,
    "weft_encoder_arena_cached_bytes": same("weft_encoder_feature_bytes_total"),
    "weft_encoder_arena_capacity_bytes": between(2**20, 2**40),
    "weft_encoder_num_features_cached": same("weft_encoder_batch_units_total"),
    "weft_encoder_transfers_total": same("weft_worker_transfers_total"),
    "weft_encoder_transfer_seconds_total": lambda name: (
        lambda seen: seen.now.sum(name) >= seen.now.sum("weft_worker_transfer_seconds_total")
    ),
    "weft_encoder_feature_bytes_total": positive,
    "weft_encoder_encode_seconds_per_cost": between(0.0, 1.0),
    "weft_encoder_batch_overhead_seconds": between(0.0, 5.0),
    "weft_encoder_max_in_flight": between(1, 4096),
    "weft_encoder_busy_ratio": between(0.0, 1.0),
    "weft_encoder_patience_seconds": equals(lambda load: 4.0),
    "weft_encoder_num_decode_processes": between(1, 64),
    **{
        f"weft_encoder_modality_{name}": lambda metric: (
            lambda seen: (
                set(seen.now.by("modality", metric)) == {"image", "video", "audio"}
                and seen.now.is_every(metric, lambda value: 0 <= value < 5)
            )
        )
        for name in (
            "seconds_per_cost",
            "overhead_seconds",
            "decode_seconds_per_cost",
            "decode_overhead_seconds",
            "device_prepare_seconds_per_cost",
            "device_prepare_overhead_seconds",
        )
    },
    # The planner, the indexes and the processes.
    "weft_planner_observations_total": equals(all_answers, stage="ttft"),
    "weft_planner_predicted_total": equals(lambda load: load.num_cached, stage="prefix_tokens"),
    "weft_planner_actual_total": equals(lambda load: load.num_cached, stage="prefix_tokens"),
    "weft_planner_abs_error_total": lambda name: (
        lambda seen: (
            seen.now.is_every(name, lambda value: value >= 0) and seen.now.sum(name, stage="prefix_tokens") == 0
        )
    ),
    "weft_index_keys": lambda name: (
        lambda seen: (
            seen.now.sum(name, index="feature") == NUM_ENCODED
            and seen.now.sum(name, index="prefix") > seen.load.num_answers
        )
    ),
    "weft_index_sources_out_of_step": at_rest,
    "weft_index_refused_keys_total": at_rest,
    "weft_index_evicted_keys_total": at_rest,
    "weft_index_bytes": positive,
    "weft_process_cpu_seconds_total": between(0.1, 10_000.0),
    "weft_process_resident_memory_bytes": between(2**26, 2**36),
    "weft_process_open_fds": between(3, 10_000),
    "weft_process_max_fds": lambda name: lambda seen: seen.now.sum(name) >= seen.now.sum("weft_process_open_fds"),
}

ELSEWHERE = {
    "weft_stage_waiting_requests": ("tests/unit/router/test_stage_series.py", '"weft_stage_waiting_requests": 3,'),
    "weft_stage_running_requests": ("tests/unit/router/test_stage_series.py", '"weft_stage_running_requests": 4,'),
    "weft_stage_requests_waiting_for_chunk": (
        "tests/unit/router/test_stage_series.py",
        '"weft_stage_requests_waiting_for_chunk": 5,',
    ),
    "weft_stage_step_seconds": ("tests/unit/router/test_stage_series.py", '"weft_stage_step_seconds": 0.25,'),
    "weft_stage_steps_total": ("tests/unit/router/test_stage_series.py", '"weft_stage_steps_total": 7,'),
    "weft_stage_chunks_received_total": (
        "tests/unit/router/test_stage_series.py",
        '"weft_stage_chunks_received_total": 8,',
    ),
    "weft_stage_chunks_sent_total": ("tests/unit/router/test_stage_series.py", '"weft_stage_chunks_sent_total": 9,'),
    "weft_stage_outputs_total": ("tests/unit/router/test_stage_series.py", '"weft_stage_outputs_total": 10,'),
    "weft_stage_stalls_total": ("tests/unit/router/test_stage_series.py", '"weft_stage_stalls_total": 11,'),
    "weft_stage_pool_used": ("tests/unit/router/test_stage_series.py", '"weft_stage_pool_used": 12,'),
    "weft_stage_pool_size": ("tests/unit/router/test_stage_series.py", '"weft_stage_pool_size": 13,'),
    "weft_router_first_audio_seconds": (
        "tests/unit/router/test_speech_series.py",
        'value(registry, "first_audio_seconds_sum") == pytest.approx(0.5)',
    ),
    "weft_router_real_time_factor_ratio": (
        "tests/unit/router/test_speech_series.py",
        'value(registry, "real_time_factor_ratio_sum") == pytest.approx(2.5 / 4.32)',
    ),
    "weft_router_audio_gap_seconds": (
        "tests/unit/router/test_speech_series.py",
        'value(registry, "audio_gap_seconds_sum") == pytest.approx(2.0)',
    ),
    "weft_router_audio_piece_seconds": (
        "tests/unit/router/test_speech_series.py",
        'value(registry, "audio_piece_seconds_sum") == pytest.approx(4.32)',
    ),
    "weft_router_audio_underruns_total": (
        "tests/unit/router/test_speech_series.py",
        'value(registry, "audio_underruns_total") == 1',
    ),
    "weft_router_audio_seconds_total": (
        "tests/unit/router/test_speech_series.py",
        'value(registry, "audio_seconds_total") == pytest.approx(4.32)',
    ),
    "weft_router_dispatch_errors_total": ("tests/fault/test_fault_busy.py", 'kind="encode"}\'] == len(late)'),
    "weft_router_frames_dropped_total": ("tests/unit/router/test_router_metrics.py", 'dropped("old_attempt") == 2'),
    "weft_router_fetch_seconds": (
        "tests/unit/router/test_fetched_requests.py",
        "assert 'weft_router_fetch_seconds_count{outcome=\"cached\"} 1.0' in",
    ),
    "weft_router_fetched_bytes_total": (
        "tests/unit/router/test_fetched_requests.py",
        'weft_router_fetched_bytes_total{{outcome="ok"}} {float(len(PICTURE))}',
    ),
    "weft_router_degraded_total": (
        "tests/unit/router/run/test_degradation.py",
        'counter(cluster, "degraded", modality="image", action="reduced", reason="encode_failed") == 1',
    ),
    "weft_router_capacity_wait_seconds": (
        "tests/unit/router/run/test_capacity.py",
        'assert waits(cluster, "served") == ',
    ),
    "weft_router_gate_wait_seconds": (
        "tests/e2e/test_admission_limits.py",
        'metric(client, "weft_router_gate_wait_seconds_count") >= 6',
    ),
    "weft_autoscaling_desired_replicas": (
        "tests/unit/router/test_scaling_series.py",
        '"weft_autoscaling_desired_replicas": 5,',
    ),
    "weft_autoscaling_running_replicas": (
        "tests/unit/router/test_scaling_series.py",
        '"weft_autoscaling_running_replicas": 2,',
    ),
    "weft_autoscaling_starting_replicas": (
        "tests/unit/router/test_scaling_series.py",
        '"weft_autoscaling_starting_replicas": 3,',
    ),
    "weft_autoscaling_silent_replicas": (
        "tests/unit/router/test_scaling_series.py",
        '"weft_autoscaling_silent_replicas": 1,',
    ),
    "weft_autoscaling_queue_seconds": (
        "tests/unit/router/test_scaling_series.py",
        '"weft_autoscaling_queue_seconds": 12.5,',
    ),
    "weft_autoscaling_work_replicas": (
        "tests/unit/router/test_scaling_series.py",
        '"weft_autoscaling_work_replicas": 2.75,',
    ),
    "weft_autoscaling_memory_replicas": (
        "tests/unit/router/test_scaling_series.py",
        '"weft_autoscaling_memory_replicas": 0.25,',
    ),
    "weft_autoscaling_needed_for_work_replicas": (
        "tests/unit/router/test_scaling_series.py",
        '"weft_autoscaling_needed_for_work_replicas": 3.9,',
    ),
    "weft_autoscaling_needed_for_queue_replicas": (
        "tests/unit/router/test_scaling_series.py",
        '"weft_autoscaling_needed_for_queue_replicas": 4.6,',
    ),
    "weft_autoscaling_needed_for_memory_replicas": (
        "tests/unit/router/test_scaling_series.py",
        '"weft_autoscaling_needed_for_memory_replicas": 0.3,',
    ),
    "weft_autoscaling_enough_replicas": (
        "tests/unit/router/test_scaling_series.py",
        '"weft_autoscaling_enough_replicas": 2,',
    ),
    "weft_autoscaling_startup_seconds": (
        "tests/unit/router/test_scaling_series.py",
        '"weft_autoscaling_startup_seconds": 31.5,',
    ),
    "weft_autoscaling_waiting_seconds": (
        "tests/unit/router/test_scaling_series.py",
        '"weft_autoscaling_waiting_seconds": 6.5,',
    ),
    "weft_autoscaling_waiting_memory_replicas": (
        "tests/unit/router/test_scaling_series.py",
        '"weft_autoscaling_waiting_memory_replicas": 1.75,',
    ),
    "weft_autoscaling_decisions_total": (
        "tests/unit/router/test_scaling_series.py",
        'assert decisions == {("encoder", "queue"): 1',
    ),
    "weft_member_up": ("tests/contract/test_node_metrics.py", '{"well": 1.0, "deaf": 0.0, "closed": 0.0}'),
}
"""Maps each metric that this load does not touch to the file of the test that asserts its values, and to a part of the
assertion."""


async def test_every_metric_has_a_check_and_every_check_a_metric() -> None:
    names = {row.name for row in metric_rows()}
    assert CHECKS.keys() & ELSEWHERE.keys() == set()
    assert names - CHECKS.keys() - ELSEWHERE.keys() == set(), "say in CHECKS what the load does to them"
    assert (CHECKS.keys() | ELSEWHERE.keys()) - names == set(), "these metrics are gone"


@pytest.mark.parametrize("name", ELSEWHERE)
async def test_another_test_asserts_the_values_of_what_the_load_does_not_touch(name: str) -> None:
    path, assertion = ELSEWHERE[name]
    assert assertion in (ROOT / path).read_text()


@pytest.mark.parametrize("name", CHECKS)
async def test_the_value_of_a_metric_is_what_the_load_did(name: str, seen: Seen) -> None:
    assert CHECKS[name](name)(seen), f"{name} is {seen.now.values(name) or seen.now.values(f'{name}_count')}"


async def test_nothing_is_shown_that_is_not_documented(seen: Seen) -> None:
    kind_to_suffix = {"counter": "_total"}
    shown = {name + kind_to_suffix.get(family.type, "") for name, family in seen.now.families.items()}
    assert shown - {row.name for row in metric_rows()} == set()
