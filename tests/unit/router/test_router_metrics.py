"""Tests what `/metrics` says: it counts served requests exactly, and a member's gauges disappear when the member
leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, get_type_hints

import msgspec
import pytest
from router_chats import chat, expected, image, read, text

from deploy.testing import TINY_MODEL, FakeCluster, TinyFamily, fake_cluster, settled, tiny_codec
from fabric.contracts import (
    BlocksStored,
    EncodeCost,
    EncoderReport,
    EngineFailed,
    FeatureEvents,
    KvEvents,
    LinkStats,
    ManualClock,
    MemberId,
    MmHash,
    Overloaded,
    ProcessStats,
    RequestId,
    RequestRefused,
    TokenFrame,
    TokenFrames,
    WorkerReport,
)
from fabric.contracts.reported_metrics import ReportedMetric, counter, gauge, metrics_of
from modalities.family import DEFAULT_OPTIONS, ItemPlan, MediaHeader, MediaOptions
from router.observe import RouterMetrics
from router.router_config import RouterConfig
from router.run import Admission


def value(cluster: FakeCluster, name: str, **labels: str) -> float | None:
    return cluster.service.metrics.registry.get_sample_value(name, labels)


PLAN_S, STEP_S = 2.0, 0.125


class SlowFamily(TinyFamily):
    """A `SlowFamily` takes PLAN_S to plan an item."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.taken_s = 0.0
        self._clock = clock

    def plan(self, header: MediaHeader, options: MediaOptions = DEFAULT_OPTIONS) -> ItemPlan:
        self._clock.advance(PLAN_S)
        self.taken_s += PLAN_S
        return super().plan(header, options)


@asynccontextmanager
async def timed_cluster() -> AsyncIterator[tuple[FakeCluster, SlowFamily]]:
    """Yields a cluster and its family; only planning a picture and each token of a worker take time."""
    clock = ManualClock(100.0)
    family = SlowFamily(clock)
    async with fake_cluster(clock=clock, model=(family, tiny_codec())) as cluster:

        def step(frames: list[TokenFrame]) -> list[TokenFrame]:
            clock.advance(STEP_S)
            return frames

        for worker in cluster.workers:
            worker.script.frames = step
        yield cluster, family


async def test_requests_and_tokens_are_counted() -> None:
    async with fake_cluster() as cluster:
        _, _, usage = await read(await cluster.service.open(chat([image()])))
        with pytest.raises(RequestRefused):
            await cluster.service.open(chat(model="other"))
        assert value(cluster, "weft_router_requests_total", code="ok") == 1
        assert value(cluster, "weft_router_requests_total", code="model_not_found") == 1
        assert value(cluster, "weft_router_attempts_total", outcome="ok") == 1
        assert value(cluster, "weft_router_prompt_tokens_total") == usage.num_prompt_tokens
        assert value(cluster, "weft_router_completion_tokens_total") == usage.num_completion_tokens > 10
        assert value(cluster, "weft_router_requests_with_media_total", modality="image") == 1
        assert value(cluster, "weft_router_media_items_total", modality="image") == 1
        assert (
            value(cluster, "weft_router_planned_media_tokens_total", modality="image")
            == (usage.modality_to_tokens["image"])
            > 0
        )
        assert value(cluster, "weft_router_requests_in_flight") == 0


