"""Defines what the planner is asked, what it sees and what it answers, as frozen values: a `RouteQuery` and a
`ClusterView` go in, and a `RoutePlan` with its `Explanation` comes out.

Times are seconds, costs of media are patches, and lengths are tokens. Types of which many are made per request are
NamedTuples. The module knows nothing of how the views come about (`ClusterState`) or of the formulas that read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from fabric.contracts import AttemptId, EncoderReport, KvScheme, MediaItem, MemberId, MmHash, PlaceholderRange
from router.planning.link_classes import LinkClass, machine


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


# ------------------------------------------------------------ what the planner sees


@dataclass(frozen=True, slots=True)
class ClusterView:
    """A `ClusterView` is the cluster at one moment, for one query."""

    block_size: int
    workers: tuple[WorkerView, ...]
    encoders: tuple[EncoderView, ...]
    links: Mapping[LinkClass, Line]
    """Maps each link class to the cost of a transfer of `x` bytes."""
    context_scale_tokens: float = float("inf")
    """This is the context at which a token's attention costs as much as the rest of the token."""
    tie_break: float = 0.0
    """This number in [0, 1) decides which of several near-equal choices is taken."""
    tolerance: float = 0.02
    """Workers are near-equal if they differ by less than this share of the request's own work on the worker where that
    is least. It is less than one more request of the same kind in a queue, so near-equality never hides load."""


class WorkerView(NamedTuple):
    worker_id: MemberId
    address: str
    host: str
    covered_blocks: int
    """Counts the leading blocks of this query's prompt that the worker's KV holds, according to the index."""
    queued_tokens: float
    """Counts the weighted tokens (tokens weighted by their context, see `fabric.contracts.learned_cost`) that were
    ahead of this request when the worker last reported, and that could be computed then."""
    num_decoding: int
    """Counts the sequences that compute one token in every step."""
    num_open: int
    """Counts this router's attempts that have not ended on the worker."""
    kv_blocks_free: int | None
    """Counts the worker's free KV blocks; it is None if unknown."""
    prefill: Line
    """`base_s` is the overhead of a step, and `per_unit_s` is the time of a weighted token."""
    decode_s: float = 0.0
    """This is the time that each decoding sequence adds to a step; 0 means as much as a weighted token."""
    pending_tokens: float = 0.0
    """Counts the weighted tokens that were dispatched and are not reported yet."""
    num_pending: int = 0
    """Counts the attempts to which `pending_tokens` belong."""
    report_age_s: float = 0.0
    """This is the time since the last report."""
    max_step_tokens: int = 0
    """Limits the tokens of one step; it is 0 if unknown."""
    place_wait_s: float = 0.0
    """This is the time until enough sequences have ended that a place in the steps is free for this request."""
    kv_blocks_per_s: float = 0.0
    """This is the rate at which sequences return blocks as they end; it is 0 if unknown."""


class EncoderView(NamedTuple):
    encoder_id: MemberId
    host: str
    modalities: frozenset[str]
    queued_cost: int
    """Counts the patches ahead of this request: those that were reported, and those that were dispatched since."""
    cached: frozenset[MmHash]
    """Lists the items of this query whose features the encoder has cached."""
    costs: EncoderCosts
    """Holds the costs over all modalities, in the mix in which items came."""
    modality_to_costs: Mapping[str, EncoderCosts] = MappingProxyType({})
    """Holds the costs of those modalities of which something is known; `costs` apply to the others."""

    queue: ReportedQueue | None = None
    """Holds the queue as the encoder reported it; it is None if no report says what waits there."""

    def costs_of(self, modality: str) -> EncoderCosts:
        return self.modality_to_costs.get(modality, self.costs)


class ReportedQueue(NamedTuple):
    """A `ReportedQueue` holds what `fabric.contracts.encoder_queue` predicts a wait from."""

    report: EncoderReport
    age_s: float
    pending_cost: int
    """Counts the patches that were dispatched since the report."""


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


def link_class(host_a: str, host_b: str) -> LinkClass:
    """Returns the class of the link between two hosts. `Member.host` is `machine`, or `machine/process` for members
    that share a process with others."""
    if host_a == host_b:
        return LinkClass.SAME_PROCESS if "/" in host_a else LinkClass.SAME_HOST
    return LinkClass.SAME_HOST if machine(host_a) == machine(host_b) else LinkClass.TCP


# ------------------------------------------------------------ what the planner answers


@dataclass(frozen=True, slots=True)
class RoutePlan:
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
    item_index: int
    encoder_id: MemberId


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explains a plan. `msgspec.to_builtins` turns it into JSON for the trace and the decision table."""

    winner: CandidateTerms
    runner_up: CandidateTerms | None
    num_workers: int
    num_scored: int
    """Counts the workers that the bound could not rule out."""
    num_near_equal: int


@dataclass(frozen=True, slots=True)
class CandidateTerms:
    """Holds one worker's prediction, with `queue_s + prefill_s + held_s + first_token_s == ttft_s`. In the terms that
    the worker measures, `queue_s` ends when the first step with a part of the request begins, and the steps take
    `prefill_s + first_token_s`."""

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


@dataclass(frozen=True, slots=True)
class ItemTerms:
    """Explains one item's landing time. The parts do not add up to it where preparing overlaps waiting."""

    item_index: int
    mm_hash: MmHash
    encoder_id: MemberId
    is_cached: bool
    wait_s: float
    prepare_s: float
    """This is the time for the decode queue, and for decoding and preprocessing in a decode process."""
    encode_s: float
    """This is the time from the start of this request's first unit on that encoder to the end of this item's last
    unit."""
    transfer_s: float
    landing_s: float
    cost: int
    """Counts the item's patches."""
    num_bytes: int
    modality: str = ""
    device_prepare_s: float = 0.0
    """This is the time for which the device prepares the item before its forward pass."""

    @property
    def load(self) -> int:
        """Counts the patches that the encoder really encodes."""
        return 0 if self.is_cached else self.cost
