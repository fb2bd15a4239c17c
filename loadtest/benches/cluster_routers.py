"""Runs the real parts of `weft bench cluster`: one router in a process of its own, and the directory's actor in Ray.

A router's event loop is stretched like the clock of the fake members, so its periodic work keeps pace with them. Times
are CPU seconds, which other processes on the machine lengthen less than they lengthen waiting. The module knows nothing
of bars, or of what the fake members send.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import selectors
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from fabric.contracts import EncoderReport, FeatureEvents, KvSnapshot, Member, MemberId, PlaneMessage, WorkerReport
from fabric.transport import Handler, PlaneKeys, ZmqPlane
from loadtest.benches.cluster_members import BLOCK_TOKENS, ClusterSpec

# ------------------------------------------------------------ routers


class Passed(NamedTuple):
    """Holds a time in seconds of the loop, and the CPU seconds of the process in it."""

    loop_s: float
    cpu_s: float


@dataclass
class RouterSample:
    """Holds what one router process has measured since its last sample."""

    cpu_s: float
    standstill_s: float
    """This is the longest turn of the event loop, as CPU time of its thread."""
    num_messages: dict[str, int] = field(default_factory=dict)
    num_fds: int = 0
    memory_bytes: int = 0
    reported: Passed | None = None
    """This is what passed from the members' names to the first report of the last member."""
    snapshots: Passed | None = None
    """This is what passed from the members' names to the last member's snapshot."""
    is_alive: bool = True


class WatchedPlane:
    """A `WatchedPlane` passes everything to a real plane, and counts what arrives."""

    def __init__(self, plane: ZmqPlane) -> None:
        self._plane = plane
        self.counts: Counter[str] = Counter()
        self.reported: set[MemberId] = set()
        self.snapshots: set[MemberId] = set()

    def start(self, handler: Handler) -> None:
        def count(message: PlaneMessage) -> None:
            self.counts[type(message).__name__] += 1
            if isinstance(message, WorkerReport):
                self.reported.add(message.worker_id)
            elif isinstance(message, EncoderReport):
                self.reported.add(message.encoder_id)
            elif isinstance(message, KvSnapshot) and message.is_last:
                self.snapshots.add(message.worker_id)
            elif isinstance(message, FeatureEvents) and message.is_snapshot:
                self.snapshots.add(message.encoder_id)
            handler(message)

        self._plane.start(count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)


def serve_router(channel: Connection, spec: ClusterSpec, name: str) -> None:
    """Runs a real router on a real plane until the other end of `channel` asks it to stop. Sends the router's record,
    takes the members' records, and then answers every message with a `RouterSample`."""
    selector = StretchedSelector(spec.stretch)
    with asyncio.Runner(loop_factory=lambda: StretchedLoop(selector)) as runner:
        runner.run(_route(channel, spec, name, selector))
    os._exit(0)


class StretchedLoop(asyncio.SelectorEventLoop):
    """A `StretchedLoop` is an event loop whose seconds take `stretch` real ones, so that a router's periodic work keeps
    pace with the fake members."""

    def __init__(self, selector: StretchedSelector) -> None:
        super().__init__(selector)
        self._stretch = selector.stretch

    def time(self) -> float:
        return super().time() / self._stretch


class StretchedSelector(selectors.DefaultSelector):
    """A `StretchedSelector` also measures the turns of its loop: a loop asks it once in each turn, and then runs what
    is ready. The times are CPU time of the loop's thread, which other processes on the machine do not lengthen. A task
    that measures them would itself wake the loop hundreds of times per second."""

    def __init__(self, stretch: float) -> None:
        super().__init__()
        self.stretch = stretch
        self._longest_s = 0.0
        self._began_s: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._began_s is not None:
            self._longest_s = max(self._longest_s, time.thread_time() - self._began_s)
        found = super().select(timeout if timeout is None else timeout * self.stretch)
        self._began_s = time.thread_time()
        return found

    def take_longest_s(self) -> float:
        """Returns the longest turn since the last call."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s


class LoopClock:
    """A `LoopClock` shows the time of the running event loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


