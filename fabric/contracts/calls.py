"""Defines what the two calls carry, as msgspec structs: a prompt with its media to a worker, media to an encoder, and
the results.

`Wire` and `PlaneWire` say how every struct of the contracts looks on the wire: immutable and positional, so fields are
only ever appended. They stand here because the calls are the lowest module that needs them; `messages` builds on both.
Then come a request's media, its sampling options and what it may want of its prompt, and then the calls themselves.

Calls go through Ray Serve, or directly in one process. Draining counts open calls, and cancelling ends them. This
module knows nothing of how a call is served.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fabric.contracts.errors import ErrorInfo
from fabric.contracts.identity import MemberId, MmHash, RequestId, UnitKey


class Wire(msgspec.Struct, frozen=True, array_like=True):
    """A `Wire` is a struct on the wire. It is immutable and positional, so fields are only ever appended."""


class PlaneWire(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A `PlaneWire` is a struct that travels alone on the message plane; it is tagged with its class name."""


# ---------------------------------------------------------------- media and prompts


class MediaItem(Wire, frozen=True):
    """A `MediaItem` is one medium of a request, as the router planned it from its header. The plan is a contract: the
    encoder delivers exactly `sum(unit_tokens)` rows."""

    index: int
    """Holds the position among the request's media, from 0."""
    modality: str
    mm_hash: MmHash
    grid: tuple[int, int, int]
    """Counts the patches (t, h, w) after preprocessing and before merging."""
    unit_tokens: tuple[int, ...]
    """Counts the rows of features in each unit; an image is one unit."""
    cost: int
    """Holds the encoding cost in patches (mel frames for a sound), the unit of the batcher's budget."""
    part: str
    """Names the place of the medium in the client's request, e.g. `messages.0.content.1`, for errors."""
    options: str = ""
    """Holds the `MediaOptions` of the package `modalities`, as JSON; it is empty for the defaults."""
    row_seconds: float = 0.0
    """For a video, this is the number of seconds between two temporal patches, where positions depend on it."""
    anchor: int = -1
    """For a sound that is the track of a video, this is the index of the video. Both begin at the same position."""
    num_levels: int = 0
    """Counts the levels of the medium's features: that of the embedding, and those of DeepStack where the medium has
    some; 0 means as many as the model has."""
    decode_bytes: int = 0
    """Holds the most bytes of memory that decoding and preprocessing the medium can take, as estimated from its header;
    0 means unknown."""
    is_given: bool = False
    """Says that the client has sent the features themselves. The bytes of the medium are then those of its one feature,
    as an encoder would store it, and no forward pass is needed."""

    @property
    def num_tokens(self) -> int:
        return sum(self.unit_tokens)

    @property
    def work(self) -> str:
        """Returns the kind of work that the medium is for an encoder: its modality, or a kind of its own for given
        features. Only work of one kind shares a forward pass, and each kind has its own costs."""
        return f"given {self.modality}" if self.is_given else self.modality

    def unit_keys(self) -> list[UnitKey]:
        return [UnitKey(self.mm_hash, unit) for unit in range(len(self.unit_tokens))]


class PlaceholderRange(Wire, frozen=True):
    """A `PlaceholderRange` is a run of prompt positions that takes the rows `[row, row + length)` of one unit's
    features.

    One unit may be spread over several runs (time stamps between frames, sound interleaved with pictures).
    """

    offset: int
    length: int
    item: int
    """Holds the `MediaItem.index`."""
    unit: int
    row: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class SamplingParams(Wire, frozen=True):
    """Says how the next token is drawn. `temperature == 0` is greedy; `top_k == 0` and `top_p == 1` are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    """The router always sets it (it draws one when the client gave none), so that a migration draws the same tokens."""
    min_p: float = 0.0
    """Tokens less probable than `min_p` times the most probable one are left out; 0 is off."""
    repetition_penalty: float = 1.0
    """It applies to prompt and output: positive logits are divided by it, and others are multiplied by it; 1 is off."""
    presence_penalty: float = 0.0
    """It is subtracted once from the logit of a token that occurs in the output."""
    frequency_penalty: float = 0.0
    """It is subtracted from a token's logit once for each time that the token occurs in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Holds pairs (token id, value added to its logit) with distinct ids."""
    num_top_logprobs: int | None = None
    """If set, the request wants log-probabilities: that of the drawn token, and those of this many most probable
    tokens. None means that it wants none."""

    grammar: str = ""
    """The output must match this grammar, in llguidance's notation; an empty grammar allows any output."""
    is_seed_given: bool = False
    """Says that the client has sent the seed. An engine whose draws do not follow from (seed, choice, index) ignores a
    seed that the router has drawn."""

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class StopConditions(Wire, frozen=True):
    """Says when a choice ends. The router handles stop strings, because it has the text; the engine stops on ids and
    counts."""

    max_tokens: int
    """Limits the generated tokens. 0 means that the prompt is computed and nothing is generated, which only a request
    with `PromptOutputs` may ask for."""
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0


# ---------------------------------------------------------------- what a prompt gives

POOLINGS = ("", "last", "mean")
"""Lists the values of `PromptOutputs.pooling`."""


