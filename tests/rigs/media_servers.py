"""Provides HTTP servers that behave as a test says, down to the byte, and resolvers that answer as a test says."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fabric.contracts import MediaUnreachable


class AskedRequest(NamedTuple):
    """An `AskedRequest` is what a server was asked."""

    target: str
    headers: dict[str, str]


Answer = Callable[[AskedRequest, asyncio.StreamWriter], Coroutine[None, None, None]]


def response(body: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    """Returns a whole response. Underscores in the names of headers stand for dashes."""
    named = {"content_length": str(len(body))} | headers
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in named.items() if value != "-"]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode() + body


class MediaServer:
    """A `MediaServer` answers by path: `pages` maps a path to the bytes of a response, or to a function that writes
    one. It counts its connections, and lists what it was asked."""

    def __init__(self, pages: Mapping[str, bytes | Answer]) -> None:
        self.pages = dict(pages)
        self.asked: list[AskedRequest] = []
        self.num_connections = 0
        self.writers: set[asyncio.StreamWriter] = set()
        """Holds the connections that are open."""
        self.port = 0

    @property
    def num_open(self) -> int:
        return len(self.writers)

    def url(self, path: str, host: str = "127.0.0.2", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writers.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode("latin-1").split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                request = AskedRequest(lines[0].split(" ")[1], headers)
                self.asked.append(request)
                page = self.pages.get(request.target, response(b"nothing", "404 Not Found"))
                if callable(page):
                    await while_client_stays(page(request, writer), reader)
                else:
                    writer.write(page)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()


async def while_client_stays(page: Coroutine[None, None, None], reader: asyncio.StreamReader) -> None:
    """Writes a page. Raises ConnectionError when the client leaves before its end."""
    writing, leaving = asyncio.create_task(page), asyncio.create_task(reader.read(1))
    try:
        await asyncio.wait([writing, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not writing.done():
            raise ConnectionError("the client has left")
        await writing
    finally:
        for task in (writing, leaving):
            task.cancel()
        await asyncio.wait([writing, leaving])


@asynccontextmanager
async def media_server(
    pages: Mapping[str, bytes | Answer] | None = None,
    hosts: Sequence[str] = ("127.0.0.2",),
    port: int = 0,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[MediaServer]:
    """Serves pages on addresses of this machine, on one port."""
    server = MediaServer(pages or {})
    listeners: list[asyncio.Server] = []
    try:
        for host in hosts:
            listener = await asyncio.start_server(server._serve, host, port, ssl=tls)
            listeners.append(listener)
            port = server.port = listener.sockets[0].getsockname()[1]
        yield server
    finally:
        for listener in listeners:
            listener.close()
        for writer in list(server.writers):
            writer.transport.abort()
        while server.writers:  # noqa: ASYNC110 - each connection ends in the next turns of the loop
            await asyncio.sleep(0)


class FixedResolver:
    """A `FixedResolver` knows some names. A name with several answers gets the next one at each look-up, and then the
    last one for ever; `asked` lists the look-ups."""

    def __init__(self, name_to_answers: Mapping[str, Sequence[Sequence[str]]] | None = None) -> None:
        self._name_to_answers = {name: list(answers) for name, answers in (name_to_answers or {}).items()}
        self.asked: list[str] = []

    async def resolve(self, host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
        self.asked.append(host)
        if host == "slow.test":
            raise MediaUnreachable("the addresses of the URL's host could not be found in time")
        if host == "hanging.test":
            await asyncio.Event().wait()
        answers = self._name_to_answers.get(host, [[]])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return [ipaddress.ip_address(address) for address in answer]

    def close(self) -> None:
        return


def local_names() -> FixedResolver:
    """Returns a resolver that knows `media.test`, on the address of `media_server`; a process can import it. At the
    first address of `two.test` nothing listens, and `hanging.test` is resolved for ever."""
    return FixedResolver(
        {"media.test": [["127.0.0.2"]], "two.test": [["127.0.0.3", "127.0.0.2"]], "forbidden.test": [["127.0.0.1"]]}
    )


def write_certificate(folder: Path, name: str = "media.test") -> tuple[Path, ssl.SSLContext]:
    """Writes a certificate for a name. Returns its file, and the context of a server that shows it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    public, private = folder / f"{name}.pem", folder / f"{name}.key"
    public.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(public, private)
    return public, context
