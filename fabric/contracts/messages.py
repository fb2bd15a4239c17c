"""Defines the messages that members send each other one way on the message plane, as msgspec structs. Shapes and units
are part of the contract.

`Member` is the record of a process in the directory. Then come the messages: tokens, heartbeats, tickets and
announcements of features (with the dtypes in which features travel), aborts, and the events of caches with their
snapshots. `PlaneMessage` names everything that may travel alone, which includes the reports of
`fabric.contracts.member_reports`, and `encode_message` and `decode_message` are its wire form. Messages to one receiver
may travel together, as `encode_bundle` and `decode_bundle` do it. The calls, which wait for an answer, are in
`fabric.contracts.calls`.

This module knows nothing of what a receiver does with a message, or of how a message travels
(`fabric.transport.message_plane`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, TypeAlias

import msgspec

from fabric.contracts.calls import PlaneWire, TokenLogprobs, Wire
from fabric.contracts.errors import ProtocolError
from fabric.contracts.identity import BlockHash, KvScheme, MemberId, MmHash, RequestId, UnitKey
from fabric.contracts.member_reports import EncoderReport, WorkerReport
from fabric.contracts.stage_calls import StageFrames, StageReport

# ---------------------------------------------------------------- membership


class MemberPlace(Wire, frozen=True):
    """A `MemberPlace` says what a member runs on, and what that is connected to."""

    hardware: str = ""
    """Names the device on which the member computes; members of one kind on equal devices cost about the same. It is
    empty for routers, which compute nothing."""
    nvlink_domain: str = ""
    """Names the group of devices, joined by NVLink, in whose memory the member keeps features. It is empty if features
    lie in host memory, or if no NVLink leaves the device."""
    rdma_fabric: str = ""
    """Names the InfiniBand or RoCE fabric that the member's transfer agent can use; it is empty if there is none."""
    labels: tuple[tuple[str, str], ...] = ()
    """Holds the labels of the member's node, sorted by name."""


class MemberStage(Wire, frozen=True):
    """A `MemberStage` says which stage of a pipeline a member runs, and how the stage before it reaches it."""

    stage_id: int
    model_stage: str
    """Names what the stage computes, for example `talker`."""
    connector_to_inbox: tuple[tuple[str, str], ...] = ()
    """Holds the member's inbox in each connector that it listens on."""
    max_num_seqs: int = 1
    """Counts the requests that the stage computes in one batch."""


EMBEDDINGS, SPEECH, ADAPTERS = "embeddings", "speech", "adapters"
"""Name what some workers can do for a request and others can't (`Member.lacks`)."""


class Member(Wire, frozen=True):
    """A `Member` is one process of the cluster, as the directory knows it."""

    member_id: MemberId
    kind: str
    """Takes one of the values `router`, `encoder`, `worker` and `stage` (a stage behind the thinker)."""
    address: str
    """Names the member's plane endpoint."""
    host: str
    """Names the machine (or the process, in one-process mode); the link class between two members follows from it."""
    epoch: int
    """It grows at each start; events of older epochs are void."""
    modalities: tuple[str, ...] = ()
    """Lists the modalities that an encoder has loaded."""
    transfer_agent: str = ""
    """Names the member's transfer agent (`FeatureTicket.source`); it is empty if the member has none."""
    pid: int = 0
    """Holds the id of the member's process on `host`, for human readers."""

    @property
    def machine(self) -> str:
        """Returns the machine on which the member runs: `host` without the process."""
        return self.host.partition("/")[0]

    kv_scheme: KvScheme | None = None
    """Says how a worker hashes its KV blocks; it is None for other members. The router knows nothing of the prefixes of
    a worker that does not say it."""
    place: MemberPlace = MemberPlace()
    """Together with `host`, it says which class the links between two members have."""
    http_address: str = ""
    """Names the host and port at which the member answers `GET /metrics` with its own series; it is empty if the member
    does not, as in one-process mode."""
    config_flaw: str = ""
    """Says why the member refused the last change of its config, of which nothing is in force; it is empty if the
    member refused none."""
    stage: MemberStage | None = None
    """Is set for members of the kind `stage`."""
    pool: str = ""
    """Names the pool of a worker; it is empty for other members."""
    engine: str = ""
    """Names the engine with which a worker computes, `weft` or `vllm`; it is empty for other members."""
    lacks: tuple[str, ...] = ()
    """Lists what a worker can't do for a request, of `EMBEDDINGS`, `SPEECH` and `ADAPTERS`."""
    max_context_tokens: int = 0
    """Limits the tokens of a sequence on a worker where workers of another pool take longer ones; 0 means that none
    do."""


