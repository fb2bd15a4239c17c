"""Does to a rendered RayService what KubeRay's operator and Kubernetes do, as far as it decides which pods are
endpoints.

It follows KubeRay's `pod.go`, `service.go` and `rayservice_controller.go`: labels that it forces, the readiness probe
that it gives to a container without one, the selector and the ports of its services, and how it counts endpoints. It
follows Kubernetes in how the port of a service finds that of a pod (the EndpointSlice controller): a pod without the
named port is in a slice without ports, where no proxy sends anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Manifest = dict[str, Any]
PROXY_PROBE = "http://localhost:8000/-/healthz"


@dataclass
class Pod:
    """A `Pod` is one pod, with what goes on in it."""

    name: str
    labels: dict[str, str]
    ports: dict[str, int]
    probe: dict[str, Any]
    spec: dict[str, Any]
    is_ray_up: bool = True
    is_router_ready: bool = False
    """Tells whether a router listens here that answers `/health/ready` with 200."""
    is_terminating: bool = False

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def is_ready(self) -> bool:
        """Returns whether the readiness probe succeeds. Weft runs no proxy of Serve, so its probe never does."""
        if not self.is_ray_up or self.is_terminating or PROXY_PROBE in str(self.probe):
            return False
        asked = self.probe.get("httpGet") or self.probe["tcpSocket"]
        if asked["port"] == "http":
            assert asked.get("path", "/health/ready") == "/health/ready"
            return self.is_router_ready
        assert (asked["port"], asked["path"]) == (52365, "/api/healthz")
        return True


class Backend(NamedTuple):
    """A `Backend` is a pod to which a service sends connections, and the port there."""

    pod: str
    port: int


@dataclass
class Cluster:
    """A `Cluster` is a RayCluster that KubeRay makes of a RayService."""

    name: str
    pods: list[Pod] = field(default_factory=list)

    def of(self, component: str) -> list[Pod]:
        return [each for each in self.pods if each.component == component]


def make_cluster(service: Manifest, name: str) -> Cluster:
    """Makes the pods of a RayCluster, in which Ray runs and no router is ready yet."""
    spec = service["spec"]["rayClusterConfig"]
    cluster = Cluster(name, [_pod(spec["headGroupSpec"], name, "headgroup", 0, is_head=True)])
    for group in spec["workerGroupSpecs"]:
        cluster.pods += [_pod(group, name, group["groupName"], index) for index in range(group["replicas"])]
    return cluster


def _pod(group: Mapping[str, Any], cluster: str, group_name: str, index: int, is_head: bool = False) -> Pod:
    template = group["template"]
    container = template["spec"]["containers"][0]
    kind = "head" if is_head else "worker"
    forced = {"ray.io/cluster": cluster, "ray.io/node-type": kind, "ray.io/group": group_name}
    preset = {
        "ray.io/is-ray-node": "yes",
        "ray.io/identifier": f"{cluster}-{kind}",
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }
    labels = preset | template["metadata"].get("labels", {}) | forced
    # Every worker pod is a candidate. The head is one only if its proxy is healthy, and never if it is excluded.
    labels["ray.io/serve"] = "false" if is_head else "true"
    ports = {each["name"]: each["containerPort"] for each in container.get("ports", ())}
    probe = container.get("readinessProbe")
    if probe is None:
        probe = {"httpGet": {"path": "/api/healthz", "port": 52365}}
        if not is_head:
            port = ports.get("serve", 8000)
            check = "wget -q -O- http://localhost:52365/api/local_raylet_healthz | grep success && wget -q -O- "
            probe = {"exec": {"command": ["bash", "-c", f"{check}http://localhost:{port}/-/healthz | grep success"]}}
    return Pod(f"{cluster}-{group_name}-{index}", labels, ports, probe, template["spec"])


def head_selector(cluster: str) -> dict[str, str]:
    """Returns the selector of the service by which workers and KubeRay itself reach the head."""
    return {
        "ray.io/cluster": cluster,
        "ray.io/node-type": "head",
        "ray.io/identifier": f"{cluster}-head",
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }


def serve_service(service: Manifest, active: str) -> Manifest:
    """Returns KubeRay's own service for Serve while this RayCluster is the active one."""
    spec = service["spec"]
    container = spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    head_ports = {each["name"]: each["containerPort"] for each in container.get("ports", ())}
    if not head_ports:
        head_ports = {"serve": 8000}
    own = [
        {"name": name, "port": port}
        for name, port in head_ports.items()
        if name == "serve" or name.startswith("serve-")
    ]
    given = {each["name"]: each for each in spec["serveService"]["spec"]["ports"]}
    ports = [given.get(each["name"], each) for each in own] or list(given.values())
    selector = {"ray.io/cluster": active, "ray.io/serve": "true"}
    return {
        "metadata": {"name": f"{service['metadata']['name']}-serve-svc"},
        "spec": {"selector": selector, "ports": ports},
    }


def selects(selector: Mapping[str, str], pod: Pod) -> bool:
    return selector.items() <= pod.labels.items()


def backends(service: Manifest, pods: Iterable[Pod]) -> set[Backend]:
    """Returns where a service sends connections."""
    spec = service["spec"]
    ready = [pod for pod in pods if selects(spec["selector"], pod) and pod.is_ready]
    return {Backend(pod.name, port) for pod in ready for port in _ports_at(spec["ports"], pod)}


def _ports_at(ports: Iterable[Mapping[str, Any]], pod: Pod) -> Iterator[int]:
    for port in ports:
        target = port.get("targetPort", port["port"])
        if isinstance(target, int):
            yield target
        elif target in pod.ports:
            yield pod.ports[target]


def num_serve_endpoints(service: Manifest, pods: Iterable[Pod]) -> int:
    """Returns how many endpoints KubeRay counts: every ready pod in a slice, also in one without ports. The RayService
    is ready with one."""
    return sum(selects(service["spec"]["selector"], pod) and pod.is_ready for pod in pods)
