"""Checks the routers' HTTPS with real certificates and requests: what a client sees, which files are refused, renewal
without a restart, and certificates of clients."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
from pathlib import Path

import httpx
import pytest
from router_chats import chat_body
from tls_files import expire, make_certificate

from deploy.config import ClusterConfig
from deploy.http_server import HttpServer
from deploy.local import serving
from deploy.testing import fake_cluster
from deploy.tls import TlsFiles, TlsRenewal, check_tls, open_tls
from fabric.contracts import ConfigError
from router.edge import create_app

HOST = "127.0.0.1"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def trusting(files: TlsFiles, own: TlsFiles | None = None) -> ssl.SSLContext:
    """Returns the context of a client that trusts this certificate alone, and shows its own one."""
    context = ssl.create_default_context(cafile=str(files.cert_file))
    if own is not None:
        context.load_cert_chain(own.cert_file, own.key_file)
    return context


def shown(port: int) -> str:
    """Returns the certificate that the server shows to a new connection."""
    return ssl.get_server_certificate((HOST, port))


async def test_a_request_over_https(files: TlsFiles) -> None:
    async with fake_cluster() as cluster:
        server = HttpServer(create_app(cluster.service), HOST, 0, tls=files)
        await server.start()
        try:
            url = f"https://{HOST}:{server.port}"
            async with httpx.AsyncClient(base_url=url, verify=trusting(files)) as client:
                answer = await client.post(CHAT, content=chat_body())
                streamed = await client.post(CHAT, content=chat_body(stream=True))
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["finish_reason"] == "stop"
            assert streamed.text.endswith("data: [DONE]\n\n")
            async with httpx.AsyncClient(base_url=url) as stranger:
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await stranger.get("/health")
            async with httpx.AsyncClient(base_url=f"http://{HOST}:{server.port}") as plain:
                with pytest.raises(httpx.TransportError):
                    await plain.get("/health")
        finally:
            await server.stop()


async def test_a_renewed_certificate_is_shown_to_new_connections(
    files: TlsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.http_server.RENEWAL_S", 0.01)
    used = TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key")
    shutil.copy(files.cert_file, used.cert_file)
    shutil.copy(files.key_file, used.key_file)
    renewed = make_certificate(tmp_path, "renewed")
    async with fake_cluster() as cluster:
        server = HttpServer(create_app(cluster.service), HOST, 0, tls=used)
        await server.start()
        try:
            before = await asyncio.to_thread(shown, server.port)
            assert before == files.cert_file.read_text()
            async with httpx.AsyncClient(base_url=f"https://{HOST}:{server.port}", verify=trusting(files)) as client:
                assert (await client.get("/health")).status_code == 200
                renewed.cert_file.replace(used.cert_file)
                renewed.key_file.replace(used.key_file)
                async with asyncio.timeout(10):
                    while await asyncio.to_thread(shown, server.port) == before:  # noqa: ASYNC110 - files set no event
                        await asyncio.sleep(0.01)
                assert (await client.get("/health")).status_code == 200, "an open connection goes on"
            assert await asyncio.to_thread(shown, server.port) == used.cert_file.read_text()
        finally:
            await server.stop()


def test_half_a_renewal_keeps_the_former_certificate(
    files: TlsFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    used = TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key")
    shutil.copy(files.cert_file, used.cert_file)
    shutil.copy(files.key_file, used.key_file)
    renewal = TlsRenewal(used)
    renewed = make_certificate(tmp_path, "renewed")
    renewed.cert_file.replace(used.cert_file)
    assert [renewal.refresh() for _ in range(3)] == [False] * 3
    used.cert_file.rename(renewed.cert_file)
    assert [renewal.refresh() for _ in range(3)] == [False] * 3
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert "key values mismatch" in errors[0]
    assert "No such file" in errors[1]
    renewed.cert_file.rename(used.cert_file)
    renewed.key_file.replace(used.key_file)
    assert [renewal.refresh() for _ in range(2)] == [True, False]


async def test_clients_may_need_a_certificate(files: TlsFiles, tmp_path: Path) -> None:
    client_files = make_certificate(tmp_path, "client", usage="clientAuth")
    async with fake_cluster() as cluster:
        server = HttpServer(
            create_app(cluster.service), HOST, 0, tls=files._replace(client_ca_file=client_files.cert_file)
        )
        await server.start()
        try:
            url = f"https://{HOST}:{server.port}"
            async with httpx.AsyncClient(base_url=url, verify=trusting(files, client_files)) as client:
                assert (await client.get("/health")).status_code == 200
            for own in (None, make_certificate(tmp_path, "stranger", usage="clientAuth")):
                async with httpx.AsyncClient(base_url=url, verify=trusting(files, own)) as stranger:
                    with pytest.raises(httpx.TransportError):
                        await stranger.get("/health")
        finally:
            await server.stop()


def test_files_that_can_not_be_used_are_named(files: TlsFiles, tmp_path: Path) -> None:
    other = make_certificate(tmp_path, "other")
    no_pem = tmp_path / "no.pem"
    no_pem.write_text("nothing")
    for wrong, flaw in (
        (TlsFiles(tmp_path / "missing.crt", files.key_file), "server.tls_cert_file .*missing.crt: No such file"),
        (TlsFiles(files.cert_file, tmp_path / "missing.key"), "server.tls_key_file .*missing.key: No such file"),
        (TlsFiles(files.cert_file, other.key_file), "no certificate with its key: key values mismatch"),
        (TlsFiles(no_pem, files.key_file), "no certificate with its key"),
        (files._replace(client_ca_file=no_pem), "server.tls_client_ca_file"),
    ):
        with pytest.raises(ConfigError, match=flaw):
            open_tls(wrong)
    assert check_tls(files).endswith(" GMT")
    with pytest.raises(ConfigError, match=r"expired\.crt can't be used: certificate has expired"):
        check_tls(expire(tmp_path, files))
    with pytest.raises(ConfigError, match=r"client\.crt can't be used"):
        check_tls(make_certificate(tmp_path, "client", usage="clientAuth"))


async def test_a_cluster_does_not_start_with_an_expired_certificate(files: TlsFiles, tmp_path: Path) -> None:
    expired = expire(tmp_path, files)
    paths = {"tls_cert_file": expired.cert_file, "tls_key_file": expired.key_file}
    config = ClusterConfig.model_validate({"server": {"port": 0} | paths})
    with pytest.raises(ConfigError, match="certificate has expired"):
        async with serving(config):
            pytest.fail("no model may be loaded for a server that nobody can reach")


def test_the_files_of_a_certificate_belong_together() -> None:
    for server, flaw in (
        ({"tls_cert_file": "a"}, "belong together"),
        ({"tls_key_file": "a"}, "belong together"),
        ({"tls_client_ca_file": "a"}, "needs tls_cert_file"),
    ):
        with pytest.raises(ValueError, match=flaw):
            ClusterConfig.model_validate({"server": server})
    whole = ClusterConfig.model_validate({"server": {"tls_cert_file": "a", "tls_key_file": "b"}})
    assert TlsFiles.of(whole.server) == TlsFiles(Path.cwd() / "a", Path.cwd() / "b")
    assert TlsFiles.of(ClusterConfig().server) is None
