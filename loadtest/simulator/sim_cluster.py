"""Builds a simulated cluster and runs requests through it: members, routers, the network between them, and faults.

Every call and message takes the table's `message_s`; reports and events reach a router later by its delay. Members
stand on machines of eight, encoders beside workers or apart from them. The module knows nothing of where requests come
from, or of how a result is shown.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from encoder_pool.encoder_config import EncoderConfig
from fabric.contracts import (
    WEFT_KV,
    AttemptId,
    ConfigError,
    EncodeRequest,
    EncodeResult,
    EncoderLost,
    FeatureNeeded,
    GenerateRequest,
    GenerateResult,
    KvScheme,
    Member,
    MemberId,
    RouterNews,
    UnitReady,
    UnitRelease,
    WeftError,
)
from llm_workers.worker_config import WorkerConfig
from loadtest.simulator.cost_tables import CostTable, LinkCosts
from loadtest.simulator.event_loop import VirtualLoop
from loadtest.simulator.faults import MemberFault
from loadtest.simulator.policies import ClusterNews, RoutingPolicy, make_policy
from loadtest.simulator.sim_encoder import SimEncoder
from loadtest.simulator.sim_requests import Outcome, SimRequest
from loadtest.simulator.sim_router import FIRST_ARRIVAL_S, RouterSettings, SimRouter
from loadtest.simulator.sim_worker import SimWorker, WorkerLimits
from modalities.family import ModelShape
from router.planning import ClusterState, PlannerSettings

MACHINE_SIZE = 8
BROKEN_CALL_S = 0.05
"""A router learns this long after a member's death that its open calls to the member are broken."""
LEAVE_LOOK_S = 0.1
"""The cluster looks this often whether a member that stops has finished."""
STUCK_S = 600.0
"""A run in which requests are open and none ends for this long is given up."""
DIRECTORY_S = 1.0
"""The directory no longer lists a member this long after the member's death."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Describes a simulated cluster."""

    table: CostTable
    num_workers: int
    num_encoders: int
    num_routers: int = 1
    policy: str = "joint"
    seed: int = 0
    block_size: int = 16
    num_blocks: int = 8192
    max_step_tokens: int = 4096
    max_sequences: int = 256
    max_model_len: int = 131072
    max_batch_cost: int = 16 * 1024
    arena_bytes: int = 16 * 2**30
    inbox_bytes: int = 16 * 2**30
    """Limits the features that are at a worker or on their way to it. The worker pulls one when there is room."""
    num_decoders: int = 8
    report_interval_s: float = 0.2
    report_spacing_s: float = 0.01
    """Holds the shortest time between two reports of a member; routers of a large cluster ask for more."""
    report_delay_s: float = 0.0
    """Delays reports and events on their way to every router."""
    shares_work: bool = True
    """Says that routers tell each other what they dispatch (`router.planning.peer_news`)."""
    news_delay_s: float = 0.0
    """Delays these news on their way to every other router."""
    encoders_stand: Literal["beside", "apart", "both"] = "beside"
    """Says whether encoders stand on the machines of workers, on machines of their own, or every second one on
    each."""
    machine_size: int = MACHINE_SIZE
    """Counts the workers of a machine, and the encoders of one that has encoders alone."""
    worker_slowness: tuple[float, ...] = ()
    """Multiplies the time of each worker's steps, in turn; an empty tuple means that all workers are equal."""
    encoder_slowness: tuple[float, ...] = ()
    is_fast: bool = True
    """Says that stretches of equal decode steps are advanced in one call."""
    waits_for_media: bool = False
    """Says that a request is sent to its worker only after its media were encoded."""
    waits_for_room: bool = True
    """Says that a router dispatches a request only when a worker has room for its KV blocks."""
    router_plan_s: float = 0.0
    """Holds the time that a router's thread takes for a plan; `weft bench router` measures it."""
    router_message_s: float = 0.0
    """Holds the time that it takes for each message but token frames."""
    shares_devices: bool = False
    """Says that encoder number i and worker number i compute on one device, one after the other."""
    is_prefix_cache_enabled: bool = True
    drain_s: float = 30.0
    """A member that is being stopped may take this long to finish; then its requests move to others."""
    faults: tuple[MemberFault, ...] = ()
    planner: PlannerSettings = PlannerSettings()  # noqa: RUF009 (it is frozen)
    """Holds the settings of every router's planner; its index grows to what the workers hold."""

    def __post_init__(self) -> None:
        if self.num_workers < 1 or self.num_encoders < 0 or self.num_routers < 1:
            raise ConfigError(
                f"a cluster needs at least one worker and one router, not {self.num_workers} and {self.num_routers}"
            )

    def worker_config(self) -> WorkerConfig:
        """Returns the config of the production code in each worker."""
        return WorkerConfig(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_step_tokens=self.max_step_tokens,
            max_sequences=self.max_sequences,
            report_interval_s=self.report_interval_s,
            is_prefix_cache_enabled=self.is_prefix_cache_enabled,
            keep_features="never",
        )

    def encoder_config(self) -> EncoderConfig:
        """Returns the config of the production code in each encoder."""
        return EncoderConfig(
            modalities=tuple(self.table.modality_to_encoding),
            max_batch_cost=self.max_batch_cost,
            max_queue_cost=1 << 40,
            max_decoded_cost=max(1 << 18, 4 * self.max_batch_cost),
            num_decode_processes=0,
            lease_s=1e9,
            report_interval_s=self.report_interval_s,
        )

    def router_settings(self) -> RouterSettings:
        """Returns the settings of each router."""
        return RouterSettings(
            2 * self.table.worker.hidden_size,
            self.waits_for_media,
            self.waits_for_room,
            report_delay_s=self.report_delay_s,
            plan_s=self.router_plan_s,
            message_s=self.router_message_s,
        )

    def member(self, kind: str, index: int) -> Member:
        """Returns the record of a worker or an encoder."""
        machine = f"m{index // self.machine_size}"
        if kind == "encoder":
            machine = self._encoder_machine(index)
        modalities = tuple(self.table.modality_to_encoding) if kind == "encoder" else ()
        name = f"{kind}-{index}"
        scheme = KvScheme(WEFT_KV, self.block_size) if kind == "worker" else None
        return Member(MemberId(name), kind, f"sim://{name}", machine, 1, modalities, kv_scheme=scheme)

    def _encoder_machine(self, index: int) -> str:
        """Returns the machine of an encoder; encoders take machines in turn beside workers, and fill their own."""
        num_machines = -(-self.num_workers // self.machine_size)
        stands_beside = self.encoders_stand == "beside" or (self.encoders_stand == "both" and index % 2 == 0)
        place = index // 2 if self.encoders_stand == "both" else index
        return f"m{place % num_machines}" if stands_beside else f"e{place // self.machine_size}"


@dataclass(slots=True)
class SimResult:
    """Holds the results of a run. Times are virtual seconds, except `cpu_s`, which is processor time, and `wall_s`."""

    policy: str
    outcomes: list[Outcome]
    end_s: float
    worker_busy: float
    """Holds the mean share of the time, until the last arrival, for which the workers computed."""
    encoder_busy: float
    num_steps: int
    num_planned: int
    """Counts the steps that were planned one by one."""
    num_stretches: int
    """Counts the times at which steps were advanced together."""
    num_needed: int
    num_waited: int
    """Counts the waits of requests for members, or for room in the KV pools."""
    num_events: int
    router_busy: float
    """Holds the largest share of the time for which a router's thread was busy."""
    cpu_s: float
    max_feature_bytes: int
    """Holds the most bytes of features that any one worker had."""
    max_kept_bytes: int
    """Holds the most bytes that a worker would have had if it had kept features until the ends of their requests."""
    max_kv_blocks: int
    wall_s: float = 0.0
    """Holds the time that the run took, with the building of the cluster; it is no virtual time."""
    stage_to_error: Mapping[str, tuple[int, float, float, float]] = field(default_factory=dict)
    """Maps each stage to (observations, predicted, actual, sum of absolute errors)."""


class SimCluster:
    """A `SimCluster` runs once. `policy_of` makes the policy of a router from the router's number; without it, every
    router has the policy of the settings."""

    def __init__(self, settings: ClusterSettings, policy_of: Callable[[int], RoutingPolicy] | None = None) -> None:
        self.settings = settings
        self.loop = VirtualLoop()  # type: ignore[abstract]  # it has no sockets
        self._delay_s = settings.table.message_s
        self.workers: dict[MemberId, SimWorker] = {}
        for index in range(settings.num_workers):
            member = settings.member("worker", index)
            self.workers[member.member_id] = self._new_worker(member, index)
        self.encoders: dict[MemberId, SimEncoder] = {}
        for index in range(settings.num_encoders):
            member = settings.member("encoder", index)
            self.encoders[member.member_id] = self._new_encoder(member, index)
        self._members: list[SimWorker | SimEncoder] = [*self.workers.values(), *self.encoders.values()]
        self._leaving: dict[MemberId, float] = {}
        """Holds the members that are being stopped, with the time at which each began."""
        self.num_moved = 0
        """Counts the requests that moved from a worker which was being stopped."""
        self._id_to_member = {one.member.member_id: one.member for one in self._members}
        self._address_to_worker = {one.member.address: one for one in self.workers.values()}
        self._address_to_encoder = {one.member.address: one for one in self.encoders.values()}
        self._hosts_to_link: dict[tuple[str, str], LinkCosts] = {}
        self._device_free_s: dict[str, float] = {}
        self._encoder_to_calls: dict[MemberId, dict[int, Callable[[EncodeResult | WeftError], None]]] = {}
        self._num_calls = 0
        self._router_members = [
            Member(MemberId(f"router-{index}"), "router", f"sim://router-{index}", "m0", 1)
            for index in range(settings.num_routers)
        ]
        self.routers = [self._new_router(index, policy_of) for index in range(settings.num_routers)]
        self._id_to_router = {one.member_id: one for one in self.routers}
        rng = random.Random(settings.seed)
        for one in self._members:
            # The first reports are there before the first request; the later ones come at moments of their own.
            one.start(rng.random() * 1e-3)
        for fault in settings.faults:
            self._plan_fault(fault)
        self._arrivals: Iterator[SimRequest] = iter(())
        self._num_open = 0
        self._has_more = True
        self._busy_until_last = (0.0, 0.0)
        self._is_closed = False
        self._outcomes: list[Outcome] = []
        self._on_end: Callable[[Outcome], None] = lambda outcome: None

    def _new_worker(self, member: Member, index: int) -> SimWorker:
        settings = self.settings
        worker = SimWorker(
            member,
            settings.worker_config(),
            settings.table,
            self.loop,
            self,
            WorkerLimits(settings.max_model_len, settings.inbox_bytes, settings.report_spacing_s),
            is_fast=settings.is_fast and not settings.shares_devices,
        )
        worker.slowness = _in_turn(settings.worker_slowness, index)
        return worker

    def _new_encoder(self, member: Member, index: int) -> SimEncoder:
        """Returns an encoder that knows all workers."""
        settings = self.settings
        encoder = SimEncoder(
            member,
            settings.encoder_config(),
            settings.table,
            self.loop,
            self,
            settings.arena_bytes,
            settings.num_decoders,
            settings.report_spacing_s,
        )
        encoder.slowness = _in_turn(settings.encoder_slowness, index)
        for worker_id in self.workers:
            encoder.worker_came(worker_id)
        return encoder

    def _new_router(self, index: int, policy_of: Callable[[int], RoutingPolicy] | None) -> SimRouter:
        """Returns a router that knows all members."""
        settings, hidden_size = self.settings, self.settings.table.worker.hidden_size
        rng = random.Random(1_000_003 * settings.seed + index)
        shape = ModelShape(hidden_size, 1, 1, 1, 1, 1, settings.max_model_len)
        num_blocks = max(1 << 18, settings.num_workers * settings.num_blocks)
        planner_settings = replace(settings.planner, max_index_blocks=num_blocks)
        router = SimRouter(
            MemberId(f"router-{index}"),
            ClusterState(shape, settings.block_size, rng, planner_settings),
            make_policy(settings.policy, rng, settings.block_size) if policy_of is None else policy_of(index),
            self.loop,
            self,
            settings.router_settings(),
        )
        router.update_members([*self._id_to_member.values(), *self._router_members])
        if settings.shares_work and settings.num_routers > 1:
            router.share_work()
        return router

    def run(
        self,
        requests: Iterable[SimRequest],
        on_end: Callable[[Outcome], None] = lambda outcome: None,
        num_clients: int = 0,
    ) -> SimResult:
        """Runs all requests, which must be in order of arrival, to their ends. Calls `on_end` with each outcome. With
        `num_clients`, so many clients send one request after the other, and the times of arrival have no meaning.
        Raises RuntimeError if no request ends for `STUCK_S`, and the first error of an event."""
        begun_s = time.process_time()
        self._arrivals, self._on_end, self._is_closed = iter(requests), on_end, num_clients > 0
        for _ in range(num_clients or 1):
            self._next_arrival()
        self.loop.after(STUCK_S, self._check_progress, -1)
        self.loop.run_while(lambda: self._has_more or self._num_open > 0)
        return self._result(time.process_time() - begun_s)

    def _result(self, cpu_s: float) -> SimResult:
        now_s, workers = max(self.loop.now(), 1e-9), list(self.workers.values())
        worker_busy, encoder_busy = self._busy_until_last
        stage_to_error = {
            stage: (error.num_observations, error.predicted, error.actual, error.abs_error)
            for stage, error in self.routers[0].cluster.accuracy().items()
        }
        return SimResult(
            policy=self.routers[0].policy.name,
            outcomes=sorted(self._outcomes, key=lambda outcome: outcome.index),
            end_s=now_s,
            worker_busy=worker_busy,
            encoder_busy=encoder_busy,
            num_steps=sum(one.num_steps for one in workers),
            num_planned=sum(one.num_planned for one in workers),
            num_stretches=sum(one.num_stretches for one in workers),
            num_needed=sum(one.num_needed for one in self.routers),
            num_waited=sum(one.num_waited for one in self.routers),
            router_busy=max(one.thread.busy_s for one in self.routers) / now_s,
            num_events=self.loop.num_events,
            cpu_s=cpu_s,
            max_feature_bytes=max(one.inbox.max_feature_bytes for one in workers),
            max_kept_bytes=max(one.max_kept_bytes for one in workers),
            max_kv_blocks=max(one.max_kv_blocks for one in workers),
            stage_to_error=stage_to_error,
        )

    # ------------------------------------------------------------ requests

    def _next_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is None:
            if self._has_more:
                self._has_more, self._busy_until_last = False, self._busy_shares()
            return
        at_s = self.loop.now() if self._is_closed else request.arrival_s
        self.loop.at(max(at_s, FIRST_ARRIVAL_S), self._arrive, request)

    def _arrive(self, request: SimRequest) -> None:
        self._num_open += 1
        router = self.routers[request.index % len(self.routers)]
        router.submit(request, request.prompt(self.settings.table))
        if not self._is_closed:
            self._next_arrival()

    def _busy_shares(self) -> tuple[float, float]:
        """Returns the shares of the time until now for which the workers and the encoders computed."""
        now_s = max(self.loop.now(), 1e-9)
        workers, encoders = list(self.workers.values()), list(self.encoders.values())
        of_workers = sum(one.busy_until_now_s() for one in workers) / len(workers) / now_s
        return of_workers, sum(one.busy_s for one in encoders) / max(len(encoders), 1) / now_s

    def _check_progress(self, num_before: int) -> None:
        """Raises RuntimeError if requests are open and none has ended for long: the simulation is stuck."""
        if self._num_open and len(self._outcomes) == num_before:
            raise RuntimeError(f"{self._num_open} requests are open and none has ended for {STUCK_S:g} s")
        self.loop.after(STUCK_S, self._check_progress, len(self._outcomes) if self._num_open else -1)

    def ended(self, outcome: Outcome) -> None:
        self._num_open -= 1
        self._outcomes.append(outcome)
        self._on_end(outcome)
        if self._is_closed:
            self._next_arrival()

    # ------------------------------------------------------------ from routers

    def generate(
        self,
        worker_id: MemberId,
        request: GenerateRequest,
        first_output: int,
        answer: Callable[[GenerateResult], None],
    ) -> None:
        worker = self.workers[worker_id]
        self.loop.after(
            self._delay_s,
            worker.generate,
            request,
            first_output,
            lambda result: self.loop.after(self._delay_s, answer, result),
        )

    def encode(
        self, encoder_id: MemberId, request: EncodeRequest, answer: Callable[[EncodeResult | WeftError], None]
    ) -> None:
        self._num_calls += 1
        number, calls = self._num_calls, self._encoder_to_calls.setdefault(encoder_id, {})
        calls[number] = answer

        def answered(result: EncodeResult | WeftError) -> None:
            if calls.pop(number, None) is not None:
                self.loop.after(self._delay_s, answer, result)

        self.loop.after(self._delay_s, self.encoders[encoder_id].encode, request, answered)

    def abort(self, attempt_id: AttemptId, worker_id: MemberId) -> None:
        self.loop.after(self._delay_s, self.workers[worker_id].abort, attempt_id)
        for encoder in self.encoders.values():
            self.loop.after(self._delay_s, encoder.end_attempt, attempt_id, EncoderLost("the attempt has ended"))

    def ask_snapshot(self, member_id: MemberId) -> None:
        member = self.workers.get(member_id) or self.encoders[member_id]
        self.loop.after(self._delay_s, member.send_snapshot, self.broadcast)

    # ------------------------------------------------------------ from members

    def broadcast(self, message: ClusterNews) -> None:
        for router in self.routers:
            self.loop.after(self._delay_s, router.receive, message)

    def share(self, router_id: MemberId, news: RouterNews) -> None:
        for router in self.routers:
            if router.member_id != router_id:
                self.loop.after(self._delay_s + self.settings.news_delay_s, router.take_news, news)

    def need(self, router_id: MemberId, message: FeatureNeeded) -> None:
        self.loop.after(self._delay_s, self._id_to_router[router_id].feature_needed, message)

    def release(self, encoder_address: str, message: UnitRelease) -> None:
        self.loop.after(self._delay_s, self._address_to_encoder[encoder_address].release, message)

    def unit_ready(self, address: str, message: UnitReady) -> None:
        self.loop.after(self._delay_s, self._address_to_worker[address].announce, message)

    def first_token(self, request: GenerateRequest, at_s: float) -> None:
        router = self._id_to_router[request.router_id]
        router.first_token(AttemptId(request.request_id, request.attempt), at_s + self._delay_s)

    def link_from(self, encoder_id: MemberId, worker: Member) -> LinkCosts:
        hosts = self._id_to_member[encoder_id].host, worker.host
        link = self._hosts_to_link.get(hosts)
        if link is None:
            link = self._hosts_to_link[hosts] = self.settings.table.link(*hosts)
        return link

    def device(self, member: SimWorker | SimEncoder, begin_s: float, seconds: float, done: Callable[[], None]) -> None:
        """Runs a step or a forward pass on the member's device."""
        if self.settings.shares_devices:
            name = member.member.member_id.rpartition("-")[2]
            begin_s = max(begin_s, self._device_free_s.get(name, 0.0))
            self._device_free_s[name] = begin_s + seconds
        self.loop.at(begin_s + seconds, done)

    # ------------------------------------------------------------ members that come and go

    def running(self, kind: str) -> list[SimWorker | SimEncoder]:
        """Returns the workers or encoders that are not being stopped, the oldest first."""
        return [
            one
            for one in self._members
            if one.is_alive and one.member.kind == kind and one.member.member_id not in self._leaving
        ]

    def join_member(self, kind: str) -> None:
        """Adds a worker or an encoder, which takes requests at once."""
        index = sum(one.member.kind == kind for one in self._members)
        member = self.settings.member(kind, index)
        self._id_to_member[member.member_id] = member
        one: SimWorker | SimEncoder
        if kind == "worker":
            one = self.workers[member.member_id] = self._address_to_worker[member.address] = self._new_worker(
                member, index
            )
            for encoder in self.encoders.values():
                encoder.worker_came(member.member_id)
        else:
            one = self.encoders[member.member_id] = self._address_to_encoder[member.address] = self._new_encoder(
                member, index
            )
        self._members.append(one)
        one.start(0.0)
        self._tell_members()

    def stop_member(self, member_id: MemberId) -> None:
        """Begins to stop a worker or an encoder: routers learn of it at once and plan nothing there, and the member
        finishes what it has."""
        self._leaving[member_id] = self.loop.now()
        self._tell_members()
        self._look_at_leaving(member_id)

    def _look_at_leaving(self, member_id: MemberId) -> None:
        member = self.workers.get(member_id) or self.encoders[member_id]
        if not member.is_alive:
            return
        is_over = self.loop.now() - self._leaving[member_id] >= self.settings.drain_s
        if isinstance(member, SimEncoder):
            is_finished = not self._encoder_to_calls.get(member_id) and not member.report().arena.num_leases
        else:
            is_finished = not member.num_open
            self.num_moved += member.num_open if is_over else 0
        if is_finished or is_over:
            self._end_calls(member)
            self._leave(member_id)
        else:
            self.loop.after(LEAVE_LOOK_S, self._look_at_leaving, member_id)

    # ------------------------------------------------------------ faults

    def _plan_fault(self, fault: MemberFault) -> None:
        member_id = MemberId(fault.member)
        member: SimWorker | SimEncoder | None = self.workers.get(member_id) or self.encoders.get(member_id)
        if member is None:
            raise ConfigError(
                f"the cluster has no member {fault.member!r} for a fault; members are worker-0, encoder-0, ..."
            )
        if fault.kind == "death":
            self.loop.at(fault.at_s, self._die, member)
        else:
            slowness = member.slowness
            self.loop.at(fault.at_s, member.slow_down, slowness * fault.factor)
            if fault.until_s < float("inf"):
                self.loop.at(fault.until_s, member.slow_down, slowness)

    def _die(self, member: SimWorker | SimEncoder) -> None:
        if not member.is_alive:
            return
        self.loop.after(DIRECTORY_S, self._leave, member.member.member_id)
        self._end_calls(member)

    def _end_calls(self, member: SimWorker | SimEncoder) -> None:
        """Ends a member. Its open calls break off, and routers make new attempts."""
        member_id = member.member.member_id
        if isinstance(member, SimEncoder):
            member.die()
            lost = EncoderLost(f"{member_id} is gone")
            for answer in self._encoder_to_calls.pop(member_id, {}).values():
                self.loop.after(BROKEN_CALL_S, answer, lost)
            return
        for opened, num_tokens in member.die():
            request = opened.request
            router = self._id_to_router[request.router_id]
            attempt_id = AttemptId(request.request_id, request.attempt)
            self.loop.after(BROKEN_CALL_S, router.worker_died, attempt_id, member_id, num_tokens)

    def _leave(self, member_id: MemberId) -> None:
        if member_id in self.workers:
            for encoder in self.encoders.values():
                encoder.worker_left(member_id)
        else:
            for worker in self.workers.values():
                worker.encoder_left(member_id)
        self._tell_members()

    def _tell_members(self) -> None:
        members = [*(one.member for one in self._members if one.is_alive), *self._router_members]
        for router in self.routers:
            router.update_members(members, self._leaving.keys())


def _in_turn(factors: Sequence[float], index: int) -> float:
    return factors[index % len(factors)] if factors else 1.0
