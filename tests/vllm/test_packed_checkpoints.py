"""Serves checkpoints in four bits with vLLM, whose towers the encoder loads from the same files: the log-probabilities
are those of transformers with the values that the packed weights stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from contract_model import ContractModel, ContractPrompt, contract_model
from engine_contract import ContractRig, contract_rig
from packed_weights import PACKED_FORMS, packed_model
from vllm_rig import make_vllm_worker

from fabric.contracts import SamplingParams, TokenFrames

pytestmark = [pytest.mark.torch, pytest.mark.nixl, pytest.mark.asyncio(loop_scope="module")]
NUM_TOKENS, NUM_TOP = 4, 20


@pytest.mark.parametrize("form", PACKED_FORMS)
async def test_packed_weights_count_as_the_values_that_they_stand_for(form: str, tmp_path: Path) -> None:
    source = contract_model("qwen2_5_vl")
    model = packed_model(source, PACKED_FORMS[form], tmp_path / form)
    async with contract_rig(model, make_vllm_worker, dtype="bfloat16") as r:
        for of in (r.model.prompt(r.text(70)), r.model.prompt(r.text(40), 1, r.text(5))):
            error, difference = await distances(r, of, source)
            assert error < difference / 4
        await r.assert_idle()


async def distances(r: ContractRig, of: ContractPrompt, source: ContractModel) -> tuple[float, float]:
    """Returns how far the worker's first log-probabilities are from those of the dequantised reference, on average, and
    how far those of the model that was quantised are from the latter."""
    request = r.request(of, NUM_TOKENS, sampling=SamplingParams(temperature=0.0, num_top_logprobs=NUM_TOP))
    await r.run(request, of)
    frames = [frame for each in r.router.of(TokenFrames) for frame in each.frames]
    first, *_ = [entry for frame in frames if frame.request_id == request.request_id for entry in frame.logprobs]
    ids, found = [token for token, _ in first.top], torch.tensor([value for _, value in first.top])
    packed, plain = (logprobs(each, of)[ids] for each in (r.model, source))
    return float((found - packed).abs().mean()), float((plain - packed).abs().mean())


def logprobs(model: ContractModel, of: ContractPrompt) -> torch.Tensor:
    return torch.log_softmax(model.generate(of, 1).logits[0][0].float(), -1)
