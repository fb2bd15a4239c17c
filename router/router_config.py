"""Holds the router's settings: limits, budgets and periods. This module reads them from nowhere; `deploy` fills them
in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from modalities.family import DEFAULT_OPTIONS, MediaOptions
from modalities.media import MediaLimits
from modalities.text import CompileLimits
from router.observe import TracingSettings
from router.planning import PlannerSettings

MIB = 2**20
Policy = Literal["error", "reduce", "text_only"]
"""Names what happens to a request with a medium that can't be encoded; see `router.run.failures`."""
ServiceClass = Literal["interactive", "batch"]
"""Names how urgent a request is: `interactive` goes first, and `batch` uses capacity that others leave."""
MODALITY_TO_ENCODE_TIMEOUT_MS = {"image": 10_000, "audio": 20_000, "video": 60_000}
OTHER_ENCODE_TIMEOUT_MS = 60_000


DEFAULT_COMPILING = CompileLimits()


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits what a request may ask for as structured output. A grammar of these sizes compiles in less than half a
    second on one core, however it is made."""

    max_bytes: int = 64 * 1024
    """Limits the text of a schema, of a regular expression, or of all choices together."""
    max_depth: int = 64
    """Limits the nesting of objects and arrays in the schema's own JSON."""
    max_choices: int = 1024
    compiling: CompileLimits = DEFAULT_COMPILING
    """Limits the sizes of the compiled grammar; the limits of workers must be the same."""
    compile_timeout_s: float = 5.0
    """Limits the wall-clock time of compiling a grammar."""
    max_pattern_bytes: int = 1024
    """Limits each regular expression, also those in schemas. Compiling one takes time and memory that grow with the
    square of its length: at worst 0.04 s and 12 MB at 1 KiB, and two minutes at 64 KiB."""


@dataclass(frozen=True, slots=True)
class RateQuota:
    """A `RateQuota` says what an API key or a tenant may use per minute, in all routers together. None sets no
    limit."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """Counts the tokens of prompts, cached ones included, and those of answers."""
    media_seconds_per_minute: float | None = None
    """Counts the length of sounds and videos; a picture has none."""

    @property
    def is_unlimited(self) -> bool:
        return (
            self.requests_per_minute is None
            and self.tokens_per_minute is None
            and self.media_seconds_per_minute is None
        )


NO_RATES = RateQuota()


@dataclass(frozen=True, slots=True)
class Tenant:
    """A `Tenant` is a party that sends requests, with its share of the cluster and its budgets in each router. A budget
    of None is that of the router."""

    name: str = "anonymous"
    key_digests: tuple[str, ...] = ()
    """Holds the SHA-256 digests of the tenant's API keys, as hexadecimal digits. A tenant without keys sends the
    requests that carry none."""
    weight: float = 1.0
    """A tenant with twice the weight gets twice the service while both wait."""
    service_class: ServiceClass = "interactive"
    """Says how urgent the tenant's requests are. `batch` holds for all of them; otherwise a request may choose."""
    ttft_deadline_ms: int | None = None
    """Applies to requests that state no deadline of their own for their first token."""
    max_in_flight: int | None = None
    """Limits the requests in flight in all routers together; each of N routers takes one part in N, at least 1."""
    max_bodies_bytes: int | None = None
    max_prompt_tokens: int | None = None
    cache_salt: str = ""
    """Keeps the tenant's caches apart from those of others; it precedes the salt of a request. Tenants with the same
    salt share their caches."""
    rates: RateQuota = NO_RATES


ANONYMOUS = Tenant()
"""Sends all requests of a cluster that is configured without tenants."""


