"""Learns costs, per member and per link class, from the timings that each response carries, and records how accurate
the predictions were. `Learning` does both with the same numbers: it compares a timing with what was predicted
(`Accuracy`), and corrects the cost behind the prediction. A planner that cannot predict is not trusted, so its error is
a metric.

A new member, of which nothing is known, costs what its kind costs in common (`member_costs`), so that a default that
fits no member neither keeps requests away from a new replica nor floods it. The module knows nothing of queues, of the
choice between members, or of how a prediction is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fabric.contracts import (
    EncodeResult,
    GenerateResult,
    ItemResult,
    Member,
    MemberId,
    MmHash,
    TraceEvent,
    weighted_tokens,
)
from router.planning.link_classes import LinkClass, LinkOverride, LinkRules
from router.planning.member_costs import CostDefaults, EncoderCost, LinearCost
from router.planning.member_state import EncoderState, WorkerState
from router.planning.views import ItemTerms, Line, RoutePlan


class Learning:
    """Creates the cost state of new members and corrects it by results. For `context_scale_tokens` see
    `fabric.contracts.learned_cost`."""

    def __init__(self, defaults: CostDefaults, context_scale_tokens: float, links: Sequence[LinkOverride] = ()) -> None:
        self.accuracy = Accuracy()
        self.context_scale_tokens = context_scale_tokens
        self.link_rules = LinkRules(links)
        self._defaults = defaults
        self._links = {link: LinearCost(defaults.link(link)) for link in LinkClass}

    def new_worker(self, member: Member) -> WorkerState:
        return WorkerState(member, self._defaults.prefill)

    def new_encoder(self, member: Member) -> EncoderState:
        return EncoderState(member, EncoderCost(self._defaults.encoder))

    def links(self) -> dict[LinkClass, Line]:
        return {link: cost.line for link, cost in self._links.items()}

    def observe_generate(
        self,
        plan: RoutePlan,
        result: GenerateResult,
        worker: WorkerState | None,
        encoders: Mapping[MemberId, EncoderState],
        now: float,
    ) -> None:
        """Corrects the costs by a worker's result. Results that ended in an error, and those of another worker than
        planned, are ignored, because they say nothing about the prediction. If a worker measures its steps itself, the
        result does not change its prefill cost, because its steps also contained other requests."""
        if result.error is not None or worker is None or result.worker_id != plan.worker_id:
            return
        terms = plan.explanation.winner
        self.accuracy.note("queue", terms.queue_s, result.queue_s)
        self.accuracy.note("prefill", terms.prefill_s + terms.first_token_s, result.prefill_s)
        self.accuracy.note("held", terms.held_s, result.held_s)
        self.accuracy.note("ttft", plan.predicted_ttft_s, result.first_token_s)
        self.accuracy.note("lower_bound", plan.lower_bound_s, result.first_token_s)
        self.accuracy.note("prefix_tokens", terms.covered_tokens, result.num_cached_tokens)
        num_computed = result.num_prompt_tokens - result.num_cached_tokens
        num_weighted = weighted_tokens(num_computed, result.num_cached_tokens, self.context_scale_tokens)
        if num_computed > 0 and not worker.prefill.is_measured:
            worker.prefill.observe(num_weighted, result.prefill_s, now)
        self._observe_transfers(plan, result, worker, encoders)

    def observe_encode(self, plan: RoutePlan, result: EncodeResult, encoder: EncoderState | None, now: float) -> None:
        """Corrects the costs by an encoder's result. Items that failed are ignored; items from the cache only count as
        cache hits in the accuracy."""
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
        if is_as_planned and not terms.is_cached:
            self.accuracy.note("encoder_wait", terms.wait_s, times.queue_s)
            self.accuracy.note("decode", costs.decode.at(terms.cost), decoded_s)
            self.accuracy.note("device_prepare", costs.device_prepare.at(terms.cost), times.device_prepare_s)
            self.accuracy.note("encode", costs.encode.at(encoded_cost), times.encode_s)
        encoder.cost.observe_decode(terms.modality, terms.cost, decoded_s, now)
        encoder.cost.observe_device_prepare(terms.modality, terms.cost, times.device_prepare_s, now)
        encoder.cost.observe_encode(terms.modality, encoded_cost, times.encode_s, now)

    def _observe_transfers(
        self, plan: RoutePlan, result: GenerateResult, worker: WorkerState, encoders: Mapping[MemberId, EncoderState]
    ) -> None:
        """Corrects the costs of the links. The time of a pull is the time between a unit's announcement and its landing
        in the worker's trace, so it includes the wait for inbox room. Units of one item are taken as equally large."""
        hash_to_terms = {terms.mm_hash: terms for terms in plan.explanation.winner.items if terms.num_bytes}
        pulls = [(unit.partition(":")[0], seconds) for unit, seconds in _pulls(result.trace)]
        hash_to_num_units = Counter(mm_hash for mm_hash, _ in pulls)
        for mm_hash, seconds in pulls:
            terms = hash_to_terms.get(MmHash(mm_hash))
            encoder = encoders.get(terms.encoder_id) if terms else None
            if terms is None or encoder is None:
                continue
            num_bytes = terms.num_bytes / hash_to_num_units[mm_hash]
            place, rules = self.link_rules.place, self.link_rules
            cost = self._links[rules.link_class(place(encoder.member), place(worker.member))]
            self.accuracy.note("transfer", cost.line.at(num_bytes), seconds)
            cost.observe(num_bytes, seconds)


def _pulls(trace: Sequence[TraceEvent]) -> list[tuple[str, float]]:
    """Returns (`mm_hash:unit`, seconds) once for each unit whose announcement and landing are both in the trace."""
    unit_to_announced_s: dict[str, float] = {}
    pulls: list[tuple[str, float]] = []
    for event in trace:
        for unit in event.detail.get("units", ()):
            if event.name == "unit_announced":
                unit_to_announced_s.setdefault(unit, event.at_s)
            elif event.name == "unit_landed" and unit in unit_to_announced_s:
                pulls.append((unit, event.at_s - unit_to_announced_s.pop(unit)))
    return pulls


# ------------------------------------------------------------ the accuracy of predictions


class Accuracy:
    """Keeps a `StageError` for each stage. These are sums only, so that a scraper can take rates of them.

    A worker has the stages `queue`, `prefill`, `held` and `ttft`; an encoder has `encoder_wait`, `decode`,
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
