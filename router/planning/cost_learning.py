"""Learns costs, per member and per link class, from the timings that results and reports carry, and records how
accurate the predictions were. `Learning` does both with the same numbers: it compares a timing with what was predicted
(`Accuracy`), and corrects the cost behind the prediction. A planner that cannot predict is not trusted, so its error is
a metric.

A new member, of which nothing is known, costs what its kind costs in common (`member_costs`), so that a default that
fits no member neither keeps requests away from a new replica nor floods it. What a former run has saved
(`saved_costs`) comes before the defaults. Plans do not compute lines: they read `BelievedCosts`, which `refresh` makes
for all members at once. The module knows nothing of queues, of the choice between members, or of how a prediction is
made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, exp2, inf, log
from typing import NamedTuple

import numpy as np

from fabric.contracts import (
    CONFIRMED,
    EncodeResult,
    GenerateResult,
    ItemResult,
    Member,
    MemberId,
    WorkerReport,
    weighted_tokens,
)
from router.planning.cost_columns import CostColumns, Floats
from router.planning.link_classes import LINK_CLASSES, LinkClass, LinkOverride, LinkPlace, LinkRules
from router.planning.member_costs import (
    GENERAL,
    STAGES,
    ZERO,
    CostDefaults,
    EncoderCost,
    LearnedLine,
)
from router.planning.member_state import EncoderState, WorkerState
from router.planning.plan_types import ItemTerms, Line, RoutePlan
from router.planning.saved_costs import CostKey, SavedCosts, SeenLine

WORKER_STAGES = ("prefill", "delivery")
"""Names the stages of a worker, in the order of `BelievedCosts.workers`: its prefill, whose base is the overhead of a
step, and the time that a request takes to the worker together with its first token's way back."""
_FETCH = CostKey("router", "", GENERAL, "fetch")
REFRESH_S = 0.05
"""Believed costs may be this old after a cost has changed. A refresh takes about half a millisecond for a thousand
workers."""


class BelievedCosts(NamedTuple):
    """Holds what the planner believes of all members, as arrays. Rows are those of `Learning.worker_row` and
    `Learning.encoder_row`; the array of a row that no member uses holds nan."""

    workers: Floats
    """Has shape `(2, 2, worker rows)`: base and slope of each of `WORKER_STAGES`."""
    encoders: Floats
    """Has shape `(modalities, 6, encoder rows)`: base and slope of decoding, of preparing on the device and of
    encoding. `Learning.modality_row` gives the number of a modality; the first one is `GENERAL`."""
    links: Floats
    """Has shape `(link classes, 2)`: alpha and beta, in the order of `LINK_CLASSES`."""
    fetch: Line = ZERO
    """This is the cost of fetching a medium of `x` bytes. It is zero until a fetch was observed; media that a request
    contains are there when it is planned."""


