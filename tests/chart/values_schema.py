"""Says what each value of the chart is and what it may be: the source of `helm/weft/values.schema.json`.

It is written in Python because most groups of values are alike, and because the keys of `config` are those of Weft's
own config. `chart_files.py` writes the file.
"""

from __future__ import annotations

from typing import Any

from deploy.config import ClusterConfig
from deploy.config_file import keys_of, section_in
from deploy.workers_config import FIRST_POOL

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}
STRINGS_BY_NAME: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
SECRET: Schema = {"type": "string", "pattern": rf"^$|{NAME}", "maxLength": 253}
SECRET_KEY: Schema = {"type": "string", "pattern": "^[-._a-zA-Z0-9]+$"}
PATH: Schema = {"type": "string", "pattern": "^/"}
DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))*$"}


def of(schema: Schema, description: str, **more: Any) -> Schema:
    return schema | more | {"description": description}


def closed(description: str, **properties: Schema) -> Schema:
    """Returns the schema of a mapping with these keys alone."""
    return {
        "type": "object",
        "description": description,
        "additionalProperties": False,
        "properties": properties,
    }


def integer(description: str, least: int, most: int | None = None) -> Schema:
    limits = {"minimum": least} | ({} if most is None else {"maximum": most})
    return {"type": "integer", "description": description} | limits


def choice(description: str, *values: str) -> Schema:
    return {"enum": list(values), "description": description}


def resources(description: str) -> Schema:
    amounts = {"type": "object", "additionalProperties": {"type": ["string", "integer"], "pattern": QUANTITY}}
    return closed(description, requests=amounts, limits=amounts)


def group(of_what: str, **own: Schema) -> Schema:
    """Returns the schema of the values of one group of pods."""
    return closed(
        f"Describes the pods of {of_what}.",
        **own,
        resources=resources("Sets requests and limits of the container, except GPUs, which the chart computes."),
        shmSize=of(STRING, "Sizes /dev/shm, which lies in memory and counts for its limit.", pattern=QUANTITY),
        nodeSelector=of(STRINGS_BY_NAME, "Selects nodes by their labels."),
        affinity=of(OBJECT, "Is the affinity of the pods."),
        tolerations=of(OBJECTS, "Lists the taints that the pods tolerate."),
        topologySpreadConstraints=of(OBJECTS, "Spreads the pods over zones or nodes."),
        runtimeClassName=of(STRING, "Names a RuntimeClass, such as `nvidia`."),
        priorityClassName=of(STRING, "Names a PriorityClass."),
        podLabels=of(STRINGS_BY_NAME, "Adds labels."),
        podAnnotations=of(STRINGS_BY_NAME, "Adds annotations."),
        env=of(OBJECTS, "Adds environment variables."),
        envFrom=of(OBJECTS, "Adds sources of environment variables."),
        volumes=of(OBJECTS, "Adds volumes."),
        volumeMounts=of(OBJECTS, "Mounts them."),
        hostNetwork=of(BOOLEAN, "Puts the pods into the network of their nodes. Only one such pod fits on a node."),
        rayStartParams=of(STRINGS_BY_NAME, "Adds options of `ray start`. Give each as a string."),
    )


POOL_NAME = "^[a-z]([a-z0-9-]{0,22}[a-z0-9])?$"


def pool(of_what: str, path: str) -> Schema:
    return group(
        of_what,
        replicasPerPod=integer(
            f"Sets how many {of_what} share a pod. The number of pods follows from `config.{path}.replicas`.", 1, 64
        ),
        gpuResource=of(
            STRING,
            "Names the GPU resource of Kubernetes, such as `nvidia.com/gpu`, `amd.com/gpu`, or a slice "
            "(`nvidia.com/mig-3g.40gb`). A pod asks for `replicasPerPod` times the GPUs of each.",
            pattern=r"^[a-z0-9.-]+/[a-zA-Z0-9._-]+$",
        ),
    )


