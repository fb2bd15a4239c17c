"""Defines what the planner is asked and what it answers, as frozen values: a `RouteQuery` with its `QueryHints` goes
in, and a `RoutePlan` with its `Explanation` comes out.

Times are seconds, costs of media are patches, and lengths are tokens. Types of which many are made per request are
structs, which are made faster than dataclasses. The module knows nothing of how a plan is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from fabric.contracts import AttemptId, KvScheme, MediaItem, MemberId, MmHash, PlaceholderRange


class MediaOfPrompt(Protocol):
    """A `MediaOfPrompt` has the media of a request and their places in its prompt."""

    @property
    def media(self) -> tuple[MediaItem, ...]: ...

    @property
    def placeholders(self) -> tuple[PlaceholderRange, ...]: ...


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """A `RouteQuery` is one attempt of a request, with its prompt expanded."""

    attempt_id: AttemptId
    token_count: int
    """Counts the prompt's tokens with the placeholders expanded."""
    scheme_to_hashes: Mapping[KvScheme, bytes]
    """Maps each scheme that workers use (`ClusterState.kv_schemes`) to the hashes of all full blocks of the prompt, 16
    bytes each, side by side."""
    media: tuple[MediaItem, ...] = ()
    placeholders: tuple[PlaceholderRange, ...] = ()
    """The ranges are sorted by offset and disjoint."""
    feature_row_bytes: int = 0
    """This is the size in bytes of one row of features on one level: `hidden_size * itemsize`."""
    excluded: frozenset[MemberId] = frozenset()
    """Holds the members that this request must not try again."""
    priority: int = 0
    """Holds the request's priority at encoders; the lowest number goes first."""


class QueryHints(NamedTuple):
    """Holds what the indexes, and this router's own dispatches, say of one query."""

    depths: npt.NDArray[np.int32]
    """Counts the leading blocks of the prompt that each worker's KV holds. Has shape `(worker slots,)`."""
    promised_tokens: npt.NDArray[np.float64] | None = None
    """Counts the leading tokens of the prompt that each worker holds or computes already for another request; None if
    no request in flight begins like this one."""
    encoder_ready: Mapping[MmHash, Sequence[tuple[int, float]]] = {}
    """Maps a hash to the encoder slots that have the features, or make them, with the seconds until they are
    complete."""
    worker_kept: Mapping[MmHash, Sequence[int]] = {}
    """Maps a hash to the slots of the workers that keep its features."""


class PlanSettings(NamedTuple):
    """Holds the settings of the choice; `PlannerSettings` explains them."""

    stale_after_s: float = 3.0
    tolerance: float = 0.02
    affinity_limit_s: float = 10.0
    exploration: float = 0.0
    num_alternatives: int = 3


class Chance(NamedTuple):
    """Holds the random numbers of one plan, in [0, 1)."""

    tie_break: float = 0.0
    explore: float = 1.0


# ------------------------------------------------------------ what work costs


class EncoderCosts(NamedTuple):
    """Holds the costs of one encoder, per patch, or per mel frame for sounds, stage by stage. Decode processes do the
    first stage; the device does the other two, one batch after another."""

    decode: Line
    """This is the cost of decoding and preprocessing an item in a decode process."""
    device_prepare: Line
    """This is the cost of the preprocessing that the device does before the forward pass, such as spectrograms. It is
    zero where the decode processes do everything."""
    encode: Line


class Line(NamedTuple):
    """A `Line` is a cost of `base_s + per_unit_s * x` seconds."""

    base_s: float
    per_unit_s: float

    def at(self, x: float) -> float:
        return self.base_s + self.per_unit_s * x


# ------------------------------------------------------------ what the planner answers


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """A `RoutePlan` is where one attempt goes: its worker, and an encoder for each item that the worker lacks."""

    attempt_id: AttemptId
    worker_id: MemberId
    worker_address: str
    assignments: tuple[Assignment, ...]
    """Assigns every item that is not covered, in order of index."""
    covered_items: tuple[int, ...]
    """These items lie wholly inside the worker's cached KV."""
    predicted_ttft_s: float
    lower_bound_s: float
    """This is the time to first token on this worker if every queue were empty."""
    explanation: Explanation = field(repr=False)
    planned_at_s: float = 0.0
    """This is the time on the router's clock when the plan was made (the argument `now`)."""


