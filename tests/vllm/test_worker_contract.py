"""Runs the contract of workers on vLLM, with tiny models on a CPU and features over NIXL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from contract_model import contract_model
from engine_contract import (
    CHECKS,
    ContractRig,
    check_an_inbox_with_room_for_one_feature_serves_many,
    check_preempted_requests_go_on,
    contract_rig,
)
from hearing_contract import HEARING_CHECKS
from migration_contract import MIGRATION_CHECKS
from vllm_rig import make_vllm_worker

pytestmark = [pytest.mark.torch, pytest.mark.nixl, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_omni"])
async def worker(request: pytest.FixtureRequest) -> AsyncIterator[ContractRig]:
    async with contract_rig(contract_model(request.param), make_vllm_worker) as made:
        yield made


@pytest.mark.parametrize(
    "check", CHECKS + MIGRATION_CHECKS + HEARING_CHECKS, ids=lambda check: check.__name__.removeprefix("check_")
)
async def test_contract(worker: ContractRig, check: Callable[[ContractRig], Awaitable[None]]) -> None:
    if check in HEARING_CHECKS and "audio" not in worker.model.family.max_items:
        pytest.skip("the model hears nothing")
    await check(worker)


async def test_preempted_requests_go_on() -> None:
    model = contract_model("qwen2_5_vl")
    async with contract_rig(model, make_vllm_worker, num_blocks=9, max_model_len=256) as small:
        await check_preempted_requests_go_on(small)


async def test_an_inbox_with_room_for_one_feature_serves_many() -> None:
    model = contract_model("qwen2_5_vl")
    async with contract_rig(model, make_vllm_worker, inbox_bytes=6000) as small:
        await check_an_inbox_with_room_for_one_feature_serves_many(small)


async def test_two_ranks_have_features_of_their_own() -> None:
    model = contract_model("qwen2_5_vl")
    async with contract_rig(model, make_vllm_worker, num_ranks=2) as made:
        of = made.model.prompt(made.text(40), 1, made.text(5))
        request = made.request(of)
        await made.run(request, of)
        assert made.tokens(request) == made.model.answer(of, 6)
        await made.assert_idle()