class Learning:
    """Creates the cost state of new members and corrects it by results and reports. For `context_scale_tokens` see
    `fabric.contracts.learned_cost`; `saved` holds what a former run has learned."""

    def __init__(
        self,
        defaults: CostDefaults,
        context_scale_tokens: float,
        links: Sequence[LinkOverride] = (),
        saved: SavedCosts | None = None,
    ) -> None:
        self.accuracy = Accuracy()
        self.context_scale_tokens = context_scale_tokens
        self.link_rules = LinkRules(links)
        self.version = 0
        """It grows with each change of a cost and of the members."""
        self._defaults = defaults
        self._saved = saved or SavedCosts()
        self._workers = CostColumns(len(WORKER_STAGES))
        self._encoders = CostColumns(len(STAGES))
        self._modality_to_row = {GENERAL: 0}
        self._member_to_row: dict[MemberId, int] = {}
        self._member_to_place: dict[MemberId, LinkPlace] = {}
        self._agent_to_member: dict[str, MemberId] = {}
        self._links = {link: LinkCost(self._saved.link(link) or defaults.link(link)) for link in LinkClass}
        fetch = self._saved.start(_FETCH)
        self._fetch = LearnedLine(*(fetch or (ZERO, 0.0)))
        self._believed: BelievedCosts | None = None
        self._believed_at_s = 0.0
        self._believed_version = -1

    # ------------------------------------------------------------ members

    def new_worker(self, member: Member) -> WorkerState:
        row = self._add(member, self._workers)
        starts = (self._defaults.prefill, self._defaults.delivery)
        costs = [
            self._new_cost(member, self._workers, row, column, GENERAL, stage, start)
            for column, (stage, start) in enumerate(zip(WORKER_STAGES, starts, strict=True))
        ]
        return WorkerState(member, *costs)

    def new_encoder(self, member: Member) -> EncoderState:
        row = self._add(member, self._encoders)

        def make(modality: str, stage: str, start: Line) -> LearnedLine:
            column = len(STAGES) * self.modality_row(modality) + STAGES.index(stage)
            return self._new_cost(member, self._encoders, row, column, modality, stage, start)

        return EncoderState(member, EncoderCost(self._defaults.encoder, make))

    def forget(self, member: Member) -> None:
        """Forgets a member that has left. What it taught about links stays."""
        columns = self._workers if member.kind == "worker" else self._encoders
        columns.remove_row(self._member_to_row.pop(member.member_id))
        del self._member_to_place[member.member_id]
        self._agent_to_member.pop(member.transfer_agent or member.member_id, None)
        self.version += 1
        self._believed = None

    def place(self, member_id: MemberId) -> LinkPlace:
        """Returns where a present worker or encoder runs."""
        return self._member_to_place[member_id]

    def worker_row(self, worker_id: MemberId) -> int:
        """Returns the worker's row in `BelievedCosts`. It stays the same until the worker is forgotten."""
        return self._member_to_row[worker_id]

    def encoder_row(self, encoder_id: MemberId) -> int:
        """Returns the encoder's row in `BelievedCosts`. It stays the same until the encoder is forgotten."""
        return self._member_to_row[encoder_id]

    def modality_row(self, modality: str) -> int:
        """Returns the modality's row in `BelievedCosts.encoders`; a new modality gets the next one."""
        if modality not in self._modality_to_row:
            self._modality_to_row[modality] = len(self._modality_to_row)
            self._encoders.add_columns(len(STAGES))
            self._believed = None
        return self._modality_to_row[modality]

    def _add(self, member: Member, columns: CostColumns) -> int:
        row = columns.add_row(member.place.hardware)
        self._member_to_row[member.member_id] = row
        self._member_to_place[member.member_id] = self.link_rules.place(member)
        self._agent_to_member[member.transfer_agent or member.member_id] = member.member_id
        self._believed = None
        return row

    def _new_cost(
        self, member: Member, columns: CostColumns, row: int, column: int, modality: str, stage: str, start: Line
    ) -> LearnedLine:
        saved = self._saved.start(CostKey(member.kind, member.place.hardware, modality, stage))
        line, weight = saved or (start, 0.0)
        cost = LearnedLine(line, weight, partial(self._changed, columns, row, column))
        self._changed(columns, row, column, cost)
        return cost

    def _changed(self, columns: CostColumns, row: int, column: int, cost: LearnedLine) -> None:
        columns.put(row, column, cost)
        self.version += 1

    # ------------------------------------------------------------ what is believed

    def refresh(self, now: float) -> bool:
        """Computes `believed` again if a member came or went, or if a cost has changed and the last computation is
        old. Returns whether it did."""
        is_changed = self.version != self._believed_version
        if self._believed is not None and not (is_changed and now - self._believed_at_s >= REFRESH_S):
            return False
        self._believed_version = self.version
        encoders = self._encoders.believed().reshape(len(self._modality_to_row), 2 * len(STAGES), -1)
        np.copyto(encoders, encoders[:1], where=np.isnan(encoders))
        links = np.array([self._links[link].line for link in LINK_CLASSES])
        self._believed = BelievedCosts(self._workers.believed(), encoders, links, self._fetch.line)
        self._believed_at_s = now
        return True

    @property
    def believed(self) -> BelievedCosts:
        """Returns what the last `refresh` has computed. The arrays are new ones after each refresh."""
        assert self._believed is not None, "refresh precedes the use of what is believed"
        return self._believed

    def mean_encode_s(self, modality: str, cost: int) -> float:
        """Returns what a medium adds to the forward passes of an encoder, by the mean of what is believed of all."""
        lines = self.believed.encoders[self._modality_to_row.get(modality, 0)]
        slopes = lines[[2 * STAGES.index(stage) + 1 for stage in ("device_prepare", "encode")]].sum(axis=0)
        known = slopes[~np.isnan(slopes)]
        return float(known.mean()) * cost if len(known) else 0.0

    def links(self) -> dict[LinkClass, Line]:
        return {link: cost.line for link, cost in self._links.items()}

    def saved(self, now: float, wall_s: float) -> SavedCosts:
        """Returns what is worth keeping for another run: the common lines of each kind and hardware, and the lines of
        the links. What this run has not seen again stays from the former one. `wall_s` is the present wall time."""
        costs: dict[CostKey, SeenLine] = {}
        for kind, columns, stages in (
            ("worker", self._workers, [(GENERAL, stage) for stage in WORKER_STAGES]),
            ("encoder", self._encoders, [(name, stage) for name in self._modality_to_row for stage in STAGES]),
        ):
            for hardware, (lines, seen_at_s) in columns.common().items():
                for column, (modality, stage) in enumerate(stages):
                    if seen_at_s[column] > -np.inf:
                        line = Line(*lines[column].tolist())
                        seen = SeenLine(line, wall_s - (now - float(seen_at_s[column])))
                        costs[CostKey(kind, hardware, modality, stage)] = seen
        if self._fetch.seen_at_s is not None:
            costs[_FETCH] = SeenLine(self._fetch.line, wall_s - (now - self._fetch.seen_at_s))
        links = {
            link: SeenLine(cost.line, wall_s - (now - cost.seen_at_s))
            for link, cost in self._links.items()
            if cost.seen_at_s is not None
        }
        return self._saved.updated(costs, links, wall_s)

    # ------------------------------------------------------------ results and reports

    def observe_generate(
        self, plan: RoutePlan, result: GenerateResult, worker: WorkerState | None, now: float, first_token_s: float
    ) -> None:
        """Corrects the costs by a worker's result. Results that ended in an error, and those of another worker than
        planned, are ignored, because they say nothing about the prediction. If a worker measures its steps itself, the
        result does not change its prefill cost, because its steps also contained other requests. `first_token_s` is the
        time from the dispatch to the first token's arrival at the router, or 0 if it is unknown."""
        if result.error is not None or worker is None or result.worker_id != plan.worker_id:
            return
        terms = plan.explanation.winner
        self.accuracy.note("queue", terms.queue_s, result.queue_s)
        self.accuracy.note("prefill", terms.prefill_s + terms.first_token_s, result.prefill_s)
        self.accuracy.note("held", terms.held_s, result.held_s)
        ttft_s = first_token_s or result.first_token_s + terms.delivery_s
        self.accuracy.note("ttft", plan.predicted_ttft_s, ttft_s)
        self.accuracy.note("lower_bound", plan.lower_bound_s, ttft_s)
        self.accuracy.note("prefix_tokens", terms.covered_tokens, result.num_cached_tokens)
        num_computed = result.num_prompt_tokens - result.num_cached_tokens
        num_weighted = weighted_tokens(num_computed, result.num_cached_tokens, self.context_scale_tokens)
        if num_computed > 0 and not worker.prefill.is_measured:
            worker.prefill.observe(num_weighted, result.prefill_s, now)
        delivery_s = first_token_s - result.first_token_s
        if result.first_token_s > 0.0 and delivery_s > 0.0:
            self.accuracy.note("delivery", worker.delivery.line.base_s, delivery_s)
            worker.delivery.observe(0.0, delivery_s, now)

    def observe_encode(self, plan: RoutePlan, result: EncodeResult, encoder: EncoderState | None, now: float) -> None:
        """Corrects the encoder's costs by an encoder's result. Items that failed are ignored; items from the cache only
        count as cache hits in the accuracy."""
        index_to_terms = {terms.item_index: terms for terms in plan.explanation.winner.items}
        for item in result.items:
            terms = index_to_terms.get(item.index)
            if item.error is None and encoder is not None and terms is not None:
                self._observe_item(item, terms, encoder, now)

    def _observe_item(self, item: ItemResult, terms: ItemTerms, encoder: EncoderState, now: float) -> None:
        times = item.times
        is_as_planned = terms.encoder_id == encoder.member.member_id
        if is_as_planned:
            self.accuracy.note("cached_items", float(terms.is_cached), float(times.is_cache_hit))
        if times.is_cache_hit:
            return
        decoded_s = times.decode_s + times.preprocess_s - times.device_prepare_s
        encoded_cost = max(times.batch_cost, terms.cost)
        costs = encoder.cost.of(terms.modality)
        prepared_cost = max(times.device_prepare_cost, terms.cost)
        if is_as_planned and not terms.is_cached and not times.is_shared:
            self.accuracy.note("encoder_wait", terms.wait_s, times.queue_s)
            self.accuracy.note("decode", costs.decode.at(terms.cost), decoded_s)
            self.accuracy.note("device_prepare", costs.device_prepare.at(prepared_cost), times.device_prepare_s)
            self.accuracy.note("encode", costs.encode.at(encoded_cost), times.encode_s)
        encoder.cost.observe_decode(terms.modality, terms.cost, decoded_s, now)
        encoder.cost.observe_device_prepare(terms.modality, prepared_cost, times.device_prepare_s, now)
        encoder.cost.observe_encode(terms.modality, encoded_cost, times.encode_s, now)

    def observe_fetch(self, num_bytes: int, seconds: float, now: float) -> None:
        """Corrects the cost of fetching a medium by what a fetch of `num_bytes` took."""
        self._fetch.observe(num_bytes, seconds, now)
        self.version += 1

    def observe_report(self, report: WorkerReport, now: float) -> None:
        """Corrects the costs of the links by the worker's pulls. Windows with a pull from an encoder that has left are
        ignored."""
        target = self._member_to_place.get(report.worker_id)
        for window in report.pulls if target is not None else ():
            sources = [self._agent_to_member.get(pull.source) for pull in window.pulls]
            if target is None or any(source is None for source in sources):
                continue
            places = [self._member_to_place[source] for source in sources if source is not None]
            classes = [self.link_rules.link_class(place, target) for place in places]
            for link in dict.fromkeys(classes):
                spans = [
                    (pull.start_s, pull.end_s, pull.num_bytes)
                    for pull, its_class in zip(window.pulls, classes, strict=True)
                    if its_class is link
                ]
                for num_bytes, seconds in _busy_times(spans):
                    self._observe_link(self._links[link], num_bytes, seconds, now)

    def _observe_link(self, cost: LinkCost, num_bytes: int, seconds: float, now: float) -> None:
        self.accuracy.note("transfer", cost.line.at(num_bytes), seconds)
        cost.observe(num_bytes, seconds, now)
        self.version += 1


