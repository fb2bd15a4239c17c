"""Stops `weft serve` and checks that accepted requests end and that nothing is left on the machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from chat_media import image_part, user
from cluster_process import ClusterProcess, eventually, launched, start_cluster, wait_ready

pytestmark = [pytest.mark.ray, pytest.mark.nixl]

NUM_TOKENS = 600
NUM_IDLE = 20
both_ways = pytest.mark.parametrize("in_process", [False, True], ids=["ray", "in-process"])


def body(cluster: ClusterProcess, max_tokens: int = NUM_TOKENS, **fields: Any) -> dict[str, Any]:
    defaults = {"model": cluster.model, "messages": user("Go on", image_part(3)), "max_tokens": max_tokens}
    return defaults | {"temperature": 0, "ignore_eos": True} | fields


def shared_memory_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def segment_makers() -> set[int]:
    """Returns the processes that made the existing System V segments."""
    rows = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()]
    return {int(row[rows[0].index("cpid")]) for row in rows[1:]}


def marked_processes(mark: str) -> list[str]:
    """Returns the command lines of the processes whose environment has the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("WEFT_TEST_MARK") == mark:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:  # it has ended, or belongs to another user
            continue
    return found


@contextmanager
def nothing_is_left(cluster: ClusterProcess) -> Iterator[None]:
    """Checks that everything that the cluster has at the start of the block is gone at its end, and that the command's
    status is 0."""
    tree = psutil.Process(cluster.process.pid).children(recursive=True)
    assert tree
    assert any(cluster.temp_dir.iterdir())
    before = shared_memory_files()
    yield
    assert cluster.process.wait(timeout=120) == 0
    assert [process for process in tree if process.is_running()] == []
    assert marked_processes(cluster.mark) == []
    assert segment_makers() & {process.pid for process in tree} == set()
    assert shared_memory_files() <= before
    assert list(cluster.temp_dir.iterdir()) == []


class Streamed(threading.Thread):
    """Reads a streamed answer in a thread of its own."""

    def __init__(self, cluster: ClusterProcess) -> None:
        super().__init__()
        self._url, self._body = f"{cluster.url}/v1/chat/completions", body(cluster, stream=True)
        self.has_begun = threading.Event()
        self.payloads: list[str] = []

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.payloads.append(line.removeprefix("data: "))
                    if len(self.payloads) == 3:
                        self.has_begun.set()

    @property
    def text(self) -> str:
        chunks = [json.loads(payload) for payload in self.payloads if payload != "[DONE]"]
        assert [chunk for chunk in chunks if "error" in chunk] == []
        return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def connect(cluster: ClusterProcess) -> socket.socket:
    place = urlsplit(cluster.url)
    assert place.hostname is not None
    return socket.create_connection((place.hostname, place.port or 80), timeout=60)


def request_bytes(content: dict[str, Any]) -> bytes:
    data = json.dumps(content).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@contextmanager
def idle_connections(cluster: ClusterProcess) -> Iterator[None]:
    """Keeps connections open that were used once."""
    with ExitStack() as stack:
        for _ in range(NUM_IDLE):
            client = stack.enter_context(connect(cluster))
            client.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 200"
        yield


@both_ways
def test_what_was_accepted_ends_and_nothing_new_is_taken(in_process: bool) -> None:
    with start_cluster(in_process=in_process, workers={"replicas": 1}, server={"port": 0, "drain_s": 90}) as cluster:
        with cluster.client() as client:
            answer = client.post("/v1/chat/completions", json=body(cluster)).json()
        expected = answer["choices"][0]["message"]["content"]
        stream = Streamed(cluster)
        stream.start()
        assert stream.has_begun.wait(60)
        with nothing_is_left(cluster), idle_connections(cluster):
            cluster.process.send_signal(signal.SIGTERM)
            ready: list[httpx.Response] = []
            eventually(lambda: ready.append(httpx.get(f"{cluster.url}/health/ready")) or ready[-1].status_code == 503)
            assert ready[-1].json()["status"] == "draining"
            refused = httpx.post(f"{cluster.url}/v1/chat/completions", json=body(cluster))
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert int(refused.headers["retry-after"]) >= 1
            assert "[DONE]" not in stream.payloads, "the stream had ended before the drain was seen"
            stream.join(120)
        assert stream.payloads[-1] == "[DONE]"
        assert stream.text == expected
        assert "Traceback" not in cluster.log.read_text()
        assert "SIGTERM received" not in cluster.log.read_text()


@both_ways
def test_a_reader_that_takes_nothing_holds_the_end_up_to_the_limit_alone(in_process: bool) -> None:
    """The test sends Ctrl-C as a terminal does: to every process of the group."""
    with start_cluster(in_process=in_process, workers={"replicas": 1}, server={"port": 0, "drain_s": 2}) as cluster:
        with connect(cluster) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.sendall(request_bytes(body(cluster, 3000, stream=True)))
            eventually(lambda: cluster.total("weft_router_requests_in_flight") >= 1)
            with nothing_is_left(cluster):
                os.killpg(cluster.process.pid, signal.SIGINT)
        said = cluster.log.read_text()
        assert "the cluster has not stopped in time" not in said, "the drain ended by itself at its limit"


@both_ways
def test_a_second_signal_ends_at_once(in_process: bool) -> None:
    sections = {"workers": {"replicas": 1}, "server": {"port": 0, "drain_s": 3600}}
    with start_cluster(in_process=in_process, **sections) as cluster, connect(cluster) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(request_bytes(body(cluster, 3000, stream=True)))
        eventually(lambda: cluster.total("weft_router_requests_in_flight") >= 1)
        with nothing_is_left(cluster):
            cluster.process.send_signal(signal.SIGTERM)
            eventually(lambda: httpx.get(f"{cluster.url}/health/ready").status_code == 503)
            cluster.process.send_signal(signal.SIGTERM)
        assert cluster.process.returncode == 0


@both_ways
def test_a_signal_while_it_starts_ends_the_start(in_process: bool) -> None:
    with launched(in_process, workers={"replicas": 1}) as starting:
        root = psutil.Process(starting.process.pid)
        eventually(lambda: root.children(recursive=True) and any(starting.temp_dir.iterdir()))
        with nothing_is_left(starting):
            starting.process.send_signal(signal.SIGTERM)
        assert starting.process.returncode == 0


def test_nothing_outlives_the_supervisor() -> None:
    with launched(in_process=True, workers={"replicas": 1}) as starting:
        cluster = wait_ready(starting)
        tree = psutil.Process(cluster.process.pid).children(recursive=True)
        cluster.process.kill()
        eventually(lambda: not any(process.is_running() for process in tree))
        assert list(cluster.temp_dir.iterdir()) == []


def test_nothing_outlives_the_server() -> None:
    with launched(in_process=True, workers={"replicas": 1}) as starting:
        cluster = wait_ready(starting)
        tree = psutil.Process(cluster.process.pid).children(recursive=True)
        server = next(process for process in tree if process.ppid() == cluster.process.pid)
        server.kill()
        assert cluster.process.wait(timeout=60) == 128 + signal.SIGKILL
        assert [process for process in tree if process.is_running()] == []
