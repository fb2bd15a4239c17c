"""Sends requests to a cluster with several pools of workers until a wanted pool has answered, and kills workers of a
wanted pool in the middle of an answer.

The router chooses the worker. Copies of a request with different salts share no cached prefix, and those that are sent
together are spread over the workers, so each pool gets one soon. The record of a request says which worker it went to.
"""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from cluster_process import ClusterProcess

CHAT = "/v1/chat/completions"
AT_ONCE = 4
"""So many copies of a request are sent together."""


class PooledWorker(NamedTuple):
    pool: str
    engine: str
    pid: int


class PooledAnswer(NamedTuple):
    text: str
    workers: tuple[PooledWorker, ...]
    """Holds the workers to which the request went, one after the other."""


class PoolClient:
    """A `PoolClient` asks a cluster, and remembers the workers that it has seen, also those that have ended."""

    def __init__(self, cluster: ClusterProcess) -> None:
        self._cluster = cluster
        self._id_to_worker: dict[str, PooledWorker] = {}

    def workers(self) -> dict[str, PooledWorker]:
        """Returns the workers that are there, by their ids."""
        with self._cluster.client() as client:
            members = client.get("/weft/members").json()["members"]
        there = {
            each["member_id"]: PooledWorker(each["pool"], each["engine"], each["pid"])
            for each in members
            if each["kind"] == "worker"
        }
        self._id_to_worker |= there
        return there

    def serving(self, completion_id: str) -> tuple[PooledWorker, ...]:
        """Returns the workers to which a request went, one after the other."""
        with self._cluster.client() as client:
            events = client.get(f"/weft/requests/{completion_id}").json()["events"]
        asked = [event["detail"]["to"] for event in events if event["name"] == "dispatched"]
        if not all(each in self._id_to_worker for each in asked):
            self.workers()
        return tuple(self._id_to_worker[each] for each in asked if each in self._id_to_worker)

    def ask(self, content: Any, **fields: Any) -> PooledAnswer:
        body = self._body(content, fields)
        with self._cluster.client() as client:
            response = client.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        return PooledAnswer(answer["choices"][0]["message"]["content"], self.serving(answer["id"]))

    def ask_each(self, content: Any, pools: Iterable[str], limit_s: float = 240.0, **fields: Any) -> dict[str, str]:
        """Asks until a worker of each pool has given a whole answer, and returns the answers by pool. Asserts that a
        pool never gives two answers."""
        found: dict[str, str] = {}
        deadline_s, wanted = time.monotonic() + limit_s, set(pools)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            while found.keys() < wanted:
                assert time.monotonic() < deadline_s, f"only {sorted(found)} of {sorted(wanted)} have answered"
                for answer in threads.map(lambda _: self.ask(content, **fields), range(AT_ONCE)):
                    assert len(answer.workers) == 1, answer
                    assert found.setdefault(answer.workers[0].pool, answer.text) == answer.text
        assert found.keys() == wanted
        return found

    def ask_and_kill(self, content: Any, pool: str, limit_s: float = 240.0, **fields: Any) -> PooledAnswer:
        """Streams answers until one comes from a worker of the pool, and kills that worker after its first words.
        Returns that answer. Streams of other pools stay open meanwhile, so that their workers are busy."""
        deadline_s = time.monotonic() + limit_s
        with self._cluster.client() as client:
            opened: list[Any] = []
            try:
                while True:
                    assert time.monotonic() < deadline_s, f"no answer has come from the pool {pool}"
                    stream = client.stream("POST", CHAT, json=self._body(content, fields) | {"stream": True})
                    response = stream.__enter__()
                    assert response.status_code == 200
                    chunks = (
                        json.loads(line.removeprefix("data: "))
                        for line in response.iter_lines()
                        if line.startswith("data: {")
                    )
                    opened.append((stream, chunks))  # An iterator that nobody holds would close its stream.
                    first = next(each for each in chunks if _words(each))
                    (worker,) = self.serving(first["id"])
                    if worker.pool != pool:
                        continue
                    os.kill(worker.pid, signal.SIGKILL)
                    text = _words(first) + "".join(_words(each) for each in chunks)
                    return PooledAnswer(text, self.serving(first["id"]))
            finally:
                for stream, _ in opened:
                    stream.__exit__(None, None, None)

    def _body(self, content: Any, fields: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self._cluster.model, "messages": [{"role": "user", "content": content}]}
        return body | {"max_tokens": 12, "temperature": 0, "cache_salt": uuid.uuid4().hex} | fields


def _words(chunk: dict[str, Any]) -> str:
    assert "error" not in chunk, chunk
    return "".join(each["delta"].get("content") or "" for each in chunk["choices"])