# ------------------------------------------------------------ links

LINK_HALF_LIFE_S = 300.0
"""This is the time after which an observation of a link counts half."""
LINK_MEMORY = 40.0
"""This is the number of observations as which all observations of a link together count at most."""
_SHORTEST_S = 1e-8
"""No transfer is shorter; a shorter one shows only the clock."""
_FEW = 3.0
"""Up to this many observations, none is taken for an outlier."""
_KEEP_SHAPE = 0.1
"""This is the part of an observation as which the present proportion of alpha to beta counts, so that it stays while
all observations are of one size."""


class LinkCost:
    """A `LinkCost` is what a class of links costs: alpha + beta * bytes.

    Pulls that overlap share the link, so none of them shows what the link alone would take. All pulls of one busy time
    together do: the bytes of all of them took as long as the link was busy. A pull that ran alone is a busy time of its
    own, and shows alpha best.

    The line is the least squares of the relative errors over the recent observations. A surprise counts in full only if
    the observation before it was a surprise in the same direction; then the link has changed, and what was known of it
    counts half. So a pause of seconds moves the line by little."""

    def __init__(self, start: Line) -> None:
        self.line = Line(max(start.base_s, 1e-9), max(start.per_unit_s, 1e-18))
        self.seen_at_s: float | None = None
        """Holds when the last observation came; it is None before the first."""
        self._last_surprise = 0.0
        self._count = 0.0
        """Holds the weight of all observations."""
        self._sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)
        """Holds the weighted sums of 1, x, x * x, y and x * y, of bytes x and seconds y."""

    def observe(self, num_bytes: int, seconds: float, now: float) -> None:
        """Takes a busy time of the link, in which `num_bytes` were moved."""
        if not (_SHORTEST_S < seconds < inf and num_bytes > 0):
            return
        predicted_s = self.line.at(num_bytes)
        surprise, last = log(seconds / predicted_s), self._last_surprise
        kept = 1.0 - 1.0 / LINK_MEMORY
        if self.seen_at_s is not None:
            kept *= exp2(-max(0.0, now - self.seen_at_s) / LINK_HALF_LIFE_S)
        if surprise * last > 0.0 and min(abs(surprise), abs(last)) > log(CONFIRMED):
            kept *= 0.5
        if self._count >= _FEW:
            limit = max(log(CONFIRMED), abs(last) if surprise * last > 0.0 else 0.0)
            seconds = predicted_s * exp(min(max(surprise, -limit), limit))
        self._last_surprise, self.seen_at_s = surprise, now
        weight = 1.0 / (seconds * seconds)
        new = (1.0, num_bytes, num_bytes * num_bytes, seconds, num_bytes * seconds)
        self._sums = tuple(kept * old + weight * each for old, each in zip(self._sums, new, strict=True))
        self._count = kept * self._count + 1.0
        self._fit()

    def _fit(self) -> None:
        ones, xs, squares, ys, products = self._sums
        alpha, beta = self.line
        scale = (ys * alpha + products * beta) / (ones * alpha**2 + 2.0 * xs * alpha * beta + squares * beta**2)
        alpha, beta = scale * alpha, scale * beta
        ones, ys = ones + _KEEP_SHAPE / alpha**2, ys + _KEEP_SHAPE / alpha
        squares, products = squares + _KEEP_SHAPE / beta**2, products + _KEEP_SHAPE / beta
        det = ones * squares - xs * xs
        fitted_alpha, fitted_beta = (ys * squares - products * xs) / det, (products * ones - ys * xs) / det
        self.line = Line(max(fitted_alpha, 0.1 * alpha), max(fitted_beta, 0.1 * beta))