def config_schema() -> Schema:
    """Returns the schema of Weft's own config: its sections and keys, and the types of those that the chart reads."""
    sections: Schema = {}
    for name, field in keys_of(ClusterConfig).items():
        inner = section_in(field.annotation)
        sections[name] = (
            {"type": "object", "additionalProperties": False, "properties": {key: {} for key in keys_of(inner)}}
            if inner is not None and name != "tenants"
            else {}
        )
    sections["tenants"] = {"type": "object"}
    pools = {
        "replicas": integer("", 1),
        "gpus_per_replica": {"type": "number", "minimum": 0},
        "device": {"enum": ["cpu", "cuda"]},
        "ray_resources": {"not": {}, "description": "The chart sets it."},
        "autoscaling": {
            "type": "object",
            "properties": {"min_replicas": integer("", 1), "max_replicas": {"type": ["integer", "null"]}},
        },
    }
    sections["encoders"]["properties"] |= pools | {"replicas": integer("", 0)}
    sections["workers"]["properties"] |= pools | {"tensor_parallel": integer("", 1)}
    sections["more_workers"] = {
        "type": "object",
        "propertyNames": {"pattern": POOL_NAME, "not": {"const": FIRST_POOL}},
        "additionalProperties": sections["workers"],
    }
    sections["router"]["properties"] |= {"replicas": integer("", 1), "ray_resources": {"not": {}}}
    sections["server"]["properties"] |= {"port": integer("", 1024, 9999), "drain_s": {"type": "number", "minimum": 0}}
    sections["server"]["properties"] |= {
        key: {"not": {}, "description": "Use `tls`."} for key in ("tls_cert_file", "tls_key_file", "tls_client_ca_file")
    }
    sections["access"]["properties"]["keys_file"] = {"not": {}, "description": "Use `apiKeys`."}
    sections["ray"]["properties"] |= {"address": {"not": {}}, "temp_dir": {"not": {}}}
    sections["network"]["properties"]["metrics_port"] = {"not": {}, "description": "Use `metrics.port`."}
    return {
        "type": "object",
        "description": "Is the config of Weft itself (docs/configuration.md). Live keys (docs/kubernetes.md) change "
        "without a restart; a change of any other starts every replica again.",
        "additionalProperties": False,
        "properties": sections,
    }


def values_schema() -> Schema:
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart weft",
    } | closed("", **_cluster(), **_pods(), **_around(), **_observed())


def _cluster() -> Schema:
    return {
        "global": of(OBJECT, "Belongs to charts that contain this one; it is not read."),
        "nameOverride": of(STRING, "Replaces `weft` in the names of objects."),
        "fullnameOverride": of(
            STRING, "Replaces the names of objects.", pattern="^$|^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"
        ),
        "commonLabels": of(STRINGS_BY_NAME, "Adds labels to all objects, except pods."),
        "commonAnnotations": of(STRINGS_BY_NAME, "Adds annotations to most objects, pods among them."),
        "image": closed(
            "Names the image, which deploy/Dockerfile builds.",
            repository=of(STRING, "Names the repository.", minLength=1),
            tag=of(STRING, "Names the tag; empty means the version of the chart's application."),
            digest=of(STRING, "Pins the image (`sha256:...`) in place of a tag.", pattern="^$|^sha256:[0-9a-f]{64}$"),
            pullPolicy=choice("Says when the image is pulled.", "Always", "IfNotPresent", "Never"),
            pullSecrets={"type": "array", "items": SECRET, "description": "Names secrets of a registry."},
        ),
        "config": config_schema(),
        "weights": closed(
            "Mounts a volume with models. `config.model.path` names a folder in it; without it, the demo model of the "
            "image is served.",
            existingClaim=of(SECRET, "Names a claim that exists."),
            create=of(BOOLEAN, "Makes a claim, which stays when the release goes."),
            size=of(STRING, "Sizes the new claim.", pattern=QUANTITY),
            storageClassName=of(STRING, "Names its class; empty means the default one."),
            accessModes={
                "type": "array",
                "minItems": 1,
                "items": {"enum": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]},
                "description": "Lists its access modes. Pods on several nodes mount it.",
            },
            mountPath=of(PATH, "Is the folder at which the volume is mounted in every pod."),
            subPath=of(STRING, "Mounts a folder of the volume only."),
            readOnly=of(BOOLEAN, "Mounts it read-only."),
        ),
        "hubToken": closed(
            "Gives the pods a token of a model hub (`HF_TOKEN`).",
            existingSecret=of(SECRET, "Names the secret."),
            key=of(SECRET_KEY, "Names its key."),
        ),
        "apiKeys": closed(
            "Mounts the file of API keys (docs/access.md). It needs `config.tenants`. Routers read a changed file "
            "again.",
            existingSecret=of(SECRET, "Names a secret with the file."),
            key=of(SECRET_KEY, "Names its key."),
            create=of(BOOLEAN, "Makes the secret of `lines`."),
            lines={
                "type": "array",
                "items": {"type": "string", "pattern": "^(sha256:)?[0-9a-f]{64} [^ ]+ [^ ]+"},
                "description": "Lists lines as `weft key new` makes them. They hold digests, and no key.",
            },
        ),
        "tls": closed(
            "Makes routers speak HTTPS.",
            existingSecret=of(SECRET, "Names a secret of the type kubernetes.io/tls. A renewed one is used at once."),
            clientCa=of(BOOLEAN, "Asks clients for certificates of the authorities in the secret's `ca.crt`."),
        ),
        "auth": closed(
            "Protects Ray itself, its dashboard and the API that deploys applications.",
            mode=choice(
                "`token` asks for a token, which KubeRay makes; `disabled` lets everybody in.", "token", "disabled"
            ),
            existingSecret=of(SECRET, "Names a secret with the token (`auth_token`) to use instead."),
        ),
    }


