"""Runs a real Prometheus on a free port of the loopback, against a cluster, with the committed rules."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_tools import prometheus_tool
from scraped_series import Scraped

RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"
STARTUP_S = 60.0


@dataclass
class PrometheusProcess:
    client: httpx.Client

    def ask(self, path: str, **parameters: object) -> Any:
        """Returns the data of an answer of Prometheus' API. Raises AssertionError with its error."""
        answer = self.client.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        return answer["data"]

    def query(self, expr: str, at_s: float | None = None) -> list[dict[str, Any]]:
        """Returns the series of an expression now, or at a time (seconds since 1970); each has `metric` (its labels)
        and `value`."""
        at = {} if at_s is None else {"time": at_s}
        return list(self.ask("query", query=expr, **at)["result"])

    def num_scrapes(self) -> float:
        """Counts the scrapes of the last minutes that were answered, over all targets."""
        return sum(float(each["value"][1]) for each in self.query("sum_over_time(up[5m])"))

    def by(self, label: str, metric: str) -> dict[str, float]:
        """Returns the sums of a metric by the values of a label, without those that are 0."""
        found = self.query(f"sum by ({label}) ({metric}) > 0")
        return {each["metric"].get(label, ""): float(each["value"][1]) for each in found}

    def range(self, expr: str, from_s: float, until_s: float, step_s: float) -> list[dict[str, Any]]:
        """Returns the series of an expression over a time (seconds since 1970); each has `metric` and `values`."""
        found = self.ask("query_range", query=expr, start=from_s, end=until_s, step=step_s)
        return list(found["result"])


def config(router_url: str) -> dict[str, Any]:
    """Returns Prometheus' config as docs/monitoring.md has it, with short intervals."""
    targets = {"url": f"{router_url}/weft/prometheus-targets", "refresh_interval": "1s"}
    return {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "2s"},
        "rule_files": [str(path) for path in sorted(RULES.glob("*.yaml"))],
        "scrape_configs": [{"job_name": "weft", "http_sd_configs": [targets]}],
    }


@contextlib.contextmanager
def prometheus_of(router_url: str, folder: Path, port: int) -> Iterator[PrometheusProcess]:
    """Runs Prometheus until the end of the block. It has scraped the cluster at least once when the block begins."""
    file, log = folder / "prometheus.yaml", folder / "prometheus.log"
    file.write_text(yaml.safe_dump(config(router_url)))
    check = [prometheus_tool("promtool"), "check", "config", str(file)]
    checked = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    command = [
        prometheus_tool("prometheus"),
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--web.enable-lifecycle",
        "--log.level=warn",
    ]
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            prometheus = PrometheusProcess(client)
            deadline_s = time.monotonic() + STARTUP_S
            while not _scrapes(prometheus):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline_s, f"Prometheus scrapes nothing: {log.read_text()}"
                time.sleep(0.2)
            yield prometheus
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _scrapes(prometheus: PrometheusProcess) -> bool:
    try:
        if prometheus.client.get("/-/ready").status_code != 200:
            return False
        return any(float(each["value"][1]) == 1 for each in prometheus.query("up"))
    except httpx.HTTPError:
        return False


def scraped(url: str) -> Scraped:
    return Scraped(httpx.get(url, timeout=30).text)
