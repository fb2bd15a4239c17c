"""Serves files over HTTP from a thread, for clusters that run in another process and fetch media by URL."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

HOST = "127.0.0.2"


class MediaWeb(NamedTuple):
    """A `MediaWeb` is a server of files that never change."""

    port: int

    def url(self, path: str) -> str:
        return f"http://{HOST}:{self.port}{path}"

    def fetch_settings(self) -> dict[str, object]:
        """Returns the section `media.fetch` of the config of a cluster that may ask this server."""
        return {"schemes": ["http"], "allowed_networks": [f"{HOST}/32"], "allowed_ports": [self.port]}


@contextmanager
def media_web(pages: Mapping[str, bytes]) -> Iterator[MediaWeb]:
    """Serves the contents by path. Any other path is not found."""

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = pages.get(self.path)
            self.send_response(HTTPStatus.NOT_FOUND if content is None else HTTPStatus.OK)
            self.send_header("content-length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, format: str, *args: object) -> None:
            """Writes nothing."""

    with ThreadingHTTPServer((HOST, 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield MediaWeb(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()
