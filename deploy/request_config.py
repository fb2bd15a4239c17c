"""Defines the sections of the cluster's configuration that say what clients may send, and who they are: keys, tenants,
media and limits.

The module knows nothing of files, or of how the limits are enforced.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from deploy.config_values import Bytes, Digest, LocalFile, Modality, Section, Size, default_of
from modalities.family import MediaOptions
from modalities.media import MediaLimits
from modalities.probing import ProbeLimits
from modalities.text import CompileLimits
from router.fetch import FetchSettings, host_pattern
from router.observe import TracingSettings
from router.router_config import GrammarLimits, RouterConfig, Tenant

PROBE_LIMITS = ProbeLimits()
HostPattern = Annotated[str, Field(pattern=r"^(\*|(\*\.)?[A-Za-z0-9_.:-]+)$", max_length=255)]


class AccessSection(Section):
    """Says where further API keys are, besides those under `tenants`, and how quotas per minute are counted."""

    keys_file: LocalFile | None = default_of(RouterConfig, "keys_file")
    """Names a file with one API key per line, as its digest, its tenant and its name; `weft key new` makes such a line.
    Routers read the file again within a second of a change. With a file, every request needs a key."""
    operator_key_digests: tuple[Digest, ...] = default_of(RouterConfig, "operator_digests")
    """Lists the SHA-256 digests of the keys that may read `/metrics` and `/weft`. The file may have such keys too."""
    allowed_hosts: tuple[HostPattern, ...] | None = default_of(RouterConfig, "allowed_hosts")
    """Lists the names under which a cluster without keys may be asked: a name, `*.example.com` for every name below it,
    or `*` for all. Addresses, `localhost` and the name of the machine are always allowed. With none, a cluster that
    listens on a loopback address allows no others, and every other cluster allows all."""
    allowed_origins: tuple[Annotated[str, Field(pattern=r"^(\*|[a-zA-Z][a-zA-Z0-9+.-]*://[^/\s]+)$")], ...] = (
        default_of(RouterConfig, "allowed_origins")
    )
    """Lists the sites, such as `https://chat.example.com`, whose pages may send requests and read the answers; `*`
    allows all. Pages of the cluster itself always may."""
    console: bool = default_of(RouterConfig, "has_console")
    """Says whether routers serve the console, a page for people, at `/console`. The page itself needs no key; what it
    shows of the cluster needs an operator's, if keys are asked for."""
    burst_s: float = Field(default_of(RouterConfig, "rate_burst_s"), ge=1, le=3600)
    """A quota per minute lets through what it gives in this many seconds at once. A smaller number spreads requests
    more evenly, and refuses more of them."""


class TracingSection(Section):
    """Says where the spans of requests go, as OpenTelemetry has them, and how many."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s]+(/\S*)?$")] | None = default_of(
        TracingSettings, "endpoint"
    )
    """Names the URL of a collector that takes OTLP over HTTP, such as `http://collector:4318/v1/traces`. None turns
    tracing off."""
    sample_ratio: float = Field(default_of(TracingSettings, "sample_ratio"), ge=0, le=1)
    """Sets the share of the requests that are sampled, for those that come without a client's `traceparent`."""
    follow_clients: bool = default_of(TracingSettings, "follows_clients")
    """Says whether a request with a client's `traceparent` is sampled exactly if the client samples it. If not,
    `sample_ratio` decides. Its spans belong to the client's trace in both cases."""
    max_requests_per_s: float = Field(default_of(TracingSettings, "max_requests_per_s"), gt=0)
    """Limits the sampled requests per second of each router, whatever clients ask for."""
    headers_file: LocalFile | None = None
    """Names a file with the headers that the collector asks for, one `name: value` per line, such as a key."""
    timeout_s: float = Field(default_of(TracingSettings, "timeout_s"), gt=0)
    """Limits the time of one call to the collector. Requests never wait for it."""


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


def _check_network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise ValueError(f"{text!r} is not a network in CIDR notation, such as 10.1.0.0/16: {error}") from error


MediaHost = Annotated[HostPattern, AfterValidator(host_pattern)]
Network = Annotated[str, AfterValidator(_check_network)]


