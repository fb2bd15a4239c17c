"""Runs the contract of workers on Weft's own engine. `tests/vllm` runs it on vLLM."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from contract_model import ContractModel, contract_model
from engine_contract import (
    CHECKS,
    ContractRig,
    WorkerParts,
    check_an_inbox_with_room_for_one_feature_serves_many,
    check_preempted_requests_go_on,
    contract_rig,
)
from hearing_contract import HEARING_CHECKS
from migration_contract import MIGRATION_CHECKS
from worker_rig import WORKER

from fabric.contracts import SystemClock
from fabric.transport import LocalChannelHub, LocalFeatureSink, LocalFeatureSource, LocalPlane
from llm_workers.compute import register_attention
from llm_workers.own_engine import OwnEngine
from llm_workers.worker_config import WorkerConfig
from llm_workers.worker_service import WorkerService

pytestmark = [pytest.mark.torch, pytest.mark.asyncio(loop_scope="module")]


def make_own_worker(model: ContractModel, plane: LocalPlane, inbox_bytes: int, **config: Any) -> WorkerParts:
    settings = WorkerConfig(**config)
    language_model = model.family.load_language_model(model.directory, "cpu", "float32", register_attention())
    hub, clock = LocalChannelHub(), SystemClock()
    sink = LocalFeatureSink(hub, "worker", inbox_bytes)
    make_engine = functools.partial(OwnEngine, settings, model.family, language_model, clock)
    service = WorkerService(WORKER, settings, model.family, make_engine, plane, sink, clock)
    return WorkerParts(service, sink, LocalFeatureSource(hub, "encoder", 1 << 24))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["qwen2_5_vl", "qwen3_vl"])
async def worker(request: pytest.FixtureRequest) -> AsyncIterator[ContractRig]:
    async with contract_rig(contract_model(request.param), make_own_worker, block_size=32, num_blocks=512) as made:
        yield made


@pytest.mark.parametrize("check", CHECKS + MIGRATION_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_contract(worker: ContractRig, check: Callable[[ContractRig], Awaitable[None]]) -> None:
    await check(worker)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hearing_worker() -> AsyncIterator[ContractRig]:
    async with contract_rig(contract_model("qwen3_omni"), make_own_worker, block_size=32, num_blocks=512) as made:
        yield made


@pytest.mark.parametrize("check", HEARING_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_hearing(hearing_worker: ContractRig, check: Callable[[ContractRig], Awaitable[None]]) -> None:
    await check(hearing_worker)


async def test_preempted_requests_go_on() -> None:
    model = contract_model("qwen2_5_vl")
    async with contract_rig(model, make_own_worker, block_size=32, num_blocks=8) as small:
        await check_preempted_requests_go_on(small)


async def test_an_inbox_with_room_for_one_feature_serves_many() -> None:
    model = contract_model("qwen2_5_vl")
    async with contract_rig(model, make_own_worker, inbox_bytes=6000, block_size=32, num_blocks=512) as small:
        await check_an_inbox_with_room_for_one_feature_serves_many(small)