def _busy_times(spans: Iterable[tuple[float, float, int]]) -> list[tuple[int, float]]:
    """Returns (bytes, seconds) of each time in which at least one of the spans (start, end, bytes) was under way."""
    busy: list[tuple[int, float]] = []
    begin_s = end_s = 0.0
    num_bytes = 0
    for start_s, until_s, span_bytes in sorted(spans):
        if num_bytes and start_s > end_s:
            busy.append((num_bytes, end_s - begin_s))
            num_bytes = 0
        if not num_bytes:
            begin_s, end_s = start_s, until_s
        num_bytes += span_bytes
        end_s = max(end_s, until_s)
    if num_bytes:
        busy.append((num_bytes, end_s - begin_s))
    return busy


# ------------------------------------------------------------ the accuracy of predictions


class Accuracy:
    """Keeps a `StageError` for each stage. These are sums only, so that a scraper can take rates of them.

    A worker has the stages `queue`, `prefill`, `held`, `delivery` and `ttft`; an encoder has `encoder_wait`, `decode`,
    `device_prepare` and `encode`. `transfer` is the time on a link. `lower_bound` compares the lower bound with the
    actual TTFT, which shows how efficiently work overlaps. `prefix_tokens` and `cached_items` compare the hits that the
    indexes promised with the hits that the members found."""

    def __init__(self) -> None:
        self._stage_to_error: dict[str, StageError] = {}

    def note(self, stage: str, predicted: float, actual: float) -> None:
        error = self._stage_to_error.get(stage, StageError())
        self._stage_to_error[stage] = StageError(
            error.num_observations + 1,
            error.predicted + predicted,
            error.actual + actual,
            error.abs_error + abs(actual - predicted),
        )

    def stages(self) -> Mapping[str, StageError]:
        return dict(self._stage_to_error)


@dataclass(frozen=True, slots=True)
class StageError:
    """A `StageError` holds one stage's sums since the start. `actual / predicted` is the bias, and `abs_error / actual`
    is the relative error. The unit is seconds, except for the stages `prefix_tokens` (tokens) and `cached_items`
    (items)."""

    num_observations: int = 0
    predicted: float = 0.0
    actual: float = 0.0
    abs_error: float = 0.0
