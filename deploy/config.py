"""Defines the cluster's configuration: one frozen tree of sections.

`ClusterConfig` is the whole tree, and each section says in its fields what a key means and states limits; defaults come
from the config class of the part that uses the key (`default_of`).

Nothing reads the configuration from the environment. The module knows nothing of files (`config_file.py` reads them),
or of how a cluster is built: `compose.py` hands each part what it needs as a small config of that part.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from encoder_pool.encoder_config import DecodeLimits, EncoderConfig
from llm_workers.worker_config import Speculation, WorkerConfig
from modalities.family import MediaOptions
from modalities.media import MediaLimits
from modalities.probing import ProbeLimits
from modalities.registry import REGISTRY
from router.fetch import FetchSettings
from router.planning import LinkClass, PlannerSettings
from router.router_config import ANONYMOUS, GrammarLimits, RouterConfig, Tenant

PROBE_LIMITS = ProbeLimits()
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_bytes(value: object) -> object:
    """Converts a size with a unit to bytes (`512MiB` -> 536870912); other values, such as integers, pass unchanged.
    Raises ValueError for an unknown unit."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise ValueError(f"{value!r} is not a size; write a number of bytes, or a number with a unit ({units})")
    return int(float(match[1]) * _UNITS[match[2]])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Device = Literal["cpu", "cuda"]


LocalFile = Annotated[Path, AfterValidator(Path.absolute)]
"""A relative path counts from the folder in which the config is read, because replicas run in other folders."""


def _parse_switch(value: object) -> object:
    """Converts a boolean back to `on` or `off`, because YAML 1.1 reads a bare `on` or `off` as a boolean."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Switch = BeforeValidator(_parse_switch)


def default_of(owner: type, name: str) -> Any:
    """Returns the default of a field of `owner`, the config class of the part that uses the key. That class alone
    states the default."""
    default = next(field.default for field in dataclasses.fields(owner) if field.name == name)
    assert default is not dataclasses.MISSING, f"{owner.__name__}.{name} has no default"
    return default


class Section(BaseModel):
    """A `Section` is a part of the config. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# ------------------------------------------------------------ sections


class ModelSection(Section):
    path: Path | None = None
    """Names a transformers model directory; None means the demo model."""
    name: str | None = None
    """Clients use this name for the model; it defaults to the directory's name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Sets the dtype of weights, KV pages and features. `auto` means the checkpoint's own dtype, or float32 if
    everything runs on CPUs that have no instructions for products of that dtype (`deploy/compute_dtype.py`)."""
    tool_format: Literal["auto", "hermes", "llama3", "mistral", "qwen3_coder"] = default_of(RouterConfig, "tool_format")
    """Says how the model writes calls of tools; `auto` means as its chat template writes them."""
    embeddings: Literal["off", "last", "mean"] = default_of(RouterConfig, "embeddings")
    """Serves embeddings of texts and conversations (`/v1/embeddings`): the last hidden state of the last token
    (`last`), or the mean over all tokens (`mean`). The model must have been trained for it to be of use."""
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
    drain_s: float = Field(30.0, ge=0)
    """Accepted requests may take this many seconds to end after the cluster has been asked to stop; new requests are
    answered 503."""
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
    labels: dict[str, str] = {}
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
    max_in_flight: int = Field(default_of(RouterConfig, "max_in_flight"), ge=1)
    """Limits the requests that each router has admitted and not ended; a further request is answered 429."""
    max_bodies_bytes: Bytes = default_of(RouterConfig, "max_bodies_bytes")
    """Limits the bodies of all requests in flight together, in each router."""
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


class AccessSection(Section):
    """Says where further API keys are, besides those under `tenants`, and how quotas per minute are counted."""

    keys_file: LocalFile | None = default_of(RouterConfig, "keys_file")
    """Names a file with one API key per line, as its digest, its tenant and its name; `weft key new` makes such a line.
    Routers read the file again within a second of a change. With a file, every request needs a key."""
    operator_key_digests: tuple[Digest, ...] = default_of(RouterConfig, "operator_digests")
    """Lists the SHA-256 digests of the keys that may read `/metrics` and `/weft`. The file may have such keys too."""
    burst_s: float = Field(default_of(RouterConfig, "rate_burst_s"), ge=1, le=3600)
    """A quota per minute lets through what it gives in this many seconds at once. A smaller number spreads requests
    more evenly, and refuses more of them."""


