"""Starts a cluster in this process behind its own HTTP API, for tests that send it requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from chat_media import user

from deploy.local import LocalCluster
from deploy.testing import in_process_cluster, small_config

WORDS = "Write a long story about a fox."


@asynccontextmanager
async def serving(**workers: Any) -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    """Starts a cluster and a client of it. `workers` are fields of that section of the config."""
    config = small_config(workers=workers, encoders={"modalities": ["image"]})
    async with in_process_cluster(config) as (cluster, client):
        yield cluster, client


def body(**fields: Any) -> dict[str, Any]:
    defaults = {"model": "weft-demo", "messages": user(WORDS), "max_tokens": 12, "seed": 3, "return_token_ids": True}
    return defaults | fields


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json=body(**fields))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer
