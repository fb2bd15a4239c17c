"""What the two calls carry: a prompt with its media to a worker, media to an encoder, and what comes back.

Calls go through Serve, or directly in one process; they are what draining counts and cancelling ends.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fabric.errors import ErrorInfo
from fabric.ids import MemberId, MmHash, RequestId, UnitKey
from fabric.wire import Wire

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
    options: str = ""
    """`MediaOptions` of the modalities, as JSON; empty for the defaults."""
    row_seconds: float = 0.0
    """Of a video: seconds between two temporal patches, where positions depend on it."""
    anchor: int = -1
    """Of a sound that is a video's track: the video's index. Both begin at the same position."""
    num_levels: int = 0
    """Of its features: the embedding's, and DeepStack's where the medium has some; 0 means as many as the model has."""
    decode_bytes: int = 0
    """Memory that decoding and preprocessing it takes at most, by its header; 0 if nobody knows."""

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
    priority: int = 0
    """The request's: the lowest number first."""
    time_left_s: float = 0.0
    """From the moment in which the encoder receives the call, for clocks differ between machines: items that are not
    done by then fail with MachineBusy. 0: no limit."""


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
    detail: dict[str, Any] = msgspec.field(default_factory=dict)


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
