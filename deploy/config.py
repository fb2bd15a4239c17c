"""Defines the cluster's configuration: one frozen tree of sections.

`ClusterConfig` is the whole tree, and each section says in its fields what a key means and states limits; defaults come
from the config class of the part that uses the key (`default_of`).

Nothing reads the configuration from the environment. The module knows nothing of files (`config_file.py` reads them),
or of how a cluster is built: `compose.py` hands each part what it needs as a small config of that part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from deploy.adapter_keys import MAX_ADAPTERS, AdapterName, AdapterPool, AdapterSource, check_adapter_keys
from deploy.config_values import (
    Bytes,
    Device,
    LocalFile,
    Modality,
    ModelPath,
    Network,
    Ports,
    RayResources,
    Section,
    Switch,
    default_of,
    one_or_more,
)
from deploy.http_limits import HttpLimits
from deploy.request_config import AccessSection, LimitsSection, MediaSection, TenantSection, TracingSection
from deploy.scaling_config import AutoscalingSection
from deploy.stages_config import StagesSection
from deploy.workers_config import FIRST_POOL, PoolName, WorkerSection, deployment_name
from encoder_pool.encoder_config import DecodeLimits, EncoderConfig
from fabric.transport import PortRange
from modalities.registry import REGISTRY
from router.planning import LinkClass, PlannerSettings
from router.router_config import ANONYMOUS, RouterConfig


class ModelSection(Section):
    path: ModelPath | None = None
    """Names a transformers model directory, the same on every node, or a URL: `s3://BUCKET/PREFIX`,
    `gs://BUCKET/PREFIX`, or `hf://OWNER/NAME` with `@REVISION` or without. Each node downloads a URL once. None means
    the demo model."""
    cache_dir: Path | None = None
    """Holds the models that a node has downloaded; None means weft/models in the user's folder for caches."""
    cache_bytes: Bytes | None = None
    """Limits what the models in `cache_dir` take together. A download then removes models that no process of the node
    reads, the one first that was opened longest ago. None means no limit; `weft node clean` removes models by hand."""
    name: str | None = None
    """Clients use this name for the model; it defaults to the directory's name."""
    adapters: dict[AdapterName, AdapterSource] = Field({}, max_length=MAX_ADAPTERS)
    """Maps the names of LoRA adapters, for which clients ask as for a model, to directories in the form of peft or to
    URLs as in `path`. They need `workers.engine: vllm` (docs/vllm.md)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = default_of(RouterConfig, "feature_dtype")
    """Sets the dtype of weights, KV pages and features. `auto` means the checkpoint's own dtype, or float32 if
    everything runs on CPUs that have no instructions for products of that dtype (`deploy/compute_dtype.py`)."""
    tool_format: Literal["auto", "hermes", "llama3", "mistral", "pythonic", "qwen3_coder"] = default_of(
        RouterConfig, "tool_format"
    )
    """Says how the model writes calls of tools; `auto` means as its chat template writes them."""
    embeddings: Literal["off", "last", "mean"] = default_of(RouterConfig, "embeddings")
    """Serves embeddings of texts and conversations (`/v1/embeddings`): the last hidden state of the last token
    (`last`), or the mean over all tokens (`mean`). The model must have been trained for it to be of use."""
    transcription_prompt: str = default_of(RouterConfig, "transcription_prompt")
    """Asks a model that hears for a transcript (`/v1/audio/transcriptions`). The demo model has a question of its
    own."""
    reads_reasoning: bool = default_of(RouterConfig, "reads_reasoning")
    """Says whether answers tell the model's reasoning apart from the text (`reasoning_content`), where its chat
    template has marks for it."""


class ServerSection(Section):
    host: str = "127.0.0.1"
    """Names the address on which the routers listen; `0.0.0.0` listens on all addresses of the machine."""
    port: int = Field(8000, ge=0, le=65535)
    """Sets the port of the HTTP API; with 0 the system chooses a free one."""
    max_body_bytes: Bytes = default_of(RouterConfig, "max_body_bytes")
    """Limits the body of one request, media in `data:` URLs included; a larger one is answered 413."""
    max_header_bytes: Bytes = Field(default_of(HttpLimits, "max_header_bytes"), ge=4096, le=2**20)
    """Limits the first line and the headers of a request together; more is answered 431."""
    max_connections: int = Field(default_of(HttpLimits, "max_connections"), ge=1)
    """Limits the open connections of each router. When it is reached, the connection that has been open longest without
    a request is closed for a new one; if there is none, the new one is closed. The limit is lowered to what the limit
    of open files allows."""
    header_timeout_s: float = Field(default_of(HttpLimits, "header_timeout_s"), gt=0)
    """A client may take this long to send the headers of a request; then it is answered 408, or its connection is
    closed if it has sent nothing."""
    body_timeout_s: float = Field(default_of(HttpLimits, "body_timeout_s"), gt=0)
    """A client may take this long to send the body of a request, and longer if the body comes at
    `min_body_bytes_per_s` or faster; then it is answered 408."""
    min_body_bytes_per_s: int = Field(default_of(RouterConfig, "min_answer_bytes_per_s"), ge=1)
    """Sets the rate at which a body that takes longer than `body_timeout_s` must come, and that at which a whole answer
    must be taken that takes longer than `write_timeout_s`."""
    write_timeout_s: float = Field(default_of(RouterConfig, "write_timeout_s"), gt=0)
    """A client that takes nothing of its answer for this long is disconnected, and its request ends."""
    drain_s: float = Field(default_of(RouterConfig, "leave_grace_s"), ge=0)
    """Accepted requests may take this many seconds to end after the cluster has been asked to stop; new requests are
    answered 503. If only their worker is stopped, they move to another worker after this time."""
    tls_cert_file: LocalFile | None = None
    """Names a file with the certificate of the routers in PEM, followed by those that lead to its root. With it the
    routers speak HTTPS; without it they speak HTTP. A renewed file is used within a few seconds."""
    tls_key_file: LocalFile | None = None
    """Names the file with the key of the certificate in PEM, without a password."""
    tls_client_ca_file: LocalFile | None = None
    """Names a file with certificates of authorities in PEM. With it, every client must show a certificate of one of
    them, also one that asks for `/health`."""

    @model_validator(mode="after")
    def _check_tls(self) -> ServerSection:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file belong together; set both, or none of them")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ValueError("tls_client_ca_file needs tls_cert_file and tls_key_file")
        return self


class LinkEndSection(Section):
    """Selects members at one end of a link. Patterns may contain `*`, `?` and `[...]`; all of them must match."""

    member: str = Field("*", min_length=1)
    """Matches the id of the member."""
    host: str = Field("*", min_length=1)
    """Matches the name of the machine, as `GET /weft/members` shows it."""
    kind: Literal["encoder", "worker"] | None = None
    """Selects members of one kind; None selects both."""
    labels: dict[str, str] = Field({})
    """Maps names of node labels to patterns; a member without such a label is not selected."""


class LinkSection(Section):
    """States the class of the links over which features travel from some encoders to some workers."""

    source: LinkEndSection = Field(LinkEndSection(), alias="from")
    target: LinkEndSection = Field(LinkEndSection(), alias="to")
    link: LinkClass = Field(alias="class")
    """Names the class, which gives a link its first cost; the real cost is learned for each class."""

    @model_validator(mode="after")
    def _check_kinds(self) -> LinkSection:
        if self.source.kind == "worker":
            raise ValueError("features travel from encoders to workers, so no link begins at a worker")
        if self.target.kind == "encoder":
            raise ValueError("features travel from encoders to workers, so no link ends at an encoder")
        return self


class RouterSection(Section):
    replicas: int = Field(1, ge=1)
    """Sets the number of routers."""
    ray_resources: RayResources = Field({})
    """Maps custom resources of Ray to the amount that each router takes, so that routers run only on nodes that have
    them (`ray start --resources`)."""
    cpus_per_replica: float = Field(0, ge=0)
    """Sets the number of CPUs that Ray reserves for each router; 0 reserves none."""
    max_in_flight: int = Field(default_of(RouterConfig, "max_in_flight"), ge=1)
    """Limits the requests that each router has admitted and not ended; a further request is answered 429."""
    max_bodies_bytes: Bytes = default_of(RouterConfig, "max_bodies_bytes")
    """Limits the bodies of all requests in flight together, and the large answers that their clients have not taken, in
    each router."""
    max_prompt_tokens: int = Field(default_of(RouterConfig, "max_prompt_tokens"), ge=1)
    """Limits the prompt tokens of all requests in flight together, in each router; a further request is answered
    429."""
    max_index_blocks: int = Field(default_of(PlannerSettings, "max_index_blocks"), ge=1)
    """Limits the KV blocks whose places each router knows, for each scheme that workers use (`KvScheme`). Each takes
    about 50 bytes. The blocks that were not used for longest are forgotten first."""
    max_index_items: int = Field(default_of(PlannerSettings, "max_index_items"), ge=1)
    """Limits the media whose encoders each router knows. The one that was not used for longest is forgotten first."""
    max_num_choices: int = Field(default_of(RouterConfig, "max_num_choices"), ge=1)
    """Limits the `n` of a request, the number of its choices."""
    min_priority: int = Field(default_of(RouterConfig, "min_priority"), ge=-(2**31), lt=2**31)
    """Limits how urgent the `priority` of a request may be; lower numbers are more urgent. Encoders and workers always
    serve requests with lower numbers first, so such requests can starve others. With 0, no request goes ahead of those
    that set no priority."""
    heartbeat_s: float = Field(default_of(RouterConfig, "heartbeat_s"), gt=0)
    """Sets the time between two heartbeats of a router to the encoders and workers."""
    lease_s: float = Field(default_of(RouterConfig, "lease_s"), gt=0)
    """A router that is silent for this long loses its lease: encoders and workers abort its requests."""
    dispatch_timeout_s: float = Field(
        default_of(RouterConfig, "dispatch_timeout_s"), gt=default_of(RouterConfig, "encode_grace_s")
    )
    """Limits the duration of one attempt to answer a request. `encode_grace_s` seconds of it are reserved for media on
    their way to an encoder, so the encoder may not use them."""
    capacity_wait_s: float = Field(120.0, ge=0)
    """A request waits this many seconds for a worker, or an encoder of its media, to come back; then it is answered
    503. It also waits this long for room in the KV cache of a worker; then it is answered 429. With 0 it does not wait
    at all, and queues at a worker that has no room."""
    batch_wait_s: float = Field(default_of(RouterConfig, "batch_wait_s"), ge=0)
    """A request of the class `batch` that has waited this many seconds counts as interactive."""
    tokens_per_encoder_second: float = Field(default_of(RouterConfig, "tokens_per_encoder_second"), ge=0)
    """A second of an encoder costs a tenant as much of its share as this many tokens of a worker."""
    costs_file: Path | None = default_of(RouterConfig, "costs_file")
    """Keeps the costs that the routers have learned (of decoding, encoding, prefill and links), so that the planner
    predicts well from the first request after a restart. With None, each run begins with its own measurements. Routers
    on one machine share the file; a file of another model is ignored."""
    links: tuple[LinkSection, ...] = ()
    """States the classes of links between encoders and workers, which otherwise follow from what each member finds on
    its machine. The first entry that fits a pair counts."""


Seconds = Annotated[float, Field(gt=0)]


def _for_all(value: object) -> object:
    """Turns a single number into a mapping that gives every modality that number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return dict.fromkeys(REGISTRY.modalities, value) if is_number else value