# ---------------------------------------------------------------- message plane


class TokenFrame(Wire, frozen=True):
    """Holds new tokens of one choice. The router drops duplicates by `first_index`, and frames of old attempts."""

    request_id: RequestId
    attempt: int
    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Holds one entry per token, if the request wants log-probabilities."""


class TokenFrames(PlaneWire, frozen=True):
    """The worker sends this to the router: everything that one engine step made for one router."""

    worker_id: MemberId
    frames: tuple[TokenFrame, ...]


class RouterHeartbeat(PlaneWire, frozen=True):
    """The router sends this to workers and encoders as its lease: when it expires, they abort that router's requests.
    The first heartbeat also subscribes the router to reports and events."""

    router_id: MemberId
    address: str
    lease_s: float
    report_spacing_s: float = 0.0
    """The router asks for reports and events of a cache at most this often."""
    taken_epoch: int = 0
    taken_seq: int = 0
    """The router has taken in the receiver's report with this number; 0 stands for none. The receiver stops repeating
    what that report acknowledged."""


DTYPE_TO_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
"""Maps the name of each dtype in which models compute and features travel to the bytes of one value. A feature of
another dtype is refused. A dtype is a name here, because messages and configs carry names, and because numpy has no
bfloat16; `modalities.torch_dtypes` maps it to torch's dtype."""


MemoryKind: TypeAlias = Literal["DRAM", "VRAM"]
"""Says whether memory belongs to the host or to a device; the names are those of NIXL."""


class FeatureTicket(Wire, frozen=True):
    """A `FeatureTicket` says where a unit's feature lies and how to read it. The payload is C-contiguous and has shape
    `(num_levels, num_tokens, hidden)`."""

    source: str
    """Names the source's transfer agent."""
    metadata: bytes
    """Holds the agent's connection metadata."""
    address: int
    """Holds the address of the payload in the source's registered memory; the 8-byte generation word lies at
    `generation_address`, always in the host's memory."""
    generation_address: int
    nbytes: int
    generation: int
    shape: tuple[int, int, int]
    dtype: str
    """Names a dtype of `DTYPE_TO_BYTES`."""
    lease_s: float
    """The source promises to hold the slot for this many seconds from receipt, unless it is released."""
    memory_kind: MemoryKind = "DRAM"
    """Says in which kind of memory the payload lies."""
    device_id: int = 0
    """Numbers the payload's device among those that the source's process sees."""


def feature_nbytes(shape: tuple[int, int, int], dtype: str) -> int:
    """Returns the bytes of a C-contiguous feature of shape `(num_levels, num_tokens, hidden_size)`. Raises ValueError
    for an unknown dtype or a dimension below one."""
    if dtype not in DTYPE_TO_BYTES or min(shape) < 1:
        known = ", ".join(DTYPE_TO_BYTES)
        raise ValueError(
            f"a feature can't have shape {shape} and dtype {dtype!r}; sizes start at 1, dtypes are {known}"
        )
    return math.prod(shape) * DTYPE_TO_BYTES[dtype]


class UnitReady(PlaneWire, frozen=True):
    """The encoder sends this to the worker: the unit can be pulled. The worker keeps the message if the request is not
    there yet."""

    encoder_id: MemberId
    encoder_address: str
    request_id: RequestId
    attempt: int
    unit: UnitKey
    ticket: FeatureTicket


class UnitRelease(PlaneWire, frozen=True):
    """The worker sends this to the encoder: for that request, the worker holds nothing of the slot any more (it has
    pulled the unit, or does not need it)."""

    worker_id: MemberId
    request_id: RequestId
    attempt: int
    unit: UnitKey
    generation: int


class FeatureNeeded(PlaneWire, frozen=True):
    """The worker sends this to the router: these units are needed after all. The router dispatches their encoding
    (again)."""

    worker_id: MemberId
    request_id: RequestId
    attempt: int
    units: tuple[UnitKey, ...]
    reason: str
    """This is `not_covered` (evicted since the plan), `preempted`, `lease_lost`, `transfer_failed` or `lost` (no
    message about the units came for long; perhaps they are only slow)."""


