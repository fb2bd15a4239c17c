"""Tests that the worker's service needs of its engine only what `WorkerEngine` says, with an engine that has neither a
scheduler nor a model."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import pytest

from fabric.contracts import (
    AttemptId,
    EngineFailed,
    EngineStats,
    FeatureEvents,
    FeatureTicket,
    GenerateRequest,
    KvSnapshot,
    MemberId,
    MmHash,
    RequestId,
    RouterHeartbeat,
    SamplingParams,
    SequenceId,
    SnapshotRequest,
    StopConditions,
    SystemClock,
    TokenFrames,
    UnitKey,
    UnitReady,
    WorkerLost,
    WorkerReport,
)
from fabric.transport import LocalChannelHub, LocalFeatureSink, LocalHub, LocalPlane
from llm_workers.engine_interface import AbortedSequence, Admitted, BlockSnapshot, Update, WorkerEngine
from llm_workers.scheduling import (
    AdmittedSequences,
    FeatureReference,
    FinishedSequence,
    Guide,
    SequenceTimes,
    SequenceTokens,
    StepCosts,
    StepEvents,
    StepWork,
)
from llm_workers.worker_config import WorkerConfig
from llm_workers.worker_service import WorkerService
from modalities.family import ModelShape, Positions

WORKER, ROUTER = MemberId("worker-0"), MemberId("router-0")
SHAPE = ModelShape(
    hidden_size=8, num_levels=1, num_layers=1, num_kv_heads=1, head_dim=8, vocab_size=100, max_model_len=100
)
TIMES = SequenceTimes(0.0, 0.1, 0.0, 0.2, 0.5)
IDLE = EngineStats(kv_blocks_total=7)


class TextFamily:
    shape = SHAPE

    @staticmethod
    def positions(token_ids: Sequence[int], *_: object) -> Positions:
        return Positions(np.arange(len(token_ids))[None], 0)


class EchoEngine:
    """An `EchoEngine` answers every request at once with its own prompt, and keeps a request open whose prompt is
    empty."""

    def __init__(self, on_update: Callable[[Update], None]) -> None:
        self.on_update = on_update
        self.calls: list[str] = []
        self.open: list[AttemptId] = []

    async def prepare(self, costs: StepCosts) -> None:
        self.calls.append("prepare")
        costs.fit([(StepWork(0, 10.0), 1.0), (StepWork(0, 20.0), 2.0)])

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def check_health(self) -> None:
        pass

    def add(self, request: GenerateRequest, positions: Positions, guide: Guide | None = None) -> None:
        assert positions.ids.shape == (1, len(request.token_ids))
        attempt = AttemptId(request.request_id, request.attempt)
        sequence_id = SequenceId(*attempt, 0)
        update = Update(admitted=[Admitted(attempt, AdmittedSequences((sequence_id,), 0, (), "not_covered"))])
        if request.token_ids:
            tokens = SequenceTokens(sequence_id, 0, request.token_ids, "stop")
            size = len(request.token_ids)
            finished = FinishedSequence(sequence_id, "stop", size, size, 0, TIMES)
            update.events = StepEvents((tokens,), (finished,), (), (), ())
            update.stats = EngineStats(kv_blocks_total=7, tokens_generated=size)
        else:
            self.open.append(attempt)
        self.on_update(update)

    def abort(self, attempt: AttemptId, choices: Sequence[int] = ()) -> None:
        if attempt in self.open:
            self.open.remove(attempt)
            self.on_update(Update(aborted=[AbortedSequence(SequenceId(*attempt, 0), TIMES)]))

    def hold_feature(self, reference: FeatureReference) -> None:
        raise AssertionError("no request of this module has a medium")

    def evict_feature(self, unit: UnitKey) -> None:
        pass

    def request_snapshot(self, address: str) -> None:
        self.on_update(Update(snapshots=[BlockSnapshot(address, 5, ())]))

    def stats(self) -> EngineStats:
        return IDLE

    def seconds_by_part(self) -> Mapping[str, float]:
        return {"echo": 1.5}


class Served(NamedTuple):
    service: WorkerService
    engine: EchoEngine
    messages: list[Any]
    worker: LocalPlane
    router: LocalPlane

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]

    async def until(self, is_true: Callable[[], object]) -> None:
        async with asyncio.timeout(10.0):
            while not is_true():  # noqa: ASYNC110 - the messages have no event
                await asyncio.sleep(0)


@pytest.fixture
async def served() -> Any:
    hub = LocalHub()
    engines: list[EchoEngine] = []
    messages: list[Any] = []
    worker, router = LocalPlane(hub, "local://worker"), LocalPlane(hub, "local://router")
    sink = LocalFeatureSink(LocalChannelHub(), "worker", 1 << 12)

    def make_engine(on_update: Callable[[Update], None]) -> WorkerEngine:
        engines.append(EchoEngine(on_update))
        return engines[-1]

    service = WorkerService(WORKER, WorkerConfig(), TextFamily, make_engine, worker, sink, SystemClock())
    await service.start()
    router.start(messages.append)
    router.send(worker.address, RouterHeartbeat(ROUTER, router.address, 30.0))
    router.send(worker.address, SnapshotRequest(ROUTER, router.address))
    yield Served(service, engines[0], messages, worker, router)
    await service.stop()
    for each in (sink, worker, router):
        each.close()


def request(name: str, *token_ids: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(name),
        attempt=0,
        router_id=ROUTER,
        router_address="local://router",
        token_ids=token_ids,
        placeholders=(),
        media=(),
        sampling=SamplingParams(),
        stop=StopConditions(max_tokens=5),
        age=(0.0, name),
    )


async def test_any_engine_serves_requests_and_its_numbers_are_reported(served: Served) -> None:
    before = served.service.report()
    assert (before.engine.kv_blocks_total, before.engine.tokens_generated) == (7, 0)
    assert before.prefill_s_per_token == pytest.approx(0.1), "what the engine was measured to take"
    result = await served.service.generate(request("a", 4, 5, 6))
    assert result.error is None
    assert [(one.finish_reason, one.num_tokens) for one in result.choices] == [("stop", 3)]
    await served.until(lambda: served.of(TokenFrames))
    assert served.of(TokenFrames)[0].frames[0].token_ids == (4, 5, 6)
    assert served.service.report().engine.tokens_generated == 3
    await served.until(lambda: served.of(WorkerReport) and served.of(KvSnapshot))
    assert served.of(KvSnapshot)[0].last_seq == 5
    assert served.of(FeatureEvents) == [FeatureEvents(WORKER, 1, 0, is_snapshot=True)], "it keeps no features"
    assert served.service.seconds_by_part() == {"echo": 1.5}


async def test_a_cancelled_call_is_aborted_in_the_engine(served: Served) -> None:
    call = asyncio.ensure_future(served.service.generate(request("a")))
    await served.until(lambda: served.engine.open)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert served.engine.open == []


@pytest.mark.parametrize("place", ["positions", "add"])
async def test_a_bug_that_one_request_meets_ends_this_request_and_no_other(
    served: Served, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise IndexError("a bug")

    with monkeypatch.context() as patch:
        if place == "positions":
            patch.setattr(TextFamily, "positions", staticmethod(fails))
        else:
            patch.setattr(served.engine, "add", fails)
        result = await served.service.generate(request("a", 4, 5, 6))
    assert result.error is not None
    assert (result.error.code, result.error.message) == (
        "engine_failed",
        "the request could not be admitted: IndexError",
    )
    assert result.choices == ()
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert (record.getMessage(), record.request_id) == ("request a failed with an unexpected exception", "a")
    assert record.exc_info is not None
    assert served.of(TokenFrames) == []
    assert (await served.service.generate(request("a", 4, 5, 6))).error is None, "nothing of it stays open"


async def test_the_death_of_any_engine_ends_its_calls(served: Served) -> None:
    call = asyncio.ensure_future(served.service.generate(request("a")))
    await served.until(lambda: served.engine.open)
    served.engine.on_update(Update(death=WorkerLost("it died")))
    assert (await call).error.code == "worker_lost"
    assert served.service.report().is_lost


async def test_a_lost_worker_is_ill_and_takes_no_request_although_its_engine_lives(served: Served) -> None:
    """The owner replaces a lost worker when its health checks fail; a loss must not depend on the engine for that."""
    losses: list[str] = []
    served.service.on_lost(lambda: losses.append("lost"))
    call = asyncio.ensure_future(served.service.generate(request("a")))
    await served.until(lambda: served.engine.open)
    served.service.lose(WorkerLost("the feature store is inconsistent"))
    assert (await call).error.message == "the feature store is inconsistent"
    assert served.engine.open == [], "the engine computes nothing any more"
    with pytest.raises(WorkerLost, match="the feature store is inconsistent"):
        served.service.check_health()
    refused = await served.service.generate(request("b", 4))
    assert (refused.error.code, refused.choices) == ("worker_lost", ())
    served.service.lose(WorkerLost("again"))
    assert losses == ["lost"]


async def test_an_update_that_can_not_be_applied_ends_every_call(served: Served) -> None:
    call = asyncio.ensure_future(served.service.generate(request("a")))
    await served.until(lambda: served.engine.open)
    served.engine.on_update(Update(aborted=[AbortedSequence(SequenceId(RequestId("a"), 0, 0), None)]))
    async with asyncio.timeout(10.0):
        assert (await call).error.code == "worker_lost"
    assert served.service.report().is_lost


async def test_a_pull_that_can_not_be_recorded_loses_the_worker(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the requests that read the unit would wait for ever."""

    def fails(*_: object) -> None:
        raise IndexError("a bug")

    receiver = served.service._receiver
    call = asyncio.ensure_future(served.service.generate(request("a")))
    await served.until(lambda: served.engine.open)
    monkeypatch.setattr(receiver, "_release", fails)
    ticket = FeatureTicket("e", b"", 0, 0, 4, 1, (1, 1, 1), "float32", 1.0)
    unit = UnitKey(MmHash(bytes(16)), 0)
    receiver._call_soon(receiver._pulled, UnitReady(MemberId("e"), "", RequestId("a"), 0, unit, ticket), Future())
    async with asyncio.timeout(10.0):
        assert (await call).error.message == "the pull of a feature can't be recorded"
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert (record.request_id, record.exc_info is not None) == ("a", True)
    with pytest.raises(WorkerLost, match="the pull of a feature can't be recorded"):
        served.service.check_health()


