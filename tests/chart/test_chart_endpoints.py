"""Tests which pods get the connections of clients, after what KubeRay and Kubernetes do to the manifests (ADR 87)."""

from __future__ import annotations

from typing import Any

import pytest
from helm_tools import CI_VALUES, one, render
from kuberay import (
    PROXY_PROBE,
    Backend,
    Cluster,
    backends,
    head_selector,
    make_cluster,
    num_serve_endpoints,
    selects,
    serve_service,
)

(VALUES,) = (path for path in CI_VALUES if path.name == "node-8gpu-values.yaml")
Manifest = dict[str, Any]


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return render(VALUES)


def services(manifests: list[Manifest], active: str) -> dict[str, Manifest]:
    """Returns the service of clients, and KubeRay's own."""
    return {
        "clients": one(manifests, "Service", "weft"),
        "kuberay": serve_service(one(manifests, "RayService"), active),
    }


def cluster_of(manifests: list[Manifest], name: str) -> Cluster:
    return make_cluster(one(manifests, "RayService"), name)


def open_routers(cluster: Cluster) -> None:
    for pod in cluster.of("router"):
        pod.is_router_ready = True


def routers(*clusters: Cluster) -> set[Backend]:
    return {Backend(pod.name, 8000) for cluster in clusters for pod in cluster.of("router")}


def test_while_a_cluster_starts_it_has_no_backend(manifests: list[Manifest]) -> None:
    cluster = cluster_of(manifests, "weft-1")
    assert [len(cluster.of(each)) for each in ("head", "router", "encoder", "worker")] == [1, 2, 1, 1]
    for service in services(manifests, "weft-1").values():
        assert backends(service, cluster.pods) == set()
    assert [pod.is_ready for pod in cluster.of("encoder") + cluster.of("worker")] == [True, True], "Ray runs there"


def test_only_routers_that_are_ready_are_backends(manifests: list[Manifest]) -> None:
    cluster = cluster_of(manifests, "weft-1")
    open_routers(cluster)
    for service in services(manifests, "weft-1").values():
        assert backends(service, cluster.pods) == routers(cluster)
    assert num_serve_endpoints(services(manifests, "weft-1")["kuberay"], cluster.pods) >= 1, "the RayService is ready"
    first, second = cluster.of("router")
    first.is_router_ready = False  # It drains, or it has lost its workers.
    for service in services(manifests, "weft-1").values():
        assert backends(service, cluster.pods) == {Backend(second.name, 8000)}
    second.is_ray_up = False
    for service in services(manifests, "weft-1").values():
        assert backends(service, cluster.pods) == set()


def test_two_clusters_of_an_upgrade_have_no_gap_and_no_other_backends(manifests: list[Manifest]) -> None:
    old, new = cluster_of(manifests, "weft-old"), cluster_of(manifests, "weft-new")
    both = old.pods + new.pods
    open_routers(old)
    clients = one(manifests, "Service", "weft")
    assert backends(clients, both) == routers(old)
    assert backends(services(manifests, "weft-old")["kuberay"], both) == routers(old)
    # KubeRay switches its own service as soon as Serve has deployed the application, before routers are ready.
    assert backends(services(manifests, "weft-new")["kuberay"], both) == set()
    assert backends(clients, both) == routers(old), "clients notice nothing of that"
    open_routers(new)
    assert backends(clients, both) == routers(old, new)
    assert backends(services(manifests, "weft-new")["kuberay"], both) == routers(new)
    for pod in old.pods:
        pod.is_terminating = True
    assert backends(clients, both) == routers(new)


def test_kuberay_finds_the_head(manifests: list[Manifest]) -> None:
    cluster = cluster_of(manifests, "weft-1")
    found = [pod.component for pod in cluster.pods if selects(head_selector("weft-1"), pod)]
    assert found == ["head"], "the chart must keep the labels by which KubeRay finds the head"


def test_kuberay_adds_no_probe_of_a_proxy(manifests: list[Manifest]) -> None:
    service = one(manifests, "RayService")
    for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        probe = group["template"]["spec"]["containers"][0].pop("readinessProbe")
        assert PROXY_PROBE not in str(probe)
    try:
        bare = make_cluster(service, "weft-1")
        open_routers(bare)
        assert all(PROXY_PROBE in str(pod.probe) for pod in bare.pods if pod.component != "head")
        assert backends(one(manifests, "Service", "weft"), bare.pods) == set(), "without them, none would be ready"
    finally:
        manifests[:] = render(VALUES)


def test_a_port_by_number_would_make_every_pod_a_backend(manifests: list[Manifest]) -> None:
    cluster = cluster_of(manifests, "weft-1")
    open_routers(cluster)
    service = serve_service(one(manifests, "RayService"), "weft-1")
    service["spec"]["ports"] = [{"name": "serve", "port": 80, "targetPort": 8000}]
    assert len(backends(service, cluster.pods)) == 4, "so the name matters"


def test_the_head_is_never_a_backend(manifests: list[Manifest]) -> None:
    spec = one(manifests, "RayService")["spec"]
    assert spec["excludeHeadPodFromServeSvc"] is True
    container = spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    names = [each["name"] for each in container["ports"]]
    assert names, "without ports of its own, KubeRay would give the head a port named serve"
    assert not [name for name in names if name.startswith("serve")]


def test_budgets_and_policies_mean_pods_that_exist(manifests: list[Manifest]) -> None:
    pods = cluster_of(manifests, "weft-1").pods
    found = {}
    for each in manifests:
        if each["kind"] in ("PodDisruptionBudget", "NetworkPolicy"):
            selector = each["spec"].get("podSelector") or each["spec"]["selector"]
            found[each["metadata"]["name"]] = {pod.component for pod in pods if selects(selector["matchLabels"], pod)}
    everything = {"head", "router", "encoder", "worker"}
    assert found == {
        "weft-router": {"router"},
        "weft-members": everything,
        "weft-routers": {"router"},
        "weft-head": {"head"},
    }
    assert one(manifests, "PodDisruptionBudget")["spec"]["minAvailable"] == 1


def test_prometheus_finds_each_port_once(manifests: list[Manifest]) -> None:
    pods = cluster_of(manifests, "weft-1").pods
    found: list[tuple[str, str]] = []
    for monitor in (each for each in manifests if each["kind"] == "PodMonitor"):
        selector, (endpoint,) = monitor["spec"]["selector"], monitor["spec"]["podMetricsEndpoints"]
        (rule,) = selector["matchExpressions"]
        for pod in pods:
            if selects(selector["matchLabels"], pod) and pod.labels[rule["key"]] in rule["values"]:
                assert endpoint["port"] in pod.ports
                found.append((pod.name, endpoint["port"]))
    wanted = [(pod.name, port) for pod in pods for port in pod.ports if port in ("metrics", "weft-metrics")]
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize(
    ("tls", "probe"),
    [
        ({}, {"httpGet": {"path": "/health/ready", "port": "http", "scheme": "HTTP"}}),
        ({"existingSecret": "a"}, {"httpGet": {"path": "/health/ready", "port": "http", "scheme": "HTTPS"}}),
        ({"existingSecret": "a", "clientCa": True}, {"tcpSocket": {"port": "http"}}),
    ],
)
def test_the_probe_of_a_router_speaks_as_the_router_does(tls: dict[str, Any], probe: dict[str, Any]) -> None:
    cluster = cluster_of(render(VALUES, values={"tls": tls}), "weft-1")
    for pod in cluster.of("router"):
        assert probe.items() <= pod.probe.items()
