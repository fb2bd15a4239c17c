"""Runs the contract of workers on vLLM on a GPU, with tiny models and features over NIXL.

`make gpu` runs these tests in the environment that `make install-vllm VLLM=gpu` makes; without a CUDA device, and in
other environments, they are skipped. They have not run on a GPU yet (docs/gpu.md)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
import torch
from contract_model import contract_model
from engine_contract import CHECKS, ContractRig, contract_rig
from gpu_report import has_vllm
from hearing_contract import HEARING_CHECKS
from migration_contract import MIGRATION_CHECKS

if not has_vllm():
    pytest.skip("this environment has no vLLM", allow_module_level=True)
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.nixl, pytest.mark.asyncio(loop_scope="module")]


def make_worker(*arguments: Any, **options: Any) -> Any:
    from vllm_rig import make_vllm_worker  # It imports vLLM, which other environments do not have.

    return make_vllm_worker(*arguments, **options)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_omni"])
async def worker(request: pytest.FixtureRequest) -> AsyncIterator[ContractRig]:
    async with contract_rig(contract_model(request.param), make_worker) as made:
        yield made


@pytest.mark.parametrize(
    "check", CHECKS + MIGRATION_CHECKS + HEARING_CHECKS, ids=lambda check: check.__name__.removeprefix("check_")
)
async def test_contract_of_vllm_on_a_gpu(worker: ContractRig, check: Callable[[ContractRig], Awaitable[None]]) -> None:
    if check in HEARING_CHECKS and "audio" not in worker.model.family.max_items:
        pytest.skip("the model hears nothing")
    await check(worker)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
async def test_two_ranks_of_vllm_have_features_of_their_own() -> None:
    async with contract_rig(contract_model("qwen2_5_vl"), make_worker, num_ranks=2) as made:
        of = made.model.prompt(made.text(40), 1, made.text(5))
        request = made.request(of)
        await made.run(request, of)
        assert made.tokens(request) == made.model.answer(of, 6)
        await made.assert_idle()
