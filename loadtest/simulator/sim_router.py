"""Runs one simulated router: the production picture of the cluster and the production plan, with the life of each
request around them.

A router plans an attempt, sends the request to the worker and the media to the encoders at the same moment, learns from
the results, has items encoded again that a worker needs after all, and makes a new attempt when a member dies. A
request that finds no member waits in the production `CapacityQueue`. Reports and events reach the router late by
`report_delay_s`. The module knows nothing of how members work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Protocol

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
    RouterNews,
    SamplingParams,
    StopConditions,
    WaitingWork,
    WeftError,
    WorkerReport,
)
from fabric.transport import ALIGNMENT_BYTES, HEADER_BYTES
from kv_index import prompt_block_hashes
from loadtest.simulator.event_loop import SimEvent, VirtualLoop
from loadtest.simulator.policies import ClusterNews, RoutingPolicy
from loadtest.simulator.sim_requests import Outcome, SimPrompt, SimRequest
from router.planning import (
    NEWS_INTERVAL_S,
    CapacityNeed,
    CapacityQueue,
    ClusterState,
    KvRoom,
    RoomNeed,
    RoutePlan,
    RouteQuery,
    Waiter,
)

MAX_ATTEMPTS = 4
REPORT_PAUSE_S = 0.002
"""Reports that come within this time make the router look for room once, as in production."""
MAY_BE_COMING = ("not_covered", "lost")
"""Lists the reasons for which a worker may ask for a unit whose encoding goes on."""
EXCLUDED_S = 5.0
"""A member whose call failed gets no requests of any kind for this long, unless it leaves the directory first."""
FIRST_ARRIVAL_S = 0.05
"""No request arrives earlier, so that routers have the first report of every member before."""
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Describes one router."""

    row_bytes: int
    """This is the number of bytes of one feature row."""
    waits_for_media: bool = False
    """Says that a request is sent to its worker only after all of its media were encoded, as in systems without
    overlap."""
    waits_for_room: bool = True
    """Says that a request is dispatched only when a worker has room for its KV blocks."""
    capacity_wait_s: float = 30.0
    report_delay_s: float = 0.0
    plan_s: float = 0.0
    """This is the time that the router's thread takes for a plan."""
    message_s: float = 0.0
    """This is the time that it takes for a request, a result, a report or another message. Token frames after the first
    one go to the HTTP edges, which are processes of their own."""


