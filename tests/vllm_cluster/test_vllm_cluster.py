"""Serves a tiny model by a real cluster whose workers run vLLM, over Ray and NIXL: answers equal those of Weft's own
engine, and killed members are noticed by no client."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from chat_media import data_url, picture, png
from cluster_process import ClusterProcess, eventually, pids, start_cluster
from contract_model import contract_model

from deploy.config import ClusterConfig
from deploy.vllm_worker import check_options_there
from fabric.contracts import ConfigError

CHAT = "/v1/chat/completions"
PYTHON = Path(f"{sys.prefix}-vllm") / "bin" / "python"
VLLM = {"enforce_eager": True, "max_model_len": 2048}
pytestmark = [
    pytest.mark.ray,
    pytest.mark.torch,
    pytest.mark.skipif(not PYTHON.exists(), reason="`make install-vllm` was not run"),
]


def sections(**workers: Any) -> dict[str, dict[str, object]]:
    directory = contract_model("qwen2_5_vl").directory
    return {
        "model": {"path": str(directory), "name": "tiny", "dtype": "float32"},
        "workers": {"max_step_tokens": 256, "max_sequences": 8, "block_size": 32} | workers,
        "encoders": {"replicas": 1},
    }


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterProcess]:
    """Has two workers with vLLM."""
    with start_cluster(**sections(engine="vllm", replicas=2, vllm=VLLM)) as running:
        yield running


class OwnAnswers(NamedTuple):
    """Holds what a cluster with Weft's own engine answers."""

    texts: dict[str, str]
    logprobs: dict[str, list[dict[str, Any] | None]]
    """Holds the log-probabilities of prompts."""


@pytest.fixture(scope="module")
def own() -> OwnAnswers:
    with start_cluster(**sections(replicas=1)) as running:
        return OwnAnswers(
            {name: ask(running, content)["choices"][0]["message"]["content"] for name, content in QUESTIONS.items()},
            {name: prompt_logprobs(running, content) for name, content in QUESTIONS.items()},
        )


def image(seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(png(picture(seed)))}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


QUESTIONS: dict[str, Any] = {
    "a text": "What can you do?",
    "a picture": [image(1), text("What do you see?")],
    "text ahead of two pictures": [
        text("First some words, and then more of them. " * 4),
        image(2),
        image(3),
        text("?"),
    ],
    "a picture again": [image(1), text("What colour is it?")],
}


def ask(cluster: ClusterProcess, content: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0}
    with cluster.client() as client:
        response = client.post(CHAT, json=body | fields)
    assert response.status_code == 200, response.text
    return response.json()


def prompt_logprobs(cluster: ClusterProcess, content: Any) -> list[dict[str, Any] | None]:
    """Returns the log-probabilities of a prompt's tokens, with two alternatives at each place."""
    found: list[dict[str, Any] | None] = ask(cluster, content, prompt_logprobs=2)["prompt_logprobs"]
    return found


def test_answers_are_those_of_the_other_engine(cluster: ClusterProcess, own: OwnAnswers) -> None:
    for _ in range(2):
        for name, content in QUESTIONS.items():
            assert ask(cluster, content)["choices"][0]["message"]["content"] == own.texts[name], name


@pytest.mark.parametrize("name", QUESTIONS)
def test_log_probabilities_of_prompts_are_those_of_the_other_engine(
    cluster: ClusterProcess, own: OwnAnswers, name: str
) -> None:
    """The prompts are longer than a step, and those with pictures wait at their doorstep."""
    found = prompt_logprobs(cluster, QUESTIONS[name])
    assert found[0] is None
    for ours, theirs in zip(own.logprobs[name], found, strict=True):
        if ours is None or theirs is None:
            assert ours == theirs
            continue
        assert ours.keys() == theirs.keys()
        for token, one in ours.items():
            other = theirs[token]
            assert (one["rank"], one["decoded_token"]) == (other["rank"], other["decoded_token"])
            assert other["logprob"] == pytest.approx(one["logprob"], abs=2e-3)


def test_what_repeats_is_found_in_the_prefix_cache(cluster: ClusterProcess) -> None:
    """Both workers run vLLM, and the router sends the second request to the one that has the prompt."""
    content = [text("A prefix of its own, which is long enough. " * 6), image(4), text("What is it?")]
    first = ask(cluster, content)["usage"]["prompt_tokens_details"]["cached_tokens"]
    eventually(lambda: ask(cluster, content)["usage"]["prompt_tokens_details"]["cached_tokens"] > first + 32)
    assert ask(cluster, content)["usage"]["prompt_tokens_details"]["cached_tokens"] > first + 32