async def test_histograms_hold_the_seconds_that_a_request_took() -> None:
    """This checks the values that were observed, not how many observations there are."""
    async with timed_cluster() as (cluster, family):
        stream = await cluster.service.open(chat([image()]))
        _, _, usage = await read(stream)
        plan = cluster.service.traces.get(stream.request_id).to_json()["plans"][0]["plan"]
        prompt_s = family.taken_s
        assert prompt_s >= PLAN_S
        worker_s = usage.num_completion_tokens * STEP_S
        seconds = {
            "time_to_first_token_seconds": prompt_s + STEP_S,
            "actual_ttft_seconds": STEP_S,
            "request_duration_seconds": prompt_s + worker_s,
            "time_per_output_token_seconds": STEP_S,
            "predicted_ttft_seconds": plan["predicted_ttft_s"],
            "ttft_ratio": plan["predicted_ttft_s"] / STEP_S,
            "overlap_efficiency_ratio": plan["lower_bound_s"] / STEP_S,
        }
        assert plan["predicted_ttft_s"] >= plan["lower_bound_s"] > 0
        by_class = ("time_to_first_token_seconds", "request_duration_seconds", "time_per_output_token_seconds")
        for name, taken in seconds.items():
            labels = {"modality": "image"} if name in by_class else {}
            assert value(cluster, f"weft_router_{name}_count", **labels) == 1, name
            assert value(cluster, f"weft_router_{name}_sum", **labels) == pytest.approx(taken), name
        for name in ("ttft_ratio", "overlap_efficiency_ratio"):
            assert value(cluster, f"weft_router_modality_{name}_count", modality="image") == 1
            taken = value(cluster, f"weft_router_modality_{name}_sum", modality="image")
            assert taken == pytest.approx(seconds[name]), name
        assert value(cluster, "weft_router_inter_token_latency_seconds_count") == usage.num_completion_tokens - 1
        assert value(cluster, "weft_router_inter_token_latency_seconds_sum") == pytest.approx(worker_s - STEP_S)
        for stage, taken in {"prompt": prompt_s, "worker": worker_s, "router": prompt_s}.items():
            assert value(cluster, "weft_router_stage_seconds_count", stage=stage) == 1
            assert value(cluster, "weft_router_stage_seconds_sum", stage=stage) == pytest.approx(taken), stage


async def test_tokens_of_one_frame_share_the_time_since_the_last() -> None:
    """A step with drafts brings several tokens at once: there are as many gaps, and their sum is no longer."""
    held: list[TokenFrame] = []
    clock = ManualClock()

    def two_at_a_time(frames: list[TokenFrame]) -> list[TokenFrame]:
        clock.advance(STEP_S)
        held.extend(frames)
        if len(held) < 2 and not any(frame.finish_reason for frame in frames):
            return []
        token_ids = tuple(token_id for frame in held for token_id in frame.token_ids)
        together = msgspec.structs.replace(held[0], token_ids=token_ids, finish_reason=held[-1].finish_reason)
        held.clear()
        return [together]

    async with fake_cluster(clock=clock) as cluster:
        cluster.workers[0].script.frames = two_at_a_time
        _, _, usage = await read(await cluster.service.open(chat()))
        num_after_first = usage.num_completion_tokens - 2
        assert value(cluster, "weft_router_inter_token_latency_seconds_count") == num_after_first > 4
        assert value(cluster, "weft_router_inter_token_latency_seconds_sum") == pytest.approx(num_after_first * STEP_S)


async def test_a_request_without_a_token_has_no_first_one() -> None:
    async with timed_cluster() as (cluster, family):
        cluster.workers[0].script.error, cluster.workers[0].script.die_at = EngineFailed("broke"), 0
        with pytest.raises(EngineFailed):
            await read(await cluster.service.open(chat([image()])))
        assert value(cluster, "weft_router_requests_total", code="engine_failed") == 1
        assert value(cluster, "weft_router_time_to_first_token_seconds_count", modality="image") == 0
        taken_s = value(cluster, "weft_router_request_duration_seconds_sum", modality="image")
        assert taken_s == pytest.approx(family.taken_s)


async def test_frames_that_are_not_used_are_counted_by_reason() -> None:
    def dropped(reason: str) -> float:
        return value(cluster, "weft_router_frames_dropped_total", reason=reason) or 0.0

    async with fake_cluster() as cluster:
        worker = cluster.workers[0]
        worker.script.pause_at = 2
        stream = await cluster.service.open(chat(n=2, stop=["choice 1"]))
        await settled(lambda: all(choice.num_tokens == 2 for choice in stream.choices))

        def send(name: MemberId, **fields: object) -> None:
            frame = TokenFrame(stream.request_id, 0, 0, 0, (65,), None)
            frame = msgspec.structs.replace(frame, **fields)
            worker.plane.send(cluster.plane.address, TokenFrames(name, (frame,)))

        send(worker.member_id, request_id=RequestId("somebody-elses"))
        send(worker.member_id, attempt=1)
        send(MemberId("worker-9"))
        send(worker.member_id, choice=2)
        send(worker.member_id, choice=-1)
        await settled(lambda: dropped("unknown_choice") == 2)
        assert dropped("unknown_request") == 1
        assert dropped("old_attempt") == 2
        assert dropped("finished_choice") == 0
        worker.script.resume.set()
        texts, _, _ = await read(stream)
        assert texts == [expected(cluster, 0), ""], "what was dropped changed nothing"
        assert dropped("finished_choice") > 0, "the worker went on with the choice that a stop string ended"


