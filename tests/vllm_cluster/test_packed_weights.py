"""Serves a checkpoint in four bits by a real cluster: vLLM computes with the packed weights, and the encoder loads the
towers of the same files. Weft's own engine refuses it by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from chat_media import data_url, picture, png
from cluster_process import launched, start_cluster
from contract_model import ContractModel, ContractPrompt, contract_model
from packed_weights import PACKED_FORMS, error_over_difference, packed_model

from modalities.text import token_bytes

CHAT = "/v1/chat/completions"
PYTHON = Path(f"{sys.prefix}-vllm") / "bin" / "python"
SEED, SIZE = 3, (160, 96)
pytestmark = [
    pytest.mark.ray,
    pytest.mark.torch,
    pytest.mark.skipif(not PYTHON.exists(), reason="`make install-vllm` was not run"),
]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> ContractModel:
    return packed_model(contract_model("qwen2_5_vl"), PACKED_FORMS["awq"], tmp_path_factory.mktemp("awq"))


def sections(model: ContractModel, **workers: Any) -> dict[str, dict[str, object]]:
    return {
        "model": {"path": str(model.directory), "name": "packed", "dtype": "bfloat16"},
        "workers": {"max_step_tokens": 256, "max_sequences": 8, "block_size": 32} | workers,
        "encoders": {"replicas": 1},
    }


def test_answers_are_those_of_the_values_that_packed_weights_stand_for(packed: ContractModel) -> None:
    image = {"type": "image_url", "image_url": {"url": data_url(png(picture(SEED, *SIZE)))}}
    question = {"type": "text", "text": "What do you see?"}
    vllm = {"enforce_eager": True, "max_model_len": 2048}
    shown_to_id = {token_bytes(packed.codec, number): number for number in range(packed.family.shape.vocab_size)}
    with start_cluster(**sections(packed, engine="vllm", vllm=vllm)) as running, running.client() as client:
        for content in ([question], [image, question]):
            body = {"model": "packed", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
            more = {"temperature": 0, "logprobs": True, "top_logprobs": 20, "return_token_ids": True}
            answer = client.post(CHAT, json=body | more)
            assert answer.status_code == 200, answer.text
            of = prompt_of(packed, answer.json()["prompt_token_ids"])
            first = answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            # The vocabulary has ids without a token, which can't be told apart here.
            found = {shown_to_id[bytes(each["bytes"])]: each["logprob"] for each in first if each["bytes"]}
            assert len(found) >= 15
            assert error_over_difference(packed, contract_model(packed.name), of, found) < 0.25


def prompt_of(packed: ContractModel, ids: list[int]) -> ContractPrompt:
    """Returns the prompt that the cluster has made, with the picture if it has one."""
    start, end = (packed.codec.token_id(f"<|vision_{side}|>") for side in ("start", "end"))
    parts = [ids[: ids.index(start)], SEED, ids[ids.index(end) + 1 :]] if start in ids else [ids]
    of = packed.prompt(*parts, size=SIZE)
    assert list(of.token_ids) == ids
    return of


def test_weft_s_own_engine_refuses_it_by_name(packed: ContractModel) -> None:
    with launched(**sections(packed)) as starting:
        assert starting.process.wait(60) != 0
        assert "quantised by awq" in starting.log.read_text()
        assert "workers.engine: vllm" in starting.log.read_text()
