"""Holds what all requests of one router share: `RouterContext` with the router's view of the cluster, its message
plane, its clock and its `Tasks`; `Pools`, the calls to members; and `CapacityGate`, where requests wait for members and
for room at them.

These stand together because each of them exists once in a router, before any request, and all requests use it; the
members change meanwhile. The module knows nothing of single requests (no prompt, plan, attempt or stream), and nothing
of HTTP.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from fabric.contracts import (
    Clock,
    EncodeRequest,
    EncodeResult,
    GenerateRequest,
    GenerateResult,
    Member,
    MemberId,
    PlaneMessage,
    StageRequest,
    StageResult,
    WaitingWork,
)
from fabric.transport import Plane
from router.observe import RouterMetrics
from router.planning import CapacityQueue, ClusterState, KvRoom, StageState, Supply, TenantShares, Waiter
from router.prompt import MediumFile
from router.router_config import RouterConfig
from router.run.admission import TenantLedger

T = TypeVar("T")


class Tasks:
    """Starts tasks that run outside the context of the request that started them, and keeps them referenced until they
    end. A task whose outcome is not awaited ends without a warning: the code that started it learns the outcome in
    another way, or has ended.

    Two concurrent calls to one Ray Serve deployment from one HTTP request share an internal request id, which Serve
    keeps in a context variable; the second call then hangs. So every task runs in an empty context."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Starts `work` in an empty context."""
        task = asyncio.create_task(work, name=name, context=contextvars.Context())
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def __len__(self) -> int:
        return len(self._running)

    async def cancel_all(self, timeout_s: float) -> None:
        """Cancels all running tasks and waits until they have ended, at most `timeout_s`."""
        running = set(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=timeout_s)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()


@dataclass(frozen=True, slots=True)
class RouterContext:
    """A `RouterContext` holds what all requests of one router share. It lives as long as the router. Once limits change
    while the router serves, later requests get a copy with another config, which shares everything else."""

    member_id: MemberId
    config: RouterConfig
    feature_row_bytes: int
    """This is the number of bytes of one feature row on one level: `hidden_size * itemsize` of the model."""
    num_levels: int
    """Counts the levels of a feature, where a medium does not state them."""
    cluster: ClusterState
    plane: Plane
    pools: Pools
    clock: Clock
    metrics: RouterMetrics
    ledger: TenantLedger
    stages: StageState = field(default_factory=StageState)
    stage_news: StageNews = field(default_factory=lambda: StageNews())
    tasks: Tasks = field(default_factory=Tasks)
    members: dict[MemberId, Member] = field(default_factory=dict)
    """Holds the workers, encoders and stages that are there."""
    limited_workers: list[Member] = field(default_factory=list)
    """Holds the workers that can't take every request, by what their records say."""
    own_record: list[Member] = field(default_factory=list)
    """Holds this router's own record, once the directory has it."""

    def send(self, member_id: MemberId, message: PlaneMessage) -> bool:
        """Sends a message to a member by its id; returns False if the member has left."""
        member = self.members.get(member_id)
        return member is not None and self.plane.send(member.address, message)

    def exclude(self, member_id: MemberId) -> None:
        """Keeps plans from using the member for `exclusion_s` seconds."""
        self.cluster.exclude(member_id, self.clock.now() + self.config.exclusion_s)

    def of_kind(self, kind: str) -> list[Member]:
        return [member for member in self.members.values() if member.kind == kind]

    def unable(self, needed: Collection[str], num_tokens: int) -> frozenset[MemberId]:
        """Returns the workers that can't take a request which needs these abilities (`Member.lacks`) and has so many
        tokens of prompt and answer already: a worker computes at least one token more."""
        return frozenset(
            each.member_id
            for each in self.limited_workers
            if any(ability in each.lacks for ability in needed) or 0 < each.max_context_tokens <= num_tokens
        )

    def set_members(self, members: Sequence[Member]) -> list[Member]:
        """Replaces the membership by all of `members` that are no routers, and returns those that left. A member
        that restarted under its id has left too."""
        old = list(self.members.values())
        self.members.clear()
        self.members.update({each.member_id: each for each in members if each.kind != "router"})
        new = self.members
        self.limited_workers[:] = [each for each in new.values() if each.lacks or each.max_context_tokens]
        self.own_record[:] = [each for each in members if each.member_id == self.member_id]
        return [each for each in old if each.member_id not in new or new[each.member_id].epoch != each.epoch]

    def machine_of(self, member_id: MemberId) -> str:
        """Returns the machine on which a member (or this router) runs, or an empty string if it is not known."""
        own = self.own_record[0] if self.own_record and member_id == self.member_id else None
        member = own or self.members.get(member_id)
        return "" if member is None else member.machine