def _pods() -> Schema:
    return {
        "head": group("Ray's head, which schedules and serves nothing"),
        "router": group("routers, of which each has a pod of its own (`config.router.replicas`)"),
        "encoder": pool("encoders", "encoders"),
        "worker": pool("LLM workers", "workers"),
        "workerPools": {
            "type": "object",
            "description": "Describes the pods of the further pools of LLM workers by the names that "
            "`config.more_workers` gives them. Each has the keys of `worker`; what it leaves out is as in `worker`.",
            "propertyNames": {"pattern": POOL_NAME},
            "additionalProperties": pool("workers of the pool", "more_workers.NAME"),
        },
        "rdma": closed(
            "Gives encoders and LLM workers RDMA devices. `config.network.ucx_net_devices` and `ucx_tls` choose among "
            "them.",
            enabled=of(BOOLEAN, "Turns it on."),
            resourceName=of(STRING, "Names the resource of a device plugin; with an empty one, pods ask for none."),
            resourceCount=integer("Sets how many a pod asks for.", 1, 64),
            ipcLock=of(BOOLEAN, "Adds the capability IPC_LOCK, with which memory is registered."),
        ),
        "rayAutoscaler": closed(
            "Adds and removes pods as `config.encoders.autoscaling` and `config.workers.autoscaling` need them. "
            "Without it, the pods of the largest size stand ready.",
            enabled=of(BOOLEAN, "Turns Ray's in-tree autoscaler on. KubeRay then makes a role for the head."),
            idleTimeoutSeconds=integer("Removes a pod that was idle for this long.", 0),
            version=choice("Chooses the autoscaler.", "v1", "v2"),
            resources=resources("Sets requests and limits of its container."),
        ),
        "gcsFaultTolerance": closed(
            "Keeps Ray's state outside the head, so that a head may restart while the cluster serves.",
            enabled=of(BOOLEAN, "Turns it on."),
            redisAddress=of(STRING, "Is the address of a Redis, such as `redis:6379`."),
            passwordSecret=of(SECRET, "Names a secret with its password."),
            passwordKey=of(SECRET_KEY, "Names the key of the secret."),
            externalStorageNamespace=of(STRING, "Names the space in Redis; empty means the id of the RayCluster."),
        ),
        "serviceAccount": closed(
            "Is the identity of the pods. It may do nothing, and no token is mounted.",
            create=of(BOOLEAN, "Makes the account."),
            name=of(SECRET, "Names it; empty means the name of the release, or `default` if none is made."),
            annotations=of(STRINGS_BY_NAME, "Adds annotations."),
        ),
        "podSecurityContext": of(
            OBJECT,
            "Is the security context of all pods.",
            properties={"runAsNonRoot": {"const": True}, "runAsUser": {"minimum": 1}},
        ),
        "containerSecurityContext": of(
            OBJECT,
            "Is the security context of all containers.",
            properties={"privileged": {"const": False}, "runAsUser": {"minimum": 1}},
        ),
        "terminationGracePeriodSeconds": {
            "type": ["integer", "null"],
            "minimum": 1,
            "description": "Is the time for pods to end. It must be at least twice `config.server.drain_s` and 30 s; "
            "null means just that.",
        },
    }