async def _route(channel: Connection, spec: ClusterSpec, name: str, selector: StretchedSelector) -> None:
    from deploy.process_setup import freeze_what_lives
    from deploy.testing import FakePools, NoProber, TinyFamily, tiny_codec
    from modalities.registry import REGISTRY
    from router.planning import PlannerSettings
    from router.prompt import PromptBuilder
    from router.router_config import RouterConfig
    from router.run import Pools
    from router.service import RouterService

    plane = WatchedPlane(ZmqPlane(spec.keys))
    settings = PlannerSettings(max_index_blocks=1 << 22)
    config = RouterConfig("bench", capacity_wait_s=1.0, block_size=BLOCK_TOKENS, planner=settings)
    builder = PromptBuilder(config, TinyFamily(4096), tiny_codec(), REGISTRY, NoProber())
    pools = FakePools()
    service = RouterService(MemberId(name), config, builder, plane, Pools(pools, pools), LoopClock())
    await service.start()
    channel.send(Member(MemberId(name), "router", plane.address, "host-router", 1))
    members: list[Member] = await asyncio.to_thread(channel.recv)
    freeze_what_lives()
    await asyncio.sleep(0)
    selector.take_longest_s()  # Imports and the making of the service are no turns of a router that serves.
    given = asyncio.create_task(_given(members, plane))
    service.update_members(members)
    began_cpu_s = time.process_time()
    while await asyncio.to_thread(channel.recv) != "stop":
        cpu_s = time.process_time()
        reported, snapshots = given.result() if given.done() else (None, None)
        channel.send(
            RouterSample(
                cpu_s - began_cpu_s,
                selector.take_longest_s(),
                dict(plane.counts),
                len(os.listdir("/proc/self/fd")),
                _resident_bytes(),
                reported,
                snapshots,
                plane.is_alive,
            )
        )
        plane.counts.clear()
        began_cpu_s = cpu_s


async def _given(members: Sequence[Member], plane: WatchedPlane) -> tuple[Passed, Passed]:
    loop = asyncio.get_running_loop()
    began_s, began_cpu_s = loop.time(), time.process_time()

    async def until(has_come: Callable[[], bool]) -> Passed:
        while not has_come():  # noqa: ASYNC110 - what arrives sets no event
            await asyncio.sleep(0.02)
        return Passed(loop.time() - began_s, time.process_time() - began_cpu_s)

    reported = await until(lambda: len(plane.reported) >= len(members))
    return reported, await until(lambda: len(plane.snapshots) >= len(members))


def _resident_bytes() -> int:
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ------------------------------------------------------------ the directory


class DirectoryLoad(NamedTuple):
    """Says what the calls of all members cost the directory."""

    cpu_s_per_s: float
    """This is the CPU time of the directory's process per second of the members' clock."""
    period_s: float
    answer_bytes: float
    """This is the size of an answer to a heartbeat, as pickled."""


def call_directory(num_members: int, num_rounds: int) -> DirectoryLoad:
    """Starts a Ray and the directory's actor in it, and sends the heartbeats of `num_members` members for `num_rounds`
    periods, as fast as the actor answers. The CPU time of a round is spread over the period that the directory asks
    for, so the time that Ray needs when it is idle is not counted."""
    import ray

    from deploy.ray.directory import DirectoryActor

    members = [
        Member(MemberId(f"worker-{index}"), "worker", f"tcp://10.0.0.1:{index}", f"host-{index}", 1)
        for index in range(num_members)
    ]
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            num_cpus=1,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
        )
        try:
            actor = DirectoryActor.remote(3600.0, PlaneKeys.make())  # type: ignore[attr-defined]  # added by ray.remote
            pid = ray.get(actor.pid.remote())
            known: dict[MemberId, tuple[int, int] | None] = dict.fromkeys(each.member_id for each in members)
            answer_bytes = period_s = 0.0

            def beat() -> None:
                nonlocal answer_bytes, period_s
                for start in range(0, num_members, _CALLS_AT_ONCE):
                    turn = members[start : start + _CALLS_AT_ONCE]
                    answers = ray.get([actor.heartbeat.remote(each, known[each.member_id]) for each in turn])
                    for each, (epoch, each_period_s, change) in zip(turn, answers, strict=True):
                        known[each.member_id], period_s = (epoch, change.version), each_period_s
                    answer_bytes = len(pickle.dumps(answers[-1]))

            beat()
            beat()
            before_s = _process_cpu_s(pid)
            for _ in range(num_rounds):
                beat()
            cpu_s = (_process_cpu_s(pid) - before_s) / num_rounds
            return DirectoryLoad(cpu_s / period_s, period_s, answer_bytes)
        finally:
            ray.shutdown()


_CALLS_AT_ONCE = 64


def _process_cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