class PromptOutputs(Wire, frozen=True):
    """Says what a request wants of its prompt in addition to generated tokens; by default it wants nothing."""

    pooling: str = ""
    """Says which of the last hidden states (after the final norm, as the LM head sees them) make the embedding of the
    prompt: `last` is that of the last token, `mean` the mean over all tokens, and an empty text means that no embedding
    is wanted. A request with a pooling generates nothing."""
    is_normalised: bool = True
    """Says that the embedding is divided by its Euclidean norm."""
    num_top_logprobs: int | None = None
    """If set, the request wants the log-probabilities of the prompt's tokens, and those of this many most probable
    tokens at each position. None means that it wants none."""

    @property
    def is_empty(self) -> bool:
        """Returns whether the request wants nothing of its prompt."""
        return not self.pooling and self.num_top_logprobs is None

    @property
    def needs_all_positions(self) -> bool:
        """Returns whether a worker must compute every position of the prompt. Such a request can't use blocks of the
        prefix cache, because these have no hidden states."""
        return self.pooling == "mean" or self.num_top_logprobs is not None


class TokenLogprobs(Wire, frozen=True):
    """Holds natural logarithms of the model's distribution before penalties, bias, temperature and truncation."""

    logprob: float
    """Holds the log-probability of the drawn token, or of the prompt's token."""
    top: tuple[tuple[int, float], ...] = ()
    """Holds (token id, log-probability) of the most probable tokens, in descending order."""


class PromptToken(NamedTuple):
    """Holds the scores of one token of a prompt."""

    token_id: int
    rank: int
    """Is 1 plus the number of tokens that are more probable at this position."""
    logprobs: TokenLogprobs


class PromptLogprobs(Wire, frozen=True):
    """Holds the log-probabilities of a prompt's tokens, except for the first one, which nothing predicts. Row i belongs
    to the token at position i + 1. The arrays are packed, because a long prompt would give millions of objects."""

    num_top: int
    """Counts the most probable tokens of each row."""
    token_ids: bytes
    """Holds int32 values, little-endian, with shape `(num_prompt_tokens - 1, 1 + num_top)`: the prompt's token, then
    the most probable tokens in descending order, the lowest id first among equals."""
    logprobs: bytes
    """Holds their log-probabilities, which are float32 and have the same shape."""
    ranks: bytes
    """Holds the ranks of the prompt's tokens as int32, with shape `(num_prompt_tokens - 1,)`."""

    def tokens(self) -> Iterator[PromptToken]:
        """Yields the scores of the tokens at positions 1, 2 and so on. They are made one by one, because a long prompt
        has so many that collecting garbage among them would stop the process for a while."""
        token_ids = np.frombuffer(self.token_ids, "<i4").reshape(-1, 1 + self.num_top)
        logprobs = np.frombuffer(self.logprobs, "<f4").reshape(-1, 1 + self.num_top)
        ranks = np.frombuffer(self.ranks, "<i4").tolist()
        for row, rank in enumerate(ranks):
            ids, values = token_ids[row].tolist(), logprobs[row].tolist()
            yield PromptToken(ids[0], rank, TokenLogprobs(values[0], tuple(zip(ids[1:], values[1:], strict=True))))


# ---------------------------------------------------------------- calls


class Destination(Wire, frozen=True):
    """A `Destination` is a worker as an encoder sees it: the place where it announces units."""

    worker_id: MemberId
    address: str


class EncodeRequest(Wire, frozen=True):
    """The router sends this to an encoder, to encode `items` for the worker `destination`. The media bytes travel next
    to it, one file per item."""

    request_id: RequestId
    attempt: int
    router_id: MemberId
    items: tuple[MediaItem, ...]
    destination: Destination
    age: tuple[float, str]
    """Orders all requests by age (wall time of admission, request id): the oldest may evict the youngest."""
    priority: int = 0
    """Holds the request's priority; the lowest number goes first."""
    time_left_s: float = 0.0
    """Limits the time of the call from the moment at which the encoder receives it, because clocks differ between
    machines. Items that are not done within this time fail with MachineBusy, or with WorkerBackedUp if their worker's
    share of the encoder's arena is used up. 0 means no limit."""