class RouterThread:
    """A `RouterThread` does the work of one router, one piece after the other, each in its time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._free_s = -inf
        self.busy_s = 0.0

    def run(self, seconds: float, work: Callable[..., object], *arguments: Any) -> None:
        """Does the work after what was given to the thread before. Work that takes no time is done at once unless there
        is other work ahead of it."""
        now = self._loop.now()
        if seconds <= 0.0 and self._free_s < now:
            work(*arguments)
            return
        self.busy_s += seconds
        self._free_s = max(now, self._free_s) + seconds
        self._loop.at(self._free_s, work, *arguments)


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

    def share(self, router_id: MemberId, news: RouterNews) -> None:
        """Sends news to all other routers."""
        ...

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
    waited_s: float = 0.0
    too_small: frozenset[MemberId] = frozenset()
    """Holds the workers that can never hold the request."""
    lacks_members: bool = False
    """Says that the present wait is for members, and not for room or for its turn."""
    coming: Counter[int] = field(default_factory=Counter)
    """Counts, for the items of the present attempt, the open calls that will deliver them."""
    is_sent: bool = False
    """Says that the present attempt was sent to its worker."""
    ready: set[int] = field(default_factory=set)
    """Holds the items whose encoding ended well in the present attempt, for a dispatch that waits for all of them."""


class SimRouter:
    """A `SimRouter` is one router. Its public methods take what reaches it; each message takes time of its thread."""

    def __init__(
        self,
        member_id: MemberId,
        cluster: ClusterState,
        policy: RoutingPolicy,
        loop: VirtualLoop,
        outlets: RouterOutlets,
        settings: RouterSettings,
    ) -> None:
        self.member_id = member_id
        self.cluster, self.policy = cluster, policy
        self.thread = RouterThread(loop)
        self._loop, self._outlets, self._settings = loop, outlets, settings
        self._attempt_to_routed: dict[AttemptId, RoutedRequest] = {}
        self._waiting = CapacityQueue(cluster)
        self._waiter_to_routed: dict[int, RoutedRequest] = {}
        self._member_to_barred_s: dict[MemberId, float] = {}
        """Maps each member that failed a call to the time until which it gets no requests."""
        self._id_to_member: dict[MemberId, Member] = {}
        self._is_releasing = self._goes_on_later = self._is_pausing = False
        self._timer: SimEvent | None = None
        self._news_at_s = 0.0
        self.num_needed = 0
        """Counts the messages in which workers asked for units after all."""
        self.num_waited = self.num_refused = 0
        """Counts the waits for members or room, and the requests that no worker could ever hold."""

    # ------------------------------------------------------------ the cluster

    def receive(self, message: ClusterNews) -> None:
        """Takes a report or events of a member. The router learns of them after `report_delay_s`, and at once until
        the first request comes."""
        if self._settings.report_delay_s and self._loop.now() >= FIRST_ARRIVAL_S:
            self._loop.after(self._settings.report_delay_s, self._take, self._apply, message)
        else:
            self._take(self._apply, message)

    def _take(self, work: Callable[..., object], *arguments: Any) -> None:
        """Does the work of one message."""
        self.thread.run(self._settings.message_s, work, *arguments)

    def _apply(self, message: ClusterNews) -> None:
        self.policy.take(message)
        for member_id in self.cluster.apply(message, self._loop.now()):
            self._outlets.ask_snapshot(member_id)
        if self._waiting.num_waiting and isinstance(message, WorkerReport) and not self._is_pausing:
            self._is_pausing = True  # Reports come in close succession, and one look for room serves all of them.
            self._loop.after(REPORT_PAUSE_S, self._end_pause)

    def _end_pause(self) -> None:
        self._is_pausing = False
        self._serve_waiting()

    def update_members(self, members: Sequence[Member], leaving: Collection[MemberId] = ()) -> None:
        """Takes the directory's view. Attempts at members that left are made again. Those that are leaving finish what
        they have, and get nothing new."""
        known = set(self._id_to_member)
        self._id_to_member = {member.member_id: member for member in members}
        staying = [member for member in members if member.member_id not in leaving]
        self.cluster.update_members(staying)
        self.policy.update_members(staying)
        gone = known - set(self._id_to_member)
        for routed in list(self._attempt_to_routed.values()):
            plan = routed.plan
            if plan is not None and plan.worker_id in gone:
                self._fail(routed, plan.worker_id)
        for routed in list(self._attempt_to_routed.values()):
            if gone & set(routed.outcome.encoder_ids):
                self._encode_again(routed, gone)
        self._serve_waiting()

    def take_news(self, news: RouterNews) -> None:
        """Takes in what another router has dispatched."""
        self.cluster.take_news(news, self._loop.now())

    def share_work(self) -> None:
        """Begins to tell the other routers what this one dispatches."""
        self.cluster.news.start(self._send_news_soon)

    def _send_news_soon(self) -> None:
        self._loop.at(self._news_at_s + NEWS_INTERVAL_S, self._send_news)

    def _send_news(self) -> None:
        self._news_at_s = self._loop.now()
        if (news := self.cluster.news.take(self.member_id, self._loop.now())) is not None:
            self._outlets.share(self.member_id, news)

    # ------------------------------------------------------------ one request

    def submit(self, request: SimRequest, prompt: SimPrompt) -> None:
        """Takes a request that arrives now."""
        self._take(self._submit, request, prompt, self._loop.now())

    def _submit(self, request: SimRequest, prompt: SimPrompt, arrived_s: float) -> None:
        query = RouteQuery(
            attempt_id=AttemptId(request.request_id, 0),
            token_count=len(prompt.token_ids),
            scheme_to_hashes={
                scheme: prompt_block_hashes(scheme, prompt.token_ids, prompt.placeholders, prompt.media)
                for scheme in self.cluster.kv_schemes()
            },
            media=prompt.media,
            placeholders=prompt.placeholders,
            feature_row_bytes=self._settings.row_bytes,
        )
        outcome = Outcome(
            request.index,
            request.kind,
            arrived_s,
            len(prompt.token_ids),
            len(prompt.media),
            request.num_output,
        )
        self._admit(RoutedRequest(request, prompt, query, outcome))

    # ------------------------------------------------------------ admission

    def _admit(self, routed: RoutedRequest) -> None:
        """Has a request planned, or lets it wait if others are ahead of it or no worker has room for it. Ends it if no
        worker can ever hold it."""
        now, queue = self._loop.now(), self._waiting
        if self._settings.waits_for_room:
            room = self._room(routed, now)
            if room.verdict == "never":
                self.num_refused += 1
                is_text = routed.query.token_count > room.max_tokens > 0
                self._end_without(routed, "context_length_exceeded" if is_text else "invalid_media")
                return
            if routed.waited_s < self._settings.capacity_wait_s:
                waiter = self._waiter(routed, now, lacks_members=False)
                # The gate of production asks the same way: without others, only room and members count.
                if queue.must_wait(waiter, now) if queue.num_waiting else queue.lacks_room(waiter, room, now):
                    self._join(routed, waiter)
                    return
        self.thread.run(self._settings.plan_s, self._dispatch, routed)

    def _room(self, routed: RoutedRequest, now: float) -> KvRoom:
        room = self.cluster.room(self._room_need(routed), self._excluded(), now)
        routed.too_small = room.too_small
        return room

    def _room_need(self, routed: RoutedRequest) -> RoomNeed:
        media = routed.prompt.media
        largest = max((max(item.unit_tokens) for item in media), default=0) * self._settings.row_bytes
        unit_bytes = -(-(HEADER_BYTES + largest) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if largest else 0
        query = routed.query
        return RoomNeed(query.token_count, routed.num_emitted, 1, query.scheme_to_hashes, unit_bytes)

    def _waiter(self, routed: RoutedRequest, now: float, *, lacks_members: bool) -> Waiter:
        need = CapacityNeed(frozenset(item.modality for item in routed.prompt.media), frozenset(routed.failed.items()))
        age = routed.request.arrival_s, routed.request.request_id
        deadline_s = now + max(0.0, self._settings.capacity_wait_s - routed.waited_s)
        room = self._room_need(routed) if self._settings.waits_for_room else None
        return Waiter(age, need, deadline_s, room=room, since_s=now, lacks_members=lacks_members)

    def waiting_work(self) -> tuple[WaitingWork, ...]:
        """Returns the work of the requests that wait here for room or for their turn."""
        return self._waiting.waiting_work(self._loop.now())

    # ------------------------------------------------------------ attempts

    def _dispatch(self, routed: RoutedRequest) -> None:
        now = self._loop.now()
        number = routed.outcome.num_attempts
        attempt_id = AttemptId(routed.request.request_id, number)
        kept_out = routed.too_small | self._waiting.reserved_from(routed.waiter)
        query = replace(routed.query, attempt_id=attempt_id, excluded=self._excluded() | kept_out)
        try:
            plan = self.policy.plan(self.cluster, query, now)
        except NoCapacity:
            self._wait_for_members(routed)
            return
        routed.query, routed.plan, routed.ready, routed.coming = query, plan, set(), Counter()
        routed.is_sent = False
        outcome = routed.outcome
        outcome.num_attempts += 1
        if not number:
            outcome.predicted_s, outcome.lower_bound_s = plan.predicted_ttft_s, plan.lower_bound_s
        outcome.worker_id = plan.worker_id
        outcome.encoder_ids = [assignment.encoder_id for assignment in plan.assignments]
        self._attempt_to_routed[attempt_id] = routed
        self.cluster.note_dispatched(query, plan, now)
        self.policy.note_dispatched(query, plan)
        if not (self._settings.waits_for_media and plan.assignments):
            self._send(routed, plan)
        self._encode(routed, [(each.encoder_id, each.item_index) for each in plan.assignments])

    def _send(self, routed: RoutedRequest, plan: RoutePlan) -> None:
        routed.is_sent = True
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
        self._outlets.generate(
            plan.worker_id, call, first, lambda result: self._take(self._answered, routed, plan, result)
        )

    def _encode(self, routed: RoutedRequest, encoder_and_item: Sequence[tuple[MemberId, int]]) -> None:
        plan = routed.plan
        assert plan is not None
        encoder_to_items: dict[MemberId, list[int]] = {}
        for encoder_id, item_index in encoder_and_item:
            encoder_to_items.setdefault(encoder_id, []).append(item_index)
        for encoder_id, indexes in encoder_to_items.items():
            routed.coming.update(indexes)
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
        return lambda result: self._take(self._encoded, routed, plan, encoder_id, indexes, result)

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
        routed.coming.subtract(indexes)
        failed = indexes
        if isinstance(result, EncodeResult):
            self.cluster.observe_encode(plan, result, self._loop.now())
            failed = [item.index for item in result.items if item.error is not None]
            routed.ready.update(item.index for item in result.items if item.error is None)
            wanted = {each.item_index for each in plan.assignments}
            if not routed.is_sent and wanted <= routed.ready:
                self._send(routed, plan)
        if failed:
            self._exclude(routed, encoder_id)
            self._need(routed, failed)

    def feature_needed(self, message: FeatureNeeded) -> None:
        """Has units encoded that a worker needs after all. Items that an open call will still deliver are not asked for
        twice if they were only not there yet."""
        self._take(self._feature_needed, message)

    def _feature_needed(self, message: FeatureNeeded) -> None:
        routed = self._attempt_to_routed.get(AttemptId(message.request_id, message.attempt))
        if routed is not None:
            self.num_needed += 1
            hashes = {unit.mm_hash for unit in message.units}
            may_be_coming = message.reason in MAY_BE_COMING
            coming = {index for index, count in routed.coming.items() if count > 0} if may_be_coming else set()
            items = [item.index for item in routed.prompt.media if item.mm_hash in hashes and item.index not in coming]
            if items:
                self._need(routed, items)

    def _need(self, routed: RoutedRequest, item_indexes: Sequence[int]) -> None:
        plan = routed.plan
        assert plan is not None
        query = replace(routed.query, attempt_id=plan.attempt_id, excluded=self._excluded())
        try:
            terms = self.cluster.plan_encoding(query, plan.worker_id, item_indexes, self._loop.now())
        except NoCapacity:
            self._outlets.abort(plan.attempt_id, plan.worker_id)
            self._give_up(routed, plan)
            self._wait_for_members(routed)
            return
        self.cluster.note_encoding(plan.attempt_id, terms, self._loop.now())
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
        """Notes the time at which the first token of an attempt reaches the router, which may be a little later."""
        if self._settings.message_s:
            self._loop.at(at_s, self._take, self._note_first_token, attempt_id)
        else:
            self._note_first_token(attempt_id, at_s)

    def _note_first_token(self, attempt_id: AttemptId, at_s: float | None = None) -> None:
        at_s = self._loop.now() if at_s is None else at_s
        routed = self._attempt_to_routed.get(attempt_id)
        if routed is not None and routed.outcome.first_token_s < 0.0:
            routed.outcome.first_token_s = at_s - routed.outcome.arrival_s
            self.cluster.note_first_token(attempt_id, at_s)
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
            self._end_without(routed, "too_many_attempts")
        else:
            self._admit(routed)

    def _give_up(self, routed: RoutedRequest, plan: RoutePlan) -> None:
        self._attempt_to_routed.pop(plan.attempt_id, None)
        self.cluster.note_ended(plan.attempt_id, self._loop.now())
        self.policy.note_ended(plan)
        self._leave(routed)
        if self._waiting.num_waiting:
            self._loop.soon(self._serve_waiting)

    def _end_without(self, routed: RoutedRequest, error: str) -> None:
        routed.outcome.end_s, routed.outcome.error = self._loop.now() - routed.outcome.arrival_s, error
        self._outlets.ended(routed.outcome)

    def _exclude(self, routed: RoutedRequest, member_id: MemberId) -> None:
        until = self._loop.now() + EXCLUDED_S
        routed.failed[member_id] = self._member_to_barred_s[member_id] = until
        self.cluster.exclude(member_id, until)

    def _excluded(self) -> frozenset[MemberId]:
        """Returns the members that no request may use now. The production plan knows them, and the policies that choose
        themselves learn them from the query."""
        now = self._loop.now()
        return frozenset(member_id for member_id, until in self._member_to_barred_s.items() if until > now)

    # ------------------------------------------------------------ waiting for members and for room

    def _wait_for_members(self, routed: RoutedRequest) -> None:
        self._leave(routed)
        self._join(routed, self._waiter(routed, self._loop.now(), lacks_members=True))

    def _join(self, routed: RoutedRequest, waiter: Waiter) -> None:
        self.num_waited += 1
        routed.waiter, routed.lacks_members = waiter, waiter.lacks_members
        self._waiter_to_routed[id(waiter)] = routed
        if waiter.room is not None:
            waiter.work = self.cluster.predicted_work(waiter.room, routed.query, frozenset(), self._loop.now())
        self._waiting.join(waiter)
        self._set_timer()

    def _set_timer(self) -> None:
        """Makes the router look at the queue again at the next moment at which a wait may end without any message."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_s = self._waiting.next_at_s(self._loop.now())
        if next_s is not None:
            self._timer = self._loop.at(next_s + 1e-6, self._serve_waiting)

    def _serve_waiting(self) -> None:
        """Releases the requests that can be served now, one after the other, so that the plan of each counts the work
        of those before it."""
        while not self._is_releasing and (taken := self._waiting.take(self._loop.now())) is not None:
            routed = self._waiter_to_routed.pop(id(taken.waiter))
            routed.waited_s += self._loop.now() - taken.waiter.since_s
            if taken.is_served or self._goes_on(routed):
                self._is_releasing = True
                self.thread.run(self._settings.plan_s, self._release, routed)
                self._goes_on_later = self._is_releasing
            else:
                self._leave(routed)
                self._end_without(routed, "no_capacity" if routed.lacks_members else "overloaded")
        if self._waiting.num_waiting and not self._is_releasing:
            self._set_timer()

    def _release(self, routed: RoutedRequest) -> None:
        goes_on, self._goes_on_later, self._is_releasing = self._goes_on_later, False, False
        self._dispatch(routed)
        if goes_on:
            self._serve_waiting()

    def _goes_on(self, routed: RoutedRequest) -> bool:
        """Returns whether a request whose time to wait is over is dispatched all the same: there is room for it now, or
        it was dispatched before, so that it queues at a worker, where its age ranks it."""
        if routed.lacks_members:
            return False
        return routed.outcome.num_attempts > 0 or self._room(routed, self._loop.now()).verdict != "later"

    def _arrived(self, routed: RoutedRequest) -> None:
        if routed.waiter is not None:
            self._leave(routed, has_arrived=True)
            self._serve_waiting()

    def _leave(self, routed: RoutedRequest, *, has_arrived: bool = False) -> None:
        if routed.waiter is not None:
            self._waiting.leave(routed.waiter, has_arrived)
            self._waiter_to_routed.pop(id(routed.waiter), None)
            routed.waiter = None