class EncoderSection(Section):
    replicas: int = Field(1, ge=0)
    """Sets the number of encoders. With 0 the cluster takes text only."""
    autoscaling: AutoscalingSection = AutoscalingSection()
    modalities: tuple[Modality, ...] | None = Field(None, min_length=1)
    """Lists the modalities that each encoder loads; None means all that the model takes."""
    device: Device = default_of(EncoderConfig, "device")
    """Says where the encoders compute."""
    gpus_per_replica: float = Field(0, ge=0)
    """Sets the number of GPUs of each encoder."""
    ray_resources: RayResources = Field({})
    """Maps custom resources of Ray to the amount that each encoder takes, so that encoders run only on nodes that have
    them."""
    cpus_per_replica: float = Field(0, ge=0)
    """Sets the number of CPUs that Ray reserves for each encoder; 0 reserves none."""
    arena_bytes: Bytes | None = None
    """Sets the size of each encoder's memory for features. With None, the encoders share 16 GB equally,
    or an eighth of the machine's memory if that is less; on a device it is 2 GB."""
    arena_device: Literal["host", "auto", "device"] = "host"
    """Says where an encoder keeps its features: in the host's memory, or in that of its GPU, from where workers read
    them. `auto` means the GPU if encoders and workers compute on CUDA. A cluster in one process uses the host's."""
    spill_bytes: Bytes | None = None
    """Sets the size of each encoder's memory of the host for features that find no room on the GPU. It counts only
    where the arena is on the GPU; with None it is what `arena_bytes` would be on the host."""
    max_batch_cost: int = Field(default_of(EncoderConfig, "max_batch_cost"), ge=1)
    """Limits the patches (or mel frames) of one forward pass; the default fits 16 pictures of 448 x 448. An encoder may
    hold four times as many that are decoded and wait."""
    max_items_in_flight: int = Field(default_of(EncoderConfig, "max_items_in_flight"), ge=1)
    """Limits the items that are decoded, or being decoded, and wait for their forward pass."""
    max_queue_cost: int = Field(default_of(EncoderConfig, "max_queue_cost"), ge=1)
    """Limits the patches, or mel frames, that an encoder has accepted and not yet encoded; a call that would exceed the
    limit is refused."""
    feature_lease_s: float = Field(default_of(EncoderConfig, "lease_s"), gt=0)
    """An encoder holds a feature for its worker for this long; after that the feature may be evicted."""
    decode_processes: int = Field(default_of(EncoderConfig, "num_decode_processes"), ge=0)
    """Sets the number of decode processes; with more than one, a long video never delays the decoding of a picture."""
    decode_cpu_s: Annotated[dict[Modality, Seconds], BeforeValidator(_for_all)] = Field({})
    """Limits the processor time for decoding an item; an item that takes more is refused (400). The defaults are 8 s
    for a picture, 16 s for a sound and 48 s for a video; a single number applies to all modalities."""
    decode_timeout_s: Annotated[dict[Modality, Seconds], BeforeValidator(_for_all)] = Field({})
    """Limits the wall-clock time for decoding an item. The encoder takes an item that exceeds it as a sign that the
    machine is too busy (503). The defaults are 9 s for a picture, 18 s for a sound and 54 s for a video, which is less
    than `media.encode_timeout_ms`."""
    decode_memory_bytes: Bytes = default_of(DecodeLimits, "memory_bytes")
    """Limits the memory of each decode process; an item that takes more is refused."""
    max_decode_bytes: Bytes = default_of(DecodeLimits, "total_bytes")
    """Limits the memory that all items being decoded take together, computed from their headers; further items wait."""
    mel_on_device: Annotated[Literal["auto", "on", "off"], Switch] = "auto"
    """Says whether the encoder's device resamples and transforms sounds, in place of the decode processes; `auto` means
    that it does on CUDA. Decode processes always transform sounds of more than max_batch_cost mel frames."""
    encode_delay_s: float = Field(default_of(EncoderConfig, "encode_delay_s"), ge=0)
    """Makes every forward pass take at least this long. It is for tests and benches: the encoder waits for the rest
    of that time, so a small model on a CPU takes the time of a large model on a GPU."""
    encode_delay_s_per_cost: float = Field(default_of(EncoderConfig, "encode_delay_s_per_cost"), ge=0)
    """Adds this to `encode_delay_s` for each patch (or mel frame) of a forward pass."""

    @property
    def first_replicas(self) -> int:
        """Returns the number of encoders with which the cluster begins."""
        return self.autoscaling.first_size(self.replicas)

    @property
    def most_replicas(self) -> int:
        """Returns the largest number of encoders that the cluster may have."""
        return self.autoscaling.largest_size(self.replicas)

    @model_validator(mode="after")
    def _check_scaling(self) -> EncoderSection:
        if self.replicas == 0 and self.autoscaling.max_replicas:
            raise ValueError("replicas is 0, so there are no encoders that autoscaling could scale; remove one of them")
        return self

    @model_validator(mode="after")
    def _check_arena(self) -> EncoderSection:
        if self.arena_device == "device" and self.device != "cuda":
            raise ValueError(f"arena_device is device, but device is {self.device}, which has no memory of its own")
        return self