class AbortAttempt(PlaneWire, frozen=True):
    """The router sends this to workers and encoders: stop working on this attempt. Unknown or ended attempts are
    ignored. If `choices` is empty, all choices are meant."""

    request_id: RequestId
    attempt: int
    choices: tuple[int, ...] = ()


ANCHOR_STRIDE = 4
"""An index that saves memory keeps one block of this many: the last of each group, counted from the root."""


class BlocksStored(Wire, frozen=True, tag="stored"):
    """Lists blocks that became findable, in chain order. The first one's parent is `parent` (None at the root)."""

    parent: BlockHash | None
    hashes: bytes
    """Holds the blocks' hashes side by side (`split_hashes`)."""
    depth: int = 0
    """Counts the blocks ahead of the first one in its chain; it is 0 at the root."""
    anchor: BlockHash | None = None
    """This is the deepest block ahead of the first one that ends a group of `ANCHOR_STRIDE` blocks, or None if there is
    no such block."""


class BlocksRemoved(Wire, frozen=True, tag="removed"):
    """Lists blocks that can no longer be found."""

    hashes: bytes
    """Holds the blocks' hashes side by side."""


class BlocksCleared(Wire, frozen=True, tag="cleared"):
    pass


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared


class KvEvents(PlaneWire, frozen=True):
    """The worker sends this to the router. `first_seq` numbers the first event; numbers are consecutive within an
    epoch. A gap, or an unknown epoch, makes the router ask for a snapshot."""

    worker_id: MemberId
    epoch: int
    first_seq: int
    events: tuple[KvEvent, ...]


class SnapshotRequest(PlaneWire, frozen=True):
    """The router sends this to a worker or encoder, to ask for everything that it holds."""

    router_id: MemberId
    address: str


class KvSnapshot(PlaneWire, frozen=True):
    """The worker sends this to the router: a page of a snapshot. The pages of a snapshot list every findable block as
    of event `last_seq`, parents before children. Later events apply on top of it; earlier ones are dropped."""

    worker_id: MemberId
    epoch: int
    last_seq: int
    chains: tuple[BlocksStored, ...]
    page: int = 0
    """This is the number of the page, from 0. Pages arrive in this order; a router that misses one asks for another
    snapshot."""
    is_last: bool = True


class FeatureEvents(PlaneWire, frozen=True):
    """The encoder sends this to the router, and so does a worker that keeps features after prefill: the items whose
    features are fully cached there (`stored`) or are no longer (`removed`). With `is_snapshot`, `stored` is everything,
    and `first_seq` is the number of the last event that it contains."""

    encoder_id: MemberId
    """Names the encoder, or the worker."""
    epoch: int
    first_seq: int
    stored: tuple[MmHash, ...] = ()
    removed: tuple[MmHash, ...] = ()
    is_snapshot: bool = False


class MetricsQuestion(PlaneWire, frozen=True):
    """A router sends this to another router: it asks for that router's own series."""

    router_id: MemberId
    address: str
    number: int
    """Holds the number of the question, which the reply repeats."""


class MetricsReply(PlaneWire, frozen=True):
    """A router sends this to the router that has sent a `MetricsQuestion`."""

    router_id: MemberId
    number: int
    text: bytes
    """Holds the series in Prometheus text format."""


class DispatchNews(Wire, frozen=True):
    """A `DispatchNews` is what an attempt of another router puts on its worker."""

    request_id: RequestId
    attempt: int
    worker_id: MemberId
    age_s: float
    """Holds the time from the dispatch to the sending of the news."""
    weighted_tokens: float
    num_blocks: int
    scheme: KvScheme | None = None
    marks: tuple[bytes, ...] = ()
    """Holds the hashes of every eighth block of the prompt in the worker's scheme."""
    awaited: tuple[tuple[float, float], ...] = ()
    """Holds the part of the weighted tokens that waits for features: in how many seconds the features should have
    landed, and how many tokens can be computed then, in order of time."""


