"""Serves the demo model by two pools of workers in one process: each has blocks of its own size, both answer, and they
answer alike."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from chat_media import image_part, user

from deploy.demo.build import demo_checkpoint
from deploy.ranks import spawn_rank
from deploy.testing import in_process_cluster, small_config
from fabric.contracts import ConfigError, MemberId

pytestmark = pytest.mark.torch
NUM_ASKED = 16


async def ask(client: httpx.AsyncClient, salt: int) -> tuple[str, str]:
    """Returns the answer, and the worker that gave it."""
    body: dict[str, Any] = {"model": "demo", "messages": user("What is in this picture?", image_part(21))}
    response = await client.post(
        "/v1/chat/completions", json=body | {"temperature": 0, "max_tokens": 12, "cache_salt": f"salt {salt}"}
    )
    assert response.status_code == 200, response.text
    answer = response.json()
    events = (await client.get(f"/weft/requests/{answer['id']}")).json()["events"]
    asked = [event["detail"]["to"] for event in events if event["name"] == "dispatched"]
    (worker,) = (each for each in asked if each.startswith("worker"))
    return answer["choices"][0]["message"]["content"], worker


async def test_both_pools_answer_and_answer_alike() -> None:
    crowded = {"max_sequences": 2, "step_delay_s": 0.01}  # So that no pool is the better one for all requests.
    more = {"small": {"block_size": 24, "num_blocks": 100} | crowded}
    sections = {"model": {"path": demo_checkpoint(), "name": "demo"}, "workers": {"num_blocks": 1024} | crowded}
    async with in_process_cluster(small_config(**sections, more_workers=more)) as (cluster, client):
        given: list[tuple[str, str]] = []
        async with asyncio.timeout(120):
            while len({worker for _, worker in given}) < 2:  # The router decides which pool gets a request.
                salts = range(len(given), len(given) + NUM_ASKED)
                given += await asyncio.gather(*(ask(client, salt) for salt in salts))
        assert len({text for text, _ in given}) == 1
        members = (await client.get("/weft/members")).json()["members"]
        pool_to_id = {each["pool"]: each["member_id"] for each in members if each["kind"] == "worker"}
        assert pool_to_id.keys() == {"main", "small"}
        assert {worker for _, worker in given} == set(pool_to_id.values())
        services = cluster.workers.services
        sizes = [services[MemberId(pool_to_id[pool])].kv_scheme.block_size for pool in ("main", "small")]
        assert sizes == [16, 24]


def test_ranks_of_several_processes_have_no_place_beside_another_pool(tmp_path: Any) -> None:
    config = small_config(more_workers={"small": {}})
    with pytest.raises(ConfigError, match="more_workers has a pool, but one process can hold rank 0 of one"):
        spawn_rank(config, tmp_path, None)  # No invitation is needed for a refusal.
