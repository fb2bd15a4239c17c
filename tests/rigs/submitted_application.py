"""Starts a Ray with its dashboard, and submits applications to its Serve as KubeRay does: by HTTP, as data."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from cluster_process import eventually
from own_ray import PATIENCE, OwnRay, own_ray

TOKEN = "0123456789abcdef" * 2


def free_ports(count: int) -> list[int]:
    """Returns ports that are free now, below those that Ray gives its workers."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in range(7000 + os.getpid() % 2000, 10_000):
            listener = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise AssertionError("no free ports")


@dataclass
class SubmittedRay:
    """A `SubmittedRay` is a Ray of its own with the REST API of Serve."""

    api: httpx.Client
    head: OwnRay
    agent_port: int
    """The agent of Ray listens here, which says whether Ray runs on its machine."""

    def submit(self, application: Mapping[str, Any]) -> None:
        """Makes this application the only one."""
        body = {"proxy_location": "Disabled", "applications": [application]}
        answer = self.api.put("/api/serve/applications/", json=body)
        assert answer.status_code == 200, answer.text

    def delete(self) -> None:
        assert self.api.delete("/api/serve/applications/").status_code == 200

    def state(self, name: str = "weft") -> dict[str, Any]:
        """Returns what Serve says of an application, or an empty dict if there is none."""
        found: dict[str, Any] = self.api.get("/api/serve/applications/").json()["applications"].get(name, {})
        return found

    def wait_for(self, status: str, timeout_s: float = 300.0) -> dict[str, Any]:
        eventually(lambda: self.state().get("status") in (status, "DEPLOY_FAILED"), timeout_s)
        state = self.state()
        assert state["status"] == status, f"{state['message']}\n{json.dumps(state['deployments'], indent=1)[:6000]}"
        return state

    def replicas(self) -> dict[str, tuple[str, int]]:
        """Maps each deployment to the id and the process of its one replica."""
        found = {}
        for name, deployment in self.state()["deployments"].items():
            (replica,) = deployment["replicas"]
            found[name] = (replica["replica_id"], replica["pid"])
        return found

    def node_address(self) -> str:
        """Returns the address at which this machine's members listen for others."""
        return str(self.state()["deployments"]["router"]["replicas"][0]["node_ip"])


@contextlib.contextmanager
def ray_with_dashboard(resources: Mapping[str, float]) -> Iterator[SubmittedRay]:
    """Runs a Ray that has none of Weft's switches in its environment, and offers these custom resources."""
    dashboard, agent = free_ports(2)
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    kept |= {"PYTHONDONTWRITEBYTECODE": "1", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    options = ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    options += [f"--dashboard-agent-listen-port={agent}", f"--resources={json.dumps(resources)}"]
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with (
        own_ray(kept | dict([PATIENCE]), *options) as ray,
        httpx.Client(base_url=f"http://127.0.0.1:{dashboard}", headers=headers, timeout=60) as api,
    ):
        yield SubmittedRay(api, ray, agent)
