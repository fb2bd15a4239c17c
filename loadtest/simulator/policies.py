"""Chooses members by one of several policies, so that a simulation can compare them on the same arrivals.

`joint` is the production plan. The others choose by rules that other systems use, and then have the production plan
computed for the members that they chose, so that prediction, learning and accounting are the same for all:

    random, round-robin    know nothing
    least-loaded           the fewest open requests, of the last report and of what was dispatched since
    kv-only                Dynamo's cost in blocks; encoders in turn
    encoder-first          the encoders from which the media land earliest, then the best worker for them
    worker-first           the worker that would answer the text earliest, then the best encoders for it

`encoder-first` and `worker-first` use the production cost model. `FixedPolicy` follows a given assignment, for the
exhaustive search. The module knows nothing of how members work or of what becomes of a request.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from msgspec import structs

from fabric.contracts import (
    AttemptId,
    ConfigError,
    EncoderReport,
    FeatureEvents,
    KvEvents,
    KvSnapshot,
    Member,
    MemberId,
    NoCapacity,
    RequestId,
    WorkerReport,
)
from kv_index import PrefixIndex
from router.planning import ClusterState, RoutePlan, RouteQuery

ClusterNews = WorkerReport | EncoderReport | KvEvents | KvSnapshot | FeatureEvents
NO_WORKER = MemberId("")


class RoutingPolicy(Protocol):
    """A `RoutingPolicy` belongs to one router and sees what that router sees."""

    name: str

    def take(self, message: ClusterNews) -> None:
        """Takes a report or events when they reach the router."""
        ...

    def update_members(self, members: Sequence[Member]) -> None: ...

    def plan(self, cluster: ClusterState, query: RouteQuery, now: float) -> RoutePlan:
        """Returns the plan of one attempt. Raises NoCapacity."""
        ...

    def note_dispatched(self, query: RouteQuery, plan: RoutePlan) -> None: ...

    def note_ended(self, plan: RoutePlan) -> None: ...


class JointPolicy:
    """A `JointPolicy` takes the production plan. The other policies derive from it, because they keep the members and
    restrict the production plan in the same way."""

    name = "joint"

    def __init__(self, rng: random.Random, block_size: int) -> None:
        self._rng, self._block_size = rng, block_size
        self._workers: dict[MemberId, Member] = {}
        self._encoders: dict[MemberId, Member] = {}

    def take(self, message: ClusterNews) -> None:
        """Does nothing: the router's picture of the cluster takes the message."""

    def update_members(self, members: Sequence[Member]) -> None:
        self._workers = {one.member_id: one for one in members if one.kind == "worker"}
        self._encoders = {one.member_id: one for one in members if one.kind == "encoder"}

    def plan(self, cluster: ClusterState, query: RouteQuery, now: float) -> RoutePlan:
        return cluster.plan(query, now)

    def note_dispatched(self, query: RouteQuery, plan: RoutePlan) -> None:
        """Does nothing."""

    def note_ended(self, plan: RoutePlan) -> None:
        """Does nothing."""

    # ------------------------------------------------------------ for the policies that choose themselves

    def _restricted(
        self,
        cluster: ClusterState,
        query: RouteQuery,
        now: float,
        worker_id: MemberId | None,
        item_to_encoder: Mapping[int, MemberId] | None,
    ) -> RoutePlan:
        """Returns the production plan among the chosen members; None leaves the choice open. Items go to the encoders
        that were chosen for them."""
        excluded: set[MemberId] = set(query.excluded)
        if worker_id is not None:
            excluded.update(self._workers.keys() - {worker_id})
        if item_to_encoder is not None and query.media:
            excluded.update(self._encoders.keys() - set(item_to_encoder.values()))
        plan = cluster.plan(replace(query, excluded=frozenset(excluded)), now)
        return plan if item_to_encoder is None else with_encoders(plan, item_to_encoder)

    def _usable_workers(self, query: RouteQuery) -> list[MemberId]:
        workers = [worker_id for worker_id in self._workers if worker_id not in query.excluded]
        if not workers:
            raise NoCapacity("no worker is available")
        return workers

    def _usable_encoders(self, query: RouteQuery, modality: str) -> list[MemberId]:
        encoders = [
            encoder_id
            for encoder_id, member in self._encoders.items()
            if modality in member.modalities and encoder_id not in query.excluded
        ]
        if not encoders:
            raise NoCapacity(f"no encoder is available for {modality}")
        return encoders


def with_encoders(plan: RoutePlan, item_to_encoder: Mapping[int, MemberId]) -> RoutePlan:
    """Returns the plan with its items on these encoders. Its predicted times stay as they were."""
    winner = plan.explanation.winner
    items = tuple(structs.replace(each, encoder_id=item_to_encoder[each.item_index]) for each in winner.items)
    if items == winner.items:
        return plan
    return replace(
        plan,
        assignments=tuple(each._replace(encoder_id=item_to_encoder[each.item_index]) for each in plan.assignments),
        explanation=structs.replace(plan.explanation, winner=structs.replace(winner, items=items)),
    )


