"""Runs the benches of a whole cluster at a tiny size, on a cluster in this process: their requests are answered, and
their tables and bars follow from the traces. Bars are not asserted, because tests never measure speed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import isfinite
from pathlib import Path

import pytest

from deploy.testing import in_process_cluster
from loadtest.bench_result import BenchResult
from loadtest.benches.served import isolation_bench, overlap_bench, prediction_bench, serve_bench
from loadtest.benches.served.timed_chats import ChatKind, ChatMaker, ChatTarget, send_each
from loadtest.benches.served.timed_cluster import TimedStages, cluster_config
from loadtest.benches.synthetic import qwen2_5_vl_small
from loadtest.load import SizedContent
from loadtest.simulator import WorkloadSpec

pytestmark = pytest.mark.torch

HIDDEN_SIZE = 256
STAGES = TimedStages(pass_s=0.005, s_per_patch=0.0002, step_s=0.005, s_per_token=0.0002, s_per_decode=0.001)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return qwen2_5_vl_small()


@asynccontextmanager
async def target_of(
    model_dir: Path, stages: TimedStages = STAGES, *, overlap: bool = True
) -> AsyncIterator[tuple[ChatMaker, ChatTarget]]:
    config = cluster_config(
        model_dir,
        stages,
        workers={"overlap": overlap},
        encoders={"decode_processes": 0},
        media={"probe_processes": 0},
    )
    async with in_process_cluster(config) as (cluster, client):
        yield ChatMaker(cluster.model.name, model_dir), ChatTarget(client, cluster.model.name)


def check(result: BenchResult, num_bars: int) -> None:
    assert len(result.bars) == num_bars
    assert all(isfinite(bar.value) for bar in result.bars)
    assert {len(row) for row in result.rows} == {len(result.rows[0])}


async def test_overlap_begins_before_the_media_and_without_it_after_them(model_dir: Path) -> None:
    # Encoding takes far longer than a busy machine delays the beginning of prefill.
    stages = STAGES._replace(s_per_patch=0.001)
    case = overlap_bench.OverlapCase(stages, (ChatKind(overlap_bench.PICTURE, num_pictures=1),), True)
    finding = overlap_bench.OverlapFinding(case)
    for is_on in (True, False):
        async with target_of(model_dir, stages, overlap=is_on) as (maker, target):
            await finding.measure(maker, HIDDEN_SIZE, 1, 3 if is_on else 0, is_on, target)
    assert finding.costs is not None
    media = finding.costs.media[overlap_bench.PICTURE]
    assert media.num_units == 1
    assert media.unit_s >= stages.pass_s + 256 * stages.s_per_patch
    (on,), (off,) = finding.with_overlap, finding.without_overlap
    assert on.first_s("prefill") < on.first_s("unit_landed")
    assert off.first_s("prefill") > off.last_s("unit_landed")
    assert finding.ideal(on).bound_s() <= on.ttft_s * 1.5
    assert len(finding.loaded) == 3
    check(overlap_bench.overlap_result([finding], is_real=False), 4)
    assert overlap_bench.overlap_result([finding], is_real=True).bars == []


async def test_predictions_are_compared_by_request_and_by_stage(model_dir: Path) -> None:
    async with target_of(model_dir) as (maker, target):
        rounds = await prediction_bench.measure_predictions(maker, 5, target, concurrencies=(1, 2))
    assert [one.concurrency for one in rounds] == [1, 2]
    assert {chat.kind.name for one in rounds for chat in one.chats} == {"text", "picture", "video"}
    for one in rounds:
        assert one.stages["ttft"].num == len(one.chats)
        assert one.stages["dispatch"].num == len(one.chats)
        assert one.stages["encode"].num >= 3
    result = prediction_bench.prediction_result(rounds, is_real=False)
    check(result, 2)
    assert set(result.profile) == {"1 open at once", "2 open at once"}


async def test_the_same_texts_come_alone_and_beside_media(model_dir: Path) -> None:
    async with target_of(model_dir) as (maker, target):
        load = isolation_bench.TextLoad(num=5, per_s=20.0, num_rounds=1)
        alone, beside = await isolation_bench.measure_isolation(maker, load, target, is_pinned=False)
    assert [len(half.texts()) for half in (alone, beside)] == [5, 5]
    assert [len(half.media()) for half in (alone, beside)] == [0, 1]
    assert [chat.kind for chat in alone.texts()] == [chat.kind for chat in beside.texts()]
    assert beside.forward_s > 0.0 == alone.forward_s
    check(isolation_bench.isolation_result((alone, beside), is_real=False), 2)


async def test_no_two_requests_of_a_kind_are_alike(model_dir: Path) -> None:
    kind = ChatKind("both", num_words=20, num_pictures=1, num_frames=8, max_tokens=1)
    async with target_of(model_dir) as (maker, target):
        one, other = await send_each(target, maker, [kind, kind])
    assert [each["modality"] for each in one.trace["media"]] == ["image", "video"]
    assert other.answer["usage"]["prompt_tokens_details"]["cached_tokens"] < 32
    assert len(other.landings_s()) == len(one.landings_s()) == 2
    assert one.first_s("dispatched") < one.first_s("received", str(one.plan["worker_id"]))


async def test_mixed_requests_give_a_table_beside_the_articles(model_dir: Path) -> None:
    found = []
    async with target_of(model_dir) as (_, target):
        content = SizedContent(target.model, ["the"])
        for row in serve_bench.ROWS:
            spec = WorkloadSpec(10**9, 1.0, row.kind_to_share, mean_prompt=8.0, mean_output=4.0)
            found.append(await serve_bench.keep_open(target, content, spec, num_clients=3, seconds=1.5))
        metrics = await target.metrics()
    for row, one in zip(serve_bench.ROWS, found, strict=True):
        assert {sample.kind for sample in one.samples} <= set(row.kind_to_share)
        assert [sample.error for sample in one.samples] == [""] * len(one.samples)
        assert all(0 < sample.ttft_s <= sample.total_s and sample.num_output for sample in one.samples)
    assert metrics["weft_router_requests_total"] >= sum(len(one.samples) for one in found) > 0
    result = serve_bench.table_result(found, slower=10.0, num_clients=3)
    check(result, num_bars=19)
    assert [row[0] for row in result.rows[1:]] == [row.mix for row in serve_bench.ROWS]
