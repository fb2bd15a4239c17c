"""Serves LoRA adapters with vLLM: a tiny model with two of them answers as transformers does with the merged weights,
whatever else is in the batch, and shares with others what does not depend on the adapter, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from contract_model import ContractModel, ContractPrompt, contract_model
from engine_contract import ContractRig, contract_rig
from lora_files import layer_shapes, merged, write_adapter
from vllm_rig import make_vllm_worker

from fabric.contracts import ConfigError, GenerateRequest, GenerateResult, KvSnapshot, SnapshotRequest, split_hashes
from kv_index import prompt_block_hashes

pytestmark = [pytest.mark.torch, pytest.mark.nixl, pytest.mark.asyncio(loop_scope="module")]
NAMES = ("", "poet", "clerk")
"""Names the model itself, and its adapters."""


class AdaptedRig:
    """Holds a worker with two adapters, and the references of the model with and without them."""

    def __init__(self, rig: ContractRig, name_to_reference: Mapping[str, ContractModel]) -> None:
        self.rig, self.name_to_reference = rig, name_to_reference

    async def ask(self, of: ContractPrompt, name: str, num_tokens: int = 8) -> tuple[GenerateRequest, GenerateResult]:
        request = self.rig.request(of, num_tokens, adapter=name)
        return request, await self.rig.run(request, of)

    def answer(self, of: ContractPrompt, name: str, num_tokens: int = 8) -> list[int]:
        return self.name_to_reference[name].answer(of, num_tokens)


def write_adapters(model: ContractModel, folder: Path) -> dict[str, Path]:
    """Writes an adapter of rank 4 and one of rank 8, of attention and MLP."""
    shapes = layer_shapes(model)
    ranks = {"poet": 4, "clerk": 8}
    return {name: write_adapter(folder / name, shapes, rank, seed=rank) for name, rank in ranks.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adapted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AdaptedRig]:
    model = contract_model("qwen2_5_vl")
    adapters = write_adapters(model, tmp_path_factory.mktemp("adapters"))
    references = {"": model} | {name: merged(model, each) for name, each in adapters.items()}
    async with contract_rig(model, make_vllm_worker, adapters=adapters) as rig:
        yield AdaptedRig(rig, references)


async def test_answers_are_those_of_merged_weights(adapted: AdaptedRig) -> None:
    r = adapted.rig
    for of in (r.model.prompt(r.text(70)), r.model.prompt(r.text(40), 1, r.text(5))):
        answers = {name: adapted.answer(of, name) for name in NAMES}
        assert len(set(map(tuple, answers.values()))) == 3, "the adapters change nothing"
        for name in NAMES:
            request, result = await adapted.ask(of, name)
            assert result.error is None
            assert r.tokens(request) == answers[name], name
    await r.assert_idle()


async def test_one_step_serves_the_model_and_its_adapters(adapted: AdaptedRig) -> None:
    """Each request generates 24 tokens, so one after the other they would take 144 steps."""
    r = adapted.rig
    prompts = [r.model.prompt(r.text(30 + index), *((index,) if index % 2 else ()), r.text(6)) for index in range(6)]
    names = [NAMES[index % 3] for index in range(6)]
    before = r.service.report().engine.steps
    answers = await asyncio.gather(*(adapted.ask(of, name, 24) for of, name in zip(prompts, names, strict=True)))
    assert r.service.report().engine.steps - before < 72
    for (request, _), of, name in zip(answers, prompts, names, strict=True):
        assert r.tokens(request) == adapted.answer(of, name, 24), name
    await r.assert_idle()


async def test_a_prompt_is_found_under_its_own_adapter_alone(adapted: AdaptedRig) -> None:
    r = adapted.rig
    of = r.model.prompt(r.text(100), 2, r.text(20))
    for round_ in range(2):
        for name in NAMES:
            request, result = await adapted.ask(of, name)
            assert (result.num_cached_tokens > 96) if round_ else (result.num_cached_tokens == 0), name
            assert r.tokens(request) == adapted.answer(of, name)
    r.router_plane.send(r.worker_plane.address, SnapshotRequest(r.request(of).router_id, r.router_plane.address))
    await r.until(lambda: any(page.is_last for page in r.router.of(KvSnapshot)))
    pages = r.router.of(KvSnapshot)
    held = {block for page in pages for chain in page.chains for block in split_hashes(chain.hashes)}
    scheme, seen = r.service.kv_scheme, set[bytes]()
    for name in NAMES:
        hashes = split_hashes(
            prompt_block_hashes(scheme, of.token_ids, of.placeholders, of.media, adapter=name),
        )
        assert set(hashes) <= held, "the router would not find them"
        assert not seen & set(hashes), "two adapters share a block"
        seen |= set(hashes)
    await r.assert_idle()


async def test_all_adapters_share_the_feature_of_a_picture(adapted: AdaptedRig) -> None:
    """The picture's KV is computed for each adapter, from the one feature that was pulled for the model itself."""
    r = adapted.rig
    of = r.model.prompt(r.text(20), 3, r.text(9))
    first, _ = await adapted.ask(of, "")
    for name in NAMES[1:]:
        request = r.request(of, 8, adapter=name, dispatched_items=())
        result = await asyncio.wait_for(r.call(request), 10)
        assert (result.error, result.num_cached_tokens) == (None, 0)
        assert r.needed(request) == []
        assert r.tokens(request) == adapted.answer(of, name)
        assert r.tokens(request) != r.tokens(first)
    await r.assert_idle()


