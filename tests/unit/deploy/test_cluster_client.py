"""Tests what the commands say when a cluster can't be asked, and what they take as its URL and key."""

from __future__ import annotations

import argparse
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tls_files import make_certificate

from deploy.commands.cluster_client import ClusterClient, ClusterOptions, plain_url
from fabric.contracts import ConfigError, Unavailable, WeftError


def client(answer: httpx.Response, key: str | None = None) -> ClusterClient:
    """Returns a client of a server that gives this answer to everything."""
    return ClusterClient(ClusterOptions("http://cluster", key), httpx.MockTransport(lambda _: answer))


def envelope(status: int, code: str, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "code": code, "type": "x", "param": None}})


@contextmanager
def served(context: ssl.SSLContext | None, reply: bytes) -> Iterator[int]:
    """Yields the port of a server that sends `reply` to the first bytes of each connection, through TLS with
    `context`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                try:
                    with connection:
                        wrapped = connection if context is None else context.wrap_socket(connection, server_side=True)
                        wrapped.recv(4096)
                        wrapped.sendall(reply)
                        if context is not None:
                            wrapped.close()
                except OSError:
                    continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


OK = b'HTTP/1.1 200 OK\r\ncontent-length: 35\r\n\r\n{"status": "ready","num_workers": 1}'.replace(b"35", b"36")


def tried(url: str, **fields: Path) -> WeftError:
    with (
        pytest.raises((ConfigError, Unavailable)) as raised,
        ClusterClient(ClusterOptions(url, None, **fields)) as asking,
    ):
        asking.readiness()
    return raised.value


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://a:8000", "http://a:8000"),
        ("a:8000", "http://a:8000"),
        ("localhost:8000/", "http://localhost:8000"),
        ("https://a/v1", "https://a"),
        ("https://a/v1/", "https://a"),
        ("http://a/behind/v1", "http://a/behind"),
        ("http://[::1]:80/", "http://[::1]"),
    ],
)
def test_a_url_may_be_written_as_clients_write_it(given: str, url: str) -> None:
    assert plain_url(given) == url


@pytest.mark.parametrize("given", ["", "ftp://a", "http://", "http://a:b", "file:///x"])
def test_what_is_no_url_is_named(given: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL"):
        plain_url(given)


def options(path: Path) -> ClusterOptions:
    named = {"url": "http://a", "api_key_file": path, "ca_file": None, "client_cert_file": None}
    return ClusterOptions.of(argparse.Namespace(**named))


def test_the_key_comes_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("weft-abc\n")
    assert options(file).api_key == "weft-abc"
    sent: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers["authorization"])
        return httpx.Response(200, json={"status": "ready", "num_workers": 1})

    with ClusterClient(options(file), httpx.MockTransport(answer)) as asking:
        asking.readiness()
    assert sent == ["Bearer weft-abc"]


@pytest.mark.parametrize("text", ["", "a b", "a\nb\n", "schlüssel"])
def test_a_file_that_holds_no_key_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(ConfigError, match="must hold the key alone"):
        options(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        options(tmp_path / "none")
    ca = tmp_path / "ca.pem"
    ca.write_text("nothing")
    with pytest.raises(ConfigError, match=r"--ca-file .*ca\.pem has no certificate"):
        ClusterOptions("https://a", None, ca).tls()
    with pytest.raises(ConfigError, match=r"--client-cert-file .*ca\.pem has no certificate with its key"):
        ClusterOptions("https://a", None, None, ca).tls()


@pytest.mark.parametrize(
    ("answer", "key", "kind", "said"),
    [
        (envelope(401, "invalid_api_key", "no key"), None, ConfigError, "asks for a key; name a file"),
        (envelope(401, "invalid_api_key", "no key"), "k", ConfigError, "does not know the key that you gave"),
        (envelope(403, "permission_denied", "not you"), "k", ConfigError, "not you; an operator's key opens it"),
        (envelope(403, "host_not_allowed", "other name"), None, ConfigError, "refuses: other name"),
        (envelope(503, "overloaded", "no room"), None, Unavailable, "answers 503: no room"),
        (envelope(400, "invalid_request", "bad limit"), None, ConfigError, "answers 400: bad limit"),
        (httpx.Response(200, text="<html>", headers={"server": "nginx"}), None, ConfigError, "it calls itself 'nginx'"),
        (httpx.Response(404, text="gone"), None, ConfigError, "answers 404 to /weft/members, and not as Weft does"),
        (httpx.Response(500), None, ConfigError, "check --url"),
    ],
)
def test_a_refusal_says_what_to_do(answer: httpx.Response, key: str | None, kind: type[WeftError], said: str) -> None:
    with pytest.raises(kind) as raised, client(answer, key) as asking:
        asking.json("/weft/members")
    assert said in raised.value.message


def test_what_is_not_found_is_told_apart_from_another_server() -> None:
    with client(envelope(404, "not_found", "no record")) as asking:
        assert asking.find("/weft/requests/x") == (None, "no record")
    with client(httpx.Response(404, text="gone")) as asking, pytest.raises(ConfigError, match="not as Weft does"):
        asking.find("/weft/requests/x")


def test_another_server_is_not_taken_for_a_cluster() -> None:
    for other in (httpx.Response(200, json=[]), httpx.Response(200, json={"status": "ok"}), httpx.Response(404)):
        with client(other) as asking, pytest.raises(ConfigError, match="not as Weft does; check --url"):
            asking.readiness()
    with client(httpx.Response(200, json={"data": []})) as asking, pytest.raises(ConfigError, match="lists no model"):
        asking.model()


def test_a_stream_that_is_refused_says_why() -> None:
    with (
        client(envelope(429, "overloaded", "too many")) as asking,
        pytest.raises(Unavailable, match="too many"),
        asking.stream("/v1/chat/completions", {}, 1.0),
    ):
        pass


def test_a_server_that_is_not_there_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert "start a cluster with `weft serve`, or set --url" in tried(f"http://127.0.0.1:{port}").message


def test_certificates_that_are_wrong_or_missing_are_told(tmp_path: Path) -> None:
    files = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert_file, files.key_file)
    with served(context, OK) as port:
        assert "with --ca-file FILE" in tried(f"https://127.0.0.1:{port}").message
        trusting = ClusterOptions(f"https://127.0.0.1:{port}", None, Path(files.cert_file))
        with ClusterClient(trusting) as asking:
            assert asking.readiness()["num_workers"] == 1
    with served(None, OK) as port:
        assert "does not speak HTTPS; try --url http://" in tried(f"https://127.0.0.1:{port}").message
    with served(None, b"") as port:
        assert "is it restarting, or does it speak HTTPS?" in tried(f"http://127.0.0.1:{port}").message
    with served(None, b"\x15\x03\x01\x00\x02\x02\x46") as port:
        assert "if it speaks HTTPS, try --url https://" in tried(f"http://127.0.0.1:{port}").message


def test_a_cluster_that_asks_for_a_certificate_of_the_client_is_told(tmp_path: Path) -> None:
    files = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert_file, files.key_file)
    own = make_certificate(tmp_path, "client", usage="clientAuth")
    context.load_verify_locations(own.cert_file)
    context.verify_mode = ssl.CERT_REQUIRED
    with served(context, OK) as port:
        url, trusted = f"https://127.0.0.1:{port}", Path(files.cert_file)
        assert "name it with --client-cert-file FILE" in tried(url, ca_file=trusted).message
        both = tmp_path / "both.pem"
        both.write_text(Path(files.cert_file).read_text() + Path(files.key_file).read_text())
        assert "does not take the certificate of" in tried(url, ca_file=trusted, client_cert_file=both).message
        both.write_text(Path(own.cert_file).read_text() + Path(own.key_file).read_text())
        with ClusterClient(ClusterOptions(url, None, trusted, both)) as asking:
            assert asking.readiness()["status"] == "ready"
