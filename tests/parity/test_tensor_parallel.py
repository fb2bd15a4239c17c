"""Tests that a worker on two gloo ranks generates the tokens of transformers, and its own tokens on one rank; and that
all its ranks end together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch
from chat_media import image_part, user
from family_rig import LoadedFamily, Text
from family_row import FamilyRow, Medium
from family_rows_pictures import LLAVA
from family_rows_qwen3_omni import QWEN3_OMNI
from family_rows_qwen_vl import QWEN3_VL
from family_rows_text import LLAMA, QWEN2, QWEN3
from rank_forks import rank_forks, smallest_in_forks
from reference_model import Answer, Comparison, ReferenceModel
from worker_rig import Rig, rig

from deploy import compose
from deploy.config import ClusterConfig
from deploy.demo.build import demo_checkpoint
from deploy.local import LocalCluster
from deploy.ranks import load_share, spawn_rank
from deploy.testing import in_process_cluster
from deploy.worker_pools import check_shares
from fabric.contracts import (
    ConfigError,
    GenerateResult,
    PromptOutputs,
    SamplingParams,
    StopConditions,
    WeftError,
    WorkerLost,
)
from llm_workers.compute import register_attention
from llm_workers.tensor_parallel import Invitation, ParallelLanguageModel, RankGroup, RankProcess
from llm_workers.worker_service import WorkerService
from modalities.checkpoint_tensors import check_plan
from modalities.families.causal_lm.language_model import load_text_half
from modalities.family import LanguageModel

if TYPE_CHECKING:
    from deploy.ranks import LaunchRank

pytestmark = pytest.mark.torch

NUM_TOKENS = 10
SYSTEM, QUESTION, BETWEEN = Text(2, 17), Text(1, 23), Text(3, 5)
FROZEN_AFTER_S = 5.0


@dataclass
class Parallel:
    """Holds a loaded family whose model runs on two ranks. It has the attributes that `worker_rig.rig` needs of
    `parts`."""

    of: LoadedFamily
    model: LanguageModel
    group: RankGroup
    rank_processes: list[Any]
    config: ClusterConfig
    eos_token_ids: tuple[int, ...] = ()

    @property
    def family(self) -> Any:
        return self.of.family


def config_of(directory: Path, **workers: Any) -> ClusterConfig:
    section = {"replicas": 1, "tensor_parallel": 2, "num_blocks": 64, "block_size": 8, **workers}
    return ClusterConfig.model_validate({"model": {"path": directory}, "workers": section})


@pytest.fixture(scope="module")
def fork_rank() -> Iterator[LaunchRank]:
    with rank_forks() as launch:
        yield launch


@contextlib.contextmanager
def two_ranks(fork_rank: LaunchRank, loaded: LoadedFamily, step_timeout_s: float = 60.0) -> Iterator[Parallel]:
    config = config_of(loaded.directory)
    rank_processes: list[RankProcess] = []

    def launch(invitation: Invitation) -> RankProcess:
        rank_processes.append(fork_rank(config, loaded.directory, invitation))
        return rank_processes[-1]

    group = RankGroup("127.0.0.1", 2, "cpu", step_timeout_s, 120.0)
    model = compose.load_model(config, loaded.directory)
    share = group.open(launch, lambda: load_share(config, model).model)
    try:
        yield Parallel(loaded, ParallelLanguageModel(share, group), group, rank_processes, config)
    finally:
        group.stop()
        assert not any(rank_process.is_alive() for rank_process in rank_processes)
        assert not torch.distributed.is_initialized()


@contextlib.asynccontextmanager
async def worker(parallel: Parallel, **config: Any) -> AsyncIterator[Rig]:
    section = parallel.config.workers
    sizes = {"num_ranks": 2, "num_blocks": section.num_blocks, "block_size": section.block_size}
    async with rig(parts=parallel, **sizes, **config) as r:
        yield r


async def answer(r: Rig, loaded: LoadedFamily, *parts: Text | Medium) -> list[int]:
    of = loaded.prompt(*parts)
    request = r.request(of, NUM_TOKENS)
    call = asyncio.ensure_future(r.service.generate(request))
    for index, (item, unit) in enumerate(of.units):
        r.publish(request, of, item, loaded.feature(of, index), unit)
    result = await asyncio.wait_for(call, 60)
    assert result.error is None
    return r.tokens(request)


def prompts_of(row: FamilyRow) -> list[tuple[Text | Medium, ...]]:
    prompts: list[tuple[Text | Medium, ...]] = [(SYSTEM, QUESTION), (Text(5, 41),)]
    for modality in row.modalities:
        one, other = Medium(modality, 1, row.sizes[0]), Medium(modality, 2, row.sizes[1])
        prompts += [(SYSTEM, one, QUESTION), (SYSTEM, one, BETWEEN, other, BETWEEN, one)]
    return prompts


@pytest.mark.parametrize("row", [QWEN3_OMNI, QWEN3_VL, LLAVA, LLAMA, QWEN2, QWEN3], ids=str)
def test_tokens_equal_transformers_and_one_rank(row: FamilyRow, tmp_path: Path, fork_rank: LaunchRank) -> None:
    """Runs prompts that share their beginnings: in chunks with the prefix cache, and whole without it."""
    loaded, comparison = LoadedFamily(row, tmp_path), Comparison()
    prompts = prompts_of(row)

    async def answers(parts: Any, **config: Any) -> list[list[int]]:
        around = worker(parts, **config) if isinstance(parts, Parallel) else rig(parts=parts, block_size=8, **config)
        async with around as r:
            found = [await answer(r, loaded, *prompt) for prompt in prompts]
            found += await asyncio.gather(*(answer(r, loaded, *prompt) for prompt in prompts))
            await r.assert_idle()
            return found

    with two_ranks(fork_rank, loaded) as parallel:
        for max_step_tokens, has_cache in ((7, True), (4096, False)):
            config = {"max_step_tokens": max_step_tokens, "is_prefix_cache_enabled": has_cache}
            ours, alone = asyncio.run(answers(parallel, **config)), asyncio.run(answers(loaded, **config))
            for parts, tokens, single in zip(prompts * 2, ours, alone, strict=True):
                of = loaded.prompt(*parts)
                expected = loaded.expected(of, NUM_TOKENS)
                reference = Answer(list(of.token_ids), expected.token_ids, expected.margins)
                for found in (tokens, single):
                    comparison.check(reference, list(of.token_ids), found, row.name)
    comparison.finish()


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> LoadedFamily:
    return LoadedFamily(QWEN2, tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="class")
def parallel(qwen2: LoadedFamily, fork_rank: LaunchRank) -> Iterator[Parallel]:
    with two_ranks(fork_rank, qwen2) as opened:
        yield opened


class TestTwoIntactRanks:
    """Holds the tests that leave their ranks intact, so one group of ranks serves all of them. Each worker on the group
    has an empty cache."""

    def test_a_block_that_choices_share_is_copied_on_every_rank(self, qwen2: LoadedFamily, parallel: Parallel) -> None:
        """The prompt ends inside a block, and the choices differ from their first tokens on. Without the copy on a
        rank, one choice would read what another has written. One process with blocks of one token copies nothing."""
        of = qwen2.prompt(Text(6, 43))
        drawn = {"sampling": SamplingParams(temperature=1.5, top_k=10, seed=4), "num_choices": 3}

        async def choices(around: Any) -> list[list[int]]:
            async with around as r:
                request = r.request(of, NUM_TOKENS, **drawn)
                result = await asyncio.wait_for(r.service.generate(request), 60)
                assert result.error is None
                assert r.service.report().engine.prompt_tokens_computed == len(of.token_ids) + 2
                return [r.tokens(request, choice) for choice in range(3)]

        found = asyncio.run(choices(worker(parallel, is_prefix_cache_enabled=False)))
        assert found == asyncio.run(choices(rig(parts=qwen2, block_size=1, num_blocks=512)))
        assert len({tuple(tokens[:2]) for tokens in found}) == 3

    def test_outputs_of_prompts_are_those_of_one_rank(self, qwen2: LoadedFamily, parallel: Parallel) -> None:
        of = qwen2.prompt(Text(6, 43))
        nothing, outputs = StopConditions(max_tokens=0), PromptOutputs("mean", num_top_logprobs=3)

        async def read(around: Any) -> GenerateResult:
            async with around as r:
                request = r.request(of, stop=nothing, prompt_outputs=outputs)
                return await asyncio.wait_for(r.service.generate(request), 60)

        ours = asyncio.run(read(worker(parallel, max_step_tokens=16)))
        alone = asyncio.run(read(rig(parts=qwen2, block_size=8)))
        assert ours.error is None
        found, expected = (np.frombuffer(each.embedding, "<f4") for each in (ours, alone))
        assert len(found) == qwen2.family.shape.hidden_size
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert ours.prompt_logprobs is not None
        assert alone.prompt_logprobs is not None
        scores = [[one.logprobs.logprob for one in each.prompt_logprobs.tokens()] for each in (ours, alone)]
        assert len(scores[0]) == len(of.token_ids) - 1
        np.testing.assert_allclose(scores[0], scores[1], atol=1e-3)

    def test_what_was_not_finite_is_found_on_no_rank(
        self, qwen2: LoadedFamily, parallel: Parallel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One embedding of a chunk in the middle of a prompt is NaN, once. Its request fails. Three later requests with
        the same prompt are answered as if the failure had not happened."""
        of = qwen2.prompt(Text(6, 43))

        async def answers() -> list[list[int]]:
            embed, calls = parallel.model.embed, []

            def poisoned(token_ids: torch.Tensor) -> torch.Tensor:
                calls.append(len(token_ids))
                embedded = embed(token_ids).clone()
                if len(calls) == 2:
                    embedded[3] = float("nan")
                return embedded

            async with worker(parallel, max_step_tokens=16, max_sequences=4) as r:
                monkeypatch.setattr(parallel.model, "embed", poisoned)
                failing = await asyncio.wait_for(r.service.generate(r.request(of, NUM_TOKENS)), 60)
                assert failing.error is not None
                assert failing.error.code == "engine_failed"
                return [await answer(r, qwen2, Text(6, 43)) for _ in range(3)]

        async def alone() -> list[int]:
            async with rig(parts=qwen2, block_size=8) as r:
                return await answer(r, qwen2, Text(6, 43))

        found = asyncio.run(answers())
        assert found == [asyncio.run(alone())] * 3

    def test_each_rank_holds_half_of_the_layers(self, qwen2: LoadedFamily, parallel: Parallel) -> None:
        part = load_text_half(qwen2.directory, "cpu", "float32", register_attention())
        whole = {name: p.shape for name, p in part.named_parameters()}
        share = {name: p.shape for name, p in parallel.model._share._part.named_parameters()}
        assert share.keys() == whole.keys()
        for name, shape in whole.items():
            is_column = any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
            halved = 0 if is_column else 1 if "_proj.weight" in name and ("o_proj" in name or "down" in name) else None
            expected = [size // 2 if axis == halved else size for axis, size in enumerate(shape)]
            assert list(share[name]) == expected, name


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"model.layers.*.self_attn.qkv_proj": "packed_colwise"}, "must split k_proj by columns"),
        ({"model.layers.*.self_attn.k_proj": "colwise"}, "must split v_proj by columns"),
        ({"model.layers.*.self_attn.k_proj": "colwise_gather_output"}, "colwise_gather_output"),
        ({"model.layers.*.input_layernorm": "sequence_parallel"}, "sequence_parallel"),
    ],
)
def test_a_plan_that_can_not_be_followed_is_refused(plan: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_plan(plan)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_rank_that_is_gone_ends_the_worker_and_its_requests(
    qwen2: LoadedFamily, number: int, fork_rank: LaunchRank
) -> None:
    """Requests end as WorkerLost, which makes a router retry them elsewhere. The worker waits for a frozen rank until
    the timeout."""

    async def lose(parallel: Parallel) -> None:
        async with worker(parallel) as r:
            of = qwen2.prompt(SYSTEM, QUESTION)
            await answer(r, qwen2, SYSTEM, QUESTION)
            r.service.check_health()
            request = r.request(of, 300)
            call = asyncio.ensure_future(r.service.generate(request))
            await r.until(lambda: len(r.tokens(request)) > 3)
            os.kill(parallel.rank_processes[0].pid, number)
            result = await asyncio.wait_for(call, FROZEN_AFTER_S + 20)
            assert result.error is not None
            assert result.error.code == "worker_lost"
            assert len(r.tokens(request)) > 3
            with pytest.raises(WorkerLost):
                r.service.check_health()
            with pytest.raises(WorkerLost):
                parallel.group.check()
            after = await asyncio.wait_for(r.service.generate(r.request(of, 4)), 10)
            assert after.error is not None
            assert after.error.code == "worker_lost"

    with two_ranks(fork_rank, qwen2, FROZEN_AFTER_S) as parallel:
        asyncio.run(lose(parallel))


def test_a_rank_that_is_gone_is_noticed_while_nothing_runs(qwen2: LoadedFamily, fork_rank: LaunchRank) -> None:
    async def lose(parallel: Parallel) -> None:
        loop, lost = asyncio.get_running_loop(), asyncio.Event()
        parallel.group.on_lost(lambda: loop.call_soon_threadsafe(lost.set))
        os.kill(parallel.rank_processes[0].pid, signal.SIGKILL)
        await asyncio.wait_for(lost.wait(), 10)

    with two_ranks(fork_rank, qwen2) as parallel:
        asyncio.run(lose(parallel))
        with pytest.raises(WorkerLost):
            parallel.group.check()


def test_a_rank_that_fails_to_load_says_why(qwen2: LoadedFamily, tmp_path: Path) -> None:
    config = config_of(qwen2.directory)
    model = compose.load_model(config, qwen2.directory)
    (tmp_path / "config.json").write_text((qwen2.directory / "config.json").read_text())
    group = RankGroup("127.0.0.1", 2, "cpu", 60.0, 120.0)
    with pytest.raises(ConfigError, match="can't load"):
        group.open(lambda it: spawn_rank(config, tmp_path, it), lambda: load_share(config, model))
    assert not torch.distributed.is_initialized()


def test_heads_that_can_not_be_shared_are_refused(qwen2: LoadedFamily) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel is 3, .* 2 KV heads"):
        compose.load_model(config_of(qwen2.directory, tensor_parallel=3), qwen2.directory)
    check_shares(qwen2.family.shape, 2)


async def healthy_until_error(service: WorkerService) -> None:
    while True:
        service.check_health()
        await asyncio.sleep(0.01)


async def test_one_process_serves_with_ranks_of_its_own() -> None:
    """Runs the cluster without Ray. Its ranks are processes that it starts and stops; the loss of one ends the
    service."""
    config = ClusterConfig.model_validate(
        {"workers": {"replicas": 1, "tensor_parallel": 2, "num_blocks": 512}, "encoders": {"decode_processes": 0}}
    )
    messages = user("What is in this picture?", image_part(21))
    body = {"model": "weft-demo", "messages": messages, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    before = set(psutil.Process().children())
    async with in_process_cluster(config) as (cluster, client):
        answered = (await client.post("/v1/chat/completions", json=body)).json()
        comparison = Comparison()
        expected = ReferenceModel(demo_checkpoint()).answer(messages, 8)
        comparison.check(expected, answered["prompt_token_ids"], answered["choices"][0]["token_ids"], "one process")
        comparison.finish()
        (service,) = cluster.workers.services.values()
        service.check_health()
        (worker,) = cluster.ranked_workers
        assert worker.group is not None
        for process in set(psutil.Process().children()) - before:
            if "spawn_main" in " ".join(process.cmdline()):
                process.kill()
        with pytest.raises(WeftError):
            await asyncio.wait_for(healthy_until_error(service), 20)


def test_one_process_has_room_for_one_such_worker() -> None:
    config = ClusterConfig.model_validate({"workers": {"replicas": 2, "tensor_parallel": 2, "num_blocks": 512}})
    with pytest.raises(ConfigError, match=r"one worker only"):
        LocalCluster(config)
    assert not torch.distributed.is_initialized()


def test_all_ranks_agree_on_the_smallest_number(fork_rank: LaunchRank) -> None:
    assert smallest_in_forks([70, 7]) == [7, 7]
