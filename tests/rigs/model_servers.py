"""Serves models on the loopback as an object store and a hub do: the few requests of S3's API and of a hub that reading
a model takes. A test says which files there are, and may damage them, refuse requests, or count them."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class ModelServer:
    """Holds the files of one model, at `s3://bucket/models/demo` and `hf://owner/demo`."""

    files: dict[str, bytes] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    """Names files that are sent with another byte than they have."""
    status: int = 200
    """Is answered to every request if it is an error."""
    asked: Counter[str] = field(default_factory=Counter)
    """Counts the requests for each file."""
    url: str = ""

    def environment(self) -> dict[str, str]:
        """Returns the variables by which the libraries find this server, and no credentials of the machine."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "HF_ENDPOINT": self.url,
            "HF_HUB_DISABLE_XET": "1",
        }

    def content(self, name: str) -> bytes:
        data = self.files[name]
        return bytes([data[0] ^ 1]) + data[1:] if name in self.damaged else data


def _listing(server: ModelServer, prefix: str) -> str:
    rows = "".join(
        f"<Contents><Key>models/demo/{name}</Key><Size>{len(data)}</Size><LastModified>2026-01-01T00:00:00Z"
        f"</LastModified><ETag>&quot;{hashlib.md5(data).hexdigest()}&quot;</ETag></Contents>"
        for name, data in sorted(server.files.items())
        if f"models/demo/{name}".startswith(prefix)
    )
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>bucket</Name><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
    )


def _error(code: str) -> str:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model: ModelServer

    def log_message(self, *_: object) -> None:
        """Prints nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        if self.model.status != 200:
            self._send(self.model.status, _error("AccessDenied").encode())
        elif path.startswith("/api/models/"):
            self._hub(path)
        elif match := re.fullmatch(r"/owner/demo/resolve/[^/]+/(.+)", path):
            self._file(match[1], {"X-Repo-Commit": REVISION})
        elif path.startswith("/bucket/models/demo/") and not path.endswith("/"):
            self._file(path.rpartition("/")[2], {})
        elif path.strip("/") == "bucket":
            prefix = parse_qs(url.query).get("prefix", [""])[0]
            self._send(200, _listing(self.model, prefix).encode())
        else:
            self._send(404, _error("NoSuchBucket").encode(), {"X-Error-Code": "RepoNotFound"})

    def _hub(self, path: str) -> None:
        match = re.fullmatch(r"/api/models/owner/demo(?:/revision/(\w+))?", path)
        if match is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        if match[1] not in (None, "main", REVISION):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "blobId": hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest(),
                **(
                    {"lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 100}}
                    if name.endswith(".safetensors")
                    else {}
                ),
            }
            for name, data in self.model.files.items()
        ]
        body = {"id": "owner/demo", "sha": REVISION, "siblings": siblings, "private": False}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, headers: dict[str, str]) -> None:
        if name not in self.model.files:
            self._send(404, _error("NoSuchKey").encode(), {"X-Error-Code": "EntryNotFound"})
            return
        data = self.model.content(name)
        if self.command == "GET":
            self.model.asked[name] += 1
        tag = {"ETag": f'"{hashlib.md5(self.model.files[name]).hexdigest()}"', "Accept-Ranges": "bytes"}
        dated = {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None:
            self._send(200, data, headers | tag | dated)
            return
        start, end = int(match[1]), min(int(match[2] or len(data) - 1), len(data) - 1)
        span = {"Content-Range": f"bytes {start}-{end}/{len(data)}"}
        self._send(206, data[start : end + 1], headers | tag | dated | span)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@contextmanager
def model_server(files: dict[str, bytes]) -> Iterator[ModelServer]:
    model = ModelServer(dict(files))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"model": model}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    model.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield model
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