Rate = Annotated[float, Field(gt=0)]


class TenantSection(Section):
    """Describes a party that sends requests. Without a limit, that of the router holds. Quotas per minute and
    `max_in_flight` hold for all routers together, each of which gives its part; the other limits hold in each
    router."""

    api_key_digests: tuple[Digest, ...] = ()
    """Lists the SHA-256 digests of the tenant's API keys (`printf %s KEY | sha256sum`). A request with one of these
    keys in `Authorization: Bearer KEY` is this tenant's. One tenant may have none: it sends the requests without a
    key."""
    weight: float = Field(default_of(Tenant, "weight"), gt=0)
    """A tenant with twice the weight gets twice the service while requests of both wait."""
    service_class: Literal["interactive", "batch"] = default_of(Tenant, "service_class")
    """Says how urgent the tenant's requests are: `batch` gives all of them spare capacity only, and with `interactive`
    a request may ask for that."""
    ttft_deadline_ms: int | None = Field(None, ge=1)
    """Refuses requests whose first token is predicted later than this (429), where a request states no deadline of its
    own."""
    max_in_flight: int | None = Field(None, ge=1)
    """Limits the requests of the tenant that are admitted and have not ended, in all routers together."""
    max_bodies_bytes: Bytes | None = None
    """Limits the bodies of the tenant's requests in flight together."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Limits the prompt tokens of the tenant's requests in flight together."""
    cache_salt: str | None = Field(None, max_length=256)
    """Keeps the tenant's caches apart from those of others: it is put before the `cache_salt` of each request. With
    none, the tenant has caches of its own; tenants with the same salt share theirs, also those with an empty one."""
    requests_per_minute: Rate | None = None
    """Limits the requests of the tenant per minute; a further one is answered 429."""
    tokens_per_minute: Rate | None = None
    """Limits the tokens of the tenant's prompts and answers per minute."""
    media_seconds_per_minute: Rate | None = None
    """Limits the length of the tenant's sounds and videos per minute; pictures have none."""


def _check_modality(name: str) -> str:
    if not REGISTRY.has_modality(name):
        raise ValueError(f"the modality {name!r} is unknown; known modalities are {', '.join(REGISTRY.modalities)}")
    return name


Modality = Annotated[str, AfterValidator(_check_modality)]


def _check_network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise ValueError(f"{text!r} is not a network in CIDR notation, such as 10.1.0.0/16: {error}") from error


HostPattern = Annotated[str, Field(pattern=r"^(\*|(\*\.)?[A-Za-z0-9_.:-]+)$", max_length=255)]