class RandomPolicy(JointPolicy):
    name = "random"

    def plan(self, cluster: ClusterState, query: RouteQuery, now: float) -> RoutePlan:
        worker_id = self._rng.choice(self._usable_workers(query))
        chosen = {item.index: self._rng.choice(self._usable_encoders(query, item.modality)) for item in query.media}
        return self._restricted(cluster, query, now, worker_id, chosen)


class RoundRobinPolicy(JointPolicy):
    name = "round-robin"

    def __init__(self, rng: random.Random, block_size: int) -> None:
        super().__init__(rng, block_size)
        self._turn = rng.randrange(1 << 20)
        self._encoder_turn = rng.randrange(1 << 20)

    def plan(self, cluster: ClusterState, query: RouteQuery, now: float) -> RoutePlan:
        workers = self._usable_workers(query)
        self._turn += 1
        chosen = {item.index: self._next_encoder(query, item.modality) for item in query.media}
        return self._restricted(cluster, query, now, workers[self._turn % len(workers)], chosen)

    def _next_encoder(self, query: RouteQuery, modality: str) -> MemberId:
        encoders = self._usable_encoders(query, modality)
        self._encoder_turn += 1
        return encoders[self._encoder_turn % len(encoders)]


class LeastLoadedPolicy(JointPolicy):
    """Counts the open requests of each worker and the open items of each encoder."""

    name = "least-loaded"

    def __init__(self, rng: random.Random, block_size: int) -> None:
        super().__init__(rng, block_size)
        self._reported: Counter[MemberId] = Counter()
        self._pending: dict[MemberId, Counter[AttemptId]] = {}

    def take(self, message: ClusterNews) -> None:
        if isinstance(message, WorkerReport):
            self._reported[message.worker_id] = message.engine.num_running + message.engine.num_waiting
            member_id = message.worker_id
        elif isinstance(message, EncoderReport):
            self._reported[message.encoder_id] = message.num_items_pending
            member_id = message.encoder_id
        else:
            return
        pending = self._pending.setdefault(member_id, Counter())
        for attempt_id in message.acknowledged:
            pending.pop(attempt_id, None)

    def plan(self, cluster: ClusterState, query: RouteQuery, now: float) -> RoutePlan:
        worker_id = self._least(self._usable_workers(query), Counter())
        taken: Counter[MemberId] = Counter()
        chosen: dict[int, MemberId] = {}
        for item in query.media:
            chosen[item.index] = encoder_id = self._least(self._usable_encoders(query, item.modality), taken)
            taken[encoder_id] += 1
        return self._restricted(cluster, query, now, worker_id, chosen)

    def _least(self, members: Iterable[MemberId], taken: Mapping[MemberId, int]) -> MemberId:
        nothing: Counter[AttemptId] = Counter()
        member_to_load = {
            one: self._reported[one] + self._pending.get(one, nothing).total() + taken.get(one, 0) for one in members
        }
        least = min(member_to_load.values())
        return self._rng.choice([one for one, load in member_to_load.items() if load == least])

    def note_dispatched(self, query: RouteQuery, plan: RoutePlan) -> None:
        self._pending.setdefault(plan.worker_id, Counter())[plan.attempt_id] = 1
        for each in plan.assignments:
            self._pending.setdefault(each.encoder_id, Counter())[plan.attempt_id] += 1

    def note_ended(self, plan: RoutePlan) -> None:
        for member_id in (plan.worker_id, *(each.encoder_id for each in plan.assignments)):
            if pending := self._pending.get(member_id):
                pending.pop(plan.attempt_id, None)