async def test_the_planners_sums_are_told_by_stage() -> None:
    """This compares what was predicted with what came, for two requests of which the second finds the first one's
    blocks."""
    async with fake_cluster() as cluster:
        for _ in range(2):
            _, _, usage = await read(await cluster.service.open(chat("the same words again and again " * 4)))
        assert usage.num_cached_tokens > 0
        assert value(cluster, "weft_planner_observations_total", stage="prefix_tokens") == 2
        assert value(cluster, "weft_planner_actual_total", stage="prefix_tokens") == usage.num_cached_tokens
        assert value(cluster, "weft_planner_predicted_total", stage="prefix_tokens") == usage.num_cached_tokens
        assert value(cluster, "weft_planner_abs_error_total", stage="prefix_tokens") == 0
        # The fakes report 0.001 s in the queue, and the planner predicts none.
        assert value(cluster, "weft_planner_actual_total", stage="queue") == pytest.approx(0.002)
        assert value(cluster, "weft_planner_abs_error_total", stage="queue") == pytest.approx(
            abs(0.002 - (value(cluster, "weft_planner_predicted_total", stage="queue") or 0.0))
        )
        for stage in ("prefill", "held", "ttft", "lower_bound"):
            assert value(cluster, "weft_planner_observations_total", stage=stage) == 2


async def test_stages_are_compared_by_the_modality_class_of_the_request() -> None:
    """The fakes report constant times: 0.001 s in the queue, 0.002 s of preparation, 0.002 s of encoding. A picture
    that a request has twice is encoded once."""
    async with fake_cluster() as cluster:
        for content in ("words", [image(), text("?")], [image(), image(), text("?")]):
            await read(await cluster.service.open(chat(content)))
        assert value(cluster, "weft_router_stage_actual_seconds_total", stage="queue", modality="text") == 0.001
        for stage, actual_s in {"queue": 0.002, "decode": 0.004, "encode": 0.004, "first_token": 0.04}.items():
            labels = {"stage": stage, "modality": "image"}
            assert value(cluster, "weft_router_stage_actual_seconds_total", **labels) == pytest.approx(actual_s)
            predicted_s = value(cluster, "weft_router_stage_predicted_seconds_total", **labels)
            error_s = value(cluster, "weft_router_stage_error_seconds_total", **labels)
            assert predicted_s is not None
            assert error_s >= abs(predicted_s - actual_s) * (1 - 1e-9), stage
        assert value(cluster, "weft_router_stage_actual_seconds_total", stage="encode", modality="text") is None


async def test_the_planners_promises_that_fail_are_seen() -> None:
    """A worker has lost its cache without a report, so predicted hits are not found."""
    async with fake_cluster() as cluster:
        words = "the same words again and again " * 4
        await read(await cluster.service.open(chat(words)))
        await settled(lambda: (value(cluster, "weft_index_keys", index="prefix") or 0) > 0)
        cluster.workers[0].script.forgets_prefix = True
        _, _, usage = await read(await cluster.service.open(chat(words)))
        assert usage.num_cached_tokens == 0
        promised = value(cluster, "weft_planner_predicted_total", stage="prefix_tokens")
        assert promised is not None
        assert promised > 0
        assert value(cluster, "weft_planner_abs_error_total", stage="prefix_tokens") == promised
        assert value(cluster, "weft_planner_actual_total", stage="prefix_tokens") == 0


