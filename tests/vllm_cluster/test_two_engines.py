"""Serves the demo model by one cluster with a worker of each engine: both give the same greedy tokens, and a request
goes on exactly on the worker of the other engine when its own is killed. Spoken answers come from Weft's own engine,
with the samples that a cluster without vLLM gives, and wait for it while only vLLM is there."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import sys
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from chat_media import image_part, text_part
from cluster_process import ClusterProcess, eventually, start_cluster
from pool_requests import CHAT, PoolClient

from deploy.testing import in_process_cluster, small_config

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
    with start_cluster(
        model={"embeddings": "last"},
        stages={},
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
            http.post(
                "/v1/embeddings", json={"model": cluster.model, "input": [f"words {number}", f"more words {number}"]}
            )
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


# ------------------------------------------------------------ spoken answers

SPEAK = "/v1/audio/speech"
QUESTION = "What can you do?"
PICTURED = [image_part(5), text_part("What colour is it?")]
READ_ALOUD = {"model": "weft-demo", "input": "I can see pictures.", "response_format": "wav", "seed": 3}
TOLERANCE = 2
"""Samples are integers of 16 bits. Other requests of a batch change how they are rounded."""


def spoken(content: Any, **fields: object) -> dict[str, Any]:
    asked = {"model": "weft-demo", "messages": [{"role": "user", "content": content}], "temperature": 0, "seed": 3}
    return asked | {"modalities": ["text", "audio"]} | fields


class Spoken(NamedTuple):
    transcript: str
    samples: np.ndarray


def samples_of(file: bytes) -> np.ndarray:
    with wave.open(io.BytesIO(file)) as sound:
        return np.frombuffer(sound.readframes(sound.getnframes()), "<i2").astype(np.int64)


def whole(response: httpx.Response) -> Spoken:
    assert response.status_code == 200, response.text
    audio = response.json()["choices"][0]["message"]["audio"]
    return Spoken(audio["transcript"], samples_of(base64.b64decode(audio["data"])))


def assert_alike(found: Spoken, expected: Spoken) -> None:
    assert found.transcript == expected.transcript != ""
    np.testing.assert_allclose(found.samples, expected.samples, atol=TOLERANCE)


@pytest.fixture(scope="module")
def expected() -> dict[str, Spoken]:
    """Holds what a cluster without vLLM says."""

    async def ask() -> dict[str, Spoken]:
        async with in_process_cluster(small_config(stages={}, workers={"num_blocks": 512})) as (_, client):
            read = await client.post(SPEAK, json=READ_ALOUD)
            return {
                "text": whole(await client.post(CHAT, json=spoken(QUESTION))),
                "picture": whole(await client.post(CHAT, json=spoken(PICTURED))),
                "read": Spoken(READ_ALOUD["input"], samples_of(read.content)),
            }

    return asyncio.run(ask())


def asked_pools(client: PoolClient, response: httpx.Response) -> list[str]:
    """Returns the pools to which a request went, by the router's record of it."""
    return [each.pool for each in client.serving(response.headers["x-request-id"])]


def test_spoken_answers_come_from_the_engine_that_speaks(
    cluster: ClusterProcess, client: PoolClient, expected: dict[str, Spoken]
) -> None:
    """Many at once make its worker the busier one, and still none goes to the other."""
    with cluster.client() as http, ThreadPoolExecutor(8) as threads:
        asked = [("picture", PICTURED), ("text", QUESTION)] * 4
        responses = list(threads.map(lambda each: http.post(CHAT, json=spoken(each[1])), asked))
        for (name, _), response in zip(asked, responses, strict=True):
            assert_alike(whole(response), expected[name])
            assert asked_pools(client, response) == ["main"]
        read = http.post(SPEAK, json=READ_ALOUD)
    assert_alike(Spoken(READ_ALOUD["input"], samples_of(read.content)), expected["read"])


def test_a_spoken_answer_waits_while_only_vllm_is_there(
    cluster: ClusterProcess, client: PoolClient, expected: dict[str, Spoken]
) -> None:
    """One is being spoken when its worker is killed, and needs another one only if its text was not complete. Others
    are asked when the worker has left."""
    eventually(lambda: pools(client) == POOL_TO_ENGINE, timeout_s=300)
    (speaking,) = (each for each in client.workers().values() if each.pool == "main")
    with cluster.client() as http, ThreadPoolExecutor(2) as threads:
        with http.stream("POST", CHAT, json=spoken(QUESTION, stream=True, cache_salt="killed")) as response:
            lines = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
            first = next(each for each in lines if heard(each).get("transcript"))
            os.kill(speaking.pid, signal.SIGKILL)
            eventually(lambda: list(pools(client)) == ["vllm"])
            waiting = [threads.submit(http.post, CHAT, json=spoken(PICTURED)) for _ in range(2)]
            refused = http.post(CHAT, json=spoken(QUESTION, weft={"ttft_deadline_ms": 100}))
            written = http.post(CHAT, json=spoken(QUESTION, modalities=["text"]))
            pieces = [heard(each) for each in [first, *lines]]
        said = [each.result() for each in waiting]
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "deadline_out_of_reach")
    assert asked_pools(client, refused) == []
    assert asked_pools(client, written) == ["vllm"]
    for each in said:
        assert_alike(whole(each), expected["picture"])
        assert asked_pools(client, each) == ["main"]
    data = b"".join(base64.b64decode(each.get("data", "")) for each in pieces)
    transcript = "".join(each.get("transcript", "") for each in pieces)
    assert_alike(Spoken(transcript, np.frombuffer(data, "<i2").astype(np.int64)), expected["text"])
    workers = client.serving(first["id"])
    assert workers[0] == speaking
    assert {each.pool for each in workers} == {"main"}


def heard(chunk: dict[str, Any]) -> dict[str, str]:
    assert "error" not in chunk, chunk
    return next((each["delta"].get("audio") or {} for each in chunk["choices"]), {})


def test_everything_is_free_afterwards(cluster: ClusterProcess) -> None:
    def held() -> list[float]:
        names = ("num_running", "num_waiting", "kv_used_blocks", "num_features", "inbox_used_bytes")
        return [cluster.total(f"weft_worker_{name}") for name in names]

    eventually(lambda: not any(held()))
    assert held() == [0.0] * 5