class FetchSection(Section):
    """Says which media the routers fetch that requests name by URL, and how much time and memory that may take. The
    defaults fetch from public addresses, by https alone."""

    enabled: bool = True
    """Says whether media are fetched. If not, a URL other than a `data:` URL is answered 400."""
    schemes: tuple[Literal["https", "http", "file"], ...] = default_of(FetchSettings, "schemes")
    """Lists the schemes that URLs may have; `file` needs a `file_root`."""
    allowed_hosts: tuple[HostPattern, ...] = default_of(FetchSettings, "allowed_hosts")
    """Lists the hosts that may be asked: a name, `*.example.com` for every name below it, or `*` for all."""
    denied_hosts: tuple[HostPattern, ...] = default_of(FetchSettings, "denied_hosts")
    """Lists hosts, in the same form, that may not be asked even if `allowed_hosts` names them."""
    allowed_networks: tuple[Annotated[str, AfterValidator(_check_network)], ...] = default_of(
        FetchSettings, "allowed_networks"
    )
    """Lists networks, such as `10.1.0.0/16`, from which media may be fetched although their addresses are private.
    Every client may then ask every host in them, on the allowed ports."""
    allowed_ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = default_of(FetchSettings, "allowed_ports")
    """Lists the ports that may be asked."""
    max_redirects: int = Field(default_of(FetchSettings, "max_redirects"), ge=0, le=20)
    """Limits the redirects of a URL; each is checked like the URL itself."""
    max_request_bytes: Bytes = default_of(FetchSettings, "max_request_bytes")
    """Limits what is fetched for one request; `media.max_bytes_per_item` limits each file."""
    connect_timeout_s: float = Field(default_of(FetchSettings, "connect_timeout_s"), gt=0)
    """Limits the time to find the address of a host, and to connect to it."""
    read_timeout_s: float = Field(default_of(FetchSettings, "read_timeout_s"), gt=0)
    """Limits the time in which a server sends nothing."""
    total_timeout_s: float = Field(default_of(FetchSettings, "total_timeout_s"), gt=0)
    """Limits the time of one fetch, redirects included."""
    wait_s: float = Field(default_of(FetchSettings, "wait_s"), gt=0)
    """Limits the wait for a place among the fetches, and for memory; after that the request is answered 429."""
    max_concurrent: int = Field(default_of(FetchSettings, "max_concurrent"), ge=1, le=1024)
    """Limits the fetches in progress of each router."""
    in_flight_bytes: Bytes = default_of(FetchSettings, "in_flight_bytes")
    """Limits the bytes that are being fetched for all requests of a router together."""
    cache_bytes: Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)] = default_of(FetchSettings, "cache_bytes")
    """Limits the fetched files that each router keeps for later requests, as their servers allow; 0 keeps none."""
    memory_bytes: Bytes = default_of(FetchSettings, "memory_bytes")
    """Limits the memory of the process that fetches, beside that of the files themselves."""
    file_root: Path | None = default_of(FetchSettings, "file_root")
    """Names the folder, on the machines of the routers, in which `file:` URLs must lie."""
    ca_file: Path | None = default_of(FetchSettings, "ca_file")
    """Names a file of certificates (PEM) that are trusted in addition to those of the system."""

    def summary(self) -> str:
        """Returns in words what may be fetched, for `weft check`."""
        if not self.enabled:
            return "media by URL: none are fetched"
        hosts = "any host" if "*" in self.allowed_hosts else ", ".join(self.allowed_hosts) or "no host"
        denied = f" except {', '.join(self.denied_hosts)}" if self.denied_hosts else ""
        networks = f" and in {', '.join(self.allowed_networks)}" if self.allowed_networks else ""
        root = f"; files under {self.file_root}" if self.file_root is not None else ""
        ports = ", ".join(map(str, self.allowed_ports))
        schemes = " and ".join(scheme for scheme in self.schemes if scheme != "file") or "nothing"
        return (
            f"media by URL: {schemes} from {hosts}{denied} with public addresses{networks}, on the ports {ports}{root}"
        )

    @model_validator(mode="after")
    def _check_root(self) -> FetchSection:
        if ("file" in self.schemes) != (self.file_root is not None):
            raise ValueError("file: URLs need both `file` in schemes and a file_root; set both, or neither")
        return self


