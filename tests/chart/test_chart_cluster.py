"""Tests that the cluster of rendered manifests could work: the config is valid for Ray and for Weft, every replica
finds a pod with what it asks for, times are in order, and nothing may do more than it must."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_tools import CI_VALUES, one, render, serve_config
from ray.serve.schema import ServeDeploySchema

import deploy.cli
from deploy.config import ClusterConfig
from deploy.live_config import SECTION_TO_LIVE_KEYS
from deploy.process_setup import SWITCHES
from deploy.serve_config import DEPLOYMENTS, check_submitted

IDS = [path.name for path in CI_VALUES]
NAME_TO_VALUES = {path.name.removesuffix("-values.yaml"): path for path in CI_VALUES}
every_values = pytest.mark.parametrize("values", CI_VALUES, ids=IDS)
Manifest = dict[str, Any]


def submitted(manifests: list[Manifest]) -> ClusterConfig:
    config, problems, _ = check_submitted(yaml.safe_dump_all(manifests))
    assert config is not None, "\n".join(map(str, problems))
    return config


def groups(manifests: list[Manifest]) -> dict[str, Manifest]:
    cluster = one(manifests, "RayService")["spec"]["rayClusterConfig"]
    return {each["groupName"]: each for each in cluster["workerGroupSpecs"]}


def pod_specs(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    cluster = one(manifests, "RayService")["spec"]["rayClusterConfig"]
    yield "head", cluster["headGroupSpec"]["template"]["spec"]
    for name, group in groups(manifests).items():
        yield name, group["template"]["spec"]
    for each in manifests:
        if each["kind"] == "Pod":
            yield each["metadata"]["name"], each["spec"]


def offered(group: Manifest) -> dict[str, float]:
    """Returns what Ray finds on a pod of a group."""
    found: dict[str, float] = json.loads(group["rayStartParams"]["resources"].strip("'"))
    return found | {"GPU": float(group["rayStartParams"]["num-gpus"])}


# ------------------------------------------------------------ the config


@every_values
def test_ray_takes_the_serve_config(values: Path) -> None:
    schema = ServeDeploySchema.model_validate(serve_config(render(values)))
    (application,) = schema.applications
    assert application.name == "weft"
    assert application.route_prefix is None
    assert schema.proxy_location == "Disabled"
    pools = {f"worker-{name}" for name in yaml.safe_load(values.read_text())["config"].get("more_workers", {})}
    assert {each.name for each in application.deployments} == set(DEPLOYMENTS) | pools


@every_values
def test_weft_takes_the_config_that_the_values_hold(values: Path) -> None:
    config = submitted(render(values))
    data = yaml.safe_load(values.read_text())["config"]
    for section, keys in data.items():
        expected = ClusterConfig.model_validate(data | {"access": {"keys_file": "/a"}} if "tenants" in data else data)
        if section == "tenants":
            assert config.tenants == expected.tenants
            continue
        for pool in keys if section == "more_workers" else ():
            own, wanted = config.more_workers[pool], expected.more_workers[pool]
            assert own.model_copy(update={"ray_resources": {}, "replicas": wanted.replicas}) == wanted
        for key in keys if section != "more_workers" else ():
            assert getattr(getattr(config, section), key) == getattr(getattr(expected, section), key), key


def test_the_command_checks_rendered_manifests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "manifests.yaml"
    for name in ("laptop", "node-8gpu"):
        file.write_text(yaml.safe_dump_all(render(NAME_TO_VALUES[name])))
        assert deploy.cli.main(["check", str(file)]) == 0, capsys.readouterr()
    assert "the config is valid (2 router, 2 encoder, 3 worker replicas)" in capsys.readouterr().out


@every_values
def test_what_may_change_without_a_restart_is_no_argument(values: Path) -> None:
    (application,) = serve_config(render(values))["applications"]
    fixed, live = application["args"]["config"], application["deployments"][0]["user_config"]
    assert all(each["user_config"] == live for each in application["deployments"])
    for section, keys in SECTION_TO_LIVE_KEYS.items():
        assert not set(keys) & set(fixed.get(section, {})), section
        assert set(live.get(section, {})) <= set(keys), section
    for name, pool in fixed.get("more_workers", {}).items():
        assert "replicas" not in pool, name
        assert live["more_workers"][name].keys() == {"replicas"}
    assert "tenants" not in fixed


def test_limits_and_sizes_change_nothing_but_the_user_config() -> None:
    def arguments(config: dict[str, Any]) -> tuple[Any, Any]:
        manifests = render(NAME_TO_VALUES["node-8gpu"], values={"config": config})
        (application,) = serve_config(manifests)["applications"]
        spec = one(manifests, "RayService")["spec"]["rayClusterConfig"]
        for group in spec["workerGroupSpecs"]:  # KubeRay takes these without new pods, too.
            for key in ("replicas", "minReplicas", "maxReplicas"):
                del group[key]
        return application["args"], spec

    before = arguments({})
    changed = {
        "router": {"max_in_flight": 7},
        "tenants": {"new": {}},
        "limits": {"max_messages": 3},
        "workers": {"replicas": 6},
    }
    assert arguments(changed) == before
    assert arguments({"more_workers": {"b": {"replicas": 2}}}) == arguments({"more_workers": {"b": {"replicas": 5}}})
    assert arguments({"workers": {"num_blocks": 123}})[0] != before[0]


def test_a_cluster_for_text_has_no_encoders() -> None:
    manifests = render(NAME_TO_VALUES["laptop"], values={"config": {"encoders": {"replicas": 0}}})
    assert submitted(manifests).encoders.replicas == 0
    assert set(groups(manifests)) == {"router", "worker"}
    (application,) = serve_config(manifests)["applications"]
    assert [each["name"] for each in application["deployments"]] == ["router", "worker"]


# ------------------------------------------------------------ room for every replica


@every_values
def test_every_replica_finds_a_pod_with_what_it_asks_for(values: Path) -> None:
    manifests = render(values)
    config, found = submitted(manifests), groups(manifests)
    (application,) = serve_config(manifests)["applications"]
    name_to_replicas = {each["name"]: each.get("num_replicas") for each in application["deployments"]}
    sections = {"router": config.router, "encoder": config.encoders}
    sections |= {each.pool_deployment: each.workers for each in config.by_pool()}
    assert set(found) == set(sections)
    for name, section in sections.items():
        ranks = getattr(section, "tensor_parallel", 1)
        gpus = getattr(section, "gpus_per_replica", 0)
        asked = dict(section.ray_resources)
        assert asked == {f"weft_{name}": 1}
        hosting = [each for each, group in found.items() if f"weft_{name}" in offered(group)]
        assert hosting == [name], "no other part runs there"
        room = offered(found[name])
        per_pod = int(room[f"weft_{name}"] // ranks)
        assert per_pod >= 1
        assert room["GPU"] == per_pod * ranks * gpus, "no GPU of a pod is idle"
        autoscaling = getattr(section, "autoscaling", None)
        most = (autoscaling and autoscaling.max_replicas) or section.replicas
        assert found[name]["maxReplicas"] * per_pod >= most
        assert (found[name]["maxReplicas"] - 1) * per_pod < most, "no pod is too many"
        if autoscaling and autoscaling.max_replicas:
            assert name_to_replicas[name] is None, "the policy decides"
            assert found[name]["replicas"] * per_pod >= autoscaling.min_replicas
        else:
            assert name_to_replicas[name] == section.replicas
            assert found[name]["replicas"] == found[name]["minReplicas"] == math.ceil(section.replicas / per_pod)


@every_values
def test_pods_ask_kubernetes_for_the_gpus_that_ray_counts(values: Path) -> None:
    manifests = render(values)
    data = yaml.safe_load(values.read_text())
    for name in groups(manifests).keys() - {"router"}:
        group = groups(manifests)[name]
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        resource = data.get(name, {}).get("gpuResource", "nvidia.com/gpu")
        assert limits.get(resource, 0) == offered(group)["GPU"]
        devices = [each for each in limits if "/" in each]
        assert devices == [*([resource] if offered(group)["GPU"] else []), *(["rdma/ib"] if "rdma" in data else [])]
    for name in ("head", "router"):
        spec = dict(pod_specs(manifests))[name]
        assert not [each for each in spec["containers"][0]["resources"]["limits"] if "/" in each], name


def test_the_machine_with_eight_gpus_uses_eight() -> None:
    found = groups(render(NAME_TO_VALUES["node-8gpu"]))
    assert {name: (group["replicas"], offered(group)["GPU"]) for name, group in found.items()} == {
        "router": (2, 0),
        "encoder": (1, 2),
        "worker": (1, 6),
    }


def test_pods_of_an_autoscaled_pool_follow_its_sizes() -> None:
    group = groups(render(NAME_TO_VALUES["infiniband"]))["encoder"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (1, 1, 4)
    manifests = render(NAME_TO_VALUES["infiniband"], values={"rayAutoscaler": {"enabled": False}})
    group = groups(manifests)["encoder"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (4, 4, 4), "nothing could add a pod"
    assert "enableInTreeAutoscaling" not in one(manifests, "RayService")["spec"]["rayClusterConfig"]


# ------------------------------------------------------------ times, and what pods may do


@every_values
def test_times_to_stop_are_in_order(values: Path) -> None:
    from deploy.ray.serve_app import STOP_S

    manifests = render(values)
    drain_s = submitted(manifests).server.drain_s
    for name, spec in pod_specs(manifests):
        if name.endswith("-chat"):
            continue
        (container,) = spec["containers"]
        grace_s, (command, *rest) = (
            spec["terminationGracePeriodSeconds"],
            container["lifecycle"]["preStop"]["exec"]["command"],
        )
        longest = 2 * drain_s + STOP_S  # an encoder's: `_deployment` in deploy/ray/serve_app.py
        if name == "head":
            assert (command, float(rest[0])) == ("sleep", drain_s)
        else:
            _, script, _, sleep_s, deadline_s = rest
            assert "ray drain-node" in script
            assert (float(sleep_s), int(deadline_s)) == (drain_s, grace_s)
            deadline_s = grace_s - 10
            assert "$(($2 - 10))" in script, "the node's deadline, by which Serve has stopped every replica"
            assert longest < deadline_s, "so Serve never stops a replica in a hurry"
        assert drain_s < longest < grace_s, name


@every_values
def test_nothing_runs_as_root_or_writes_to_its_image(values: Path) -> None:
    for name, spec in pod_specs(render(values)):
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] >= 1000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is (name == "head" and "infiniband" in values.name)
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]
            is_rdma = "infiniband" in values.name and name in ("encoder", "worker")
            assert security["capabilities"].get("add", []) == (["IPC_LOCK"] if is_rdma else []), name
            written = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
            assert {"/tmp"} <= written
            assert "hostPath" not in json.dumps(spec["volumes"])


def test_the_network_of_the_node_is_used_only_if_asked() -> None:
    specs = dict(pod_specs(render(values={"worker": {"hostNetwork": True}})))
    assert [name for name, spec in specs.items() if spec.get("hostNetwork")] == ["worker"]
    assert specs["worker"]["dnsPolicy"] == "ClusterFirstWithHostNet"


@every_values
def test_shared_memory_holds_the_features_of_a_pod(values: Path) -> None:
    manifests = render(values)
    config = submitted(manifests)
    found = groups(manifests)
    for name, num_bytes in (("encoder", config.encoders.arena_bytes), ("worker", config.workers.inbox_bytes)):
        spec = found[name]["template"]["spec"]
        (shm,) = (each["emptyDir"] for each in spec["volumes"] if each["name"] == "shm")
        assert shm["medium"] == "Memory"
        limit = spec["containers"][0]["resources"]["limits"]["memory"]
        assert num_bytes is not None
        assert _bytes(shm["sizeLimit"]) < _bytes(limit), "it counts for the memory of the container"
        assert _bytes(limit) > num_bytes * offered(found[name])[f"weft_{name}"]


def _bytes(quantity: str) -> int:
    return int(quantity.removesuffix("Gi")) * 2**30 if quantity.endswith("Gi") else int(quantity[:-2]) * 2**20


def test_rays_own_processes_get_the_switches_that_they_read() -> None:
    for name, spec in pod_specs(render(NAME_TO_VALUES["laptop"])):
        if name.endswith("-chat"):
            continue
        environment = {each["name"]: each.get("value") for each in spec["containers"][0]["env"]}
        wanted = {key: value for key, value in SWITCHES.items() if key.startswith("RAY_")}
        assert wanted.items() <= environment.items(), name


@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_ray_asks_for_a_token_unless_told_otherwise(mode: str) -> None:
    manifests = render(NAME_TO_VALUES["laptop"], values={"auth": {"mode": mode, "existingSecret": "mine"}})
    cluster = one(manifests, "RayService")["spec"]["rayClusterConfig"]
    environment = {
        each["name"]: each.get("value") for each in dict(pod_specs(manifests))["head"]["containers"][0]["env"]
    }
    if mode == "token":
        assert cluster["authOptions"] == {"mode": "token", "secretName": "mine"}
        assert "RAY_AUTH_MODE" not in environment, "KubeRay sets it, with the token"
    else:
        assert "authOptions" not in cluster
        assert environment["RAY_AUTH_MODE"] == "disabled"


def test_upgrades_need_no_further_gpus_by_default() -> None:
    spec = one(render(NAME_TO_VALUES["laptop"]), "RayService")["spec"]
    assert spec["upgradeStrategy"] == {"type": "None"}
    assert one(render(NAME_TO_VALUES["infiniband"]), "RayService")["spec"]["upgradeStrategy"] == {"type": "NewCluster"}


def test_keys_and_certificates_are_mounted_where_the_config_reads_them() -> None:
    values = {"tls": {"existingSecret": "certificate", "clientCa": True}, "apiKeys": {"key": "the-keys"}}
    manifests = render(NAME_TO_VALUES["node-8gpu"], values=values)
    config = submitted(manifests)
    for name, spec in pod_specs(manifests):
        mounts = {each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
        for path in (config.access.keys_file, config.server.tls_cert_file, config.server.tls_client_ca_file):
            assert path is not None
            assert (str(path.parent) in mounts) is (name == "router"), "only routers read them"
    assert config.access.keys_file is not None
    assert config.access.keys_file.name == "the-keys"


def test_pods_of_a_further_pool_are_as_its_values_say_and_else_like_the_first() -> None:
    found = groups(render(NAME_TO_VALUES["two-engines"]))
    first, small = (found[name]["template"]["spec"] for name in ("worker", "worker-small"))
    assert first["nodeSelector"] != small["nodeSelector"]
    assert [each["key"] for each in small["tolerations"]] == ["nvidia.com/gpu", "small"]
    assert [each["key"] for each in first["tolerations"]] == ["nvidia.com/gpu"]
    assert small["containers"][0]["resources"]["requests"]["memory"] == "24Gi"
    assert small["containers"][0]["env"] == first["containers"][0]["env"]
    assert (found["worker"]["replicas"], found["worker-small"]["replicas"]) == (2, 3)


def test_the_pods_of_all_pools_of_workers_have_one_disruption_budget() -> None:
    manifests = render(NAME_TO_VALUES["two-engines"])
    budgets = {each["metadata"]["name"]: each for each in manifests if each["kind"] == "PodDisruptionBudget"}
    assert budgets.keys() == {"weft-worker"}
    assert budgets["weft-worker"]["spec"]["minAvailable"] == 4
