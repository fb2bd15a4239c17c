"""What the planner sees and what it answers: frozen values.

Times are seconds, costs of media are patches, lengths are tokens. NamedTuples where many are made per request.
Knows nothing of how the views come about (`cluster`) or of the formula (`score`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from fabric.ids import AttemptId, BlockHash, MemberId, MmHash
from fabric.messages import MediaItem, PlaceholderRange
from router.planning.links import LinkClass


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """One attempt of a request, its prompt expanded."""

    attempt_id: AttemptId
    token_count: int
    """Prompt tokens, placeholders expanded."""
    block_hashes: tuple[BlockHash, ...]
    """Of all full blocks of the prompt."""
    media: tuple[MediaItem, ...] = ()
    placeholders: tuple[PlaceholderRange, ...] = ()
    """Sorted by offset, disjoint."""
    feature_row_bytes: int = 0
    """Bytes of one row of features on one level: `hidden_size * itemsize`."""
    excluded: frozenset[MemberId] = frozenset()
    """Members that this request must not try again."""


class Line(NamedTuple):
    """`base_s + per_unit_s * x` seconds."""

    base_s: float
    per_unit_s: float

    def at(self, x: float) -> float:
        return self.base_s + self.per_unit_s * x


class EncoderCosts(NamedTuple):
    """Of one encoder, in patches, or mel frames of sounds: decoding and preprocessing of an item (on the CPU), and its
    forward."""

    prepare: Line
    encode: Line


class WorkerView(NamedTuple):
    worker_id: MemberId
    address: str
    host: str
    covered_blocks: int
    """Leading blocks of this query's prompt in its KV, by the index."""
    queued_tokens: float
    """In front of this request, when it last reported; flat ones (`fabric.flat_tokens`) that could be computed then."""
    num_decoding: int
    """Sequences with a token in every step."""
    num_open: int
    """Attempts of this router that have not ended there."""
    kv_blocks_free: int | None
    """None if unknown."""
    prefill: Line
    """`base_s` is the overhead of a step, `per_unit_s` the time of a flat token."""
    decode_s: float = 0.0
    """What each sequence that decodes adds to a step; 0: as much as a flat token."""
    pending_tokens: float = 0.0
    """Flat tokens dispatched and not yet reported."""
    num_pending: int = 0
    """Attempts that they are of."""
    report_age_s: float = 0.0
    """Since the last report."""
    max_step_tokens: int = 0
    """0 if unknown."""
    place_wait_s: float = 0.0
    """Until a sequence has ended whose place in the steps is free for this one."""
    kv_blocks_per_s: float = 0.0
    """That sequences give back as they end; 0 if unknown."""


class EncoderView(NamedTuple):
    encoder_id: MemberId
    host: str
    modalities: frozenset[str]
    queued_cost: int
    """Patches in front of this request: reported, and dispatched since."""
    cached: frozenset[MmHash]
    """Which of this query's items it holds."""
    costs: EncoderCosts
    """Over all modalities."""
    modality_to_costs: Mapping[str, EncoderCosts] = MappingProxyType({})
    """Of those that something is known of."""

    def costs_of(self, modality: str) -> EncoderCosts:
        return self.modality_to_costs.get(modality, self.costs)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cluster at one moment, for one query."""

    block_size: int
    workers: tuple[WorkerView, ...]
    encoders: tuple[EncoderView, ...]
    links: Mapping[LinkClass, Line]
    """Transfer of `x` bytes."""
    context_scale_tokens: float = float("inf")
    """Context at which a token's attention costs as much as the rest of it."""
    tie_break: float = 0.0
    """In [0, 1): which of several near-equal choices is taken."""
    tolerance: float = 0.02
    """Workers are near-equal within this share of the request's lower bound: less than one more request of its kind
    in a queue, so that near-equality never hides load."""


class Assignment(NamedTuple):
    item_index: int
    encoder_id: MemberId


@dataclass(frozen=True, slots=True)
class ItemTerms:
    """How one item's landing time came about; the parts do not sum where preparing overlaps waiting."""

    item_index: int
    mm_hash: MmHash
    encoder_id: MemberId
    is_cached: bool
    wait_s: float
    prepare_s: float
    encode_s: float
    """From this request's first unit on that encoder to this item's last."""
    transfer_s: float
    landing_s: float
    cost: int
    """Patches of the item."""
    num_bytes: int
    modality: str = ""

    @property
    def load(self) -> int:
        """Patches that the encoder will really encode."""
        return 0 if self.is_cached else self.cost


@dataclass(frozen=True, slots=True)
class CandidateTerms:
    """One worker's prediction: `queue_s + prefill_s + held_s + first_token_s == ttft_s`. As the worker measures it,
    `queue_s` ends when the first step with a part of the request begins, and steps are `prefill_s + first_token_s`."""

    worker_id: MemberId
    covered_tokens: int
    num_prefill_tokens: int
    queue_s: float
    prefill_s: float
    """Prompt tokens: the request's, and those of others in its first step."""
    held_s: float
    """Standing at the doorstep, waiting for features."""
    first_token_s: float
    """The step that the first token comes of, besides its prompt tokens: overhead and others' decodes."""
    ttft_s: float
    items: tuple[ItemTerms, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why: `msgspec.to_builtins` makes it JSON for the trace and the decision table."""

    winner: CandidateTerms
    runner_up: CandidateTerms | None
    num_workers: int
    num_scored: int
    """Workers that the bound could not rule out."""
    num_near_equal: int


@dataclass(frozen=True, slots=True)
class RoutePlan:
    attempt_id: AttemptId
    worker_id: MemberId
    worker_address: str
    assignments: tuple[Assignment, ...]
    """Every item that isn't covered, in order of index."""
    covered_items: tuple[int, ...]
    """Items that lie wholly inside the worker's cached KV."""
    predicted_ttft_s: float
    lower_bound_s: float
    """The same walk on this worker with every queue empty."""
    explanation: Explanation = field(repr=False)
    planned_at_s: float = 0.0
    """The router's clock when it was made: what `now` was."""