def test_what_a_request_may_carry(cluster: ClusterProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    constrained = ask(
        cluster,
        "Give a number.",
        max_tokens=40,
        n=2,
        temperature=1,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        logprobs=True,
        top_logprobs=2,
    )
    for choice in constrained["choices"]:
        if choice["finish_reason"] == "stop":
            assert set(json.loads(choice["message"]["content"])) == {"n"}
        else:
            assert choice["message"]["content"].lstrip().startswith("{")
        assert all(len(each["top_logprobs"]) == 2 for each in choice["logprobs"]["content"])
    answer = ask(cluster, "Say it again.", max_tokens=30)["choices"][0]["message"]["content"]
    stop = answer[len(answer) // 2 : len(answer) // 2 + 4]
    stopped = ask(cluster, "Say it again.", max_tokens=30, stop=[stop])["choices"][0]
    assert stopped["message"]["content"] == answer[: answer.index(stop)]
    assert stopped["finish_reason"] == "stop"


def stream(cluster: ClusterProcess, content: Any, kill: str) -> str:
    """Streams a long answer. When the first words are there, kills the worker that serves it, or a rank of it, which is
    a process that vLLM has started."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 600, "temperature": 0}
    words = ""
    with cluster.client() as client, client.stream("POST", CHAT, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            words += chunk["choices"][0]["delta"].get("content") or ""
            if words and kill:
                worker = serving(cluster, chunk["id"], "worker")
                os.kill(worker if kill == "worker" else rank_of(worker), signal.SIGKILL)
                kill = ""
    assert not kill, "the answer ended before its first words"
    return words


def serving(cluster: ClusterProcess, completion_id: str, kind: str) -> int:
    """Returns the process of the member that serves a request."""
    with cluster.client() as client:
        events = client.get(f"/weft/requests/{completion_id}").json()["events"]
        members = client.get("/weft/members").json()["members"]
    dispatched = {event["detail"]["to"] for event in events if event["name"] == "dispatched"}
    (pid,) = [each["pid"] for each in members if each["member_id"] in dispatched and each["kind"] == kind]
    return int(pid)


def rank_of(worker: int) -> int:
    """Returns the process of a rank of a worker."""
    (rank,) = [each.pid for each in psutil.Process(worker).children() if "VLLM" in " ".join(each.cmdline())]
    return rank


@pytest.mark.parametrize(
    ("kill", "content"),
    [
        ("worker", "Tell me a long story."),
        ("worker", [image(5), text("Tell me a long story.")]),
        ("rank", [image(7), text("Tell me a long story.")]),
    ],
)
def test_a_stream_survives_a_killed_worker_and_a_killed_rank(cluster: ClusterProcess, kill: str, content: Any) -> None:
    """The worker counts as lost, its request moves to the other one, and Serve replaces it."""
    whole = ask(cluster, content, max_tokens=600)["choices"][0]["message"]["content"]
    before = set(pids(cluster, "worker"))
    assert stream(cluster, content, kill) == whole
    eventually(lambda: len(set(pids(cluster, "worker")) - before) == 1, timeout_s=300)
    eventually(lambda: len(pids(cluster, "worker")) == 2, timeout_s=300)


def test_a_killed_encoder_is_replaced(cluster: ClusterProcess, own: OwnAnswers) -> None:
    (pid,) = pids(cluster, "encoder").values()
    os.kill(pid, signal.SIGKILL)
    fresh = [image(6), text("What do you see?")]
    assert ask(cluster, fresh)["choices"][0]["message"]["content"]
    assert ask(cluster, QUESTIONS["a picture"])["choices"][0]["message"]["content"] == own.texts["a picture"]


def test_everything_is_free_afterwards(cluster: ClusterProcess) -> None:
    for name in ("num_running", "num_waiting", "kv_used_blocks", "num_features", "inbox_used_bytes"):
        eventually(lambda name=name: cluster.total(f"weft_worker_{name}") == 0)
    assert cluster.total("weft_router_requests_in_flight") == 0


def test_a_missing_environment_is_named() -> None:
    from cluster_process import launched

    with launched(**sections(engine="vllm", python="/no/such/python")) as starting:
        assert starting.process.wait(60) != 0
        assert "/no/such/python" in starting.log.read_text()
        assert "make install-vllm" in starting.log.read_text()


def test_wrong_options_of_vllm_are_named_before_anything_starts() -> None:
    """vLLM's own environment answers, in a process that ends after that."""
    for options, message in (
        ({"enforce_eagre": True, "seed": 7}, "workers.vllm has keys that vLLM does not know: enforce_eagre"),
        ({"scheduler_cls": "x"}, "workers.vllm.scheduler_cls can't be set"),
    ):
        config = ClusterConfig.model_validate({"workers": {"engine": "vllm", "vllm": options}})
        with pytest.raises(ConfigError, match=message):
            check_options_there(config, timeout_s=600)
    right = ClusterConfig.model_validate({"workers": {"engine": "vllm", "vllm": VLLM}})
    assert check_options_there(right, timeout_s=600) == []
