"""Checks the reasons why the router has its own HTTP server (docs/adr/0001): a slow reader, a body of 1 GB, and the
addresses that it listens on. Checks also that the front loads no torch."""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from chat_media import user
from cluster_process import ClusterProcess, eventually

pytestmark = pytest.mark.ray

GIB = 2**30


def connect(cluster: ClusterProcess) -> socket.socket:
    place = urlsplit(cluster.url)
    assert place.hostname is not None
    return socket.create_connection((place.hostname, place.port or 80), timeout=60)


def head(cluster: ClusterProcess, length: int | None) -> bytes:
    size = f"Content-Length: {length}" if length is not None else "Transfer-Encoding: chunked"
    host = urlsplit(cluster.url).netloc
    lines = ["POST /v1/chat/completions HTTP/1.1", f"Host: {host}", "Content-Type: application/json", size, "", ""]
    return "\r\n".join(lines).encode()


def listeners(cluster: ClusterProcess) -> set[tuple[str, int]]:
    """Returns the addresses on which the cluster's processes listen."""
    root = psutil.Process(cluster.process.pid)
    found = set()
    for process in [root, *root.children(recursive=True)]:
        found |= {(connection.laddr.ip, connection.laddr.port) for connection in listening(process)}
    return found


def listening(process: psutil.Process) -> list[Any]:
    return [each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]


def test_http_listens_on_loopback_only(cluster: ClusterProcess) -> None:
    port = urlsplit(cluster.url).port
    assert {ip for ip, at in listeners(cluster) if at == port} == {"127.0.0.1"}


def test_only_members_that_compute_load_torch(cluster: ClusterProcess) -> None:
    """Importing torch takes seconds of processor time, and a router and the server start without it."""
    root = psutil.Process(cluster.process.pid)
    tree = [root, *root.children(recursive=True)]
    with_torch = {process.pid for process in tree if "libtorch_cpu.so" in loaded_libraries(process)}
    with cluster.client() as client:
        assert with_torch == {member["pid"] for member in client.get("/weft/members").json()["members"]}


def loaded_libraries(process: psutil.Process) -> set[str]:
    """Returns the names of the files that are mapped into the memory of a process."""
    return {Path(mapped.path).name for mapped in process.memory_maps()}


def test_planes_and_transfers_stay_on_loopback(cluster: ClusterProcess) -> None:
    """The sockets that move messages and features between members must not be reachable from outside. Ray's own servers
    listen on every interface and require the cluster's token; they speak HTTP/2, which neither ZeroMQ nor UCX does."""
    with cluster.client() as client:
        members = client.get("/weft/members").json()["members"]
    assert {member["kind"] for member in members} == {"worker", "encoder"}
    for member in members:
        ours = listening(psutil.Process(member["pid"]))
        assert len(outside(ours)) < len(ours), "its plane listens somewhere"
        strange = [each.laddr for each in outside(ours) if not speaks_http2(each.laddr.port)]
        assert strange == [], member["kind"]


def speaks_http2(port: int) -> bool:
    """Returns whether the server at the port answers HTTP/2's opening with a frame of settings."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0")
        try:
            head = client.recv(9, socket.MSG_WAITALL)
        except (TimeoutError, ConnectionResetError):
            return False
    return len(head) == 9 and head[3] == 4


def outside(listeners: list[Any]) -> list[Any]:
    """Returns the listeners that are reachable from another machine."""
    return [each for each in listeners if not ipaddress.ip_address(each.laddr.ip).is_loopback]


def test_a_declared_gigabyte_is_refused_before_it_is_read(cluster: ClusterProcess) -> None:
    with connect(cluster) as client:
        client.sendall(head(cluster, GIB))
        answer = http.client.HTTPResponse(client)
        answer.begin()
        assert answer.status == 413
        assert json.loads(answer.read())["error"]["code"] == "body_too_large"


def test_an_undeclared_gigabyte_is_cut_off_while_it_arrives(cluster: ClusterProcess) -> None:
    """The body is chunked, so its size is not known in advance: the answer comes long before its end, and memory stays
    flat."""
    processes = [psutil.Process(cluster.process.pid), *psutil.Process(cluster.process.pid).children(recursive=True)]
    before = max(process.memory_info().rss for process in processes)
    piece = b"x" * (1 << 20)
    frame = b"%x\r\n" % len(piece) + piece + b"\r\n"
    sent = 0
    with connect(cluster) as client:
        client.sendall(head(cluster, None))
        try:
            while sent < GIB:
                client.sendall(frame)
                sent += len(piece)
                client.setblocking(False)
                try:
                    if client.recv(1, socket.MSG_PEEK):
                        break
                except BlockingIOError:
                    pass
                finally:
                    client.settimeout(60)
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert sent < GIB / 4, f"{sent} bytes were taken"
    after = max(process.memory_info().rss for process in processes if process.is_running())
    assert after - before < 256 * 2**20


def test_a_slow_reader_delays_nobody(cluster: ClusterProcess) -> None:
    """One client asks for a long answer and does not read it; other clients get their whole answers meanwhile."""
    body = json.dumps(
        {"model": cluster.model, "messages": user("Go on"), "max_tokens": 2000, "ignore_eos": True, "stream": True}
    ).encode()
    slow = connect(cluster)
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    try:
        slow.sendall(head(cluster, len(body)) + body)
        eventually(lambda: cluster.total("weft_router_requests_in_flight") >= 1)
        with cluster.client() as client:
            for _ in range(3):
                quick = {"model": cluster.model, "messages": user("Hi"), "max_tokens": 4, "ignore_eos": True}
                answer = client.post("/v1/chat/completions", json=quick)
                assert answer.json()["usage"]["completion_tokens"] == 4
    finally:
        slow.close()
    eventually(lambda: cluster.total("weft_router_requests_in_flight") == 0)
