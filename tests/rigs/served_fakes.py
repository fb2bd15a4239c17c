"""Serves a cluster of fake members on a port of this machine, from a thread, for tests of programs that ask it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import uvicorn

from deploy.testing import FakeCluster, fake_cluster
from router.edge import create_app

T = TypeVar("T")


class ServedFakes:
    """`ServedFakes` are a cluster of fake members that answers at `url`."""

    def __init__(self, cluster: FakeCluster, url: str, loop: asyncio.AbstractEventLoop) -> None:
        self.cluster = cluster
        self.url = url
        self._loop = loop

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the loop of the cluster and returns its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def do(self, action: Callable[[], T]) -> T:
        """Calls a function in the loop of the cluster."""

        async def call() -> T:
            return action()

        return self.run(call())

    def report(self) -> None:
        """Makes every member send a report, as members do several times a second."""

        def send() -> None:
            service = self.cluster.service
            for member in (*self.cluster.workers, *self.cluster.encoders):
                service.arrivals.take(member.report(1))

        self.do(send)


@contextmanager
def served_fakes(**settings: object) -> Iterator[ServedFakes]:
    """Starts the cluster. `settings` are those of `fake_cluster`."""
    started: list[ServedFakes | BaseException] = []
    has_started, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with fake_cluster(**settings) as cluster:
            config = uvicorn.Config(create_app(cluster.service), port=0, log_config=None, lifespan="off")
            server = uvicorn.Server(config)
            server.install_signal_handlers = lambda: None
            serving = asyncio.create_task(server.serve())
            while not server.started:  # noqa: ASYNC110 - uvicorn sets no event
                await asyncio.sleep(0.001)
            port = server.servers[0].sockets[0].getsockname()[1]
            started.append(ServedFakes(cluster, f"http://127.0.0.1:{port}", asyncio.get_running_loop()))
            has_started.set()
            await stop.wait()
            server.should_exit = True
            await serving

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # The test's thread raises it.
            started.append(error)
            has_started.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert has_started.wait(30)
    fakes = started[0]
    if isinstance(fakes, BaseException):
        raise fakes
    try:
        yield fakes
    finally:
        fakes._loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        assert not thread.is_alive()
    assert len(started) == 1, started[1]
