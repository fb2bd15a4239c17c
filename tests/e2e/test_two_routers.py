"""Checks two routers, and every modality, on real Ray and NIXL: their answers equal those of one process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from chat_media import data_url, image_part, user
from cluster_process import ClusterProcess, eventually, start_cluster
from media_corpus import sound_file, video_file

from deploy.config import ClusterConfig
from deploy.local import running

pytestmark = [pytest.mark.ray, pytest.mark.nixl, pytest.mark.torch]

SECTIONS: dict[str, dict[str, object]] = {
    "media": {"max_frames": 8},
    "encoders": {"modalities": ["image", "video", "audio"]},
    "workers": {"replicas": 2, "num_blocks": 512},
}
VIDEO = {"type": "video_url", "video_url": {"url": data_url(video_file("mp4-h264-aac"), "video/mp4")}}
SOUND = {"type": "audio_url", "audio_url": {"url": data_url(sound_file("flac"), "audio/flac")}}
SILENT = {"mm_processor_kwargs": {"use_audio_in_video": False}}
QUESTIONS: list[tuple[list[Any], dict[str, Any], set[str]]] = [
    ([VIDEO, "What is it?"], {}, {"video", "audio"}),
    ([VIDEO, "What is it?"], SILENT, {"video"}),
    ([SOUND, "How many beeps?"], {}, {"audio"}),
    ([image_part(31), "What is it?"], {}, {"image"}),
    (["First", image_part(32), "then", SOUND, "and", VIDEO, "?"], SILENT, {"image", "audio", "video"}),
    (["Only words"], {}, set()),
]
"""Each question has its parts, the fields of the request, and the modalities that the prompt must hold tokens of."""


def body(index: int) -> dict[str, Any]:
    parts, fields, _ = QUESTIONS[index]
    base = {"model": "weft-demo", "messages": user(*parts), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return base | {"return_token_ids": True} | fields


def essence(answer: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the parts of an answer that must not depend on the router that gave it."""
    choice, usage = answer["choices"][0], answer["usage"]
    media = {name: count for name, count in usage["prompt_tokens_details"].items() if name != "cached_tokens"}
    return choice["message"]["content"], choice["token_ids"], answer["prompt_token_ids"], media


@pytest.fixture(scope="module")
def expected() -> list[tuple[Any, ...]]:
    """Returns the answers of one process, which uses direct calls and copies features within its memory."""

    async def ask_all() -> list[tuple[Any, ...]]:
        local = SECTIONS | {"encoders": SECTIONS["encoders"] | {"decode_processes": 0}}
        local["media"] = SECTIONS["media"] | {"probe_processes": 0}
        config = ClusterConfig.model_validate(local)
        async with (
            running(config) as cluster,
            httpx.AsyncClient(
                transport=httpx.ASGITransport(cluster.app), base_url="http://localhost", timeout=120
            ) as client,
        ):
            answers = []
            for index in range(len(QUESTIONS)):
                response = await client.post("/v1/chat/completions", json=body(index))
                assert response.status_code == 200, response.text
                answers.append(essence(response.json()))
            return answers

    return asyncio.run(ask_all())


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterProcess]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Two routers can share a port only if the config names it.
    with start_cluster(server={"port": port}, router={"replicas": 2}, **SECTIONS) as running_cluster:
        yield running_cluster


def ask(cluster: ClusterProcess, index: int) -> tuple[dict[str, Any], str]:
    """Returns the answer and the router that gave it. It opens a new connection, which reaches either router."""
    with cluster.client() as client:
        response = client.post("/v1/chat/completions", json=body(index))
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        trace = client.get(f"/weft/requests/{answer['id']}").json()
    (router,) = {event["member_id"] for event in trace["events"] if event["name"] == "planned"}
    return answer, router


def routers(cluster: ClusterProcess) -> set[str]:
    """Returns the routers that answer now, as far as 16 connections show."""
    return {ask(cluster, len(QUESTIONS) - 1)[1] for _ in range(16)}