class FetchSection(Section):
    """Says which media the routers fetch that requests name by URL, and how much time and memory that may take. The
    defaults fetch from public addresses, by https alone."""

    enabled: bool = True
    """Says whether media are fetched. If not, a URL other than a `data:` URL is answered 400."""
    schemes: tuple[Literal["https", "http", "file"], ...] = default_of(FetchSettings, "schemes")
    """Lists the schemes that URLs may have; `file` needs a `file_root`."""
    allowed_hosts: tuple[MediaHost, ...] = default_of(FetchSettings, "allowed_hosts")
    """Lists the hosts that may be asked: a name, `*.example.com` for every name below it, or `*` for all."""
    denied_hosts: tuple[MediaHost, ...] = default_of(FetchSettings, "denied_hosts")
    """Lists hosts, in the same form, that may not be asked even if `allowed_hosts` names them."""
    allowed_networks: tuple[Network, ...] = default_of(FetchSettings, "allowed_networks")
    """Lists networks, such as `10.1.0.0/16`, from which media may be fetched although their addresses are private.
    Every client may then ask every host in them, on the allowed ports."""
    denied_networks: tuple[Network, ...] = default_of(FetchSettings, "denied_networks")
    """Lists networks from which no media may be fetched although their addresses are public, such as your own, or the
    prefix that your network puts before IPv4 addresses (NAT64). They are denied even if `allowed_networks` names
    them."""
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
    """Limits the fetches in progress of each router. They are shared fairly: one tenant alone gets at most half of
    them. One host alone gets at most a third, or half where there are no API keys."""
    max_waiting: int = Field(default_of(FetchSettings, "max_waiting"), ge=1, le=65536)
    """Limits the fetches that wait for a place; a further one is answered 429. One tenant alone may have half of
    them."""
    in_flight_bytes: Bytes = default_of(FetchSettings, "in_flight_bytes")
    """Limits the bytes that are being fetched for all requests of a router together."""
    cache_bytes: Size = default_of(FetchSettings, "cache_bytes")
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
        networks += f" but not in {', '.join(self.denied_networks)}" if self.denied_networks else ""
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

    limit_mm_per_prompt: dict[Modality, Annotated[int, Field(ge=0)]] = Field({})
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
    image_embeds: bool = default_of(RouterConfig, "takes_image_embeds")
    """Says whether clients may send the features of a picture, computed elsewhere, in place of the picture. They go to
    the language model as they are, so a client can show it what no picture shows; turn this on for clients that you
    trust. `max_bytes_per_item` limits them."""
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
    named_media_bytes: Size = default_of(RouterConfig, "named_media_bytes")
    """Keeps the media to which clients gave a `uuid`, in each router, so that later requests may send the `uuid` alone;
    0 keeps none. Names and books count too. The tenant that has most is the first whose media are forgotten, beginning
    with what was not used for longest."""
    probe_processes: int = Field(2, ge=0)
    """Sets the number of helper processes of each router. They read the headers of videos, of sounds, and of pictures
    whose first bytes do not contain the whole header. With 0, a thread of the router reads them."""
    probe_cpu_s: dict[Modality, Annotated[float, Field(gt=0)]] = Field({})
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
    encode_timeout_ms: dict[Modality, Annotated[int, Field(ge=1)]] = Field({})
    """Limits the time for encoding an item, its wait at the encoder included; the defaults are 10 s for a picture, 20 s
    for a sound and 60 s for a video. An encoder that is too busy says so within this time, and the router tries another
    one."""


class LimitsSection(Section):
    """Limits the parts of one request, so that no request costs more than another by its form alone. What passes a
    limit is answered 400 before any work. `media` limits the media themselves, and `weft check` prints all limits."""

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
    max_prompt_logprobs: int = Field(default_of(RouterConfig, "max_prompt_logprobs"), ge=1)
    """Limits the log-probabilities of the prompts in one answer (`prompt_logprobs`, and `logprobs` with `echo`): the
    tokens of the prompts, times the alternatives of each and one more, times the choices."""
    max_grammar_bytes: Bytes = default_of(GrammarLimits, "max_bytes")
    """Limits the text of a JSON schema, of a regular expression, or of all choices together."""
    max_schema_depth: int = Field(default_of(GrammarLimits, "max_depth"), ge=1, le=128)
    """Limits how deep objects and arrays are nested in a JSON schema."""
    max_grammar_choices: int = Field(default_of(GrammarLimits, "max_choices"), ge=1)
    """Limits the strings of `guided_choice`."""
    max_grammar_symbols: int = Field(default_of(CompileLimits, "max_symbols"), ge=1, le=500_000)
    """Limits the symbols of a compiled grammar; a short schema of unions within intersections may have very many."""
    max_lexer_fuel: int = Field(default_of(CompileLimits, "max_lexer_fuel"), ge=1, le=1_000_000)
    """Limits the steps in which the regular expressions of a grammar are built."""
    max_lexer_states: int = Field(default_of(CompileLimits, "max_lexer_states"), ge=1000, le=1_000_000)
    """Limits the states of a grammar's lexer at a worker, each of which takes 1 to 2 kB. They are made while tokens are
    drawn; an answer that needs more ends with an error."""
    max_lexer_steps: int = Field(default_of(CompileLimits, "max_lexer_steps"), ge=100_000, le=100_000_000)
    """Limits the steps in which a grammar's lexer is built and extended. A step takes up to 16 bytes of memory at a
    worker. A grammar that takes more is refused, and an answer that needs more ends with an error."""
    max_pattern_bytes: Bytes = default_of(GrammarLimits, "max_pattern_bytes")
    """Limits each regular expression, also each `pattern` of a schema; all of a schema, or of all tools, together may
    have four times as many. Compiling one takes time and memory that grow with the square of its length."""
    grammar_timeout_s: float = Field(default_of(GrammarLimits, "compile_timeout_s"), gt=0)
    """Limits the time in which a grammar is compiled. The limits above make grammars refused sooner, and on every
    machine alike."""