async def test_the_sizes_of_the_indexes_are_told() -> None:
    def of(name: str, index: str) -> float | None:
        return value(cluster, f"weft_index_{name}", index=index)

    async with fake_cluster() as cluster:
        worker, encoder = cluster.workers[0], cluster.encoders[0]
        for index in ("prefix", "feature"):
            assert (of("keys", index), of("refused_keys_total", index)) == (0, 0)

        def stored(name: bytes) -> BlocksStored:
            return BlocksStored(None, name * 16)

        def tell(seq: int, *events: BlocksStored) -> None:
            worker.plane.send(cluster.plane.address, KvEvents(worker.member_id, 1, seq, events))

        tell(0, stored(b"a"), stored(b"b"), stored(b"c"))
        await settled(lambda: of("keys", "prefix") == 3)
        assert of("sources_out_of_step", "prefix") == 0
        features = (MmHash("m" * 64), MmHash("n" * 64))
        encoder.plane.send(cluster.plane.address, FeatureEvents(encoder.member_id, 1, 1, features, is_snapshot=True))
        await settled(lambda: of("keys", "feature") == 2)
        worker.handle = lambda message: None
        tell(7, stored(b"d"))  # Messages 1 to 6 were lost.
        await settled(lambda: of("sources_out_of_step", "prefix") == 1)
        assert of("sources_out_of_step", "feature") == 0


async def test_in_flight_is_live() -> None:
    async with fake_cluster() as cluster:
        cluster.workers[0].script.pause_at = 1
        stream = await cluster.service.open(chat())
        assert value(cluster, "weft_router_requests_in_flight") == 1
        stream.close()
        await settled(lambda: value(cluster, "weft_router_requests_in_flight") == 0)


async def test_members_gauges_come_with_reports_and_go_with_members() -> None:
    async with fake_cluster(num_workers=2) as cluster:
        for each in (*cluster.workers, *cluster.encoders):
            each.plane.send(cluster.plane.address, each.report(1))
        reports = cluster.service.reports
        await settled(lambda: len(reports.workers) == 2 and len(reports.encoders) == 1)
        for worker in ("worker-0", "worker-1"):
            assert value(cluster, "weft_worker_kv_used_blocks", worker=worker) == 7
            assert value(cluster, "weft_worker_inbox_used_bytes", worker=worker) == 4096
            assert value(cluster, "weft_worker_num_features", worker=worker) == 3
            assert value(cluster, "weft_worker_prefix_hit_tokens_total", worker=worker) == 14
        assert value(cluster, "weft_encoder_queue_cost", encoder="encoder-0") == 21
        assert value(cluster, "weft_encoder_items_encoded_total", encoder="encoder-0") == 26
        gone = cluster.pools.workers.pop(cluster.workers[0].member_id)
        cluster.publish()
        gone.plane.send(cluster.plane.address, gone.report(2))  # This is late, because the worker has left.
        cluster.workers[1].plane.send(cluster.plane.address, cluster.workers[1].report(2))
        await settled(lambda: reports.workers[cluster.workers[1].member_id].seq == 2)
        assert value(cluster, "weft_worker_kv_used_blocks", worker="worker-0") is None
        assert value(cluster, "weft_worker_kv_used_blocks", worker="worker-1") == 7
        assert b'worker="worker-0"' not in await cluster.service.metrics_exposition()


REPORT_TO_PREFIX = {
    WorkerReport: "weft_worker_",
    LinkStats: "weft_worker_transfer",
    EncoderReport: "weft_encoder_",
    EncodeCost: "weft_encoder_modality_",
    ProcessStats: "weft_process_",
}


def numbers_of(struct: type[msgspec.Struct], path: str = "") -> Iterator[str]:
    """Yields the path of every number in a report and its parts."""
    for field, kind in get_type_hints(struct).items():
        if kind is ProcessStats:
            continue  # It has labels of its own.
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from numbers_of(kind, f"{path}{field}.")
        elif kind in (int, float):
            yield path + field


