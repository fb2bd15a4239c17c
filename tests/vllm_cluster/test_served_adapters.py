"""Serves a tiny model with two LoRA adapters by a real cluster of two workers with vLLM, to OpenAI's Python library:
answers are those of transformers with the merged weights, also when the worker of a request is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_media import data_url, picture, png
from cluster_process import ClusterProcess, eventually, launched, pids, start_cluster
from contract_model import ContractModel, ContractPrompt, contract_model
from lora_files import layer_shapes, merged, write_adapter

PYTHON = Path(f"{sys.prefix}-vllm") / "bin" / "python"
NAMES = ("tiny", "poet", "org/clerk")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.torch,
    pytest.mark.skipif(not PYTHON.exists(), reason="`make install-vllm` was not run"),
]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, shapes = tmp_path_factory.mktemp("adapters"), layer_shapes(contract_model("qwen2_5_vl"))
    return {
        name: write_adapter(folder / name, shapes, rank, seed=rank) for name, rank in (("poet", 4), ("org/clerk", 8))
    }


@pytest.fixture(scope="module")
def references(adapters: Mapping[str, Path]) -> dict[str, ContractModel]:
    model = contract_model("qwen2_5_vl")
    return {"tiny": model} | {name: merged(model, directory) for name, directory in adapters.items()}


def sections(adapters: Mapping[str, Path]) -> dict[str, dict[str, object]]:
    model = {"path": str(contract_model("qwen2_5_vl").directory), "name": "tiny", "dtype": "float32"}
    options = {"enforce_eager": True, "max_model_len": 2048}
    workers = {"engine": "vllm", "replicas": 2, "block_size": 32, "max_sequences": 8, "vllm": options}
    return {
        "model": model | {"adapters": {name: str(directory) for name, directory in adapters.items()}},
        "workers": workers | {"max_step_tokens": 256},
        "encoders": {"replicas": 1},
    }


@pytest.fixture(scope="module")
def cluster(adapters: Mapping[str, Path]) -> Iterator[ClusterProcess]:
    with start_cluster(**sections(adapters)) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: ClusterProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


class Question:
    """Is a question of texts and pictures, as a client sends it and as the model gets it."""

    def __init__(self, *parts: str | int) -> None:
        """`parts` holds texts and seeds of pictures."""
        model, seeds = contract_model("qwen2_5_vl"), [part for part in parts if isinstance(part, int)]
        self.messages: list[Any] = [{"role": "user", "content": [_content(part) for part in parts]}]
        bare = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
        ids = model.codec.render([{"role": "user", "content": bare}])
        mark, pieces = model.codec.token_id("<|vision_start|>"), list[Any]()
        for seed in seeds:
            at = ids.index(mark)
            pieces += [tuple(ids[:at]), seed]
            ids = ids[at + 3 :]  # The placeholder and the end of the frame follow the mark.
        self.prompt: ContractPrompt = model.prompt(*pieces, tuple(ids))

    def answer(self, reference: ContractModel, num_tokens: int) -> list[int]:
        return reference.answer(self.prompt, num_tokens)


def _content(part: str | int) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": data_url(png(picture(part, 160, 96)))}}


TOKENS = {"return_token_ids": True, "ignore_eos": True}


def ask(client: openai.OpenAI, question: Question, name: str, num_tokens: int = 12) -> Any:
    return client.chat.completions.create(
        model=name, messages=question.messages, max_tokens=num_tokens, temperature=0, extra_body=TOKENS
    )


def test_the_library_lists_the_adapters(client: openai.OpenAI, adapters: Mapping[str, Path]) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert (next(iter(listed)), set(listed)) == ("tiny", set(NAMES))
    for name, directory in adapters.items():
        extra = client.models.retrieve(name).model_extra
        assert extra is not None
        assert (extra["parent"], extra["root"]) == ("tiny", str(directory))


def test_an_unknown_name_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="the model `singer` does not exist; this server serves `tiny`, `"):
        ask(client, Question("Hello."), "singer")


@pytest.mark.parametrize("parts", [("Tell me something.",), ("What is on ", 21, " and on ", 22, "?")])
def test_each_adapter_answers_as_its_reference(
    client: openai.OpenAI, references: Mapping[str, ContractModel], parts: tuple[str | int, ...]
) -> None:
    question = Question(*parts)
    answers = {name: question.answer(reference, 12) for name, reference in references.items()}
    assert len(set(map(tuple, answers.values()))) == 3, "the adapters change nothing"
    for name in NAMES:
        for _ in range(2):
            found = ask(client, question, name)
            assert found.model == name
            assert found.choices[0].model_extra["token_ids"] == answers[name]


def test_a_picture_is_encoded_once_and_no_prompt_is_shared(cluster: ClusterProcess, client: openai.OpenAI) -> None:
    question = Question("A beginning that is long enough for several blocks of the cache. " * 6, 23, "What is it?")
    before = cluster.total("weft_encoder_items_encoded_total")

    def num_cached(name: str) -> int:
        return int(ask(client, question, name).usage.prompt_tokens_details.cached_tokens)

    assert {name: num_cached(name) for name in NAMES} == dict.fromkeys(NAMES, 0)
    for name in NAMES:
        eventually(lambda name=name: num_cached(name) > 96)
    assert cluster.total("weft_encoder_items_encoded_total") - before == 1


def test_an_adapters_request_survives_a_killed_worker(
    cluster: ClusterProcess, client: openai.OpenAI, references: Mapping[str, ContractModel]
) -> None:
    question = Question("Tell me a long story about ", 24)
    stream = client.chat.completions.create(
        model="poet", messages=question.messages, max_tokens=500, temperature=0, extra_body=TOKENS, stream=True
    )
    tokens: list[int] = []
    is_killed = False
    for chunk in stream:
        assert chunk.model == "poet"
        tokens += (chunk.choices[0].model_extra or {}).get("token_ids") or []
        if tokens and not is_killed:
            os.kill(serving_worker(cluster, chunk.id), signal.SIGKILL)
            is_killed = True
    assert is_killed
    assert tokens == question.answer(references["poet"], 500)


def serving_worker(cluster: ClusterProcess, completion_id: str) -> int:
    with cluster.client() as http:
        events = http.get(f"/weft/requests/{completion_id}").json()["events"]
    workers = pids(cluster, "worker")
    (pid,) = {workers[to] for event in events if (to := event["detail"].get("to")) in workers}
    return pid


def test_a_broken_adapter_is_named_before_anything_starts(adapters: Mapping[str, Path], tmp_path: Path) -> None:
    given = json.loads((adapters["poet"] / "adapter_config.json").read_text())
    broken = write_adapter(tmp_path / "broken", {"model.visual.blocks.0.attn.qkv": (96, 32)}, 4)
    (broken / "adapter_config.json").write_text(json.dumps(given))
    given_sections = sections({"broken": broken})
    del given_sections["workers"]["vllm"]  # Asking vLLM about its options takes longer than the adapter's check.
    with launched(**given_sections) as starting:
        assert starting.process.wait(120) != 0
        said = starting.log.read_text()
        assert "model.adapters.broken" in said
        assert "the adapter changes the vision tower" in said
