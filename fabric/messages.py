"""What travels between parts, as msgspec structs. Shapes and units are part of the contract.

Two planes carry them. *Calls* (`fabric.calls`, named here too): `EncodeRequest`/`EncodeResult`,
`GenerateRequest`/`GenerateResult`. *Messages* (fabric.plane, one way, by address): everything in `PlaneMessage`,
members' reports among them (`fabric.reports`).
"""

from __future__ import annotations

import msgspec

from fabric.calls import (
    ChoiceResult,
    Destination,
    EncodeRequest,
    EncodeResult,
    GenerateRequest,
    GenerateResult,
    ItemResult,
    MediaItem,
    PlaceholderRange,
    SamplingParams,
    StageTimes,
    StopConditions,
    TraceEvent,
)
from fabric.errors import ProtocolError
from fabric.ids import BlockHash, MemberId, MmHash, RequestId, SequenceId, UnitKey
from fabric.reports import EncodeCost, EncoderReport, WorkerReport
from fabric.wire import PlaneWire, Wire

# ---------------------------------------------------------------- membership


class Member(Wire, frozen=True):
    """One process of the cluster, as the directory knows it."""

    member_id: MemberId
    kind: str
    """`router`, `encoder` or `worker`."""
    address: str
    """Of its plane endpoint."""
    host: str
    """Machine (or process, in one-process mode): the link class between two members follows from it."""
    epoch: int
    """Raised at each start; events of older epochs are void."""
    modalities: tuple[str, ...] = ()
    """What an encoder has loaded."""
    transfer_agent: str = ""
    """Name of the member's transfer agent (`FeatureTicket.source`), if it has one."""
    pid: int = 0
    """Of its process on `host`, for people."""


# ---------------------------------------------------------------- message plane


class TokenLogprobs(Wire, frozen=True):
    """Natural logarithms, of the model's distribution before penalties, bias, temperature and truncation."""

    logprob: float
    """Of the drawn token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the most probable tokens, in descending order."""


class TokenFrame(Wire, frozen=True):
    """New tokens of one choice. The router drops duplicates by `first_index` and frames of old attempts."""

    request_id: RequestId
    attempt: int
    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, if they are wanted."""


class TokenFrames(PlaneWire, frozen=True):
    """Worker -> router: everything one engine step made for one router."""

    worker_id: MemberId
    frames: tuple[TokenFrame, ...]


class RouterHeartbeat(PlaneWire, frozen=True):
    """Router -> worker, encoder. Its lease: when it expires, that router's requests are aborted.
    The first one also subscribes the router to reports and events."""

    router_id: MemberId
    address: str
    lease_s: float


class FeatureTicket(Wire, frozen=True):
    """Where a unit's feature lies and how to read it. Payload is C-contiguous `(num_levels, num_tokens, hidden)`."""

    source: str
    """Name of the source's transfer agent."""
    metadata: bytes
    """The agent's connection metadata."""
    address: int
    """Of the payload, in the source's registered memory; the 8-byte generation word lies at `generation_address`."""
    generation_address: int
    nbytes: int
    generation: int
    shape: tuple[int, int, int]
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    lease_s: float
    """Seconds, from receipt, for which the source promises to hold the slot unless released."""


class UnitReady(PlaneWire, frozen=True):
    """Encoder -> worker: this unit can be pulled. Kept by the worker if the request is not there yet."""

    encoder_id: MemberId
    encoder_address: str
    request_id: RequestId
    attempt: int
    unit: UnitKey
    ticket: FeatureTicket


class UnitRelease(PlaneWire, frozen=True):
    """Worker -> encoder: this worker holds nothing of the slot any more for that request (pulled, or not needed)."""

    worker_id: MemberId
    request_id: RequestId
    attempt: int
    unit: UnitKey
    generation: int


class FeatureNeeded(PlaneWire, frozen=True):
    """Worker -> router: these units are needed after all. The router dispatches their encoding (again)."""

    worker_id: MemberId
    request_id: RequestId
    attempt: int
    units: tuple[UnitKey, ...]
    reason: str
    """`not_covered` (evicted since the plan), `preempted`, `lease_lost`, `transfer_failed` or `lost` (nothing was heard
    of them for long; perhaps they are only slow)."""


class AbortAttempt(PlaneWire, frozen=True):
    """Router -> worker, encoder: stop working on this attempt. Unknown or ended attempts are ignored.
    `choices` empty means all of it."""

    request_id: RequestId
    attempt: int
    choices: tuple[int, ...] = ()


class BlocksStored(Wire, frozen=True, tag="stored"):
    """Blocks that became findable, in chain order; the first one's parent is `parent` (None at the root)."""

    parent: BlockHash | None
    hashes: tuple[BlockHash, ...]


class BlocksRemoved(Wire, frozen=True, tag="removed"):
    hashes: tuple[BlockHash, ...]


class BlocksCleared(Wire, frozen=True, tag="cleared"):
    pass


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared


class KvEvents(PlaneWire, frozen=True):
    """Worker -> router. `first_seq` numbers the first event; numbers are consecutive within an epoch. A gap, or
    an unknown epoch, makes the router ask for a snapshot."""

    worker_id: MemberId
    epoch: int
    first_seq: int
    events: tuple[KvEvent, ...]


class SnapshotRequest(PlaneWire, frozen=True):
    """Router -> worker, encoder: send what you hold."""

    router_id: MemberId
    address: str


class KvSnapshot(PlaneWire, frozen=True):
    """Worker -> router: every findable block, parents before children, as of event `last_seq`.
    Later events apply on top, earlier ones are dropped."""

    worker_id: MemberId
    epoch: int
    last_seq: int
    chains: tuple[BlocksStored, ...]


class FeatureEvents(PlaneWire, frozen=True):
    """Encoder -> router: items whose features are fully cached there (`stored`) or no more (`removed`).
    With `is_snapshot`, `stored` is everything and `first_seq` the number of the last event it contains."""

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
    """Raises ProtocolError for what is not a PlaneMessage (msgspec checks every field's type)."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a plane message: {error}") from error


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[PlaneMessage] = msgspec.msgpack.Decoder(PlaneMessage)

__all__ = [
    "AbortAttempt",
    "BlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "ChoiceResult",
    "Destination",
    "EncodeCost",
    "EncodeRequest",
    "EncodeResult",
    "EncoderReport",
    "FeatureEvents",
    "FeatureNeeded",
    "FeatureTicket",
    "GenerateRequest",
    "GenerateResult",
    "ItemResult",
    "KvEvent",
    "KvEvents",
    "KvSnapshot",
    "MediaItem",
    "Member",
    "PlaceholderRange",
    "PlaneMessage",
    "PlaneWire",
    "RouterHeartbeat",
    "SamplingParams",
    "SequenceId",
    "SnapshotRequest",
    "StageTimes",
    "StopConditions",
    "TokenFrame",
    "TokenFrames",
    "TokenLogprobs",
    "TraceEvent",
    "UnitReady",
    "UnitRelease",
    "Wire",
    "WorkerReport",
    "decode_message",
    "encode_message",
]