class StageNews:
    """Wakes requests that wait for a replica of a stage behind the thinker."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def changed(self) -> None:
        """Wakes all that wait, because a replica has joined or reported."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, limit_s: float) -> None:
        """Returns at the next change, or after `limit_s`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait([future], timeout=limit_s)
        finally:
            self._waiting.discard(future)


# ------------------------------------------------------------ calls to members


class Pools(NamedTuple):
    """Holds the calls to named replicas as the router sees them. `deploy` implements them in one process and over Ray
    Serve. A call is aborted by cancelling the task that awaits it."""

    workers: WorkerPool
    encoders: EncoderPool
    stages: StagePool | None = None
    """Is None in a cluster that gives no speech."""


class StagePool(Protocol):
    async def run(self, member_id: MemberId, request: StageRequest) -> StageResult:
        """Runs an attempt on a replica of a stage behind the thinker; the call stays open until the stage has ended its
        work. Raises TargetGone if the replica had left before the call, WorkerLost if it died during the call, or what
        it raised."""
        ...


class WorkerPool(Protocol):
    async def generate(self, worker_id: MemberId, request: GenerateRequest) -> GenerateResult:
        """Runs an attempt on a worker; the call stays open until the attempt's terminal event. Raises TargetGone if the
        worker had left before the call, WorkerLost if the worker died during the call, or what the worker raised."""
        ...


class EncoderPool(Protocol):
    async def encode(self, encoder_id: MemberId, request: EncodeRequest, media: Sequence[MediumFile]) -> EncodeResult:
        """Encodes the items of a request; `media` holds the file of each item, as the client sent it. Items of one file
        have the same object, and so has an item that is sent again. Raises TargetGone
        if the encoder had left before the call, EncoderLost if the encoder died during the call, or what the encoder
        raised: Overloaded if its queue is full, and WorkerBackedUp if only the share of the request's worker is
        full."""
        ...


# ------------------------------------------------------------ the wait for capacity


REPORT_PAUSE_S = 0.002
"""Reports that come within this time make the gate look for room once."""


class CapacityGate:
    """A `CapacityGate` lets requests wait until a worker, or an encoder of the right kind, is there, and until a worker
    has room. It runs a `CapacityQueue` in the router's event loop, to which it belongs.

    Nothing polls. A waiting request wakes when the members change, when blocks become free, when an exclusion ends, or
    at its own deadline. Each turn of the loop releases one request, so that the plan of each counts the load of those
    released before it."""

    def __init__(self, supply: Supply, clock: Clock, metrics: RouterMetrics, shares: TenantShares) -> None:
        self.clock, self.metrics = clock, metrics
        self._queue = CapacityQueue(supply, shares=shares)
        self._waits: dict[Waiter, Wait] = {}
        self._is_releasing = False
        self._pause: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    def waiting_work(self) -> tuple[WaitingWork, ...]:
        """Returns the work of the requests that wait for room or for their turn."""
        return self._queue.waiting_work(self.clock.now())

    def must_wait(self, newcomer: Waiter, room: KvRoom) -> bool:
        """Returns whether a request must join the queue, because other requests are ahead of it or no worker has room
        for it. `room` is what the supply has said about the request."""
        if not self._queue.num_waiting:
            return self._queue.lacks_room(newcomer, room, self.clock.now())
        return self._queue.must_wait(newcomer, self.clock.now())

    def reserved_from(self, wait: Wait | None) -> frozenset[MemberId]:
        """Returns the workers that requests other than that of `wait` have reserved."""
        return self._queue.reserved_from(None if wait is None else wait.waiter)

    def wait_ahead_s(self, newcomer: Waiter, tokens_per_s: float) -> float:
        """Predicts the time until the requests that wait for room ahead of this one have got it, if workers return
        blocks of this many tokens per second."""
        num_tokens = self._queue.num_tokens_ahead(newcomer, self.clock.now())
        return num_tokens / tokens_per_s if tokens_per_s > 0 else 0.0

    def join(self, waiter: Waiter) -> Wait:
        """Adds a request to the queue until its deadline at the latest, and returns its wait."""
        wait = Wait(self, waiter)
        self._waits[wait.waiter] = wait
        self._queue.join(wait.waiter)
        self.changed()
        return wait

    def changed(self) -> None:
        """Releases, in the next turns of the loop, the requests that can be served now. It is called when members
        joined or left, when an attempt ended, and when a released request gave up its place or got its first
        token."""
        if self._queue.num_waiting and not self._is_releasing:
            self._is_releasing = True
            asyncio.get_running_loop().call_soon(self._release)

    def blocks_freed(self) -> None:
        """Does what `changed` does, after a pause, because a worker has reported. The reports of a large cluster come
        in close succession, and one look serves all of them."""
        if self._queue.num_waiting and self._pause is None:
            self._pause = asyncio.get_running_loop().call_later(REPORT_PAUSE_S, self._end_pause)

    def _end_pause(self) -> None:
        self._pause = None
        self.changed()

    def leave(self, wait: Wait, has_arrived: bool) -> None:
        """Frees the place of a wait; waits call it."""
        if self._waits.pop(wait.waiter, None) is not None:
            self._queue.leave(wait.waiter, has_arrived)
            self.changed()
            if not self._queue.num_waiting:
                self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _release(self) -> None:
        """Ends one wait and runs again in the next turn of the loop. If no wait can end now, sets a timer for the next
        moment at which one may."""
        loop = asyncio.get_running_loop()
        self._stop_timer()
        turn = self._queue.take(self.clock.now())
        if turn is not None:
            self._waits[turn.waiter].end(turn.is_served)
            loop.call_soon(self._release)
            return
        self._is_releasing = False
        now = self.clock.now()
        at_s = self._queue.next_at_s(now)
        if at_s is not None:
            self._timer = loop.call_later(max(0.0, at_s - now), self.changed)


class Wait:
    """A `Wait` is one request's stay in the queue. Its owner awaits `ended`, and calls `leave` in any case, at the
    latest when the first token is there."""

    def __init__(self, gate: CapacityGate, waiter: Waiter) -> None:
        self.waiter = waiter
        self.waited_s = 0.0
        self._gate = gate
        self._began_s = gate.clock.now()
        self._future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        """Tells whether the request was released, or its time has passed."""
        return self._future.done()

    async def ended(self) -> bool:
        """Waits for the end, and returns whether the members that the request needs are there; False means that its
        deadline passed first. Records the time waited in the metrics."""
        outcome = "left"
        try:
            is_served = await self._future
            outcome = "served" if is_served else "expired"
            return is_served
        finally:
            self.waited_s = self._gate.clock.now() - self._began_s
            self._gate.metrics.capacity_wait.labels(outcome).observe(self.waited_s)
            service_class = "batch" if self.waiter.standing.is_batch else "interactive"
            self._gate.metrics.gate_wait.labels(service_class).observe(self.waited_s)

    def end(self, is_served: bool) -> None:
        """Ends the wait now with the outcome `is_served`, whether or not a member came. Has no effect once the wait is
        over."""
        if not self._future.done():
            self._future.set_result(is_served)

    def leave(self, has_arrived: bool = False) -> None:
        """Gives up the place in the queue, or the place among released requests that have no token yet. `has_arrived`
        says that the first token is there. The method is idempotent."""
        self._gate.leave(self, has_arrived)
