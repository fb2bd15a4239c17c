"""Runs the contract of workers on vLLM, with tiny models on a CPU and features over NIXL."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from contract_model import contract_model
from engine_contract import (
    CHECKS,
    ContractRig,
    check_a_video_is_computed_unit_by_unit,
    check_an_inbox_with_room_for_one_feature_serves_many,
    check_many_requests_at_once,
    check_preempted_requests_go_on,
    contract_rig,
)
from hearing_contract import HEARING_CHECKS
from migration_contract import MIGRATION_CHECKS
from vllm_rig import make_vllm_worker

from llm_workers.vllm_engine import engine_args, patient_waits
from llm_workers.vllm_engine.rank_extension import CPU_BUFFERS
from llm_workers.vllm_engine.shared_names import names_in

pytestmark = [pytest.mark.torch, pytest.mark.nixl, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["qwen2_5_vl", "qwen2_5_vl with overlapping steps", "qwen3_vl", "qwen3_omni"],
)
async def worker(request: pytest.FixtureRequest) -> AsyncIterator[ContractRig]:
    name, _, is_overlapping = request.param.partition(" with ")
    async with contract_rig(contract_model(name), make_vllm_worker, is_overlapping=bool(is_overlapping)) as made:
        yield made


@pytest.mark.parametrize(
    "check", CHECKS + MIGRATION_CHECKS + HEARING_CHECKS, ids=lambda check: check.__name__.removeprefix("check_")
)
async def test_contract(worker: ContractRig, check: Callable[[ContractRig], Awaitable[None]]) -> None:
    if check in HEARING_CHECKS and "audio" not in worker.model.family.max_items:
        pytest.skip("the model hears nothing")
    await check(worker)


@pytest.mark.parametrize("is_overlapping", [False, True])
async def test_preempted_requests_go_on(*, is_overlapping: bool) -> None:
    model = contract_model("qwen2_5_vl")
    room = {"num_blocks": 9, "max_model_len": 256}
    async with contract_rig(model, make_vllm_worker, is_overlapping=is_overlapping, **room) as small:
        await check_preempted_requests_go_on(small)


async def test_two_pipeline_stages_compute_two_steps_at_once() -> None:
    others = rank_processes()
    async with contract_rig(contract_model("qwen2_5_vl"), make_vllm_worker, num_stages=2) as made:
        for process in rank_processes() - others:
            assert_nothing_is_left_of(process, "psm_")
        await check_many_requests_at_once(made)
        await check_a_video_is_computed_unit_by_unit(made)


async def test_an_inbox_with_room_for_one_feature_serves_many() -> None:
    model = contract_model("qwen2_5_vl")
    async with contract_rig(model, make_vllm_worker, inbox_bytes=6000) as small:
        await check_an_inbox_with_room_for_one_feature_serves_many(small)


async def test_the_engine_core_sleeps_while_its_ranks_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    model, slept = contract_model("qwen2_5_vl"), list[float]()
    monkeypatch.setattr(patient_waits, "SPIN_S", 0.0)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(seconds)

    def wait_and_count(condition: patient_waits.SpinCondition) -> None:
        patient_waits.wait_patiently(condition, sleep=sleep)

    monkeypatch.setattr(engine_args, "wait_patiently", wait_and_count)
    async with contract_rig(model, make_vllm_worker) as made:
        slept.clear()
        of = made.model.prompt(made.text(40), 1, made.text(5))
        request = made.request(of)
        await made.run(request, of)
        assert made.tokens(request) == made.model.answer(of, 6)
        assert set(slept) == {patient_waits.SLEEP_S}


def rank_processes() -> set[int]:
    """Returns the ids of the processes in which vLLM's ranks run."""
    children = multiprocessing.active_children()
    return {child.pid for child in children if child.pid is not None and child.name.startswith("VllmWorker")}


def shared_memory_of(process: int) -> list[str]:
    """Returns the names of the shared memory that a process maps; a name that was removed ends in `(deleted)`."""
    return names_in(Path(f"/proc/{process}/maps").read_text().splitlines())


def assert_nothing_is_left_of(process: int, *marks: str) -> None:
    """Checks that a process maps shared memory with each of `marks` in its name, and none whose name is still there. A
    semaphore of `multiprocessing` counts as shared memory."""
    shared = shared_memory_of(process)
    for mark in marks:
        assert any(mark in name for name in shared), f"vLLM does not share memory as {mark} any more"
    assert [name for name in shared if not name.endswith("(deleted)")] == []


async def test_two_ranks_have_features_of_their_own_and_shared_memory_without_names() -> None:
    """So a worker that is killed leaves no shared memory."""
    model, others = contract_model("qwen2_5_vl"), rank_processes()
    async with contract_rig(model, make_vllm_worker, num_ranks=2) as made:
        ranks = rank_processes() - others
        assert len(ranks) == 2
        has_buffers = hasattr(torch.ops._C, "init_shm_manager")  # vLLM's builds for AVX2 have none.
        for process in ranks:
            assert_nothing_is_left_of(process, "psm_", "sem.mp-", *(CPU_BUFFERS,) * has_buffers)
        of = made.model.prompt(made.text(40), 1, made.text(5))
        request = made.request(of)
        await made.run(request, of)
        assert made.tokens(request) == made.model.answer(of, 6)
        await made.assert_idle()
