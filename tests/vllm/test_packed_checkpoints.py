"""Serves checkpoints in four bits with vLLM, whose towers the encoder loads from the same files: the log-probabilities
are those of transformers with the values that the packed weights stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
from contract_model import contract_model
from engine_contract import contract_rig
from packed_weights import PACKED_FORMS, error_over_difference, packed_model
from vllm_rig import make_vllm_worker

from fabric.contracts import SamplingParams, TokenFrames

pytestmark = [pytest.mark.torch, pytest.mark.nixl, pytest.mark.asyncio(loop_scope="module")]
SAMPLING = SamplingParams(temperature=0.0, num_top_logprobs=20)


@pytest.mark.parametrize("form", PACKED_FORMS)
async def test_packed_weights_count_as_the_values_that_they_stand_for(form: str, tmp_path: Path) -> None:
    source = contract_model("qwen2_5_vl")
    model = packed_model(source, PACKED_FORMS[form], tmp_path / form)
    async with contract_rig(model, make_vllm_worker, dtype="bfloat16") as r:
        for of in (r.model.prompt(r.text(70)), r.model.prompt(r.text(40), 1, r.text(5))):
            request = r.request(of, 1, sampling=SAMPLING)
            await r.run(request, of)
            frames = [frame for each in r.router.of(TokenFrames) for frame in each.frames]
            (first,) = [each for frame in frames if frame.request_id == request.request_id for each in frame.logprobs]
            assert error_over_difference(model, source, of, dict(first.top)) < 0.25
        await r.assert_idle()
