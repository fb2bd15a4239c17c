"""Runs one simulated router: the production picture of the cluster and the production plan, with the life of each
request around them.

A router plans an attempt, sends the request to the worker and the media to the encoders at the same moment, learns from
the results, has items encoded again that a worker needs after all, and makes a new attempt when a member dies. A
request that finds no member waits in the production `CapacityQueue`. Reports and events reach the router late by
`report_delay_s`. The module knows nothing of how members work.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from fabric.contracts import (
    AttemptId,
    Destination,
    EncodeRequest,
    EncodeResult,
    FeatureNeeded,
    GenerateRequest,
    GenerateResult,
    Member,
    MemberId,
    NoCapacity,
    SamplingParams,
    StopConditions,
    WeftError,
)
from kv_index import prompt_block_hashes
from loadtest.simulator.event_loop import VirtualLoop
from loadtest.simulator.policies import ClusterNews, RoutingPolicy
from loadtest.simulator.sim_requests import Outcome, SimPrompt, SimRequest
from router.planning import CapacityNeed, CapacityQueue, ClusterState, RoutePlan, RouteQuery, Waiter

MAX_ATTEMPTS = 4
EXCLUDED_S = 5.0
"""A member whose call failed gets no requests of any kind for this long, unless it leaves the directory first."""
GREEDY = SamplingParams(temperature=0.0)


class RouterOutlets(Protocol):
    """A `RouterOutlets` takes everything that leaves a router."""

    def generate(
        self,
        worker_id: MemberId,
        request: GenerateRequest,
        first_output: int,
        answer: Callable[[GenerateResult], None],
    ) -> None: ...

    def encode(
        self, encoder_id: MemberId, request: EncodeRequest, answer: Callable[[EncodeResult | WeftError], None]
    ) -> None: ...

    def abort(self, attempt_id: AttemptId, worker_id: MemberId) -> None:
        """Tells the worker and all encoders to stop working on an attempt."""
        ...

    def ask_snapshot(self, member_id: MemberId) -> None: ...

    def ended(self, outcome: Outcome) -> None:
        """Takes the end of a request, which comes once for each."""
        ...


@dataclass(slots=True)
class RoutedRequest:
    """A `RoutedRequest` is a request of one router from its arrival to its end."""

    request: SimRequest
    prompt: SimPrompt
    query: RouteQuery
    outcome: Outcome
    plan: RoutePlan | None = None
    num_emitted: int = 0
    """Counts the tokens that earlier attempts generated."""
    failed: dict[MemberId, float] = field(default_factory=dict)
    """Holds the members that failed the request, each until the time at which it may try them again."""
    waiter: Waiter | None = None
    ready: set[int] = field(default_factory=set)
    """Holds the items whose encoding ended well in the present attempt, for a dispatch that waits for all of them."""


class SimRouter:
    """A `SimRouter` is one router. With `waits_for_media`, it sends a request to its worker only after all of its media
    were encoded, as systems without overlap do."""

    def __init__(
        self,
        member_id: MemberId,
        cluster: ClusterState,
        policy: RoutingPolicy,
        loop: VirtualLoop,
        outlets: RouterOutlets,
        row_bytes: int,
        *,
        waits_for_media: bool = False,
        capacity_wait_s: float = 30.0,
    ) -> None:
        self.member_id = member_id
        self.cluster, self.policy = cluster, policy
        self.report_delay_s = 0.0
        self._loop, self._outlets, self._row_bytes = loop, outlets, row_bytes
        self._waits_for_media, self._capacity_wait_s = waits_for_media, capacity_wait_s
        self._attempt_to_routed: dict[AttemptId, RoutedRequest] = {}
        self._waiting = CapacityQueue(cluster)
        self._waiter_to_routed: dict[int, RoutedRequest] = {}
        self._id_to_member: dict[MemberId, Member] = {}
        self.num_needed = 0
        """Counts the messages in which workers asked for units after all."""

    # ------------------------------------------------------------ the cluster

    def receive(self, message: ClusterNews) -> None:
        """Takes a report or events of a member. The router learns of them after `report_delay_s`."""
        if self.report_delay_s:
            self._loop.after(self.report_delay_s, self._apply, message)
        else:
            self._apply(message)

    def _apply(self, message: ClusterNews) -> None:
        self.policy.take(message)
        for member_id in self.cluster.apply(message, self._loop.now()):
            self._outlets.ask_snapshot(member_id)

    def update_members(self, members: Sequence[Member]) -> None:
        """Takes the directory's view. Attempts at members that left are made again."""
        self._id_to_member = {member.member_id: member for member in members}
        change = self.cluster.update_members(members)
        self.policy.update_members(members)
        gone = {member.member_id for member in change.left}
        for routed in list(self._attempt_to_routed.values()):
            plan = routed.plan
            if plan is not None and plan.worker_id in gone:
                self._fail(routed, plan.worker_id)
        for routed in list(self._attempt_to_routed.values()):
            if gone & set(routed.outcome.encoder_ids):
                self._encode_again(routed, gone)
        self._serve_waiting()

    # ------------------------------------------------------------ one request

    def submit(self, request: SimRequest, prompt: SimPrompt) -> None:
        """Takes a request that arrives now."""
        query = RouteQuery(
            attempt_id=AttemptId(request.request_id, 0),
            token_count=len(prompt.token_ids),
            scheme_to_hashes={
                scheme: prompt_block_hashes(scheme, prompt.token_ids, prompt.placeholders, prompt.media)
                for scheme in self.cluster.kv_schemes()
            },
            media=prompt.media,
            placeholders=prompt.placeholders,
            feature_row_bytes=self._row_bytes,
        )
        outcome = Outcome(
            request.index,
            request.kind,
            self._loop.now(),
            len(prompt.token_ids),
            len(prompt.media),
            request.num_output,
        )
        self._dispatch(RoutedRequest(request, prompt, query, outcome))

    def _dispatch(self, routed: RoutedRequest) -> None:
        now = self._loop.now()
        number = routed.outcome.num_attempts
        attempt_id = AttemptId(routed.request.request_id, number)
        query = replace(routed.query, attempt_id=attempt_id, excluded=self._excluded(routed))
        try:
            plan = self.policy.plan(self.cluster, query, now)
        except NoCapacity:
            self._wait(routed)
            return
        routed.query, routed.plan, routed.ready = query, plan, set()
        outcome = routed.outcome
        outcome.num_attempts += 1
        if not number:
            outcome.predicted_s, outcome.lower_bound_s = plan.predicted_ttft_s, plan.lower_bound_s
        outcome.worker_id = plan.worker_id
        outcome.encoder_ids = [assignment.encoder_id for assignment in plan.assignments]
        self._attempt_to_routed[attempt_id] = routed
        self.cluster.note_dispatched(query, plan, now)
        self.policy.note_dispatched(query, plan)
        if not (self._waits_for_media and plan.assignments):
            self._send(routed, plan)
        self._encode(routed, [(each.encoder_id, each.item_index) for each in plan.assignments])

    def _send(self, routed: RoutedRequest, plan: RoutePlan) -> None:
        request, prompt, num_emitted = routed.request, routed.prompt, routed.num_emitted
        first = request.first_output
        call = GenerateRequest(
            request_id=plan.attempt_id.request_id,
            attempt=plan.attempt_id.attempt,
            router_id=self.member_id,
            router_address=str(self.member_id),
            token_ids=prompt.token_ids,
            placeholders=prompt.placeholders,
            media=prompt.media,
            sampling=GREEDY,
            stop=StopConditions(request.num_output, ignore_eos=True),
            age=(request.arrival_s, request.request_id),
            dispatched_items=tuple(each.item_index for each in plan.assignments),
            emitted=(tuple(range(first, first + num_emitted)),) if num_emitted else (),
        )
        self._outlets.generate(plan.worker_id, call, first, lambda result: self._answered(routed, plan, result))

    def _encode(self, routed: RoutedRequest, encoder_and_item: Sequence[tuple[MemberId, int]]) -> None:
        plan = routed.plan
        assert plan is not None
        encoder_to_items: dict[MemberId, list[int]] = {}
        for encoder_id, item_index in encoder_and_item:
            encoder_to_items.setdefault(encoder_id, []).append(item_index)
        for encoder_id, indexes in encoder_to_items.items():
            call = EncodeRequest(
                request_id=plan.attempt_id.request_id,
                attempt=plan.attempt_id.attempt,
                router_id=self.member_id,
                items=tuple(routed.prompt.media[index] for index in indexes),
                destination=Destination(plan.worker_id, plan.worker_address),
                age=(routed.request.arrival_s, routed.request.request_id),
            )
            self._outlets.encode(encoder_id, call, self._encoded_by(routed, plan, encoder_id, indexes))

    def _encoded_by(
        self, routed: RoutedRequest, plan: RoutePlan, encoder_id: MemberId, indexes: list[int]
    ) -> Callable[[EncodeResult | WeftError], None]:
        return lambda result: self._encoded(routed, plan, encoder_id, indexes, result)

    def _encoded(
        self,
        routed: RoutedRequest,
        plan: RoutePlan,
        encoder_id: MemberId,
        indexes: list[int],
        result: EncodeResult | WeftError,
    ) -> None:
        if self._attempt_to_routed.get(plan.attempt_id) is not routed:
            return
        failed = indexes
        if isinstance(result, EncodeResult):
            self.cluster.observe_encode(plan, result, self._loop.now())
            failed = [item.index for item in result.items if item.error is not None]
            routed.ready.update(item.index for item in result.items if item.error is None)
            wanted = {each.item_index for each in plan.assignments}
            if self._waits_for_media and wanted and wanted <= routed.ready:
                routed.ready.clear()
                self._send(routed, plan)
        if failed:
            self._exclude(routed, encoder_id)
            self._need(routed, failed)

    def feature_needed(self, message: FeatureNeeded) -> None:
        """Has units encoded that a worker needs after all."""
        routed = self._attempt_to_routed.get(AttemptId(message.request_id, message.attempt))
        if routed is not None:
            self.num_needed += 1
            hashes = {unit.mm_hash for unit in message.units}
            self._need(routed, [item.index for item in routed.prompt.media if item.mm_hash in hashes])

    def _need(self, routed: RoutedRequest, item_indexes: Sequence[int]) -> None:
        plan = routed.plan
        assert plan is not None
        query = replace(routed.query, attempt_id=plan.attempt_id, excluded=self._excluded(routed))
        try:
            terms = self.cluster.plan_encoding(query, plan.worker_id, item_indexes, self._loop.now())
        except NoCapacity:
            self._outlets.abort(plan.attempt_id, plan.worker_id)
            self._give_up(routed, plan)
            self._wait(routed)
            return
        self.cluster.note_encoding(plan.attempt_id, terms)
        routed.outcome.encoder_ids += [each.encoder_id for each in terms]
        self._encode(routed, [(each.encoder_id, each.item_index) for each in terms])

    def _encode_again(self, routed: RoutedRequest, gone: set[MemberId]) -> None:
        """Sends the items of encoders that left to other encoders, unless the first token is there. A worker that has
        the features of an item already does not pull them again."""
        plan = routed.plan
        assert plan is not None
        items = [each.item_index for each in plan.assignments if each.encoder_id in gone]
        routed.outcome.encoder_ids = [each for each in routed.outcome.encoder_ids if each not in gone]
        if items and routed.outcome.first_token_s < 0.0:
            self._need(routed, items)

    # ------------------------------------------------------------ ends

    def first_token(self, attempt_id: AttemptId, at_s: float) -> None:
        """Notes the time at which the first token of an attempt came."""
        routed = self._attempt_to_routed.get(attempt_id)
        if routed is not None and routed.outcome.first_token_s < 0.0:
            routed.outcome.first_token_s = at_s - routed.outcome.arrival_s
            self.cluster.note_first_token(attempt_id)
            self._arrived(routed)

    def _answered(self, routed: RoutedRequest, plan: RoutePlan, result: GenerateResult) -> None:
        if self._attempt_to_routed.get(plan.attempt_id) is not routed:
            return
        if result.error is not None and result.error.to_error().retryable:
            self._fail(routed, plan.worker_id)
            return
        self._give_up(routed, plan)
        outcome = routed.outcome
        outcome.end_s = self._loop.now() - outcome.arrival_s
        if result.error is not None:
            outcome.error = result.error.code
        else:
            self.cluster.observe_generate(plan, result, self._loop.now())
            outcome.num_tokens, outcome.num_cached = result.choices[0].num_tokens, result.num_cached_tokens
        self._arrived(routed)
        self._outlets.ended(outcome)

    def worker_died(self, attempt_id: AttemptId, worker_id: MemberId, num_tokens: int) -> None:
        """Records that the open call of an attempt broke off after this many tokens had come, and starts another
        attempt."""
        routed = self._attempt_to_routed.get(attempt_id)
        if routed is not None:
            routed.num_emitted += num_tokens
            self._fail(routed, worker_id)

    def _fail(self, routed: RoutedRequest, member_id: MemberId) -> None:
        """Makes another attempt after a member failed the request."""
        assert routed.plan is not None
        self._give_up(routed, routed.plan)
        self._exclude(routed, member_id)
        if routed.outcome.num_attempts >= MAX_ATTEMPTS:
            self._leave(routed)
            self._end_without(routed, "too_many_attempts")
        else:
            self._dispatch(routed)

    def _give_up(self, routed: RoutedRequest, plan: RoutePlan) -> None:
        self._attempt_to_routed.pop(plan.attempt_id, None)
        self.cluster.note_ended(plan.attempt_id)
        self.policy.note_ended(plan)

    def _end_without(self, routed: RoutedRequest, error: str) -> None:
        routed.outcome.end_s, routed.outcome.error = self._loop.now() - routed.outcome.arrival_s, error
        self._outlets.ended(routed.outcome)

    def _exclude(self, routed: RoutedRequest, member_id: MemberId) -> None:
        until = self._loop.now() + EXCLUDED_S
        routed.failed[member_id] = until
        self.cluster.exclude(member_id, until)

    def _excluded(self, routed: RoutedRequest) -> frozenset[MemberId]:
        now = self._loop.now()
        return frozenset(member_id for member_id, until in routed.failed.items() if until > now)

    # ------------------------------------------------------------ waiting for members

    def _wait(self, routed: RoutedRequest) -> None:
        modalities = frozenset(item.modality for item in routed.prompt.media)
        need = CapacityNeed(modalities, frozenset(routed.failed.items()))
        now = self._loop.now()
        deadline_s = now + self._capacity_wait_s if routed.waiter is None else routed.waiter.deadline_s
        self._leave(routed)
        routed.waiter = Waiter((routed.request.arrival_s, routed.request.request_id), need, deadline_s)
        self._waiter_to_routed[id(routed.waiter)] = routed
        self._waiting.join(routed.waiter)
        self._wake()

    def _wake(self) -> None:
        next_s = self._waiting.next_at_s(self._loop.now())
        if next_s is not None:
            self._loop.at(next_s + 1e-6, self._serve_waiting)

    def _serve_waiting(self) -> None:
        while (taken := self._waiting.take(self._loop.now())) is not None:
            routed = self._waiter_to_routed.pop(id(taken.waiter))
            if taken.is_served:
                self._dispatch(routed)
            else:
                self._leave(routed)
                self._end_without(routed, "no_capacity")
        if self._waiting.num_waiting:
            self._wake()

    def _arrived(self, routed: RoutedRequest) -> None:
        if routed.waiter is not None:
            self._leave(routed, has_arrived=True)
            self._serve_waiting()

    def _leave(self, routed: RoutedRequest, *, has_arrived: bool = False) -> None:
        if routed.waiter is not None:
            self._waiting.leave(routed.waiter, has_arrived)
            self._waiter_to_routed.pop(id(routed.waiter), None)
            routed.waiter = None


def make_cluster_rng(seed: int, router_index: int) -> random.Random:
    """Returns the random source of one router's plans."""
    return random.Random(1_000_003 * seed + router_index)
