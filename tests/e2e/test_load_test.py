"""Runs locust as a user does against a real cluster, and compares what it reports with what the cluster has counted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster_process import ClusterProcess

ROOT = Path(__file__).parents[2]


def locust(cluster: ClusterProcess, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs locust without its page until the test is over."""
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--host", cluster.url]
    command += ["--load-report", str(folder / "page"), "--only-summary", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def answered(cluster: ClusterProcess) -> dict[str, float]:
    """Returns how many requests and output tokens the cluster has counted."""
    return {name: cluster.total(f"weft_{name}") for name in ("router_requests_total", "worker_tokens_generated_total")}


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "page" / "summary.json").read_text())
    return found


def test_an_open_loop_in_two_processes_is_counted_as_the_cluster_counts(
    cluster: ClusterProcess, tmp_path: Path
) -> None:
    before = answered(cluster)
    options = ("--processes", "2", "--users", "2", "--spawn-rate", "2", "--run-time", "12s", "--seed", "5")
    done = locust(cluster, tmp_path, *options, "--scenario", "mixed", "--rate", "4", "--least-right", "0.8")
    assert done.returncode == 0, done.stdout + done.stderr
    found = summary(tmp_path)
    assert found["requests"] == answered(cluster)["router_requests_total"] - before["router_requests_total"] > 5
    assert (found["failed"], found["errors"]) == (0, {})
    assert found["right_share"] >= 0.8
    assert sum(kind["requests"] for kind in found["kinds"].values()) == found["requests"]
    assert 0 < found["ttft_ms"]["p50"] <= found["total_ms"]["p50"]
    rows = re.findall(r"^(chat|TTFT|TPOT) +\S+ +(\d+) +\d+\(", done.stdout + done.stderr, re.MULTILINE)
    type_to_count = {name: sum(int(count) for each, count in rows if each == name) for name, _ in rows}
    assert type_to_count["chat"] == type_to_count["TTFT"] == found["requests"]
    assert (tmp_path / "page" / "index.html").read_text().count("<img") == 4


@pytest.mark.parametrize("scenario", ["multi-turn", "shared-pictures"])
def test_a_closed_loop_of_given_sizes_reuses_what_is_cached(
    cluster: ClusterProcess, tmp_path: Path, scenario: str
) -> None:
    series = "weft_encoder_cache_hits_total" if scenario == "shared-pictures" else "weft_worker_prefix_hit_tokens_total"
    before, hits = answered(cluster), cluster.total(series)
    options = ("--users", "2", "--spawn-rate", "2", "--run-time", "6s", "--content", "sized", "--output-tokens", "6")
    done = locust(cluster, tmp_path, *options, "--scenario", scenario)
    assert done.returncode == 0, done.stdout + done.stderr
    after, found = answered(cluster), summary(tmp_path)
    assert found["requests"] == after["router_requests_total"] - before["router_requests_total"]
    assert found["output_tokens"] == after["worker_tokens_generated_total"] - before["worker_tokens_generated_total"]
    assert found["right_share"] is None
    assert cluster.total(series) > hits


def test_requests_that_are_refused_fail_the_run_with_their_code(cluster: ClusterProcess, tmp_path: Path) -> None:
    done = locust(cluster, tmp_path, "--run-time", "3s", "--scenario", "text", "--rate", "3", "--model", "nope")
    assert done.returncode == 1
    found = summary(tmp_path)
    assert found["errors"] == {"404 model_not_found": found["requests"]}


def test_a_cluster_that_does_not_answer_is_named_before_the_test_begins(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless"]
    for options, message in (
        ((), "locust: name the cluster with --host"),
        (("--host", "http://127.0.0.1:9"), "locust: the cluster at http://127.0.0.1:9 does not answer"),
    ):
        done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1
        assert message in done.stderr