async def test_a_contradiction_in_the_feature_store_loses_the_worker_and_its_reports_go_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def contradict() -> None:
        raise AssertionError("counted wrong")

    monkeypatch.setattr(served.service._receiver, "settle", contradict)
    await served.until(lambda: any(report.is_lost for report in served.of(WorkerReport)))
    num_reports = len(served.of(WorkerReport))
    await served.until(lambda: len(served.of(WorkerReport)) > num_reports + 1)
    with pytest.raises(WorkerLost, match="the feature store is inconsistent"):
        served.service.check_health()


async def test_a_worker_without_its_periodic_work_is_ill_and_stops_all_the_same(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no lease can be read")

    served.service.check_health()
    monkeypatch.setattr(served.service._routers, "take_expired", fail)
    ticker = served.service._ticker
    assert ticker is not None
    await served.until(ticker.done)
    with pytest.raises(EngineFailed, match="periodic work"):
        served.service.check_health()
    await served.service.stop()
    assert served.engine.calls[-1] == "stop"


async def test_the_service_prepares_starts_and_stops_its_engine_once(served: Served) -> None:
    assert served.engine.calls == ["prepare", "start"]
    await served.service.stop()
    assert served.engine.calls == ["prepare", "start", "stop"]


def test_the_service_imports_no_torch() -> None:
    code = "import sys, llm_workers.worker_service, llm_workers.engine"
    show = "; print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code + show], check=True, capture_output=True, text=True)
    assert found.stdout == "[]\n"
