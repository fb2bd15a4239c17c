"""Checks a cluster without `weft serve`: the application of the rendered chart is submitted to Serve as data, as
KubeRay does, and limits change while it serves."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_media import image_part, user
from cluster_process import eventually
from helm_tools import CHART, CI_VALUES, render, serve_config
from reference_model import ReferenceModel
from submitted_application import SubmittedRay, free_ports, ray_with_dashboard

from deploy.demo.build import demo_checkpoint
from deploy.serve_config import DEPLOYMENTS

pytestmark = [pytest.mark.ray, pytest.mark.nixl, pytest.mark.torch]

OPERATOR_KEY = "operator"
RESOURCES = {"weft_router": 1.0, "weft_encoder": 1.0, "weft_worker": 1.0}


@pytest.fixture(scope="module")
def ray() -> Iterator[SubmittedRay]:
    with ray_with_dashboard(RESOURCES) as running:
        yield running


def application(ports: list[int], config: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the application that the chart's values for a laptop become, with these ports and this further config."""
    (laptop,) = (path for path in CI_VALUES if path.name == "laptop-values.yaml")
    values = {"config": {"server": {"port": ports[0], "drain_s": 1}} | (config or {}), "metrics": {"port": ports[1]}}
    (found,) = serve_config(render(laptop, values=values))["applications"]
    assert isinstance(found, dict)
    return found


def ask(url: str, **fields: Any) -> httpx.Response:
    messages = user("What is in this picture?", image_part(21))
    body = {"model": "weft-demo", "messages": messages, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    return httpx.post(f"{url}/v1/chat/completions", json=body | fields, timeout=120)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=30).status_code == 200
    except httpx.TransportError:
        return False


def test_a_submitted_application_lives_and_ends_with_serve(ray: SubmittedRay) -> None:
    ports = free_ports(2)
    url = f"http://127.0.0.1:{ports[0]}"
    ray.submit(application(ports))
    ray.wait_for("RUNNING")
    eventually(lambda: is_ready(url))
    understood = ReferenceModel(demo_checkpoint()).answer(user("What is in this picture?", image_part(21)), 12)
    assert ask(url).json()["choices"][0]["token_ids"] == understood.token_ids
    replicas, directories = ray.replicas(), ray.head.actors("DirectoryActor")
    assert replicas.keys() == set(DEPLOYMENTS)
    assert len(directories) == 1

    check_probes(ray, url)
    check_live_changes(ray, ports, replicas)
    check_metrics(ray.node_address(), ports[1])

    ray.head.actors("ServeController")[0].kill()
    eventually(lambda: is_serve_up(ray) and ray.state().get("status") == "RUNNING")
    assert ray.replicas() == replicas, "a new controller finds all replicas again"

    ray.submit(application(ports, {"workers": {"num_blocks": 600}}))
    eventually(lambda: not set(replicas.values()) & set(all_replicas(ray)), 300)
    ray.wait_for("RUNNING")
    eventually(lambda: is_ready(url))
    assert [each.pid for each in ray.head.actors("DirectoryActor")] == [directories[0].pid], "it stays the same one"
    assert ask(url).json()["choices"][0]["token_ids"] == understood.token_ids

    ray.delete()
    eventually(lambda: not ray.head.actors("ServeReplica:weft:") and not ray.head.actors("DirectoryActor"), 60)


def check_live_changes(ray: SubmittedRay, ports: list[int], replicas: dict[str, tuple[str, int]]) -> None:
    """Checks that limits and keys change without a restart, and that a wrong change does nothing."""
    url = f"http://127.0.0.1:{ports[0]}"
    assert ask(url, n=2).status_code == 200
    digest = "2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683"  # that of "key"
    live = {"router": {"max_num_choices": 1}, "tenants": {"shop": {"api_key_digests": [digest]}}}
    live["access"] = {"operator_key_digests": [hashlib.sha256(OPERATOR_KEY.encode()).hexdigest()]}
    ray.submit(application(ports, live))
    eventually(lambda: ask(url, n=2).status_code == 401, 60)
    headers = {"Authorization": "Bearer key"}
    refused = httpx.post(f"{url}/v1/completions", json={"model": "weft-demo", "prompt": "a", "n": 2}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")

    address = ray.node_address(), ports[1]
    assert refusing(*address) == {"router": 0, "encoder": 0, "worker": 0, "stage": 0}
    ray.submit(application(ports, live | {"router": {"max_num_choices": 0}}))
    said = "router.max_num_choices: the value must be greater than or equal to 1, not 0"
    eventually(
        lambda: any(said in path.read_text(errors="replace") for path in ray.head.folder.rglob("worker-*.err")), 60
    )
    eventually(lambda: refusing(*address) == {"router": 1, "encoder": 1, "worker": 1, "stage": 0}, 60)
    assert f"(1 router, 1 encoder, 1 worker), so the former values stay: {said}" in status(url, ray.head.folder)
    assert ask(url).status_code == 401, "the former keys stay"

    ray.submit(application(ports))
    eventually(lambda: ask(url, n=2).status_code == 200, 60)
    eventually(lambda: refusing(*address) == {"router": 0, "encoder": 0, "worker": 0, "stage": 0}, 60)
    assert ray.replicas() == replicas, "no replica has started again"
    assert ray.state()["status"] == "RUNNING"


def refusing(host: str, port: int) -> dict[str, float]:
    """Returns how many members of each kind say that they refused the last change of the config."""
    text = httpx.get(f"http://{host}:{port}/metrics", timeout=30).text
    lines = re.findall(r'^weft_router_members_refusing_config\{kind="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    return {kind: float(value) for kind, value in lines}


def status(url: str, folder: Path) -> str:
    """Returns what `weft status` says to an operator, whose key lies in the folder meanwhile."""
    key_file = folder / "operator"
    key_file.write_text(OPERATOR_KEY)
    command = [sys.executable, "-m", "deploy.cli", "status", "--url", url, "--api-key-file", str(key_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_probes(ray: SubmittedRay, url: str) -> None:
    """Checks what the kubelet and `helm test` do: both have no token of Ray."""
    assert httpx.get(f"http://127.0.0.1:{ray.agent_port}/api/healthz", timeout=30).status_code == 200
    program = [sys.executable, CHART / "files" / "ask_once.py"]
    done = subprocess.run(program, env={"WEFT_URL": url}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "weft-demo answers: Hello!" in done.stdout


def check_metrics(host: str, port: int) -> None:
    """Checks that the port which the PodMonitor of the chart names serves the series of all members of the machine."""
    text = httpx.get(f"http://{host}:{port}/metrics", timeout=30).text
    for name in ("weft_router_requests_total", "weft_worker_kv_capacity_blocks", "weft_encoder_arena_capacity_bytes"):
        assert f"\n{name}{{" in text or f"\n{name} " in text, name


def is_serve_up(ray: SubmittedRay) -> bool:
    return ray.api.get("/api/serve/applications/").status_code == 200


def all_replicas(ray: SubmittedRay) -> list[tuple[str, int]]:
    deployments = ray.state().get("deployments", {}).values()
    return [(each["replica_id"], each["pid"]) for deployment in deployments for each in deployment["replicas"]]