@dataclass(frozen=True, slots=True)
class SpeechSettings:
    """Says how a cluster speaks whose config has stages behind the thinker."""

    voices: tuple[str, ...]
    """Lists the model's voices in lower case."""
    sample_rate: int
    num_stages: int = 2
    """Counts the stages behind the thinker."""
    talker_rows: str = ""
    """Names the side tensor (`GenerateRequest.side_names`) whose rows the next stage needs."""
    needs_all_rows: bool = False
    """Says whether the next stage needs the rows of all positions, those of generated tokens included, or of a prompt's
    media alone."""

    @property
    def default_voice(self) -> str:
        return self.voices[0]


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """A `RouterConfig` is frozen; each router process has one."""

    model_name: str
    """This is the name of the model that clients ask for."""
    capacity_wait_s: float
    """Limits how long a request waits in all for workers, and for encoders of its media, that are not there."""
    block_size: int
    """This is the number of tokens per KV block of a worker whose record does not say its own (`Member.kv_scheme`).
    Weft's workers say it, so pools may have blocks of different sizes; the router finds no prefix at one that does
    not."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Maps the name of each LoRA adapter, for which clients ask as for a model, to the path or URL of its files."""
    system_fingerprint: str = ""
    """Names the version of Weft and of the model in answers; it is left out if it is empty."""
    version: str = ""
    """Is the version of Weft, for operators; it is empty if it is not known."""
    embeddings: Literal["off", "last", "mean"] = "off"
    """Says of which of the last hidden states the embeddings of prompts are made; `off` serves none."""
    tool_format: str = "auto"
    """Names the format in which the model writes calls of tools (`modalities.answers`)."""
    transcription_prompt: str = "Write down what is said in this recording, and nothing else."
    """Is what the model is asked for a transcript."""
    reads_reasoning: bool = True
    """Says whether answers tell the model's reasoning apart from the text."""
    feature_itemsize: int = 4
    """This is the size in bytes of one number of a feature, for the planner's estimate of transfers."""
    feature_dtype: str = "float32"
    """Names the dtype of features, to which those that clients send are converted."""
    takes_image_embeds: bool = False
    """Says whether clients may send the features of pictures (`image_embeds`)."""
    max_body_bytes: int = 32 * MIB
    max_bodies_bytes: int = 1024 * MIB
    """Limits the bytes of the bodies (and of the media cut from them) of all requests in flight together, and of large
    answers that their clients have not taken."""
    max_in_flight: int = 256
    max_prompt_tokens: int = 8 * MIB
    """Limits the prompt tokens of all requests in flight together."""
    tenants: tuple[Tenant, ...] = ()
    """Lists the tenants; without any, all requests are those of one anonymous tenant, and no key is asked for."""
    keys_file: Path | None = None
    """Names a file with further API keys, which is read again when it changes; with one, every request needs a key."""
    operator_digests: tuple[str, ...] = ()
    """Holds the SHA-256 digests of the keys that may read metrics and the records of all requests."""
    allowed_hosts: tuple[str, ...] | None = None
    """Lists the names under which a cluster without keys may be asked, besides addresses and `localhost`; None allows
    all names."""
    allowed_origins: tuple[str, ...] = ()
    """Lists the sites whose pages may send requests and read the answers, besides the cluster's own."""
    rate_burst_s: float = 60.0
    """A quota per minute lets through what it gives in this time at once."""
    batch_wait_s: float = 60.0
    """A request of the class `batch` that has waited this long counts as interactive."""
    tokens_per_encoder_second: float = 10_000.0
    """A second of an encoder costs a tenant as much as this many tokens of a worker."""
    max_num_choices: int = 8
    min_priority: int = -(2**31)
    """Limits how urgent a request may be: a request with a lower number is always served first."""
    max_stop_strings: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 64
    max_media_items: int = 64
    max_messages: int = 4096
    max_content_parts: int = 4096
    """Limits the parts of the contents of all messages of a request together, texts included."""
    grammar: GrammarLimits = field(default_factory=GrammarLimits)
    media_limits: MediaLimits = field(default_factory=MediaLimits)
    max_items_per_prompt: Mapping[str, int] = field(default_factory=dict)
    """Maps a modality to the most items of a request, where that is less than what the family takes; 0 refuses the
    modality."""
    video_options: MediaOptions = DEFAULT_OPTIONS
    """Says how videos are sampled where a request does not say; `max_tokens` limits all videos of a request
    together."""
    named_media_bytes: int = 256 * MIB
    """Limits the media that a router keeps because clients gave them a name (`uuid`)."""
    answer_tokens: int = 512
    """Videos leave this many tokens of the context for an answer of no stated length, at most an eighth of the
    context."""
    on_encode_failure: Policy = "error"
    """Applies to requests that do not name a policy."""
    encode_timeout_ms: Mapping[str, int] = field(default_factory=lambda: dict(MODALITY_TO_ENCODE_TIMEOUT_MS))
    """Maps a modality to the time that the encoding of an item may take, including its wait at the encoder. The items
    of a call share the sum of their times. The limit travels with the call; an encoder that is too busy reports so
    before the time is over."""
    encode_grace_s: float = 5.0
    """The answer of an encoder may come this much later than the encoding time allows, because the media must first
    travel to the encoder. After that the router considers the encoder silent."""
    heartbeat_s: float = 0.5
    lease_s: float = 5.0
    dispatch_timeout_s: float = 600.0
    """Limits one attempt, from dispatch to its terminal event."""
    max_attempts: int = 3
    max_encodes_per_item: int = 8
    """Limits the encodings of one item within one attempt: evictions and lost encoders may require more than one.
    Refusals by busy encoders are counted separately, up to the same number."""
    leave_grace_s: float = 30.0
    """Requests on a worker that is being stopped may take this much longer; then they move to another worker."""
    exclusion_s: float = 7.0
    """The router plans nothing onto a member for this long after the member was gone or lost. The time is longer than
    the directory takes to notice."""
    gap_timeout_s: float = 2.0
    """Token frames may arrive this much later than the terminal event; if they do not, a new attempt is made."""
    settle_timeout_s: float = 2.0
    """A worker may take this long to answer an abort with its terminal event."""
    write_timeout_s: float = 120.0
    """The router treats a reader that takes nothing for this long as gone."""
    min_answer_bytes_per_s: int = 16 * 1024
    """A whole answer may take `write_timeout_s`, and longer by the time that this rate allows for its size."""
    max_prompt_logprobs: int = 2**17
    """Limits the log-probabilities of the prompts in one answer, each of which has 70 to 80 bytes there."""
    retry_after_s: float = 1.0
    """This is the value of Retry-After when the error does not name one."""
    planner: PlannerSettings = field(default_factory=PlannerSettings)
    costs_file: Path | None = None
    """The router keeps the costs that it has learned in this file; with None it forgets them when it stops."""
    cluster_name: str = "weft"
    """Tells the series of several clusters apart where one Prometheus finds them."""
    metrics_port: int = 0
    """Names the port of the scrape endpoint of each node; with 0, nodes have none."""
    kind_to_expected: Mapping[str, int] = field(default_factory=dict)
    """Maps each kind of members to the number that the config asks for."""
    shows_members: bool = True
    """Says whether the router's metrics contain the series of workers and encoders. In a large cluster each member
    shows its own."""
    has_console: bool = True
    """Says whether the router serves the console, a page for people."""
    speech: SpeechSettings | None = None
    """Is None for a cluster that gives no speech."""
    tracing: TracingSettings = field(default_factory=TracingSettings)
    max_traces: int = 256
    max_trace_events: int = 512

    @property
    def model_names(self) -> tuple[str, ...]:
        """Returns the names for which clients may ask: that of the model, and those of its adapters."""
        return (self.model_name, *self.adapters)

    def adapter_of(self, name: str) -> str:
        """Returns the adapter for which a request asks by the name of a model, or an empty text for the model
        itself."""
        return name if name in self.adapters else ""

    def encode_timeout_s(self, modality: str) -> float:
        return self.encode_timeout_ms.get(modality, OTHER_ENCODE_TIMEOUT_MS) / 1000
