"""Checks a cluster without `weft serve`: its application is submitted to Serve as data, as KubeRay does, and limits
change while it serves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from chat_media import image_part, user
from cluster_process import eventually
from reference_model import ReferenceModel
from submitted_application import SubmittedRay, free_ports, ray_with_dashboard

from deploy.demo.build import demo_checkpoint
from deploy.serve_config import DEPLOYMENTS, IMPORT_PATH

pytestmark = [pytest.mark.ray, pytest.mark.nixl, pytest.mark.torch]

RESOURCES = {"weft_router": 1.0, "weft_encoder": 1.0, "weft_worker": 1.0}


@pytest.fixture(scope="module")
def ray() -> Iterator[SubmittedRay]:
    with ray_with_dashboard(RESOURCES) as running:
        yield running


def application(port: int, live: dict[str, Any] | None = None, **workers: Any) -> dict[str, Any]:
    config = {
        "server": {"port": port, "drain_s": 1},
        "router": {"ray_resources": {"weft_router": 1}},
        "encoders": {"ray_resources": {"weft_encoder": 1}},
        "workers": {"ray_resources": {"weft_worker": 1}} | workers,
    }
    deployments = [{"name": name, "user_config": live or {}} for name in DEPLOYMENTS]
    fields = {"name": "weft", "route_prefix": None, "import_path": IMPORT_PATH, "args": {"config": config}}
    return fields | {"deployments": deployments}


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
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    ray.submit(application(port))
    ray.wait_for("RUNNING")
    eventually(lambda: is_ready(url))
    understood = ReferenceModel(demo_checkpoint()).answer(user("What is in this picture?", image_part(21)), 12)
    assert ask(url).json()["choices"][0]["token_ids"] == understood.token_ids
    replicas, directories = ray.replicas(), ray.actors("DirectoryActor")
    assert replicas.keys() == set(DEPLOYMENTS)
    assert len(directories) == 1

    check_live_changes(ray, port, replicas)

    ray.actors("ServeController")[0].kill()
    eventually(lambda: is_serve_up(ray) and ray.state().get("status") == "RUNNING")
    assert ray.replicas() == replicas, "a new controller finds all replicas again"

    ray.submit(application(port, num_blocks=600))
    eventually(lambda: not set(replicas.values()) & set(all_replicas(ray)), 300)
    ray.wait_for("RUNNING")
    eventually(lambda: is_ready(url))
    assert [each.pid for each in ray.actors("DirectoryActor")] == [directories[0].pid], "it stays the same one"
    assert ask(url).json()["choices"][0]["token_ids"] == understood.token_ids

    ray.delete()
    eventually(lambda: not ray.actors("ServeReplica:weft:") and not ray.actors("DirectoryActor"), 60)


def check_live_changes(ray: SubmittedRay, port: int, replicas: dict[str, tuple[str, int]]) -> None:
    """Checks that limits and keys change without a restart, and that a wrong change does nothing."""
    url = f"http://127.0.0.1:{port}"
    assert ask(url, n=2).status_code == 200
    digest = "2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683"  # that of "key"
    live = {"router": {"max_num_choices": 1}, "tenants": {"shop": {"api_key_digests": [digest]}}}
    ray.submit(application(port, live))
    eventually(lambda: ask(url, n=2).status_code == 401, 60)
    headers = {"Authorization": "Bearer key"}
    refused = httpx.post(f"{url}/v1/completions", json={"model": "weft-demo", "prompt": "a", "n": 2}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")

    ray.submit(application(port, live | {"router": {"max_num_choices": 0}}))
    said = "router.max_num_choices: the value must be greater than or equal to 1, not 0"
    eventually(lambda: any(said in path.read_text(errors="replace") for path in ray.folder.rglob("worker-*.err")), 60)
    assert ask(url).status_code == 401, "the former keys stay"

    ray.submit(application(port))
    eventually(lambda: ask(url, n=2).status_code == 200, 60)
    assert ray.replicas() == replicas, "no replica has started again"
    assert ray.state()["status"] == "RUNNING"


def is_serve_up(ray: SubmittedRay) -> bool:
    return ray.api.get("/api/serve/applications/").status_code == 200


def all_replicas(ray: SubmittedRay) -> list[tuple[str, int]]:
    deployments = ray.state().get("deployments", {}).values()
    return [(each["replica_id"], each["pid"]) for deployment in deployments for each in deployment["replicas"]]