def test_every_modality_is_answered_alike_by_both_routers(
    cluster: ClusterProcess, expected: list[tuple[Any, ...]]
) -> None:
    index_to_routers: dict[int, set[str]] = {index: set() for index in range(len(QUESTIONS))}
    for _ in range(12):
        for index, seen in index_to_routers.items():
            if len(seen) < 2:
                answer, router = ask(cluster, index)
                assert essence(answer) == expected[index], f"question {index} of {router}"
                seen.add(router)
    assert {len(seen) for seen in index_to_routers.values()} == {2}, index_to_routers
    for (_, _, modalities), answer in zip(QUESTIONS, expected, strict=True):
        media = answer[-1]
        assert {name.removesuffix("_tokens") for name, count in media.items() if count} == {"text"} | modalities


def test_features_of_every_modality_went_from_process_to_process(cluster: ClusterProcess) -> None:
    """Each medium of the questions of the first test was encoded once or found, then moved, and its lease was
    released."""
    eventually(lambda: cluster.total("weft_encoder_num_leases") == 0)
    assert cluster.total("weft_encoder_transfers_total") >= 6
    assert cluster.total("weft_encoder_items_failed_total") == 0
    for modality in ("image", "video", "audio"):
        assert any(
            sample.startswith("weft_encoder_modality_seconds_per_cost") and f'modality="{modality}"' in sample
            for sample in cluster.metrics()
        ), modality


def test_both_routers_know_what_the_workers_hold(cluster: ClusterProcess) -> None:
    """Each router's index has every block of the questions of the first test, whichever router sent them."""

    def indexes() -> dict[str, float]:
        """Maps each router to the number of keys of its index. Every scrape has both, whichever router answers."""
        keys = re.compile(r'weft_index_keys\{index="prefix",router="([^"]+)"\}')
        return {found[1]: value for sample, value in cluster.metrics().items() if (found := keys.fullmatch(sample))}

    eventually(lambda: len(indexes()) == 2 and len(set(indexes().values())) == 1)
    assert min(indexes().values()) > 10


def test_a_request_is_explained_whichever_router_is_asked(cluster: ClusterProcess) -> None:
    """New connections reach either router, and both give the record of a request that one of them ran."""
    ran: dict[str, str] = {}
    for _ in range(64):
        answer, router = ask(cluster, len(QUESTIONS) - 1)
        ran[answer["id"].removeprefix("chatcmpl-")] = router
        if len(set(ran.values())) == 2:
            break
    assert len(set(ran.values())) == 2
    for _ in range(8):
        with cluster.client() as client:
            for name, router in ran.items():
                record = client.get(f"/weft/requests/{name}")
                assert record.status_code == 200, record.text
                assert (record.json()["request_id"], record.json()["router_id"]) == (name, router)
            listed = client.get("/weft/requests", params={"limit": 100}).json()
            assert listed["routers_without_answer"] == []
            assert ran.items() <= {each["request_id"]: each["router_id"] for each in listed["requests"]}.items()
            assert client.get("/weft/requests/req-unknown").status_code == 404


def test_when_a_router_is_killed_the_other_serves_on(cluster: ClusterProcess, expected: list[tuple[Any, ...]]) -> None:
    port = urlsplit(cluster.url).port

    def front_ends() -> set[int]:
        processes = psutil.Process(cluster.process.pid).children(recursive=True)
        return {process.pid for process in processes if any(each.laddr.port == port for each in listening(process))}

    before = front_ends()
    assert len(before) == 2
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: victim not in front_ends())
    for index in (0, 2, 3):
        assert essence(ask(cluster, index)[0]) == expected[index]
    eventually(lambda: len(front_ends()) == 2, timeout_s=300)
    eventually(lambda: len(routers(cluster)) == 2)
    assert essence(ask(cluster, 1)[0]) == expected[1]


def listening(process: psutil.Process) -> list[Any]:
    try:
        return [each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    except psutil.NoSuchProcess:
        return []
