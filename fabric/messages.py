"""What travels between parts, as msgspec structs. Shapes and units are part of the contract.

Two planes carry them. *Calls* (through Serve, or directly in one process): `EncodeRequest`/`EncodeResult`,
`GenerateRequest`/`GenerateResult`. *Messages* (fabric.plane, one way, by address): everything in `PlaneMessage`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fabric.errors import ErrorInfo
from fabric.ids import AttemptId, BlockHash, MemberId, MmHash, RequestId, SequenceId, UnitKey


class Wire(msgspec.Struct, frozen=True, array_like=True):
    """A struct on the wire: immutable and positional, so fields are only ever appended."""


class PlaneWire(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A struct that travels alone on the message plane: tagged with its class name."""


# ---------------------------------------------------------------- media and prompts


class MediaItem(Wire, frozen=True):
    """One medium of a request, as planned from its header. The plan is a contract: what the encoder delivers
    has exactly `sum(unit_tokens)` rows."""

    index: int
    """Position among the request's media, from 0."""
    modality: str
    mm_hash: MmHash
    grid: tuple[int, int, int]
    """Patches (t, h, w) after preprocessing, before merging."""
    unit_tokens: tuple[int, ...]
    """Rows of features in each unit; an image is one unit."""
    cost: int
    """Encoding cost in patches, the batcher's unit of budget."""
    part: str
    """Where it stood in the client's request, e.g. `messages.0.content.1`, for errors."""

    @property
    def num_tokens(self) -> int:
        return sum(self.unit_tokens)

    def unit_keys(self) -> list[UnitKey]:
        return [UnitKey(self.mm_hash, unit) for unit in range(len(self.unit_tokens))]


class PlaceholderRange(Wire, frozen=True):
    """A run of prompt positions that takes rows `[row, row + length)` of one unit's features.

    One unit may be spread over several runs (time stamps between frames, sound interleaved with pictures).
    """

    offset: int
    length: int
    item: int
    """`MediaItem.index`."""
    unit: int
    row: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class SamplingParams(Wire, frozen=True):
    """How the next token is drawn. `temperature == 0` is greedy; `top_k == 0` and `top_p == 1` are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    """Always set by the router (drawn there when the client gave none), so that a migration draws the same."""
    min_p: float = 0.0
    """Tokens less probable than `min_p` times the most probable one are left out; 0 is off."""
    repetition_penalty: float = 1.0
    """Over prompt and output: positive logits are divided by it, others multiplied; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once for a token of the output."""
    frequency_penalty: float = 0.0
    """Subtracted for each time a token stands in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit), ids distinct."""
    num_top_logprobs: int | None = None
    """Log-probabilities are wanted: the drawn token's and those of so many most probable ones. None: not wanted."""

    grammar: str = ""
    """What the output has to match, in llguidance's notation; empty: anything."""

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class StopConditions(Wire, frozen=True):
    """When a choice ends. Stop strings are the router's (it has the text); the engine stops on ids and counts."""

    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0


# ---------------------------------------------------------------- calls


class Destination(Wire, frozen=True):
    """A worker as an encoder sees it: where to announce units."""

    worker_id: MemberId
    address: str


class EncodeRequest(Wire, frozen=True):
    """Router -> encoder: encode these items for that worker. The media bytes travel beside it, one per item."""

    request_id: RequestId
    attempt: int
    router_id: MemberId
    items: tuple[MediaItem, ...]
    destination: Destination
    age: tuple[float, str]
    """Age order over all requests (wall time of admission, request id): the oldest may evict the youngest."""


class StageTimes(Wire, frozen=True):
    """Seconds that one item spent in each stage of the encoder, for the cost model and the trace."""

    queue_s: float = 0.0
    decode_s: float = 0.0
    preprocess_s: float = 0.0
    encode_s: float = 0.0
    batch_items: int = 0
    batch_cost: int = 0
    is_cache_hit: bool = False


class ItemResult(Wire, frozen=True):
    index: int
    times: StageTimes
    error: ErrorInfo | None = None


class TraceEvent(Wire, frozen=True):
    """Something that happened to a request. `at_s` is CLOCK_MONOTONIC of the member's host."""

    at_s: float
    member_id: MemberId
    name: str
    """One of: planned, dispatched, received, admitted, prefill, unit_encoded, unit_announced, unit_landed,
    unit_reused, feature_needed, first_token, finished, aborted, preempted."""
    detail: dict[str, Any] = {}


