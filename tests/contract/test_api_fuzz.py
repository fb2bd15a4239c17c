"""Sends what schemathesis makes of the OpenAPI document to a router with fake members, over a real socket.

These checks hold: no 5xx, no status, content type, header or body that the document does not describe, no success for
a body or parameter that the document forbids, 405 for other methods, and 401 without a key where one is asked for.
`positive_data_acceptance` does not: fields that exclude each other, unknown models and full contexts are refused, and
JSON schema does not say so. There are no links between operations, because nothing that a request makes is kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from pathlib import Path

import pytest

from deploy.http_server import HttpServer
from deploy.testing import fake_cluster
from router.edge import create_app
from router.router_config import Tenant

EXAMPLES = os.environ.get("WEFT_FUZZ_EXAMPLES", "5")
PHASES = os.environ.get("WEFT_FUZZ_PHASES", "examples,fuzzing")
SEED = os.environ.get("WEFT_FUZZ_SEED", "12")
"""`make api-fuzz` sets these three; the phase `coverage` takes minutes."""
KEY = "a-key"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "ignored_auth",
)


async def fuzz(port: int, folder: Path, is_short: bool, *options: str) -> tuple[int, str]:
    """Runs schemathesis against a server. Returns its exit status and what it has printed."""
    url = f"http://127.0.0.1:{port}"
    words = ["-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", ",".join(CHECKS), "--no-color"]
    words += ["--phases", "examples" if is_short else PHASES, "--max-examples", EXAMPLES, "--seed", SEED]
    words += ["--request-timeout", "30", "--continue-on-failure", *options]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


@pytest.mark.parametrize("has_key", [False, True])
async def test_the_api_answers_as_its_document_says(tmp_path: Path, has_key: bool) -> None:
    pytest.importorskip("schemathesis")
    tenants = (Tenant("a", key_digests=(hashlib.sha256(KEY.encode()).hexdigest(),)),) if has_key else ()
    async with fake_cluster(embeddings="last", tenants=tenants) as cluster:
        server = HttpServer(create_app(cluster.service), "127.0.0.1", 0)
        await server.start()
        try:
            options = ("-H", f"Authorization: Bearer {KEY}") if has_key else ()
            status, output = await fuzz(server.port, tmp_path, has_key, *options)
        finally:
            await server.stop()
    assert status == 0, output
    assert " passed" in output
    assert any(worker.requests for worker in cluster.workers)