LogLevel = Literal["debug", "info", "warning", "error"]


class LoggingSection(Section):
    level: LogLevel = "info"
    """Sets the level of Weft's own modules; libraries log from `warning` on."""
    levels: dict[str, LogLevel] = Field({})
    """Sets the levels of single loggers by name, for example `router`, `llm_workers.engine` or `uvicorn`."""
    format: Literal["text", "json"] = "text"
    """Writes lines for people (`text`) or for machines (`json`)."""
    to: Literal["files", "terminal"] = "files"
    """With `files`, each process writes a file in a folder of this run, which `weft serve` names when it starts. With
    `terminal`, the lines of all processes go to the standard error of `weft serve`."""
    dir: Path | None = None
    """Holds the folders of the runs, on each machine; None means weft/logs in the user's folder for state."""
    max_file_bytes: Bytes = 64 * 2**20
    """A log file that grows beyond this size is put aside and a new one begins; the last three are kept."""


class NetworkSection(Section):
    """Says at which address, on which ports and over which devices the members of several machines reach each other.
    Where Weft starts a Ray of its own, all of them are on this machine and use the loopback."""

    interface: Annotated[tuple[str, ...], BeforeValidator(one_or_more), Field(min_length=1)] | None = None
    """Lists names of interfaces, as patterns (`eth1`, `ib*`); members advertise the first address that fits. None means
    Ray's own address of the node. `WEFT_NODE_ADDRESS` in the environment of a node names its address itself."""
    subnet: Annotated[tuple[Network, ...], BeforeValidator(one_or_more), Field(min_length=1)] | None = None
    """Lists networks (`10.1.0.0/16`) in one of which the advertised address lies, for nodes whose interfaces have
    different names."""
    ports: Ports | None = None
    """Sets the range of ports (`21000-21999`) on which everything of Weft listens that other machines connect to,
    except the HTTP API: messages, features over TCP, ranks that come together, and metrics of members. With None the
    system chooses free ports. A member takes about five, and each rank process two."""
    ucx_net_devices: str | None = Field(None, min_length=1)
    """Sets `UCX_NET_DEVICES` (`mlx5_0:1,eth1`), the devices over which features travel. None means the interface of the
    advertised address and every RDMA device with an active port."""
    ucx_tls: str | None = Field(None, min_length=1)
    """Sets `UCX_TLS`, the transports that UCX may use for features (`tcp`, or `rc,tcp`); None means all."""
    metrics_port: int = Field(default_of(RouterConfig, "metrics_port"), ge=0, le=65535)
    """Sets the port on which one member of each machine (of each pod, on Kubernetes) answers `GET /metrics` for all
    members there; with 0 only each member itself does, and `GET /weft/prometheus-targets` lists the members."""


