"""Tests that the chart renders with every complete set of values, in both versions of Helm, and that Kubernetes and the
operators would take what comes out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_files import CHART, generated, present_copies
from crd_schemas import CRDS, schema_of
from helm_tools import (
    CI_VALUES,
    HELM_TO_PACKAGE,
    KUBERNETES_VERSIONS,
    NO_SCHEMA,
    ROOT,
    crd_validator,
    flaws,
    one,
    render,
    run_helm,
)
from values_schema import values_schema

IDS = [path.name for path in CI_VALUES]
EVERYTHING: dict[str, Any] = {
    "commonLabels": {"team": "models"},
    "commonAnnotations": {"owner": "models"},
    "config": {"tenants": {"shop": {}}},
    "image": {"digest": "sha256:" + "0" * 64, "pullSecrets": ["registry"]},
    "apiKeys": {"create": True, "lines": ["a" * 64 + " shop first"]},
    "tls": {"existingSecret": "certificate", "clientCa": True},
    "weights": {"create": True, "storageClassName": "shared", "subPath": "qwen"},
    "hubToken": {"existingSecret": "hub"},
    "rdma": {"enabled": True},
    "worker": {
        "hostNetwork": True,
        "env": [{"name": "A", "value": "b"}],
        "envFrom": [{"secretRef": {"name": "c"}}],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
        "affinity": {"podAntiAffinity": {}},
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
        "podAnnotations": {"a": "b"},
        "rayStartParams": {"object-store-memory": "1000000000"},
    },
    "rayAutoscaler": {"enabled": True, "version": "v1"},
    "gcsFaultTolerance": {"enabled": True, "redisAddress": "redis:6379", "externalStorageNamespace": "weft"},
    "serviceAccount": {"annotations": {"a": "b"}},
    "service": {"type": "LoadBalancer", "loadBalancerSourceRanges": ["10.0.0.0/8"], "annotations": {"a": "b"}},
    "ingress": {"enabled": True, "hosts": ["a.example.com"], "tls": [{"hosts": ["a.example.com"], "secretName": "t"}]},
    "gateway": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["a.example.com"], "timeout": "600s"},
    "networkPolicy": {
        "clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        "operatorNamespace": {"matchLabels": {"kubernetes.io/metadata.name": "kuberay"}},
        "monitoring": [{"namespaceSelector": {}}],
        "egress": [{"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": [{"port": 443, "protocol": "TCP"}]}],
    },
    "tests": {"apiKeySecret": "test-key"},
    "extraObjects": ["apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-more'}"],
}


@pytest.mark.parametrize("version", HELM_TO_PACKAGE)
@pytest.mark.parametrize("values", CI_VALUES, ids=IDS)
def test_helm_finds_no_fault(values: Path, version: str) -> None:
    done = run_helm(version, "lint", "--strict", str(CHART), "-f", str(values))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 chart(s) failed" in done.stdout


@pytest.mark.parametrize("values", CI_VALUES, ids=IDS)
def test_both_versions_of_helm_render_the_same(values: Path) -> None:
    assert render(values, version="3") == render(values, version="4")


@pytest.mark.parametrize("kubernetes", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("values", [*CI_VALUES, "everything"], ids=[*IDS, "everything"])
def test_kubernetes_and_the_operators_take_the_manifests(values: Path | str, kubernetes: str) -> None:
    manifests = render(values) if isinstance(values, Path) else render(values=EVERYTHING)
    found = {f"{each['kind']} {each['metadata']['name']}": flaws(each, kubernetes) for each in manifests}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    kinds = {each["kind"] for each in manifests}
    assert {"RayService", "Service", "NetworkPolicy", "PodMonitor", "ServiceAccount"} <= kinds


def test_the_schemas_find_what_is_wrong() -> None:
    manifests = render(values=EVERYTHING)
    service = one(manifests, "RayService")
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["imag"] = "a"
    service["spec"]["upgradeStrategy"]["type"] = 7
    assert len(flaws(service, "1.33")) == 2
    monitor = one(manifests, "PodMonitor", "weft-weft")
    monitor["spec"]["podMetricsEndpoint"] = []
    assert len(flaws(monitor, "1.33")) == 1
    account = one(manifests, "ServiceAccount")
    account["automountToken"] = True
    assert len(flaws(account, "1.29")) == 1


def test_every_kind_has_a_schema_but_the_named_ones() -> None:
    custom = {each["kind"] for each in render(values=EVERYTHING) if "." in each["apiVersion"].split("/")[0]}
    builtin = {"NetworkPolicy", "Ingress"}
    assert {kind for kind in custom - builtin if crd_validator(kind) is None} == NO_SCHEMA


def test_the_schemas_are_those_of_the_definitions() -> None:
    folder = ROOT.parent / "shared" / "data" / "crds"
    if not folder.is_dir():
        pytest.skip("the definitions of custom kinds are not beside this checkout")
    for path in folder.glob("crd_*.yaml"):
        kind, packed = schema_of(path.read_text())
        assert (CRDS / f"{kind.lower()}.json.gz").read_bytes() == packed, kind


def test_the_files_that_are_made_are_up_to_date() -> None:
    found = generated()
    stale = [path.name for path, text in found.items() if not path.is_file() or path.read_text() != text]
    stale += [path.name for path in present_copies() - found.keys()]
    assert stale == [], "run `make chart-files`, and commit what it writes"


def test_every_value_has_a_description_and_a_default() -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())

    def check(schema: dict[str, Any], values: Any, path: str) -> None:
        for name, inner in schema["properties"].items():
            assert inner.get("description"), f"{path}{name} has no description"
            if name == "global":
                continue
            assert name in values, f"{path}{name} has no default"
            if inner.get("additionalProperties") is False and name not in ("config", "resources"):
                check(inner, values[name], f"{path}{name}.")

    check(values_schema(), defaults, "")


def test_prometheus_is_used_if_the_cluster_has_its_operator() -> None:
    def kinds(**options: Any) -> set[str]:
        return {each["kind"] for each in render(CI_VALUES[1], **options)}

    assert "PodMonitor" in kinds()
    assert "PodMonitor" not in kinds(has_prometheus=False)
    on, off = {"podMonitor": {"enabled": True}}, {"podMonitor": {"enabled": False}, "rules": {"enabled": False}}
    assert "PodMonitor" in kinds(values={"metrics": on}, has_prometheus=False)
    assert not {"PodMonitor", "PrometheusRule"} & kinds(values={"metrics": off})


def test_dashboards_and_alerts_are_taken_as_they_are(tmp_path: Path) -> None:
    """Uses a copy of the chart with files that only look like templates."""
    copied = tmp_path / "weft"
    shutil.copytree(CHART, copied)
    dashboard = {"title": "{{ instance }}", "panels": []}
    rules = {
        "groups": [{"name": "weft", "rules": [{"alert": "A", "expr": "up == 0", "annotations": {"b": "{{ $value }}"}}]}]
    }
    (copied / "files/grafana/one_view.json").write_text(json.dumps(dashboard))
    (copied / "files/prometheus/alerts_of_weft.yaml").write_text(yaml.safe_dump(rules))
    done = run_helm("4", "template", "weft", str(copied), values={"metrics": {"rules": {"enabled": True}}})
    assert done.returncode == 0, done.stderr
    manifests = [each for each in yaml.safe_load_all(done.stdout) if each]
    shown = one(manifests, "ConfigMap", "weft-one-view")
    assert shown["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(shown["data"]["one_view.json"]) == dashboard
    assert len(json.dumps(shown)) < 2**20, "Kubernetes takes objects of 1 MiB"
    rule = one(manifests, "PrometheusRule", "weft-alerts-of-weft")
    assert rule["spec"] == rules
    assert flaws(rule, "1.33") == []


def test_the_program_of_helm_test_is_python(tmp_path: Path) -> None:
    (pod,) = (each for each in render(CI_VALUES[1]) if each["metadata"]["name"].endswith("-chat"))
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["python", "-c"]
    compile(container["args"][0], "ask_once.py", "exec")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"


def test_extra_objects_are_templates() -> None:
    (values,) = (path for path in CI_VALUES if path.name == "mig-values.yaml")
    assert one(render(values), "ConfigMap", "weft-extra")["data"] == {"greeting": "hello"}


def test_the_notes_say_what_an_upgrade_costs() -> None:
    def notes(*values: str) -> str:
        options = [option for each in values for option in ("--set", each)]
        files = ["-f", str(CI_VALUES[0])]
        assert CI_VALUES[0].name == "infiniband-values.yaml"
        done = run_helm("4", "install", "weft", str(CHART), "--dry-run=client", *files, *options)
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("NOTES:")[2]

    said = notes()
    assert "1 encoder pods, 4 worker pods and 3 router pods, with up to 48 GPUs" in said
    assert "it needs 48 further GPUs meanwhile" in said
    assert "WARNING" not in said
    assert "delete raycluster -l ray.io/originated-from-cr-name=weft-ib" in notes("upgrade.type=None")
    assert "WARNING: config.encoders.autoscaling" in notes("rayAutoscaler.enabled=false")
    assert "No API keys are configured" in said
    assert "No API keys are configured" not in notes("apiKeys.existingSecret=keys")
