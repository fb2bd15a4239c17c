"""Serves a cluster of fake members on a real socket, for OpenAI's Python library."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai

from deploy.http_server import HttpServer
from deploy.testing import FakeCluster, fake_cluster
from router.edge import create_app


class WatchedClient(openai.AsyncOpenAI):
    """A `WatchedClient` notes how long the library would wait ahead of each new try, and does not wait."""

    waits: tuple[float, ...] = ()

    def _calculate_retry_timeout(self, *args: Any, **kwargs: Any) -> float:
        self.waits += (super()._calculate_retry_timeout(*args, **kwargs),)
        return 0.0


@asynccontextmanager
async def serving(
    api_key: str = "none", max_retries: int = 2, **settings: Any
) -> AsyncIterator[tuple[FakeCluster, WatchedClient]]:
    async with fake_cluster(**settings) as cluster:
        server = HttpServer(create_app(cluster.service), "127.0.0.1", 0)
        await server.start()
        try:
            url = f"http://127.0.0.1:{server.port}/v1"
            async with WatchedClient(base_url=url, api_key=api_key, max_retries=max_retries) as client:
                yield cluster, client
        finally:
            await server.stop()