class EncodingNews(Wire, frozen=True):
    """An `EncodingNews` is what an attempt of another router puts on an encoder."""

    request_id: RequestId
    attempt: int
    encoder_id: MemberId
    age_s: float
    seconds: float
    """Sums the predicted forward passes."""
    decode_s: float
    priority: int = 0
    features: tuple[tuple[MmHash, float], ...] = ()
    """Holds the features that the encoder makes, each with the seconds until it should be complete."""
    num_units: int = 1
    """Counts the units of these features."""


class ComputedNews(Wire, frozen=True):
    """A `ComputedNews` says that the prompt of an attempt was computed, as its first token came."""

    request_id: RequestId
    attempt: int
    age_s: float


class EncodedNews(Wire, frozen=True):
    """An `EncodedNews` says that an encoder has ended its work on an attempt."""

    request_id: RequestId
    attempt: int
    encoder_id: MemberId
    age_s: float


class RouterNews(PlaneWire, frozen=True):
    """A router sends this to the other routers: what it dispatched, and what of it has left the queues of members.
    Numbers are consecutive, from 1; a receiver that misses one forgets the sender's attempts."""

    router_id: MemberId
    seq: int
    dispatched: tuple[DispatchNews, ...] = ()
    encodings: tuple[EncodingNews, ...] = ()
    computed: tuple[ComputedNews, ...] = ()
    encoded: tuple[EncodedNews, ...] = ()
    ended: tuple[tuple[RequestId, int], ...] = ()
    """Lists the attempts that have ended, each with its request."""


class TraceQuestion(PlaneWire, frozen=True):
    """A router sends this to another router: it asks for the record of one of that router's requests, or, if
    `request_id` is empty, for summaries of its latest requests."""

    router_id: MemberId
    address: str
    number: int
    """Holds the number of the question, which the reply repeats."""
    request_id: RequestId
    limit: int = 0
    """Limits the number of summaries."""
    outcome: str = ""
    """If it is not empty, only requests with this outcome are wanted."""
    modality: str = ""
    """If it is not empty, only requests of this modality class are wanted."""


class TraceReply(PlaneWire, frozen=True):
    """A router sends this to the router that has sent a `TraceQuestion`."""

    router_id: MemberId
    number: int
    records: bytes
    """Holds a JSON array of objects; it is empty if the router has no record of what was asked."""


PlaneMessage = (
    TokenFrames
    | RouterHeartbeat
    | UnitReady
    | UnitRelease
    | FeatureNeeded
    | AbortAttempt
    | KvEvents
    | SnapshotRequest
    | KvSnapshot
    | FeatureEvents
    | WorkerReport
    | EncoderReport
    | MetricsQuestion
    | MetricsReply
    | RouterNews
    | TraceQuestion
    | TraceReply
    | StageFrames
    | StageReport
)


def encode_message(message: PlaneMessage) -> bytes:
    return _ENCODER.encode(message)


def decode_message(data: bytes) -> PlaneMessage:
    """Returns the message. Raises ProtocolError for data that is not a PlaneMessage (msgspec checks every field's
    type)."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the data is not a message of the message plane: {error}") from error


class MessageBundle(PlaneWire, frozen=True):
    """A `MessageBundle` holds messages that travel together, in the order in which they were sent. Each arrival costs a
    receiver the work of waking up, so a receiver of many small messages is spared most of it."""

    messages: tuple[PlaneMessage, ...]


def encode_bundle(encoded: Sequence[bytes]) -> bytes:
    """Returns the wire form of messages that travel together; each of them is encoded already. A single message travels
    as it is."""
    if len(encoded) == 1:
        return encoded[0]
    return _ENCODER.encode((MessageBundle.__name__, [msgspec.Raw(each) for each in encoded]))


def decode_bundle(data: bytes) -> tuple[PlaneMessage, ...]:
    """Returns the messages that have arrived together. Raises ProtocolError if one of them is not a PlaneMessage."""
    try:
        arrived = _ARRIVAL_DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the data is not a message of the message plane: {error}") from error
    return arrived.messages if isinstance(arrived, MessageBundle) else (arrived,)


_ENCODER = msgspec.msgpack.Encoder()
_ARRIVAL_DECODER: msgspec.msgpack.Decoder[PlaneMessage | MessageBundle] = msgspec.msgpack.Decoder(
    PlaneMessage | MessageBundle
)
_DECODER: msgspec.msgpack.Decoder[PlaneMessage] = msgspec.msgpack.Decoder(PlaneMessage)
