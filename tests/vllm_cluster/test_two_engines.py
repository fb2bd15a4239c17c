"""Serves a tiny model by one cluster with a worker of each engine: both give the same greedy tokens, and a request goes
on exactly on the worker of the other engine when its own is killed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_media import image_part, text_part
from cluster_process import ClusterProcess, eventually, start_cluster
from contract_model import contract_model
from pool_requests import PoolClient

PYTHON = Path(f"{sys.prefix}-vllm") / "bin" / "python"
POOL_TO_ENGINE = {"main": "weft", "vllm": "vllm"}
pytestmark = [
    pytest.mark.ray,
    pytest.mark.torch,
    pytest.mark.skipif(not PYTHON.exists(), reason="`make install-vllm` was not run"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterProcess]:
    """The pools have blocks of different sizes. A step of Weft's own engine takes about as long as one of vLLM, so that
    streams are still open when their workers are killed."""
    sizes = {"replicas": 1, "max_step_tokens": 256, "max_sequences": 8}
    options = {"enforce_eager": True, "max_model_len": 2048}
    vllm = sizes | {"engine": "vllm", "block_size": 32, "vllm": options}
    directory = contract_model("qwen2_5_vl").directory
    with start_cluster(
        model={"path": str(directory), "name": "tiny", "dtype": "float32", "embeddings": "last"},
        workers=sizes | {"block_size": 16, "step_delay_s": 0.004},
        more_workers={"vllm": vllm},
        encoders={"replicas": 1},
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: ClusterProcess) -> PoolClient:
    """A cluster is ready with one worker, and that with vLLM takes longer to start."""
    made = PoolClient(cluster)
    eventually(lambda: pools(made) == POOL_TO_ENGINE, timeout_s=300)
    return made


def pools(client: PoolClient) -> dict[str, str]:
    return {each.pool: each.engine for each in client.workers().values()}


CONTENTS: dict[str, Any] = {
    "a text": "What can you do?",
    "a longer text": "A prefix which fills several blocks of either size. " * 8,
    "a picture": [image_part(1), text_part("What do you see?")],
    "text ahead of two pictures": [
        text_part("First some words, and then more of them. " * 4),
        image_part(2),
        image_part(3),
        text_part("?"),
    ],
    "pictures of different sizes": [
        image_part(4, width=64),
        text_part("and"),
        image_part(5, height=140),
        image_part(6),
    ],
}


@pytest.mark.parametrize("name", CONTENTS)
def test_each_engine_gives_the_same_greedy_tokens(client: PoolClient, name: str) -> None:
    answers = client.ask_each(CONTENTS[name], POOL_TO_ENGINE, max_tokens=24, ignore_eos=True)
    assert answers["main"] == answers["vllm"] != ""


def test_embeddings_go_to_the_engine_that_gives_them(cluster: ClusterProcess) -> None:
    """A worker with vLLM would refuse them."""
    with cluster.client() as http:
        answers = [
            http.post("/v1/embeddings", json={"model": "tiny", "input": [f"words {number}", f"more words {number}"]})
            for number in range(6)
        ]
    assert [each.status_code for each in answers] == [200] * 6, [each.text for each in answers]
    assert {len(each.json()["data"]) for each in answers} == {2}


def test_status_shows_which_engine_a_worker_has(cluster: ClusterProcess, capsys: pytest.CaptureFixture[str]) -> None:
    import deploy.cli

    assert deploy.cli.main(["status", "--url", cluster.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    (header,) = (line.split() for line in lines if line.startswith("WORKER"))
    assert header[1:3] == ["POOL", "ENGINE"]
    start = next(number for number, line in enumerate(lines) if line.startswith("WORKER"))
    assert sorted(line.split()[1:3] for line in lines[start + 1 : start + 3]) == [["main", "weft"], ["vllm", "vllm"]]


@pytest.mark.parametrize(("pool", "name"), [("main", "a text"), ("main", "a picture"), ("vllm", "a picture")])
def test_a_killed_engine_is_continued_by_the_other(client: PoolClient, pool: str, name: str) -> None:
    eventually(lambda: pools(client) == POOL_TO_ENGINE, timeout_s=300)
    fields = {"max_tokens": 500, "ignore_eos": True}
    whole = client.ask(CONTENTS[name], **fields).text
    answer = client.ask_and_kill(CONTENTS[name], pool, **fields)
    assert [each.pool for each in answer.workers] == [pool, *(each for each in POOL_TO_ENGINE if each != pool)]
    assert answer.text == whole


def test_everything_is_free_afterwards(cluster: ClusterProcess) -> None:
    for name in ("num_running", "num_waiting", "kv_used_blocks", "num_features", "inbox_used_bytes"):
        eventually(lambda name=name: cluster.total(f"weft_worker_{name}") == 0)
