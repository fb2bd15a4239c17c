"""`weft serve` on a Ray that somebody else has started, with an environment that knows nothing of Weft."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from chat_media import image_part, user
from cluster_process import eventually, start_cluster
from reference_model import ReferenceModel

from deploy.demo.build import demo_checkpoint
from deploy.environment import SWITCHES

pytestmark = [pytest.mark.ray, pytest.mark.nixl, pytest.mark.torch]

RAY = [sys.executable, "-m", "ray.scripts.scripts"]


@contextmanager
def foreign_ray() -> Iterator[tuple[str, psutil.Process]]:
    """A Ray of its own: address and process. It has the token of this run, and no switch of Weft's."""
    kept = ("PATH", "HOME", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="r-"))
    options = [f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false", f"--temp-dir={folder}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*RAY, "start", "--head", "--block", "--num-cpus=4", "--disable-usage-stats", *options],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        eventually(lambda: "Ray runtime started" in (folder / "log").read_text() or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield f"127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for each in tree:  # asked to end, it would drain for half a minute
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
        psutil.wait_procs(tree, timeout=10)
        shutil.rmtree(folder, ignore_errors=True)


def actors(ray: psutil.Process, name: str) -> list[psutil.Process]:
    """Live ones below the Ray whose title has the name."""
    found = []
    for process in ray.children(recursive=True):
        try:
            if name in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_picture_is_understood_and_the_switches_reach_the_replicas() -> None:
    messages = user("What is in this picture?", image_part(21))
    expected = ReferenceModel(demo_checkpoint()).answer(messages, 12)
    with foreign_ray() as (address, ray):
        assert not ray.environ().keys() & SWITCHES.keys(), "the test would prove nothing"
        with start_cluster(ray={"address": address}, workers={"replicas": 1}) as cluster:
            body = {"model": cluster.model, "messages": messages, "max_tokens": 12, "temperature": 0}
            with cluster.client() as client:
                answer = client.post("/v1/chat/completions", json=body | {"return_token_ids": True}).json()
            assert answer["choices"][0]["token_ids"] == expected.token_ids
            for kind in ("encoder", "worker", "router"):
                (replica,) = actors(ray, f"ServeReplica:weft:{kind}")
                seen = {name: replica.environ().get(name) for name in SWITCHES}
                assert seen == SWITCHES, kind
        eventually(lambda: not actors(ray, "ServeReplica:weft"), 30)
        assert ray.is_running(), "the Ray is not ours to end"
