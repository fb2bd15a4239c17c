"""Defines the messages that members send each other one way on the message plane, as msgspec structs. Shapes and units
are part of the contract.

The module begins with the reports of workers and encoders to routers, sent several times a second and on change. A
router keeps the newest report; times are in seconds, memory is in bytes, and `seq` only grows within one `epoch`, the
member's life. `Member` is the record of a process in the directory. Then come the other messages: tokens, heartbeats,
tickets and announcements of features, aborts, and the events of caches with their snapshots. `PlaneMessage` names
everything that may travel alone, and `encode_message` and `decode_message` are its wire form. The calls, which wait for
an answer, are in `fabric.contracts.calls`.

This module knows nothing of what a receiver does with a message, or of how a message travels
(`fabric.transport.message_plane`).
"""

from __future__ import annotations

import msgspec

from fabric.contracts.calls import (
    PlaneWire,
    Wire,
)
from fabric.contracts.errors import ProtocolError
from fabric.contracts.identity import AttemptId, BlockHash, MemberId, MmHash, RequestId, UnitKey


class WorkerReport(PlaneWire, frozen=True):
    """The worker sends this to routers, several times a second and on change. The fields are gauges; `seq` only
    grows."""

    worker_id: MemberId
    epoch: int
    seq: int
    acknowledged: tuple[AttemptId, ...]
    """Lists the attempts that the numbers already contain; the router stops adding them locally."""
    num_running: int
    """Counts the sequences that have begun, including those at their doorstep."""
    num_waiting: int
    """Counts the sequences that have not begun; they hold no blocks."""
    num_at_doorstep: int
    """Counts the sequences that can't continue until the feature of their next placeholder arrives."""
    queued_tokens: int
    """Counts the admitted tokens that could be computed now and are not yet. It leaves out the tokens behind a missing
    feature, those of choices that take over a sibling's, and the next token of a sequence that decodes."""
    num_decoding: int
    """Counts the sequences of which only the next token is to be computed."""
    kv_blocks_used: int
    """Counts the blocks that a sequence references; cached free blocks do not count."""
    kv_blocks_total: int
    """Counts the KV blocks of the worker."""
    inbox_bytes_used: int
    """Counts the bytes of the inbox that hold features or wait for a transfer to end."""
    inbox_bytes_total: int
    """Holds the size of the inbox."""
    num_features: int
    """Counts the features that lie in the inbox."""
    num_quarantined: int
    """Counts the slots of the inbox whose transfer did not end. They stay unused, because bytes of a frozen encoder may
    still arrive there."""
    steps: int
    """Counts the steps that were computed."""
    tokens_generated: int
    """Counts the generated tokens."""
    prompt_tokens_computed: int
    """Counts the computed prompt tokens; tokens that are computed again after a preemption count again."""
    prefix_hit_tokens: int
    """Counts the prompt tokens that were found in the prefix cache."""
    prefix_query_tokens: int
    """Counts the prompt tokens of all sequences that have begun, which is what `prefix_hit_tokens` is a part of."""
    num_preemptions: int
    """Counts the sequences that had to give up their blocks to a sequence of higher rank and begin again."""
    prefill_s_per_token: float
    """Holds the seconds per weighted token, measured at boot and corrected online; it is 0 until known."""
    step_overhead_s: float
    """Holds the time of a step that does not depend on its tokens, measured at boot and corrected online."""
    kept_bytes_used: int = 0
    """Counts the bytes of host memory that hold features which were kept after prefill."""
    num_kept_hits: int = 0
    """Counts the features that were kept and used again, so that no encoder had to send them."""
    drafts_proposed: int = 0
    """Counts the tokens that were guessed and computed; `drafts_accepted` counts those of them that were right."""
    drafts_accepted: int = 0
    """Counts the guessed tokens that were right and were sent."""
    queued_flat_tokens: float = 0.0
    """Counts `queued_tokens`, weighted by their contexts (`fabric.contracts.learned_cost`)."""
    decode_s_per_sequence: float = 0.0
    """Holds the time that a decoding sequence adds to a step. A step takes `step_overhead_s`, this time for each
    decoding sequence, and `prefill_s_per_token` for each weighted token of the other sequences."""
    residence_s: float = 0.0
    """Holds the time from a sequence's first step to its end, as recently measured; it is 0 until a sequence has
    ended."""
    max_step_tokens: int = 0
    """Holds the limit of tokens in one step; 0 means unknown."""
    max_sequences: int = 0
    """Holds the limit of sequences in one step; 0 means unknown."""
    is_lost: bool = False
    """This says that the engine has died: the worker ends its requests and takes no more."""


class EncodeCost(Wire, frozen=True):
    """Holds what a forward pass over one modality takes: `overhead_s + seconds_per_cost * cost`."""

    modality: str
    seconds_per_cost: float
    overhead_s: float


