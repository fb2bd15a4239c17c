"""Serves a router with fake members to an HTTP client, without a socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from deploy.testing import FakeCluster, fake_cluster
from router.edge import create_app


@asynccontextmanager
async def served(**settings: object) -> AsyncIterator[tuple[FakeCluster, httpx.AsyncClient]]:
    async with fake_cluster(**settings) as cluster:
        transport = httpx.ASGITransport(create_app(cluster.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://weft") as client:
            yield cluster, client


def events(body: bytes | str) -> list[Any]:
    """Returns the payloads of a stream, parsed; `[DONE]` stays a string."""
    lines = (body.decode() if isinstance(body, bytes) else body).split("\n\n")
    payloads = [line.removeprefix("data: ") for line in lines if line]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]