async def test_choices_and_migrated_requests_keep_their_adapter(adapted: AdaptedRig) -> None:
    r = adapted.rig
    of = r.model.prompt(r.text(33), 4, r.text(7))
    answer = adapted.answer(of, "poet", 10)
    for num_sent in (0, 1, 6):
        emitted = (tuple(answer[:num_sent]),) * 2
        request = r.request(of, 10, attempt=1, emitted=emitted, adapter="poet", num_choices=2)
        for choice in range(2):
            r.router.tokens[request.request_id, 1, choice] = list(answer[:num_sent])
        result = await r.run(request, of)
        assert result.error is None
        assert [r.tokens(request, choice) for choice in range(2)] == [answer, answer]
    await r.assert_idle()


async def test_an_unknown_adapter_is_refused_alone(adapted: AdaptedRig) -> None:
    r = adapted.rig
    of = r.model.prompt(r.text(12))
    _, refused = await adapted.ask(of, "singer")
    assert refused.error is not None
    assert (refused.error.code, refused.error.message) == ("model_not_found", "this worker has no adapter `singer`")
    request, _ = await adapted.ask(of, "clerk")
    assert r.tokens(request) == adapted.answer(of, "clerk")
    await r.assert_idle()


@pytest.mark.parametrize(
    ("name", "ranks"), [("qwen3_vl", {"num_ranks": 2, "is_overlapping": True}), ("qwen2_5_vl", {"num_stages": 2})]
)
async def test_ranks_and_stages_apply_an_adapter(tmp_path: Path, name: str, ranks: dict[str, Any]) -> None:
    model = contract_model(name)
    adapters = write_adapters(model, tmp_path)
    async with contract_rig(model, make_vllm_worker, adapters=adapters, **ranks) as rig:
        adapted = AdaptedRig(rig, {"": model} | {each: merged(model, adapters[each]) for each in adapters})
        prompts = [rig.model.prompt(rig.text(40), 1, rig.text(5)), rig.model.prompt(rig.text(50))]
        pairs = [(of, each) for of in prompts for each in NAMES]
        answers = await asyncio.gather(*(adapted.ask(of, each) for of, each in pairs))
        for (request, _), (of, each) in zip(answers, pairs, strict=True):
            assert rig.tokens(request) == adapted.answer(of, each), each
        await rig.assert_idle()


async def test_a_broken_adapter_fails_at_the_start(tmp_path: Path) -> None:
    """Its header is in order, so only what reads the weights can find it."""
    model = contract_model("qwen2_5_vl")
    adapters = write_adapters(model, tmp_path)
    weights = adapters["clerk"] / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"vLLM can't load the adapter clerk \(.*/clerk\)"):
        async with contract_rig(model, make_vllm_worker, adapters=adapters):
            pass


async def test_a_module_that_vllm_would_leave_out_fails_at_the_start(tmp_path: Path) -> None:
    """Older versions of transformers named the layers of such a model so, and vLLM does not know it for this family."""
    model = contract_model("qwen3_vl")
    shapes = {name.replace("language_model.", ""): shape for name, shape in layer_shapes(model).items()}
    adapters = {"poet": write_adapter(tmp_path / "poet", shapes, 4)}
    said = r"the adapter poet changes model\.layers\.0\..*, which vLLM does not find in this model"
    with pytest.raises(ConfigError, match=said):
        async with contract_rig(model, make_vllm_worker, adapters=adapters):
            pass