def _around() -> Schema:
    return {
        "upgrade": closed(
            "Says what happens when pods change (image, resources).",
            type=choice(
                "`None` keeps the pods until you delete the RayCluster, which interrupts the service, and needs no "
                "further GPU. `NewCluster` starts a second RayCluster beside the first, and needs twice the GPUs.",
                "None",
                "NewCluster",
            ),
            clusterDeletionDelaySeconds=integer("Keeps the former RayCluster this long after the switch.", 0),
        ),
        "service": closed(
            "Is the service of clients; its backends are the routers that are ready.",
            type=choice("Is its type.", "ClusterIP", "NodePort", "LoadBalancer"),
            port=integer("Is its port.", 1, 65535),
            annotations=of(STRINGS_BY_NAME, "Adds annotations."),
            loadBalancerSourceRanges={"type": "array", "items": STRING, "description": "Lists networks of clients."},
        ),
        "ingress": closed(
            "Makes an Ingress. Turn buffering off for streams, and allow bodies of `config.server.max_body_bytes`.",
            enabled=of(BOOLEAN, "Makes it."),
            className=of(STRING, "Names its class."),
            annotations=of(STRINGS_BY_NAME, "Adds annotations."),
            hosts={"type": "array", "items": STRING | {"minLength": 1}, "description": "Lists its hosts."},
            tls=of(OBJECTS, "Lists hosts with their secrets."),
        ),
        "gateway": closed(
            "Makes an HTTPRoute of the Gateway API.",
            enabled=of(BOOLEAN, "Makes it."),
            parentRefs=of(OBJECTS, "Names the Gateways."),
            hostnames={"type": "array", "items": STRING, "description": "Lists its hosts."},
            timeout=of(DURATION, "Limits a request, such as `600s`; streams of long answers need long ones."),
        ),
        "networkPolicy": closed(
            "Lets only clients, members, KubeRay and Prometheus reach the pods.",
            enabled=of(BOOLEAN, "Makes the policies."),
            clients=of(
                OBJECTS,
                "Lists peers (`namespaceSelector`, `podSelector`, `ipBlock`) that may reach routers; none means all.",
            ),
            operatorNamespace=of(OBJECT, "Selects the namespace of KubeRay's operator by labels; empty means all."),
            monitoring=of(OBJECTS, "Lists peers that may read metrics; none means nobody outside the release."),
            egress=of(
                OBJECTS,
                "Lists further rules of egress. With any, pods reach nothing else but each other and DNS; routers "
                "fetch media by URL, and the autoscaler reaches the API server.",
            ),
        ),
        "podDisruptionBudget": closed(
            "Lets evictions take one pod of a kind at a time, where there are several.",
            enabled=of(BOOLEAN, "Makes the budgets."),
        ),
    }


def _observed() -> Schema:
    enabled: Schema = {
        "type": ["boolean", "null"],
        "description": "Makes them; null means if the cluster has Prometheus' operator.",
    }
    labels = of(STRINGS_BY_NAME, "Adds labels, by which Prometheus selects them.")
    return {
        "metrics": closed(
            "Shows the cluster to Prometheus and Grafana (docs/monitoring.md).",
            port=integer("Is the port at which each pod serves the series of its members.", 1024, 9999),
            podMonitor=closed(
                "Makes PodMonitors.",
                enabled=enabled,
                interval=of(DURATION, "Is the time between two scrapes."),
                labels=labels,
            ),
            rules=closed("Makes PrometheusRules of the alerts.", enabled=enabled, labels=labels),
            dashboards=closed(
                "Makes a ConfigMap of each dashboard, for Grafana's sidecar.",
                enabled=of(BOOLEAN, "Makes them."),
                labels=of(STRINGS_BY_NAME, "Adds labels, by which the sidecar selects them."),
                annotations=of(STRINGS_BY_NAME, "Adds annotations, such as the folder."),
                namespace=of(STRING, "Puts them into another namespace."),
            ),
        ),
        "tests": closed(
            "Is the hook of `helm test`, which asks for one answer.",
            enabled=of(BOOLEAN, "Makes it."),
            apiKeySecret=of(SECRET, "Names a secret with an API key, if the cluster asks for one."),
            apiKeyKey=of(SECRET_KEY, "Names its key."),
        ),
        "extraObjects": {
            "type": "array",
            "items": {"type": ["object", "string"]},
            "description": "Adds objects, whose text may be a template.",
        },
    }