class KvOnlyPolicy(RoundRobinPolicy):
    """Minimises, in blocks, `max(0, active prefill + prompt - overlap) + decode blocks` over the workers, as Dynamo's
    router does with its default weights. Encoders take turns."""

    name = "kv-only"

    def __init__(self, rng: random.Random, block_size: int) -> None:
        super().__init__(rng, block_size)
        self._index = PrefixIndex(1 << 20)
        self._worker_to_slot: dict[MemberId, int] = {}
        self._num_slots = 0
        """Counts the slots up to the highest that was ever in use."""
        self._worker_to_report: dict[MemberId, WorkerReport] = {}
        self._pending: dict[MemberId, dict[AttemptId, tuple[float, float]]] = {}
        """Holds, for attempts that no report contains yet, their prefill blocks and their prompt blocks."""

    def take(self, message: ClusterNews) -> None:
        if isinstance(message, WorkerReport):
            self._worker_to_report[message.worker_id] = message
            pending = self._pending.get(message.worker_id, {})
            for attempt_id in message.acknowledged:
                pending.pop(attempt_id, None)
        elif isinstance(message, KvEvents):
            self._index.apply(message.worker_id, message.epoch, message.first_seq, message.events)
        elif isinstance(message, KvSnapshot):
            self._index.load_snapshot(message)

    def update_members(self, members: Sequence[Member]) -> None:
        before = self._workers.keys()
        super().update_members(members)
        for worker_id in before - self._workers.keys():
            self._index.remove_worker(worker_id)
            self._worker_to_slot.pop(worker_id, None)
            self._worker_to_report.pop(worker_id, None)
            self._pending.pop(worker_id, None)
        for worker_id in self._workers.keys() - before:
            slot = min(set(range(len(self._workers))) - set(self._worker_to_slot.values()))
            self._worker_to_slot[worker_id] = slot
            self._num_slots = max(self._num_slots, slot + 1)
            self._index.add_worker(worker_id, slot)

    def plan(self, cluster: ClusterState, query: RouteQuery, now: float) -> RoutePlan:
        (hashes,) = query.scheme_to_hashes.values()
        overlaps = np.zeros(self._num_slots, dtype=np.int32)
        self._index.lookup(hashes, overlaps)
        worker_to_cost = {
            worker_id: self._cost(worker_id, query, int(overlaps[self._worker_to_slot[worker_id]]))
            for worker_id in self._usable_workers(query)
        }
        least = min(worker_to_cost.values())
        worker_id = self._rng.choice([one for one, cost in worker_to_cost.items() if cost <= least])
        chosen = {item.index: self._next_encoder(query, item.modality) for item in query.media}
        return self._restricted(cluster, query, now, worker_id, chosen)

    def _cost(self, worker_id: MemberId, query: RouteQuery, overlap_blocks: int) -> float:
        report = self._worker_to_report.get(worker_id)
        pending = self._pending.get(worker_id, {}).values()
        active = sum(prefill for prefill, _ in pending)
        decode = sum(blocks for _, blocks in pending)
        if report is not None:
            active += report.engine.queued_tokens / self._block_size
            decode += report.engine.kv_blocks_used
        return max(0.0, active + query.token_count / self._block_size - overlap_blocks) + decode

    def note_dispatched(self, query: RouteQuery, plan: RoutePlan) -> None:
        prefill = plan.explanation.winner.num_prefill_tokens / self._block_size
        blocks = query.token_count / self._block_size
        self._pending.setdefault(plan.worker_id, {})[plan.attempt_id] = (prefill, blocks)

    def note_ended(self, plan: RoutePlan) -> None:
        self._pending.get(plan.worker_id, {}).pop(plan.attempt_id, None)


class EncoderFirstPolicy(JointPolicy):
    """Chooses encoders without regard to workers, and then the worker with the earliest first token for them."""

    name = "encoder-first"

    def plan(self, cluster: ClusterState, query: RouteQuery, now: float) -> RoutePlan:
        if not query.media:
            return cluster.plan(query, now)
        terms = cluster.plan_encoding(query, NO_WORKER, [item.index for item in query.media], now)
        chosen = {each.item_index: each.encoder_id for each in terms}
        return self._restricted(cluster, query, now, None, chosen)


class WorkerFirstPolicy(JointPolicy):
    """Chooses the worker as if the media were there already, and then the encoders with the earliest landing for
    it."""

    name = "worker-first"

    def plan(self, cluster: ClusterState, query: RouteQuery, now: float) -> RoutePlan:
        if not query.media:
            return cluster.plan(query, now)
        worker_id = cluster.plan(replace(query, media=(), placeholders=()), now).worker_id
        return self._restricted(cluster, query, now, worker_id, None)


class FixedPolicy(JointPolicy):
    """Sends each request to the worker and each of its items to the encoder that an assignment names."""

    name = "fixed"

    def __init__(self, request_to_members: Mapping[RequestId, tuple[MemberId, tuple[MemberId, ...]]]) -> None:
        super().__init__(random.Random(0), 1)
        self._request_to_members = request_to_members

    def plan(self, cluster: ClusterState, query: RouteQuery, now: float) -> RoutePlan:
        worker_id, encoders = self._request_to_members[query.attempt_id.request_id]
        return self._restricted(cluster, query, now, worker_id, dict(enumerate(encoders)))


POLICIES: Mapping[str, Callable[[random.Random, int], RoutingPolicy]] = {
    policy.name: policy
    for policy in (
        RandomPolicy,
        RoundRobinPolicy,
        LeastLoadedPolicy,
        KvOnlyPolicy,
        EncoderFirstPolicy,
        WorkerFirstPolicy,
        JointPolicy,
    )
}
SEQUENTIAL = ("encoder-first", "worker-first")


def make_policy(name: str, rng: random.Random, block_size: int) -> RoutingPolicy:
    """Returns a policy for one router. Raises ConfigError for an unknown name."""
    if name not in POLICIES:
        raise ConfigError(f"there is no policy {name!r}; the policies are {', '.join(POLICIES)}")
    return POLICIES[name](rng, block_size)