@pytest.mark.parametrize("report", REPORT_TO_PREFIX)
def test_every_number_of_a_report_declares_one_metric(report: type[msgspec.Struct]) -> None:
    declared = metrics_of(report)
    assert sorted(path for path, _ in declared) == sorted(set(numbers_of(report)) - {"epoch", "seq", "at_s"})
    names = [metric.name for _, metric in declared]
    assert len(set(names)) == len(names)
    assert [name for name in names if not name.startswith(REPORT_TO_PREFIX[report])] == []
    for _, metric in declared:
        assert metric.text.endswith("."), metric.name


class PausesStats(msgspec.Struct):
    num_pauses: Annotated[int, counter("weft_worker_pauses", "Pauses of the worker.")] = 0
    num_hidden: int = 0


class PausesReport(msgspec.Struct):
    pauses: PausesStats
    load_s: Annotated[float, gauge("weft_worker_load_seconds", "Load of the worker.")] = 0.5


def test_metrics_are_found_in_a_report_and_in_its_parts() -> None:
    assert metrics_of(PausesReport) == (
        ("pauses.num_pauses", ReportedMetric("counter", "weft_worker_pauses", "Pauses of the worker.")),
        ("load_s", ReportedMetric("gauge", "weft_worker_load_seconds", "Load of the worker.")),
    )


async def test_metrics_of_members_have_the_kind_and_the_text_of_their_field() -> None:
    async with fake_cluster() as cluster:
        report = cluster.workers[0].report(1)
        report.engine.num_preemptions = 3
        cluster.service.reports.put(report)
        lines = (await cluster.service.metrics_exposition()).decode().splitlines()
    assert "# HELP weft_worker_num_running Sequences that have begun, including those that wait for a feature." in lines
    assert "# TYPE weft_worker_num_running gauge" in lines
    assert "# TYPE weft_worker_preemptions_total counter" in lines
    assert 'weft_worker_preemptions_total{worker="worker-0"} 3.0' in lines


async def test_encoders_costs_are_told_by_modality() -> None:
    async with fake_cluster() as cluster:
        encoder = cluster.encoders[0]
        costs = (EncodeCost("video", 2e-5, 0.5), EncodeCost("audio", 3e-6, 0.25))
        encoder.plane.send(cluster.plane.address, msgspec.structs.replace(encoder.report(1), costs=costs))
        await settled(lambda: bool(cluster.service.reports.encoders))
        labels = {"encoder": "encoder-0", "modality": "audio"}
        assert value(cluster, "weft_encoder_modality_seconds_per_cost", **labels) == 3e-6
        assert value(cluster, "weft_encoder_modality_overhead_seconds", **labels) == 0.25


async def test_a_router_of_a_large_cluster_leaves_the_members_series_to_the_members() -> None:
    async with fake_cluster(shows_members=False) as cluster:
        cluster.workers[0].plane.send(cluster.plane.address, cluster.workers[0].report(1))
        await settled(lambda: bool(cluster.service._feeds._marks))
        text = await cluster.service.metrics_exposition()
        assert b"weft_worker_" not in text
        assert b"weft_encoder_" not in text
        assert b"weft_router_requests_in_flight 0.0" in text


def test_two_routers_share_no_registry() -> None:
    one, other = (RouterMetrics(lambda: 0, lambda: 0) for _ in range(2))
    one.prompt_tokens.inc(5)
    assert other.registry.get_sample_value("weft_router_prompt_tokens_total") == 0


def test_admission_counts_requests_and_bytes_and_forgives_double_release() -> None:
    config = RouterConfig(TINY_MODEL, 1.0, 16, max_in_flight=2, max_bodies_bytes=100, retry_after_s=1.5)
    admission = Admission(config, ManualClock())
    first, second = admission.admit(), admission.admit()
    assert first.request_id != second.request_id
    with pytest.raises(Overloaded) as caught:
        admission.admit()
    assert caught.value.retry_after_s == 1.5
    first.grow(60)
    second.grow(40)
    with pytest.raises(Overloaded):
        second.grow(1)
    first.release()
    first.release()
    assert (admission.num_in_flight, admission.bodies_bytes) == (1, 40)
    second.grow(60)
    second.release()
    assert (admission.num_in_flight, admission.bodies_bytes) == (0, 0)
