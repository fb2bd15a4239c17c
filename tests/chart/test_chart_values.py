"""Tests that wrong values are refused before anything is installed, with a message that names them."""

from __future__ import annotations

from typing import Any

import pytest
from helm_tools import HELM_TO_PACKAGE, refusal

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"replicas": 2}, "additional properties 'replicas' not allowed"),
    ({"image": {"tagg": "1"}}, "additional properties 'tagg' not allowed"),
    ({"image": {"digest": "latest"}}, "at '/image/digest': 'latest' does not match pattern"),
    ({"image": {"pullPolicy": "Sometimes"}}, "at '/image/pullPolicy': value must be one of"),
    ({"config": {"worker": {}}}, "at '/config': additional properties 'worker' not allowed"),
    ({"config": {"workers": {"replica": 2}}}, "at '/config/workers': additional properties 'replica' not allowed"),
    ({"config": {"workers": {"replicas": 0}}}, "at '/config/workers/replicas': minimum: got 0, want 1"),
    (
        {"config": {"more_workers": {"b": {"replica": 2}}}},
        "at '/config/more_workers/b': additional properties",
    ),
    ({"config": {"more_workers": {"main": {}}}}, "invalid propertyName 'main'"),
    ({"config": {"more_workers": {"Big": {}}}}, "invalid propertyName 'Big'"),
    (
        {"config": {"more_workers": {"b": {"ray_resources": {"a": 1}}}}},
        "/config/more_workers/b/ray_resources': 'not'",
    ),
    ({"workerPools": {"b": {"replicas": 2}}}, "at '/workerPools/b': additional properties 'replicas' not allowed"),
    ({"config": {"encoders": {"device": "gpu"}}}, "at '/config/encoders/device': value must be one of 'cpu', 'cuda'"),
    (
        {"config": {"encoders": {"gpus_per_replica": "one"}}},
        "at '/config/encoders/gpus_per_replica': got string, want number",
    ),
    ({"config": {"router": {"ray_resources": {"a": 1}}}}, "at '/config/router/ray_resources': 'not' failed"),
    ({"config": {"server": {"port": 80}}}, "at '/config/server/port': minimum: got 80, want 1,024"),
    ({"config": {"server": {"tls_cert_file": "/a"}}}, "at '/config/server/tls_cert_file': 'not' failed"),
    ({"config": {"access": {"keys_file": "/a"}}}, "at '/config/access/keys_file': 'not' failed"),
    ({"config": {"ray": {"address": "auto"}}}, "at '/config/ray/address': 'not' failed"),
    ({"config": {"network": {"metrics_port": 1}}}, "at '/config/network/metrics_port': 'not' failed"),
    ({"encoder": {"replicasPerPod": 0}}, "at '/encoder/replicasPerPod': minimum: got 0, want 1"),
    ({"encoder": {"gpuResource": "gpu"}}, "at '/encoder/gpuResource': 'gpu' does not match pattern"),
    ({"router": {"replicasPerPod": 2}}, "at '/router': additional properties 'replicasPerPod' not allowed"),
    ({"worker": {"shmSize": "many"}}, "at '/worker/shmSize': 'many' does not match pattern"),
    ({"worker": {"resources": {"request": {}}}}, "at '/worker/resources': additional properties 'request' not allowed"),
    ({"worker": {"rayStartParams": {"num-cpus": 4}}}, "at '/worker/rayStartParams/num-cpus': got number, want string"),
    ({"worker": {"tolerations": {}}}, "at '/worker/tolerations': got object, want array"),
    ({"upgrade": {"type": "Recreate"}}, "at '/upgrade/type': value must be one of 'None', 'NewCluster'"),
    ({"upgrade": {"type": "NewClusterWithIncrementalUpgrade"}}, "at '/upgrade/type': value must be one of"),
    ({"auth": {"mode": "none"}}, "at '/auth/mode': value must be one of 'token', 'disabled'"),
    ({"service": {"type": "ExternalName"}}, "at '/service/type': value must be one of"),
    ({"service": {"port": 70000}}, "at '/service/port': maximum: got 70,000, want 65,535"),
    ({"apiKeys": {"lines": ["sk-weft-secret"]}}, "at '/apiKeys/lines/0': 'sk-weft-secret' does not match pattern"),
    ({"tls": {"existingSecret": "Not_A_Name"}}, "at '/tls/existingSecret': 'Not_A_Name' does not match pattern"),
    ({"weights": {"accessModes": ["ReadOnly"]}}, "at '/weights/accessModes/0': value must be one of"),
    ({"weights": {"mountPath": "models"}}, "at '/weights/mountPath': 'models' does not match pattern"),
    ({"podSecurityContext": {"runAsNonRoot": False}}, "at '/podSecurityContext/runAsNonRoot': value must be true"),
    ({"podSecurityContext": {"runAsUser": 0}}, "at '/podSecurityContext/runAsUser': minimum: got 0, want 1"),
    (
        {"containerSecurityContext": {"privileged": True}},
        "at '/containerSecurityContext/privileged': value must be false",
    ),
    ({"metrics": {"port": 12000}}, "at '/metrics/port': maximum: got 12,000, want 9,999"),
    ({"gateway": {"timeout": "ten"}}, "at '/gateway/timeout': 'ten' does not match pattern"),
    ({"fullnameOverride": "9lives"}, "at '/fullnameOverride': '9lives' does not match pattern"),
    ({"rdma": {"resourceCount": 0}}, "at '/rdma/resourceCount': minimum: got 0, want 1"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[message[:60] for _, message in REFUSED])
def test_a_wrong_value_is_refused_by_its_schema(values: dict[str, Any], message: str) -> None:
    assert message in refusal(values)


@pytest.mark.parametrize("version", HELM_TO_PACKAGE)
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"terminationGracePeriodSeconds": 60, "config": {"server": {"drain_s": 60}}},
            "terminationGracePeriodSeconds is 60, but config.server.drain_s needs at least 150",
        ),
        (
            {"config": {"encoders": {"gpus_per_replica": 0.5}}, "encoder": {"replicasPerPod": 3}},
            "a pod would need 1.5 GPUs, which is not a whole number",
        ),
        ({"workerPools": {"b": {}}}, "workerPools has b, which is no pool of config.more_workers"),
        (
            {"config": {"more_workers": {"b": {"device": "cuda", "gpus_per_replica": 0.5}}}},
            "workerPools.b.replicasPerPod is 1, and config.more_workers.b.gpus_per_replica is 0.5: a pod would need",
        ),
        ({"ingress": {"enabled": True}}, "ingress.hosts is empty, but ingress.enabled is true"),
        ({"gateway": {"enabled": True}}, "gateway.parentRefs is empty, but gateway.enabled is true"),
        ({"apiKeys": {"create": True}}, "apiKeys.lines is empty, but apiKeys.create is true"),
        ({"gcsFaultTolerance": {"enabled": True}}, "gcsFaultTolerance.redisAddress is empty"),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused(values: dict[str, Any], message: str, version: str) -> None:
    assert message in refusal(values, version)
