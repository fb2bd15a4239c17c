"""A real cluster as a user starts it: the `weft serve` command in a process of its own, found by what it prints."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml


@dataclass
class ClusterProcess:
    url: str
    model: str
    process: subprocess.Popen[str]
    log: Path

    def client(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, **options)  # type: ignore[arg-type]

    def metrics(self) -> dict[str, float]:
        """Sample name with labels -> value, as /metrics prints them."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def total(self, name: str) -> float:
        """Sum of a metric over its labels."""
        return sum(value for sample, value in self.metrics().items() if re.match(rf"{name}(\{{|$)", sample))


@contextlib.contextmanager
def start_cluster(
    ready_timeout_s: float = 400.0, in_process: bool = False, **sections: dict[str, object]
) -> Iterator[ClusterProcess]:
    """`weft serve` on a free port with the given config sections on top of the laptop's defaults."""
    with tempfile.TemporaryDirectory(prefix="weft-e2e-") as folder:
        config = Path(folder) / "cluster.yaml"
        config.write_text(yaml.safe_dump({"server": {"port": 0}, **sections}))
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "deploy.cli", "serve", "--config", str(config)]
        if in_process:
            command.append("--in-process")
        with log.open("w") as sink:
            process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
        try:
            yield _wait_ready(process, log, ready_timeout_s)
        finally:
            _stop(process)


def _wait_ready(process: subprocess.Popen[str], log: Path, timeout_s: float) -> ClusterProcess:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        match = re.search(r"ready at (\S+) \(model (\S+)\)", log.read_text())
        if match:
            return ClusterProcess(match[1], match[2], process, log)
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise AssertionError(f"the cluster did not start (status {process.poll()}):\n{log.read_text()[-6000:]}")


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def eventually(condition: object, timeout_s: float = 120.0) -> None:
    """Waits until `condition()` is true; reports arrive periodically, so state seen from outside lags behind."""
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not reached in time"
        time.sleep(0.05)
