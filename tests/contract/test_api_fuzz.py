"""Sends what schemathesis makes of the OpenAPI document to a router with fake members, over a real socket.

These checks hold: no 5xx, no status, content type, header or body that the document does not describe, no success for
a body or parameter that the document forbids, 405 for other methods, and 401 without a key where one is asked for.
`positive_data_acceptance` does not: fields that exclude each other, unknown models and full contexts are refused, and
JSON schema does not say so. The phase `stateful` follows the links of the document, to the records of requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from router_media_fakes import media_cluster

from deploy.http_server import HttpServer
from router.edge import create_app
from router.router_config import Tenant

EXAMPLES = os.environ.get("WEFT_FUZZ_EXAMPLES", "5")
"""Limits the requests that the phase `fuzzing` makes for each operation; `make api-fuzz` asks for more."""
SEED = os.environ.get("WEFT_FUZZ_SEED", "12")
PHASES = ("examples", "coverage", "fuzzing", "stateful")
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


async def fuzz(port: int, folder: Path, *options: str) -> tuple[int, str]:
    """Runs schemathesis against a server. Returns its exit status and what it has printed."""
    url = f"http://127.0.0.1:{port}"
    words = ["-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", ",".join(CHECKS), "--no-color"]
    words += ["--phases", ",".join(PHASES), "--max-examples", EXAMPLES, "--seed", SEED]
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
    access: dict[str, Any] = {}
    if has_key:
        access = {"tenants": (Tenant("shop"),), "keys_file": tmp_path / "keys"}
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        access["keys_file"].write_text(f"{digest} shop fuzzer role=operator\n")
        access["keys_file"].chmod(0o600)
    async with media_cluster(embeddings="last", **access) as cluster:
        server = HttpServer(create_app(cluster.service), "127.0.0.1", 0)
        await server.start()
        try:
            options = ("-H", f"Authorization: Bearer {KEY}") if has_key else ()
            status, output = await fuzz(server.port, tmp_path, *options)
        finally:
            await server.stop()
    assert status == 0, output
    assert [phase for phase in PHASES if f"✅ {phase.capitalize()}" not in output] == []
    assert re.search(r"Selected: (\d+)/\1\n  Tested: \1\n", output)
    num_cases = int(re.search(r"(\d+) generated", output)[1])
    assert num_cases > 3000
    assert any(worker.requests for worker in cluster.workers)