class MediaSection(Section):
    """Says which media clients may send, how media are sampled where a request does not say, and what happens when
    encoding fails."""

    limit_mm_per_prompt: dict[Modality, Annotated[int, Field(ge=0)]] = {}
    """Limits the items of a modality in one request, where the limit is lower than the model's own; 0 refuses the
    modality."""
    sampling: Literal["fps", "uniform", "keyframe"] = default_of(MediaOptions, "sampling")
    """Chooses the frames of a video: `fps` takes them at a fixed rate, `uniform` spreads them evenly, and `keyframe`
    takes those at which the picture changes."""
    fps: float = Field(default_of(MediaOptions, "fps"), gt=0)
    """Sets the frames per second that the model sees of a video, for the sampling `fps`."""
    max_frames: int = Field(default_of(MediaOptions, "max_frames"), ge=1)
    """Limits the frames of a video that the model sees, where a request does not say."""
    max_video_tokens: int = Field(default_of(MediaOptions, "max_tokens"), ge=1)
    """Limits the tokens of all videos of a request together."""
    num_pooled_frames: int = Field(default_of(MediaOptions, "num_pooled_frames"), ge=1)
    """Averages this many temporal patches into one; 1 turns this off."""
    keep_fraction: float = Field(default_of(MediaOptions, "keep_fraction"), gt=0, le=1)
    """Keeps this fraction of the rows of a temporal patch, evenly spread."""
    max_bytes_per_item: Bytes = default_of(MediaLimits, "max_bytes_per_item")
    """Limits the file of one item. A request's body has a smaller limit of its own (`server.max_body_bytes`)."""
    max_image_pixels: int = Field(default_of(MediaLimits, "max_image_pixels"), ge=1)
    """Limits the width x height of a picture. The default is the number above which Pillow warns of a decompression
    bomb."""
    max_video_pixels: int = Field(default_of(MediaLimits, "max_video_pixels"), ge=1)
    """Limits the pixels of one frame."""
    max_video_seconds: float = Field(default_of(MediaLimits, "max_video_seconds"), gt=0)
    """Limits the length of a video."""
    max_video_frames: int = Field(default_of(MediaLimits, "max_video_frames"), ge=1)
    """Limits the frames of a video file, before any are chosen."""
    max_audio_seconds: float = Field(default_of(MediaLimits, "max_audio_seconds"), gt=0)
    """Limits the length of a sound, and of the sound track of a video that the model hears."""
    max_audio_bytes: Bytes = default_of(MediaLimits, "max_audio_bytes")
    """Limits the file of one sound."""
    max_decoded_bytes: Bytes = default_of(MediaLimits, "max_decoded_bytes")
    """Limits what all media of a request take together once they are decoded, as their headers say: 4 bytes for each
    pixel of a picture and for each sample of a channel of a sound. The default is one picture of the largest size."""
    probe_processes: int = Field(2, ge=0)
    """Sets the number of helper processes of each router. They read the headers of videos, of sounds, and of pictures
    whose first bytes do not contain the whole header. With 0, a thread of the router reads them."""
    probe_cpu_s: dict[Modality, Annotated[float, Field(gt=0)]] = {}
    """Limits the processor time for reading a header; the defaults are 1 s for a picture and 5 s for other media."""
    probe_timeout_s: float = Field(PROBE_LIMITS.timeout_s, gt=0)
    """Limits the wall-clock time for reading a header. The router takes a file that exceeds it as a sign that the
    machine is too busy (503)."""
    probe_memory_bytes: Bytes = PROBE_LIMITS.memory_bytes
    """Limits the memory of each of these helper processes."""
    fetch: FetchSection = FetchSection()
    """Says what is fetched of the media that requests name by URL."""
    on_encode_failure: Literal["error", "reduce", "text_only"] = default_of(RouterConfig, "on_encode_failure")
    """`error` fails the request. `reduce` encodes the medium once more with every other frame, or with half the sides,
    and fails the request if that fails too. `text_only` does the same, but then answers without the medium."""
    encode_timeout_ms: dict[Modality, Annotated[int, Field(ge=1)]] = {}
    """Limits the time for encoding an item, its wait at the encoder included; the defaults are 10 s for a picture, 20 s
    for a sound and 60 s for a video. An encoder that is too busy says so within this time, and the router tries another
    one."""


Seconds = Annotated[float, Field(gt=0)]


def _for_all(value: object) -> object:
    """Turns a single number into a mapping that gives every modality that number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return dict.fromkeys(REGISTRY.modalities, value) if is_number else value


class EncoderSection(Section):
    replicas: int = Field(1, ge=0)
    """Sets the number of encoders. With 0 the cluster takes text only."""
    modalities: tuple[Modality, ...] | None = Field(None, min_length=1)
    """Lists the modalities that each encoder loads; None means all that the model takes."""
    device: Device = "cpu"
    """Says where the encoders compute."""
    gpus_per_replica: float = Field(0, ge=0)
    """Sets the number of GPUs of each encoder."""
    arena_bytes: Bytes | None = None
    """Sets the size of each encoder's memory for features. With None, the encoders share 16 GB equally,
    or an eighth of the machine's memory if that is less."""
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
    decode_cpu_s: Annotated[dict[Modality, Seconds], BeforeValidator(_for_all)] = {}
    """Limits the processor time for decoding an item; an item that takes more is refused (400). The defaults are 8 s
    for a picture, 16 s for a sound and 48 s for a video; a single number applies to all modalities."""
    decode_timeout_s: Annotated[dict[Modality, Seconds], BeforeValidator(_for_all)] = {}
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