class StageTimes(Wire, frozen=True):
    """Holds the seconds that one item spent in each stage of the encoder, for the cost model and the trace.

    The stages of a picture follow each other: it waits for a decode process (`decode_wait_s`), is decoded and
    preprocessed, waits for the device (`device_wait_s`), and is encoded. The sum of these is `total_s`, up to the time
    for which a worker's share of the arena holds its features back. A sound may be prepared on the device in between,
    which is a part of `preprocess_s`; `device_wait_s` then contains both waits for the device. The first units of a
    video are encoded while the rest is decoded, so its stages overlap and sum to more. An item that is cached has no
    stages. An item that joins the work of another request (`is_shared`) has the costs of that work in full, and waits
    only from the moment at which it joined."""

    queue_s: float = 0.0
    """Holds the time in which the item was neither being decoded nor on the device."""
    decode_s: float = 0.0
    preprocess_s: float = 0.0
    """Holds the time from pixels or samples to the encoder's input, which includes handing it over between processes
    and the work of the device (`device_prepare_s`)."""
    encode_s: float = 0.0
    """Sums the forward passes over units of the item, which may contain units of other items."""
    batch_items: int = 0
    """Counts the units in the largest of these passes."""
    batch_cost: int = 0
    """Sums the costs of these passes."""
    is_cache_hit: bool = False
    device_prepare_s: float = 0.0
    """Holds the part of `preprocess_s` for which the encoder's device worked, on a batch of sounds."""
    decode_wait_s: float = 0.0
    device_wait_s: float = 0.0
    """Holds the time in which a part of the item lay decoded and none was on the device."""
    device_prepare_cost: int = 0
    """Sums the cost of the sounds in that batch."""
    num_passes: int = 0
    """Counts the forward passes of `encode_s`."""
    is_shared: bool = False
    """Says that another request had begun the work."""
    total_s: float = 0.0
    """Holds the time from the item's arrival until all its units were announced."""


class ItemResult(Wire, frozen=True):
    index: int
    times: StageTimes
    error: ErrorInfo | None = None


class TraceEvent(Wire, frozen=True):
    """A `TraceEvent` is something that happened to a request. `at_s` is CLOCK_MONOTONIC of the member's host. If
    `detail` has `from_s`, a time of the same clock, then the event took from there until `at_s`."""

    at_s: float
    member_id: MemberId
    name: str
    """This is one of: read, prompted, waiting, waited, planned, dispatched, received, admitted, decoded, prepared,
    unit_encoded, unit_announced, unit_landed, unit_reused, feature_needed, prefill, held, first_token, finished,
    aborted, preempted."""
    detail: dict[str, Any] = msgspec.field(default_factory=dict)


class EncodeResult(Wire, frozen=True):
    """The encoder sends this to the router once every item was announced or has failed."""

    encoder_id: MemberId
    items: tuple[ItemResult, ...]
    trace: tuple[TraceEvent, ...] = ()


class StageTarget(Wire, frozen=True):
    """A `StageTarget` is the replica that takes the output of a stage, as the stage before it sees it."""

    stage_id: int
    member_id: MemberId
    inbox: str
    """Names the replica's inbox in the connector (`StageConnector.put`)."""
    connector: str
    """Names the connector that leads there: `shared_memory` or `nixl`."""


class GenerateRequest(Wire, frozen=True):
    """The router sends this to a worker. The call stays open until the terminal event; the router aborts it by
    cancelling."""

    request_id: RequestId
    attempt: int
    router_id: MemberId
    router_address: str
    """Names the address on the message plane to which the worker sends token frames and `FeatureNeeded`."""
    token_ids: tuple[int, ...]
    """Holds the prompt with placeholders expanded: one id per position."""
    placeholders: tuple[PlaceholderRange, ...]
    """The ranges are sorted by offset and disjoint."""
    media: tuple[MediaItem, ...]
    sampling: SamplingParams
    stop: StopConditions
    age: tuple[float, str]
    num_choices: int = 1
    cache_salt: str = ""
    priority: int = 0
    dispatched_items: tuple[int, ...] = ()
    """Lists the indexes of the media that the router sent to encoders. Cached KV is expected to cover the rest."""
    emitted: tuple[tuple[int, ...], ...] = ()
    """Holds, per choice, the tokens that a former attempt already sent (after a migration); it is empty at the first
    attempt."""
    side_names: tuple[str, ...] = ()
    """Names the side tensors that blocks must carry for every position (rows of a hidden layer, for speech)."""
    prompt_outputs: PromptOutputs = PromptOutputs()
    next_stage: StageTarget | None = None
    """Names the replica that makes speech of the answer, if the client wants to hear it."""
    adapter: str = ""
    """Names the LoRA adapter with which the worker computes; it is empty for the model itself."""


class ChoiceResult(Wire, frozen=True):
    choice: int
    finish_reason: str
    """Takes one of the values `stop`, `length` and `abort`."""
    num_tokens: int
    """Counts the generated tokens over all attempts, including the end-of-sequence token if one was drawn."""


class GenerateResult(Wire, frozen=True):
    """The worker sends this to the router as the one terminal event of an attempt."""

    worker_id: MemberId
    choices: tuple[ChoiceResult, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    """Counts the prompt tokens whose KV the worker found in the prefix cache at admission."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    """Sums the seconds of the engine steps that computed prompt tokens of this request."""
    held_s: float = 0.0
    """Sums the seconds for which the request waited for a feature at its doorstep, the first placeholder whose unit has
    not arrived."""
    first_token_s: float = 0.0
    """Holds the time from the request's receipt to its first token, or to the outputs of its prompt if it generates
    nothing."""
    trace: tuple[TraceEvent, ...] = ()
    error: ErrorInfo | None = None
    embedding: bytes = b""
    """Holds the embedding of the prompt as float32, little-endian, with shape `(hidden_size,)`; it is empty if the
    request wants none or has failed."""
    prompt_logprobs: PromptLogprobs | None = None
    """Is set if the request wants the log-probabilities of its prompt, and its prompt was computed."""
