"""What `/metrics` says: exact counts of served requests, and members' gauges that go when members go."""

from __future__ import annotations

import msgspec
import pytest
from router_chats import chat, image, read
from router_fakes import FakeCluster, fake_cluster, settled

from fabric.errors import Overloaded, RequestRefused
from fabric.messages import EncodeCost, EncoderReport, WorkerReport
from router.admission import Admission
from router.member_metrics import ENCODER_COUNTERS, ENCODER_GAUGES, WORKER_COUNTERS, WORKER_GAUGES
from router.metrics import RouterMetrics


def value(cluster: FakeCluster, name: str, **labels: str) -> float | None:
    return cluster.service.metrics.registry.get_sample_value(name, labels)


async def test_requests_and_tokens_are_counted() -> None:
    async with fake_cluster() as cluster:
        _, _, usage = await read(await cluster.service.open(chat([image()])))
        with pytest.raises(RequestRefused):
            await cluster.service.open(chat(model="other"))
        assert value(cluster, "weft_router_requests_total", code="ok") == 1
        assert value(cluster, "weft_router_requests_total", code="model_not_found") == 1
        assert value(cluster, "weft_router_attempts_total", outcome="ok") == 1
        assert value(cluster, "weft_router_prompt_tokens_total") == usage.num_prompt_tokens
        assert value(cluster, "weft_router_completion_tokens_total") == usage.num_completion_tokens
        assert value(cluster, "weft_router_itl_seconds_count") == usage.num_completion_tokens - 1
        for once in ("ttft_seconds", "e2e_seconds", "predicted_ttft_seconds", "ttft_ratio", "overlap_efficiency"):
            assert value(cluster, f"weft_router_{once}_count") == 1
        for stage in ("intake", "worker", "router"):
            assert value(cluster, "weft_router_stage_seconds_count", stage=stage) == 1
        assert value(cluster, "weft_router_requests_in_flight") == 0


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
        reports = cluster.service.metrics.reports
        await settled(lambda: len(reports.workers) == 2 and len(reports.encoders) == 1)
        for worker in ("worker-0", "worker-1"):
            assert value(cluster, "weft_worker_kv_blocks_used", worker=worker) == 7
            assert value(cluster, "weft_worker_inbox_bytes_used", worker=worker) == 4096
            assert value(cluster, "weft_worker_num_features", worker=worker) == 3
            assert value(cluster, "weft_worker_prefix_hit_tokens_total", worker=worker) == 14
        assert value(cluster, "weft_encoder_queue_cost", encoder="encoder-0") == 21
        assert value(cluster, "weft_encoder_items_encoded_total", encoder="encoder-0") == 26
        gone = cluster.pools.workers.pop(cluster.workers[0].member_id)
        cluster.publish()
        gone.plane.send(cluster.plane.address, gone.report(2))  # Late: it has left.
        cluster.workers[1].plane.send(cluster.plane.address, cluster.workers[1].report(2))
        await settled(lambda: reports.workers[cluster.workers[1].member_id].seq == 2)
        assert value(cluster, "weft_worker_kv_blocks_used", worker="worker-0") is None
        assert value(cluster, "weft_worker_kv_blocks_used", worker="worker-1") == 7
        assert b'worker="worker-0"' not in cluster.service.metrics.exposition()


@pytest.mark.parametrize(
    ("report", "gauges", "counters"),
    [(WorkerReport, WORKER_GAUGES, WORKER_COUNTERS), (EncoderReport, ENCODER_GAUGES, ENCODER_COUNTERS)],
)
def test_every_number_of_a_report_is_a_series(report: type, gauges: dict[str, str], counters: dict[str, str]) -> None:
    numbers = {name for name, kind in report.__annotations__.items() if kind in ("int", "float")}
    assert numbers - {"epoch", "seq"} == set(gauges) | set(counters)
    assert not set(gauges) & set(counters)


async def test_encoders_costs_are_told_by_modality() -> None:
    async with fake_cluster() as cluster:
        encoder = cluster.encoders[0]
        costs = (EncodeCost("video", 2e-5, 0.5), EncodeCost("audio", 3e-6, 0.25))
        encoder.plane.send(cluster.plane.address, msgspec.structs.replace(encoder.report(1), costs=costs))
        await settled(lambda: bool(cluster.service.metrics.reports.encoders))
        labels = {"encoder": "encoder-0", "modality": "audio"}
        assert value(cluster, "weft_encoder_modality_seconds_per_cost", **labels) == 3e-6
        assert value(cluster, "weft_encoder_modality_overhead_seconds", **labels) == 0.25


def test_two_routers_share_no_registry() -> None:
    one, other = (RouterMetrics(lambda: 0, lambda: 0) for _ in range(2))
    one.prompt_tokens.inc(5)
    assert other.registry.get_sample_value("weft_router_prompt_tokens_total") == 0


def test_admission_counts_requests_and_bytes_and_forgives_double_release() -> None:
    admission = Admission(max_in_flight=2, max_bodies_bytes=100, retry_after_s=1.5)
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