class SpeculationSection(Section):
    """Configures prompt lookup: workers guess tokens from a request's own text and check them in the same step. It
    changes no answer."""

    max_tokens: int = Field(default_of(Speculation, "max_tokens"), ge=0, le=64)
    """Limits the guesses per sequence and step; 0 turns prompt lookup off."""
    min_ngram: int = Field(default_of(Speculation, "min_ngram"), ge=1)
    """Sets the smallest number of last tokens for which prompt lookup searches an earlier copy in the text."""
    max_ngram: int = Field(default_of(Speculation, "max_ngram"), ge=1)
    """Sets the largest number of these tokens. Prompt lookup uses the longest copy that it finds."""

    @model_validator(mode="after")
    def _check_order(self) -> SpeculationSection:
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram is {self.min_ngram}, but it must be at most max_ngram, which is {self.max_ngram}"
            )
        return self


class WorkerSection(Section):
    replicas: int = Field(1, ge=1)
    """Sets the number of workers."""
    device: Device = "cpu"
    """Says where the workers compute."""
    tensor_parallel: int = Field(default_of(WorkerConfig, "num_ranks"), ge=1)
    """Sets the number of ranks of each replica; each rank is a process with a device of its own. The ranks share the
    layers and KV heads."""
    gpus_per_replica: float = Field(0, ge=0)
    """Sets the number of GPUs of each rank."""
    step_timeout_s: float = Field(60.0, gt=0)
    """Each rank of a replica waits this many seconds for the others in a step; then the replica counts as lost."""
    block_size: int = Field(default_of(WorkerConfig, "block_size"), ge=1)
    num_blocks: int = Field(default_of(WorkerConfig, "num_blocks"), ge=2)
    """Sets the number of KV blocks of each worker. Together they hold `num_blocks * block_size` tokens, which all
    requests of the worker share with the prefix cache."""
    max_step_tokens: int = Field(default_of(WorkerConfig, "max_step_tokens"), ge=1)
    media_chunk_tokens: int | None = Field(default_of(WorkerConfig, "media_chunk_tokens"), ge=0)
    """Limits the tokens of a step while the worker has a request without media, and for two seconds after, by limiting
    prompts with media that are not more urgent. With None, nine in ten steps of texts stay below it; 0 sets none."""
    max_sequences: int = Field(default_of(WorkerConfig, "max_sequences"), ge=1)
    prefix_cache: bool = default_of(WorkerConfig, "is_prefix_cache_enabled")
    """Says whether workers keep the KV blocks of earlier prompts and use them again for prompts that begin the same."""
    inbox_bytes: Bytes | None = None
    """Sets the size of each worker's memory for features. With None, the workers share 4 GB equally,
    or a sixteenth of the machine's memory if that is less."""
    keep_features: Literal["auto", "always", "never"] = default_of(WorkerConfig, "keep_features")
    """Says whether features stay in host memory after prefill; `auto` keeps those that were needed before."""
    kept_bytes: Bytes = default_of(WorkerConfig, "kept_bytes")
    pull_timeout_s: float = Field(default_of(WorkerConfig, "pull_timeout_s"), gt=0)
    """Limits the time in which a worker reads one feature from an encoder; after that it asks for the feature again."""
    unit_wait_s: float = Field(default_of(WorkerConfig, "unit_wait_s"), gt=0)
    """A worker waits this many seconds for a feature before it asks the router again."""
    speculation: SpeculationSection = SpeculationSection()
    cuda_graphs: Annotated[Literal["off", "auto"], Switch] = default_of(WorkerConfig, "cuda_graphs")
    """Says whether workers record decode steps as CUDA graphs, which needs a block size that is a multiple of 256
    tokens."""
    overlap: bool = default_of(WorkerConfig, "is_overlap_enabled")
    """Says whether a worker computes a prompt up to the first medium that is not encoded yet. If not, it begins with a
    request when all its media are encoded, and the inbox must have room for all of them; that is for comparisons."""
    step_delay_s: float = Field(default_of(WorkerConfig, "step_delay_s"), ge=0)
    """Makes every step take at least this long. It is for tests and benches, like `encoders.encode_delay_s`."""
    step_delay_s_per_token: float = Field(default_of(WorkerConfig, "step_delay_s_per_token"), ge=0)
    """Adds this to `step_delay_s` for each prompt token of a step; a token after a long context counts for more."""
    step_delay_s_per_decode: float = Field(default_of(WorkerConfig, "step_delay_s_per_decode"), ge=0)
    """Adds this to `step_delay_s` for each sequence that decodes in a step."""


