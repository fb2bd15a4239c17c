"""Serves the demo model by two pools of workers with blocks of different sizes: both answer alike, and a request goes
on in the other pool when its worker is killed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from chat_media import image_part, text_part, user
from cluster_process import ClusterProcess, eventually, start_cluster
from pool_requests import PoolClient, PooledWorker
from reference_model import ReferenceModel

from deploy.demo.build import demo_checkpoint
from modalities.text import TextCodec

pytestmark = [pytest.mark.ray, pytest.mark.nixl, pytest.mark.torch]

POOLS = ("main", "small")


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterProcess]:
    slow = {"step_delay_s": 0.005}  # So the streams are still open when their workers are killed.
    small = {"replicas": 1, "block_size": 24, "num_blocks": 300} | slow
    workers = {"replicas": 1, "block_size": 16} | slow
    with start_cluster(workers=workers, more_workers={"small": small}, encoders={"replicas": 1}) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: ClusterProcess) -> PoolClient:
    """A cluster is ready with one worker, so this waits for the other one."""
    made = PoolClient(cluster)
    eventually(lambda: pools_of(made.workers()) == ["main", "small"])
    return made


@pytest.fixture(scope="module")
def reference() -> ReferenceModel:
    return ReferenceModel(demo_checkpoint())


def pools_of(workers: dict[str, PooledWorker]) -> list[str]:
    return sorted(each.pool for each in workers.values())


def test_members_say_their_pool_and_engine(cluster: ClusterProcess, client: PoolClient) -> None:
    assert pools_of(client.workers()) == ["main", "small"]
    assert {each.engine for each in client.workers().values()} == {"weft"}
    with cluster.client() as http:
        members = http.get("/weft/members").json()["members"]
        picture = http.get("/weft/cluster").json()
    assert [each for each in members if each["kind"] == "encoder" and "pool" in each] == []
    assert sorted(each["pool"] for each in picture["workers"]) == ["main", "small"]
    assert cluster.total("weft_router_members_expected") == 4.0


CONTENTS: list[Any] = [
    "What can you do?",
    [image_part(21), text_part("What is in this picture?")],
    [text_part("Here are two pictures. " * 12), image_part(22), image_part(23), text_part("What is in them?")],
]


@pytest.mark.parametrize("content", CONTENTS)
def test_each_pool_answers_like_the_reference(client: PoolClient, reference: ReferenceModel, content: Any) -> None:
    turns = user(*(content if isinstance(content, list) else [content]))
    expected = reference.answer(turns, 12)
    answers = client.ask_each(content, POOLS)
    assert answers["main"] == answers["small"]
    assert answers["main"] == TextCodec.load(demo_checkpoint()).decode(expected.token_ids)


def test_the_prefix_cache_of_each_pool_is_found_by_its_own_hashes(cluster: ClusterProcess) -> None:
    """The router hashes the prompt in both sizes of blocks, so what a worker of either pool has is found."""
    before = cluster.total("weft_worker_prefix_hit_tokens_total")
    asked = PoolClient(cluster)
    content = [text_part("Some words that fill several blocks of either size. " * 6), image_part(31), text_part("?")]
    first = asked.ask(content, cache_salt="shared")
    eventually(lambda: asked.ask(content, cache_salt="shared").workers == first.workers)
    assert cluster.total("weft_worker_prefix_hit_tokens_total") > before + 48


@pytest.mark.parametrize("pool", POOLS)
def test_a_request_goes_on_in_the_other_pool(client: PoolClient, pool: str) -> None:
    content = [image_part(21), text_part("What is in this picture?")]
    fields = {"max_tokens": 400, "ignore_eos": True}
    whole = client.ask(content, **fields).text
    answer = client.ask_and_kill(content, pool, **fields)
    assert [each.pool for each in answer.workers] == [pool, *(each for each in POOLS if each != pool)]
    assert answer.text == whole
    eventually(lambda: pools_of(client.workers()) == ["main", "small"], timeout_s=300)


def test_everything_is_free_afterwards(cluster: ClusterProcess) -> None:
    for name in ("num_running", "num_waiting", "kv_used_blocks", "num_features", "inbox_used_bytes"):
        eventually(lambda name=name: cluster.total(f"weft_worker_{name}") == 0)
    assert httpx.get(f"{cluster.url}/health/ready").status_code == 200