class Assignment(NamedTuple):
    """An `Assignment` sends one item to an encoder."""

    item_index: int
    encoder_id: MemberId


class Explanation(msgspec.Struct, frozen=True):
    """Explains a plan. `msgspec.to_builtins` turns it into JSON for the trace and the decision table."""

    winner: CandidateTerms
    runner_up: CandidateTerms | None
    num_workers: int
    """Counts the workers that could have served the request."""
    num_near_equal: int
    alternatives: tuple[CandidateTerms, ...] = ()
    """Holds the best other workers, the best first. Their encoders are those of the greedy choice."""
    is_explored: bool = False
    """Says that the worker was taken to learn about it, although another one had the better score."""


class CandidateTerms(msgspec.Struct, frozen=True):
    """Holds one worker's prediction, with `queue_s + prefill_s + held_s + first_token_s + delivery_s == ttft_s`. In the
    terms that the worker measures, `queue_s` ends when the first step with a part of the request begins, and the steps
    take `prefill_s + first_token_s`."""

    worker_id: MemberId
    covered_tokens: int
    num_prefill_tokens: int
    queue_s: float
    prefill_s: float
    """This is the time for prompt tokens: those of the request, and those of other requests in its first step."""
    held_s: float
    """This is the time that the request waits for features at its doorstep, the first placeholder whose unit has not
    arrived."""
    first_token_s: float
    """This is the time of the step that produces the first token, without its prompt tokens: the step's overhead and
    the decoding of other sequences."""
    ttft_s: float
    items: tuple[ItemTerms, ...]
    delivery_s: float = 0.0
    """This is the time of the request's way to the worker and of the first token's way to the router."""
    released_s: float = 0.0
    """This was added to the score in the choice, because the worker's queue is so long that its cached prefix does not
    bind the request (`PlannerSettings.affinity_limit_s`). It is no part of `ttft_s`."""


class ItemTerms(msgspec.Struct, frozen=True):
    """Explains one item's landing time. The parts do not add up to it, because an item waits for the device while it is
    decoded, and because the units of a request share encoders and links."""

    item_index: int
    mm_hash: MmHash
    encoder_id: MemberId
    is_cached: bool
    wait_s: float
    """This is the time until the device begins with work of this request; for a feature that the encoder is making
    already, it is the time until the feature is complete."""
    decode_wait_s: float
    """This is the time until a decode process takes the item."""
    decode_s: float
    device_prepare_s: float
    """This is the time for which the device prepares the item before its forward pass."""
    encode_s: float
    """This is the time of the item's own forward passes."""
    transfer_s: float
    landing_s: float
    cost: int
    """Counts the item's patches."""
    num_bytes: int
    modality: str = ""
    fetch_s: float = 0.0
    """This is the time until the medium's bytes are at the router; it is 0 for bytes that came with the request."""
    num_units: int = 1
    """Counts the parts that are encoded one after the other."""

    @classmethod
    def twin(cls, item: MediaItem, encoder_id: MemberId, landing_s: float) -> ItemTerms:
        """Returns the terms of a medium that occurs a second time: it is encoded once, and its features land once."""
        none = (0.0,) * 6
        return cls(item.index, item.mm_hash, encoder_id, True, *none, landing_s, item.cost, 0, item.modality)

    @property
    def load(self) -> int:
        """Counts the patches that the encoder really encodes."""
        return 0 if self.is_cached else self.cost


class PairScores(NamedTuple):
    """Holds the terms of pairs of a worker and an encoder, the best first."""

    pairs: tuple[CandidateTerms, ...]
    """Each has all media that its worker lacks on one encoder. A worker that lacks nothing, or that no single encoder
    can serve, is here once, as the search has scored it."""
    num_pairs: int
    """Counts all pairs of the cluster that could have served the request."""