class LimitsSection(Section):
    """Limits the parts of one request, so that no request costs more than another by its form alone. What passes a
    limit is answered 400 before any work. `media` limits the media themselves, and `weft check` prints all limits."""

    max_header_bytes: int = Field(64 * 2**10, ge=4096, le=2**20)
    """Limits the request line and the headers together."""
    max_messages: int = Field(default_of(RouterConfig, "max_messages"), ge=1)
    """Limits the messages of a request."""
    max_content_parts: int = Field(default_of(RouterConfig, "max_content_parts"), ge=1)
    """Limits the parts of the contents of all messages of a request together."""
    max_media_items: int = Field(default_of(RouterConfig, "max_media_items"), ge=1)
    """Limits the media of a request, of all modalities together."""
    max_stop_strings: int = Field(default_of(RouterConfig, "max_stop_strings"), ge=1)
    """Limits the strings of `stop`."""
    max_stop_chars: int = Field(default_of(RouterConfig, "max_stop_chars"), ge=1)
    """Limits the characters of each stop string."""
    max_stop_token_ids: int = Field(default_of(RouterConfig, "max_stop_token_ids"), ge=1)
    """Limits the ids of `stop_token_ids`."""
    max_grammar_bytes: Bytes = default_of(GrammarLimits, "max_bytes")
    """Limits the text of a JSON schema, of a regular expression, or of all choices together."""
    max_schema_depth: int = Field(default_of(GrammarLimits, "max_depth"), ge=1, le=128)
    """Limits how deep objects and arrays are nested in a JSON schema."""
    max_grammar_choices: int = Field(default_of(GrammarLimits, "max_choices"), ge=1)
    """Limits the strings of `guided_choice`."""
    max_grammar_symbols: int = Field(default_of(GrammarLimits, "max_symbols"), ge=1, le=500_000)
    """Limits the symbols of a compiled grammar; a short schema of unions within intersections may have very many."""
    max_lexer_fuel: int = Field(default_of(GrammarLimits, "max_lexer_fuel"), ge=1, le=1_000_000)
    """Limits the steps in which the regular expressions of a grammar are built."""
    grammar_timeout_s: float = Field(default_of(GrammarLimits, "compile_timeout_s"), gt=0)
    """Limits the time in which a grammar is compiled. The limits above make grammars refused sooner, and on every
    machine alike."""


LogLevel = Literal["debug", "info", "warning", "error"]


class LoggingSection(Section):
    level: LogLevel = "info"
    """Sets the level of Weft's own modules; libraries log from `warning` on."""
    levels: dict[str, LogLevel] = {}
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


class RaySection(Section):
    address: str | None = None
    """Names an existing Ray cluster; None starts one on this machine for as long as `weft serve` runs."""
    cluster_name: str = Field("weft", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Names this cluster on its Ray, where the Serve application and the directory carry this name. Each cluster needs
    its own name."""
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
    ray: RaySection = RaySection()
    logging: LoggingSection = LoggingSection()
    limits: LimitsSection = LimitsSection()
    access: AccessSection = AccessSection()
    tenants: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")], TenantSection] = Field(
        {}, max_length=256
    )
    """Names the parties that send requests; without any, no API key is asked for."""
    allow_shared_gpu: bool = False
    """Allows a `gpus_per_replica` that is not a whole number, so that encoders and workers share a GPU."""
    threads_per_replica: int = Field(1, ge=1)
    """Limits the threads with which each encoder and worker computes on a CPU."""

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
    def _check_devices(self) -> ClusterConfig:
        for name, section in (("encoders", self.encoders), ("workers", self.workers)):
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
