"""Starts a real cluster as a user does: it runs the `weft serve` command in a separate process and reads the cluster's
address from its output."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import yaml


@dataclass
class ClusterProcess:
    url: str
    model: str
    process: subprocess.Popen[str]
    log: Path
    temp_dir: Path
    """The cluster keeps its temporary files here, and nothing else does."""
    log_dir: Path
    """This folder contains the folder of the cluster's logs."""
    mark: str
    """The environment that the cluster is started with contains this value."""

    def client(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, **options)

    def metrics(self) -> dict[str, float]:
        """Returns the values of all samples of /metrics by the sample's name with its labels, and those of the members'
        own samples where the routers do not give them."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        if "\nweft_worker_" not in text:
            for target in httpx.get(f"{self.url}/weft/prometheus-targets", timeout=30).json():
                with contextlib.suppress(httpx.TransportError):  # A member that ended is listed for a moment longer.
                    text += httpx.get(f"http://{target['targets'][0]}/metrics", timeout=30).text
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def total(self, name: str) -> float:
        """Returns the sum of a metric over its labels."""
        return sum(value for sample, value in self.metrics().items() if re.match(rf"{name}(\{{|$)", sample))


def pids(cluster: ClusterProcess, kind: str) -> dict[str, int]:
    """Returns the process id of each live member of a kind, by the member's name."""
    with cluster.client() as client:
        members = client.get("/weft/members").json()["members"]
    return {member["member_id"]: member["pid"] for member in members if member["kind"] == kind}


RAY_GAVE_UP = "The current node timed out during startup"
"""Ray says this if a node of its own does not start within 30 s, which no setting changes. On two cores that start two
clusters at once, it takes longer now and then; the cluster is then started a second time."""


@contextlib.contextmanager
def start_cluster(
    ready_timeout_s: float = 400.0, in_process: bool = False, **sections: dict[str, object]
) -> Iterator[ClusterProcess]:
    """Runs `weft serve` on a free port, with the given config sections in addition to the laptop's defaults. Asserts
    that the cluster leaves nothing in its temporary folder."""
    for is_last in (False, True):
        with launched(in_process, **sections) as starting:
            try:
                cluster = wait_ready(starting, ready_timeout_s)
            except AssertionError as error:
                if is_last or RAY_GAVE_UP not in str(error):
                    raise
                continue
            yield cluster
            return


@contextlib.contextmanager
def launched(in_process: bool = False, **sections: dict[str, object]) -> Iterator[ClusterProcess]:
    """Does the same as `start_cluster`, but does not wait until it is ready: `url` and `model` are empty."""
    with tempfile.TemporaryDirectory(prefix="") as folder:  # The name is short because Ray puts sockets below it.
        config, log, temp_dir = Path(folder) / "cluster.yaml", Path(folder) / "log", Path(folder) / "t"
        logs: dict[str, object] = {"logging": {"dir": str(Path(folder) / "logs")}}
        config.write_text(yaml.safe_dump({"server": {"port": 0}} | logs | sections))
        temp_dir.mkdir()
        command = [sys.executable, "-m", "deploy.cli", "serve", "--config", str(config)]
        if in_process:
            command.append("--in-process")
        mark = uuid.uuid4().hex
        with log.open("w") as sink:
            process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env=os.environ | {"TMPDIR": str(temp_dir), "WEFT_TEST_MARK": mark},
            )
        try:
            yield ClusterProcess("", "", process, log, temp_dir, Path(folder) / "logs", mark)
        finally:
            _stop(process)
        left = [str(path.relative_to(temp_dir)) for path in temp_dir.rglob("*")]
        assert left == [], f"the cluster ended with status {process.returncode} and left {left}"


def wait_ready(starting: ClusterProcess, timeout_s: float = 400.0) -> ClusterProcess:
    """Returns the cluster with its address once it has printed it. Raises AssertionError with the end of its log if the
    cluster ends or `timeout_s` passes before that."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        match = re.search(r"ready at (\S+) \(model (\S+)\)", starting.log.read_text())
        if match:
            return replace(starting, url=match[1], model=match[2])
        if starting.process.poll() is not None:
            break
        time.sleep(0.1)
    said = starting.log.read_text()[-6000:]
    raise AssertionError(f"the cluster did not start (status {starting.process.poll()}):\n{said}")


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=90)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def eventually(condition: object, timeout_s: float = 120.0) -> None:
    """Waits until `condition()` is true. Reports arrive periodically, so the state that a test sees from outside lags
    behind."""
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not reached in time"
        time.sleep(0.05)