class EncoderReport(PlaneWire, frozen=True):
    """The encoder sends this to routers. Costs are in patches, or in mel frames for sounds. A field that is called a
    sum only grows."""

    encoder_id: MemberId
    epoch: int
    seq: int
    acknowledged: tuple[AttemptId, ...]
    num_queued: int
    """Counts the units that are not yet in a forward pass."""
    queued_cost: int
    """Sums the cost of the units that are not yet in a forward pass."""
    num_encoding: int
    """Counts the units in the present forward pass."""
    arena_bytes_used: int
    """Counts the bytes that are leased or being written; `arena_bytes_cached` counts the cached bytes that may be
    evicted."""
    arena_bytes_cached: int
    """Counts the bytes of complete features without a lease, which may be evicted."""
    arena_bytes_total: int
    """Holds the size of the arena."""
    num_leases: int
    """Counts the leases under which workers read features."""
    items_encoded: int
    """Counts the items that were encoded."""
    batches: int
    """Counts the forward passes."""
    cache_hits: int
    """Counts the items whose features were still in the arena, so that nothing had to be encoded."""
    encode_s_per_cost: float
    """Holds the seconds per unit of cost over all modalities, measured at boot and corrected online; it is 0 until
    known."""
    batch_overhead_s: float
    """Holds the time of a forward pass that does not depend on its cost, over all modalities."""
    costs: tuple[EncodeCost, ...] = ()
    """Holds the same costs for each modality."""
    num_items_queued: int = 0
    """Counts the items whose last unit is not in the forward pass."""
    queued_s: float = 0.0
    """Predicts the time that `queued_cost` adds to forward passes."""
    num_items_pending: int = 0
    """Counts the items of open calls that have no result."""
    num_in_flight: int = 0
    """Counts the items that are being decoded, are decoded, or are in the forward pass."""
    max_in_flight: int = 0
    """Limits how many items may be in decoding, or decoded and waiting for the forward pass; items in the forward pass
    come in addition."""
    num_decoding: int = 0
    """Counts the items that are being decoded."""
    busy_fraction: float = 0.0
    """Holds the fraction of the last second or so in which a forward pass was running."""
    num_features_encoding: int = 0
    """Counts the features that are being written."""
    num_features_cached: int = 0
    """Counts the features that are complete and have no lease."""
    num_features_staged: int = 0
    """Counts the features that are leased to a worker."""
    arena_bytes_encoding: int = 0
    """Counts the part of `arena_bytes_used` that is being written."""
    items_received: int = 0
    """Counts the items that routers asked for; a content that occurs several times in one call counts once. This field
    is a running sum since the start, and so are all fields below."""
    items_failed: int = 0
    """Counts the items that failed or were refused, once for each call that asked for them."""
    items_decoded: int = 0
    """Counts the items that were decoded."""
    decode_s: float = 0.0
    """Sums the time of decoding files to pixels or samples."""
    forward_s: float = 0.0
    """Sums the time of forward passes."""
    batch_units: int = 0
    """Counts the units in `batches`."""
    batch_cost: int = 0
    """Sums the cost of `batches`."""
    transfers: int = 0
    """Counts the units that a worker has read and then released."""
    transfer_s: float = 0.0
    """Sums the time from the announcement of units to their release by the worker."""
    cache_hit_bytes: int = 0
    """Counts the bytes of the features that were still in the arena when an item asked for them."""
    evictions: int = 0
    """Counts the cached features that were evicted to make room."""
    evicted_bytes: int = 0
    """Counts the bytes of the cached features that were evicted."""
    preprocess_s: float = 0.0
    """Sums the time from pixels or samples to what the encoder takes as input."""


# ---------------------------------------------------------------- membership


class Member(Wire, frozen=True):
    """A `Member` is one process of the cluster, as the directory knows it."""

    member_id: MemberId
    kind: str
    """Takes one of the values `router`, `encoder` and `worker`."""
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


# ---------------------------------------------------------------- message plane


class TokenLogprobs(Wire, frozen=True):
    """Holds natural logarithms of the model's distribution before penalties, bias, temperature and truncation."""

    logprob: float
    """Holds the log-probability of the drawn token."""
    top: tuple[tuple[int, float], ...] = ()
    """Holds (token id, log-probability) of the most probable tokens, in descending order."""


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


class FeatureTicket(Wire, frozen=True):
    """A `FeatureTicket` says where a unit's feature lies and how to read it. The payload is C-contiguous and has shape
    `(num_levels, num_tokens, hidden)`."""

    source: str
    """Names the source's transfer agent."""
    metadata: bytes
    """Holds the agent's connection metadata."""
    address: int
    """Holds the address of the payload in the source's registered memory; the 8-byte generation word lies at
    `generation_address`."""
    generation_address: int
    nbytes: int
    generation: int
    shape: tuple[int, int, int]
    dtype: str
    """Takes one of the values `float32`, `bfloat16` and `float16`."""
    lease_s: float
    """The source promises to hold the slot for this many seconds from receipt, unless it is released."""


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


class BlocksStored(Wire, frozen=True, tag="stored"):
    """Lists blocks that became findable, in chain order. The first one's parent is `parent` (None at the root)."""

    parent: BlockHash | None
    hashes: tuple[BlockHash, ...]


class BlocksRemoved(Wire, frozen=True, tag="removed"):
    hashes: tuple[BlockHash, ...]


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
    """The worker sends this to the router: every findable block, parents before children, as of event `last_seq`. Later
    events apply on top of it; earlier ones are dropped."""

    worker_id: MemberId
    epoch: int
    last_seq: int
    chains: tuple[BlocksStored, ...]


class FeatureEvents(PlaneWire, frozen=True):
    """The encoder sends this to the router: the items whose features are fully cached there (`stored`) or are no longer
    (`removed`). With `is_snapshot`, `stored` is everything, and `first_seq` is the number of the last event that it
    contains."""

    encoder_id: MemberId
    epoch: int
    first_seq: int
    stored: tuple[MmHash, ...] = ()
    removed: tuple[MmHash, ...] = ()
    is_snapshot: bool = False


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


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[PlaneMessage] = msgspec.msgpack.Decoder(PlaneMessage)
