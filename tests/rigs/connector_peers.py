"""Provides stage connectors for tests, by the name of their kind, and a process that owns one and can be killed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fabric.contracts import WeftError
from fabric.transport import (
    LocalStageConnector,
    LocalStageHub,
    NixlStageConnector,
    SharedMemoryStageConnector,
    StageConnector,
)

NIXL_ARENA_BYTES = 4 << 20


def connector_maker(kind: str, root: Path) -> Callable[[], StageConnector]:
    """Returns a function that makes connectors of a kind, which reach each other. `root` is the directory in shared
    memory."""
    hub = LocalStageHub()
    kind_to_maker: dict[str, Callable[[], StageConnector]] = {
        "in_process": lambda: LocalStageConnector(hub),
        "shared_memory": lambda: SharedMemoryStageConnector(root),
        "nixl": lambda: NixlStageConnector(NIXL_ARENA_BYTES),
    }
    return kind_to_maker[kind]


def _own(connection: Any, kind: str, root: Path) -> None:
    """Owns a connector in the other process: it receives calls and sends results until the pipe ends."""
    connector = connector_maker(kind, root)()
    connection.send(connector.inbox)
    try:
        while True:
            method, arguments = connection.recv()
            try:
                connection.send(getattr(connector, method)(*arguments))
            except WeftError as error:
                connection.send(error)
    except EOFError:
        connector.close()


class ConnectorProcess:
    """A `ConnectorProcess` owns a connector in a spawned process."""

    def __init__(self, kind: str, root: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_own, args=(theirs, kind, root), daemon=True)
        self._process.start()
        theirs.close()
        self.inbox: str = self._receive()

    def call(self, method: str, *arguments: Any) -> Any:
        self._connection.send((method, arguments))
        result = self._receive()
        if isinstance(result, WeftError):
            raise result
        return result

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        self._connection.close()
        self._process.join(20.0)
        if self._process.is_alive():
            self.kill()
        self._process.close()

    def _receive(self) -> Any:
        assert self._connection.poll(60.0), "the process of the connector does not answer"
        return self._connection.recv()