class EncodeResult(Wire, frozen=True):
    """Encoder -> router, once every item was announced or has failed."""

    encoder_id: MemberId
    items: tuple[ItemResult, ...]
    trace: tuple[TraceEvent, ...] = ()


class GenerateRequest(Wire, frozen=True):
    """Router -> worker. The call stays open until the terminal event; cancelling it is the abort."""

    request_id: RequestId
    attempt: int
    router_id: MemberId
    router_address: str
    """Where token frames and `FeatureNeeded` go (message plane)."""
    token_ids: tuple[int, ...]
    """The prompt with placeholders expanded: one id per position."""
    placeholders: tuple[PlaceholderRange, ...]
    """Sorted by offset, disjoint."""
    media: tuple[MediaItem, ...]
    sampling: SamplingParams
    stop: StopConditions
    age: tuple[float, str]
    num_choices: int = 1
    cache_salt: str = ""
    priority: int = 0
    dispatched_items: tuple[int, ...] = ()
    """Indexes of the media that were sent to encoders. The rest is expected to be covered by cached KV."""
    emitted: tuple[tuple[int, ...], ...] = ()
    """Per choice, the tokens a former attempt already sent (migration); empty at the first attempt."""
    side_names: tuple[str, ...] = ()
    """Side tensors that blocks must carry for every position (rows of a hidden layer, for speech)."""


class ChoiceResult(Wire, frozen=True):
    choice: int
    finish_reason: str
    """`stop`, `length` or `abort`."""
    num_tokens: int
    """Generated tokens over all attempts, the end-of-sequence token included when one was drawn."""


class GenerateResult(Wire, frozen=True):
    """Worker -> router: the one terminal event of an attempt."""

    worker_id: MemberId
    choices: tuple[ChoiceResult, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose KV was found in the prefix cache at admission."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    """Seconds of engine steps that computed prompt tokens of this request."""
    held_s: float = 0.0
    """Seconds that the request stood at its doorstep, waiting for a feature."""
    first_token_s: float = 0.0
    """From receipt to first token."""
    trace: tuple[TraceEvent, ...] = ()
    error: ErrorInfo | None = None


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
    """`not_covered` (evicted since the plan), `preempted`, `lease_lost` or `transfer_failed`."""


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


class WorkerReport(PlaneWire, frozen=True):
    """Worker -> router, several times a second and on change. Gauges; `seq` only grows."""

    worker_id: MemberId
    epoch: int
    seq: int
    acknowledged: tuple[AttemptId, ...]
    """Attempts that these numbers already contain: the router stops adding them locally."""
    num_running: int
    num_waiting: int
    num_at_doorstep: int
    queued_tokens: int
    """Prompt tokens admitted and not yet computed."""
    num_decoding: int
    kv_blocks_used: int
    """Blocks referenced by a sequence; cached free blocks do not count."""
    kv_blocks_total: int
    inbox_bytes_used: int
    inbox_bytes_total: int
    num_features: int
    num_quarantined: int
    steps: int
    tokens_generated: int
    prompt_tokens_computed: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    num_preemptions: int
    prefill_s_per_token: float
    """Measured at boot and corrected online; 0 until known."""
    step_overhead_s: float
    kept_bytes_used: int = 0
    """Of host memory, by features that were kept after prefill."""
    num_kept_hits: int = 0
    """Features that were kept and used again, so that nobody had to send them."""


class EncoderReport(PlaneWire, frozen=True):
    """Encoder -> router. `queued_cost` in patches."""

    encoder_id: MemberId
    epoch: int
    seq: int
    acknowledged: tuple[AttemptId, ...]
    num_queued: int
    queued_cost: int
    num_encoding: int
    arena_bytes_used: int
    """Leased or being written; cached bytes that may be evicted are `arena_bytes_cached`."""
    arena_bytes_cached: int
    arena_bytes_total: int
    num_leases: int
    items_encoded: int
    batches: int
    cache_hits: int
    encode_s_per_cost: float
    """Measured at boot and corrected online; 0 until known."""
    batch_overhead_s: float


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
    from fabric.errors import ProtocolError

    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a plane message: {error}") from error


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[PlaneMessage] = msgspec.msgpack.Decoder(PlaneMessage)

__all__ = [
    name for name, value in list(globals().items()) if isinstance(value, type) and issubclass(value, msgspec.Struct)
]
__all__ += ["KvEvent", "PlaneMessage", "SequenceId", "decode_message", "encode_message"]