class RaySection(Section):
    address: str | None = None
    """Names an existing Ray cluster; None starts one on this machine for as long as `weft serve` runs."""
    cluster_name: str = Field(default_of(RouterConfig, "cluster_name"), pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Names this cluster on its Ray, where the Serve application and the directory carry this name. Each cluster needs
    its own name."""
    token_file: LocalFile | None = None
    """Names the file with the token of the Ray at `address`. With None, Ray looks for the token itself
    (`RAY_AUTH_TOKEN`, `RAY_AUTH_TOKEN_PATH`, `~/.ray/auth_token`)."""
    temp_dir: Path | None = None
    """Holds the files of a Ray that `weft serve` starts; None means the folder for temporary files."""


class ClusterConfig(Section):
    """Configures one model with its router, encoders and workers."""

    model: ModelSection = ModelSection()
    server: ServerSection = ServerSection()
    router: RouterSection = RouterSection()
    media: MediaSection = MediaSection()
    encoders: EncoderSection = EncoderSection()
    workers: WorkerSection = WorkerSection()
    more_workers: dict[PoolName, WorkerSection] = Field({})
    """Maps the names of further pools of workers to what they are, for workers of another engine, size or device in the
    same cluster. Each entry has the keys of `workers`, with the same defaults. The pool of `workers` is called
    `main`."""
    stages: StagesSection | None = None
    """Describes the stages that speak; without it, the cluster answers in text alone."""
    ray: RaySection = RaySection()
    network: NetworkSection = NetworkSection()
    logging: LoggingSection = LoggingSection()
    limits: LimitsSection = LimitsSection()
    access: AccessSection = AccessSection()
    tracing: TracingSection = TracingSection()
    tenants: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")], TenantSection] = Field(
        {}, max_length=256
    )
    """Names the parties that send requests; without any, no API key is asked for."""
    allow_shared_gpu: bool = False
    """Allows a `gpus_per_replica` that is not a whole number, so that encoders and workers share a GPU."""
    threads_per_replica: int = Field(1, ge=1)
    """Limits the threads with which each encoder and worker computes on a CPU."""

    _pool: str = PrivateAttr(FIRST_POOL)

    @property
    def pool(self) -> str:
        """Returns the name of the pool that `workers` describes."""
        return self._pool

    @property
    def pool_path(self) -> str:
        """Returns where a file has the section that `workers` holds, for messages."""
        return "workers" if self._pool == FIRST_POOL else f"more_workers.{self._pool}"

    @property
    def pool_deployment(self) -> str:
        """Returns the name of the deployment of the pool that `workers` describes."""
        return deployment_name(self._pool)

    def of_pool(self, name: str) -> ClusterConfig:
        """Returns the config as the workers of a pool see it: `workers` describes that pool, and `more_workers` all
        others. It has no `stages` if the pool's engine does not hand over what speech needs."""
        sections = {self._pool: self.workers, **self.more_workers}
        own = sections.pop(name)
        changes: dict[str, Any] = {"workers": own, "more_workers": sections}
        if own.engine == "vllm":
            changes["stages"] = None
        made = self.model_copy(update=changes)
        made._pool = name
        return made

    def by_pool(self) -> list[ClusterConfig]:
        """Returns the config as each pool of workers sees it."""
        return [self.of_pool(name) for name in (self._pool, *self.more_workers)]

    @property
    def all_workers(self) -> tuple[WorkerSection, ...]:
        """Returns the sections of all pools of workers."""
        return (self.workers, *self.more_workers.values())

    @property
    def first_workers(self) -> int:
        """Returns the number of workers of all pools with which the cluster begins."""
        return sum(each.first_replicas for each in self.all_workers)

    @property
    def most_workers(self) -> int:
        """Returns the largest number of workers that all pools may have together."""
        return sum(each.most_replicas for each in self.all_workers)

    @property
    def is_arena_on_device(self) -> bool:
        """Returns whether encoders that have a process of their own keep features in the memory of their GPU."""
        return self.encoders.arena_device == "device" or (self.encoders.arena_device == "auto" and self._is_all_on_cuda)

    @property
    def is_inbox_on_device(self) -> bool:
        """Returns whether features land in the memory of the GPU of a worker that has a process of its own."""
        return self.workers.inbox_device == "device" or (self.workers.inbox_device == "auto" and self._is_all_on_cuda)

    @property
    def _is_all_on_cuda(self) -> bool:
        return {"cuda"} == {self.encoders.device, *(each.device for each in self.all_workers)}

    @property
    def num_stage_replicas(self) -> int:
        """Returns the number of replicas of all stages behind the thinker."""
        return 0 if self.stages is None else sum(each.replicas for each in self.stages.later)

    @model_validator(mode="after")
    def _check_tenants(self) -> ClusterConfig:
        keyless = [name for name, each in self.tenants.items() if not each.api_key_digests]
        if len(keyless) > 1 and self.access.keys_file is None:
            raise ValueError(
                f"the tenants {', '.join(keyless)} have no api_key_digests, but only one tenant may send requests "
                "without a key, unless access.keys_file has their keys"
            )
        digests = [digest for each in self.tenants.values() for digest in each.api_key_digests]
        if len(digests) != len(set(digests)):
            raise ValueError("two tenants have the same digest in api_key_digests; each key belongs to one tenant")
        if set(digests) & set(self.access.operator_key_digests):
            raise ValueError(
                "access.operator_key_digests has a digest of a tenant; a line of access.keys_file may give both roles"
            )
        if not self.tenants and (self.access.keys_file is not None or self.access.operator_key_digests):
            raise ValueError("access has keys, but tenants names nobody who may send requests; add a tenant")
        if ANONYMOUS.name in self.tenants and self.tenants[ANONYMOUS.name].api_key_digests:
            raise ValueError(f"the tenant {ANONYMOUS.name} sends requests without a key; give it another name")
        return self

    @model_validator(mode="after")
    def _check_metrics_port(self) -> ClusterConfig:
        port, ports = self.network.metrics_port, self.network.ports
        if port and port == self.server.port:
            raise ValueError(f"network.metrics_port is {port}, which is server.port too; choose another port")
        if port and ports is not None and port in PortRange.parse(ports):
            raise ValueError(
                f"network.metrics_port is {port}, which lies in network.ports ({ports}); choose another port"
            )
        return self

    @model_validator(mode="after")
    def _check_pools(self) -> ClusterConfig:
        if FIRST_POOL in self.more_workers:
            raise ValueError(f"more_workers.{FIRST_POOL} has the name of the pool of `workers`; choose another name")
        pools = self.by_pool()
        for each in pools:
            _check_engine(each.pool_path, each.workers)
        if all(each.workers.engine == "vllm" for each in pools):
            if self.stages is not None:
                raise ValueError(
                    "speech (stages) needs workers.engine: weft, because vLLM does not hand over the thinker's hidden "
                    "states, which the talker reads; deploy/configs/gpu-speech.yaml is an example"
                )
            if self.model.embeddings != "off":
                raise ValueError(
                    f"model.embeddings is {self.model.embeddings}, but vLLM gives no embeddings; a pool of workers "
                    "needs engine: weft for them"
                )
        sharing = [each for each in pools if each.workers.shares_gpu]
        for each in sharing if len(sharing) > 1 else ():
            stated = {"gpu_memory_utilization", "kv_cache_memory_bytes"} & each.workers.vllm.keys()
            if each.workers.engine == "vllm" and not stated:
                others = ", ".join(other.pool_path for other in sharing if other is not each)
                raise ValueError(
                    f"{each.pool_path} and {others} may share a GPU, so {each.pool_path}.vllm.gpu_memory_utilization "
                    "must say how much of it vLLM takes"
                )
        return self

    @model_validator(mode="after")
    def _check_adapters(self) -> ClusterConfig:
        pools = [
            AdapterPool(each.pool_path, each.workers.engine, each.workers.device, each.workers.vllm)
            for each in self.by_pool()
        ]
        model, has_speech = self.model, self.stages is not None
        check_adapter_keys(model.adapters, model.name, model.embeddings, pools, has_speech=has_speech)
        return self

    @model_validator(mode="after")
    def _check_devices(self) -> ClusterConfig:
        sections: list[tuple[str, EncoderSection | WorkerSection]] = [("encoders", self.encoders)]
        sections += [(each.pool_path, each.workers) for each in self.by_pool()]
        for name, section in sections:
            gpus = section.gpus_per_replica
            if section.device == "cuda" and gpus == 0:
                raise ValueError(f"{name}.device is cuda, but {name}.gpus_per_replica is 0; set both for a GPU")
            if section.device == "cpu" and gpus > 0:
                raise ValueError(f"{name}.gpus_per_replica is {gpus:g}, but {name}.device is cpu; set both for a GPU")
            if gpus % 1 and not self.allow_shared_gpu:
                raise ValueError(
                    f"{name}.gpus_per_replica is {gpus:g}, which shares a GPU; allow this with allow_shared_gpu: true"
                )
        return self


def _check_engine(path: str, workers: WorkerSection) -> None:
    """Raises ValueError if a section of workers, which a file has at `path`, says what its engine does not know."""
    if workers.engine == "weft":
        for name in ("vllm", "python"):
            if getattr(workers, name):
                raise ValueError(f"{path}.{name} is set, but {path}.engine is weft; set engine to vllm")
        return
    for name, value in workers.unused_by_vllm().items():
        if value:
            raise ValueError(f"{path}.{name} needs {path}.engine: weft; vLLM has options of its own ({path}.vllm)")
