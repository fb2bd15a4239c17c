"""Runs `weft bench cluster`: shows what a large cluster costs its routers and its directory, with the real protocol and
fake members.

The directory is the real Ray actor, and it gets the heartbeats of all members. The routers are real router services on
real message planes with keys, and fake members in two processes send them reports, events and snapshots. The routers
start one after the other while the load is on, and then all of them are measured.

The fake members share the machine's cores with the routers, so by default they run at a tenth of the rate of a full
cluster, and on a clock that is slower than the real one; times are CPU seconds per second of that clock. The module
knows nothing of the answers to requests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from deploy.process_setup import set_local_switches, set_switches
from fabric.contracts import Member
from fabric.transport import PlaneKeys
from loadtest.bench_result import RESULTS, Bar, BenchResult
from loadtest.benches.cluster_members import ClusterSpec, FleetCounts, serve_fleet
from loadtest.benches.cluster_routers import DirectoryLoad, RouterSample, call_directory, serve_router

NUM_FLEETS = 2
FULL_RATE = 10.0
"""A worker of a full cluster gets this many requests per second."""
MAX_CORE_SHARE = 0.5
MAX_READY_S = 10.0
MAX_STANDSTILL_MS = 50.0
START_S = 600.0
"""The bench waits this many real seconds for a router that starts, and then measures it as it is."""
DIRECTORY_ROUNDS = 5


class BenchProcess(NamedTuple):
    process: multiprocessing.process.BaseProcess
    channel: Connection

    def ask(self) -> Any:
        self.channel.send("sample")
        return self.channel.recv()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.send("stop")
        self.process.join(5)
        self.process.kill()


class ClusterFigures(NamedTuple):
    """Holds what a run has measured."""

    starts: list[RouterSample]
    """Holds a sample of each router's start; the first one has all of the machine to itself and the fake members."""
    loaded: list[RouterSample]
    fleets: list[FleetCounts]
    """Holds what each process of fake members did in the time of `loaded`."""
    directory: DirectoryLoad


def run(options: Sequence[str] = ()) -> BenchResult:
    parser = argparse.ArgumentParser(prog="weft bench cluster")
    parser.add_argument("--workers", type=int, default=1000, help="simulates this many workers")
    parser.add_argument("--encoders", type=int, default=200, help="simulates this many encoders")
    parser.add_argument("--routers", type=int, default=4, help="runs this many routers")
    parser.add_argument("--rate", type=float, default=FULL_RATE / 10, help="sends each worker this many requests/s")
    parser.add_argument("--blocks", type=int, default=2048, help="lets each worker hold this many KV blocks")
    parser.add_argument("--stretch", type=float, default=8.0, help="lets a simulated second take this many real ones")
    parser.add_argument("--seconds", type=float, default=10.0, help="measures this many simulated seconds")
    chosen = parser.parse_args(list(options))
    set_switches()
    set_local_switches()
    spec = ClusterSpec(
        chosen.workers,
        chosen.encoders,
        chosen.routers,
        chosen.rate,
        chosen.blocks,
        chosen.stretch,
        PlaneKeys.make(),
    )
    starts, loaded, fleets = _measure(spec, chosen.seconds)
    num_members = spec.num_workers + spec.num_encoders + spec.num_routers
    directory = call_directory(num_members, DIRECTORY_ROUNDS)
    figures = ClusterFigures(starts, loaded, fleets, directory)
    default = (parser.get_default("workers"), parser.get_default("encoders"), parser.get_default("routers"))
    is_default = (spec.num_workers, spec.num_encoders, spec.num_routers) == default
    return _result(spec, figures, variant="" if is_default else "partial")


# ------------------------------------------------------------ a run


def _measure(spec: ClusterSpec, seconds: float) -> tuple[list[RouterSample], list[RouterSample], list[FleetCounts]]:
    names = [f"worker-{index}" for index in range(spec.num_workers)]
    names += [f"encoder-{index}" for index in range(spec.num_encoders)]
    with _processes() as start:
        fleets = [start(serve_fleet, spec, names[index::NUM_FLEETS]) for index in range(NUM_FLEETS)]
        members: list[Member] = [member for fleet in fleets for member in fleet.channel.recv()]
        starts, routers = [], []
        for index in range(spec.num_routers):
            router = start(serve_router, spec, f"router-{index}")
            router.channel.recv()
            router.channel.send(members)
            starts.append(_started(router))
            routers.append(router)
        for router in routers:
            router.ask()
        before: list[FleetCounts] = [fleet.ask() for fleet in fleets]
        time.sleep(seconds * spec.stretch)
        loaded: list[RouterSample] = [router.ask() for router in routers]
        after: list[FleetCounts] = [fleet.ask() for fleet in fleets]
    done = [
        FleetCounts(
            late.simulated_s - early.simulated_s,
            late.bytes_sent - early.bytes_sent,
            late.messages_sent - early.messages_sent,
        )
        for early, late in zip(before, after, strict=True)
    ]
    return starts, loaded, done


@contextlib.contextmanager
def _processes() -> Iterator[Callable[..., BenchProcess]]:
    """Yields a function that starts a process with one end of a pipe; all of them are stopped at the end."""
    context = multiprocessing.get_context("spawn")
    started: list[BenchProcess] = []

    def start(target: Callable[..., None], *args: object) -> BenchProcess:
        here, there = context.Pipe()
        process = context.Process(target=target, args=(there, *args), daemon=True)
        process.start()
        started.append(BenchProcess(process, here))
        return started[-1]

    try:
        yield start
    finally:
        for each in started:
            each.stop()


def _started(router: BenchProcess) -> RouterSample:
    """Waits until the router has the snapshots of all members, and returns a sample of its whole start."""
    deadline_s = time.monotonic() + START_S
    cpu_s = standstill_s = 0.0
    while True:
        time.sleep(0.5)
        sample: RouterSample = router.ask()
        cpu_s += sample.cpu_s
        standstill_s = max(standstill_s, sample.standstill_s)
        if sample.snapshots is not None or not sample.is_alive or time.monotonic() > deadline_s:
            sample.cpu_s, sample.standstill_s = cpu_s, standstill_s
            return sample


# ------------------------------------------------------------ the result


def _result(spec: ClusterSpec, figures: ClusterFigures, variant: str) -> BenchResult:
    starts, loaded, fleets, directory = figures
    simulated_s = min(fleet.simulated_s for fleet in fleets)
    router_share = max(sample.cpu_s for sample in loaded) / simulated_s
    num_messages = sum(sum(sample.num_messages.values()) for sample in loaded) / len(loaded) / simulated_s
    num_bytes = sum(fleet.bytes_sent for fleet in fleets) / simulated_s
    reported = [sample.reported for sample in starts if sample.reported is not None]
    snapshots = [sample.snapshots for sample in starts if sample.snapshots is not None]
    is_complete = len(snapshots) == len(starts) and all(sample.is_alive for sample in (*starts, *loaded))
    ready_s = max((each.cpu_s for each in reported), default=float("inf"))
    loaded_s = max((each.cpu_s for each in snapshots), default=float("inf"))
    starting_ms = max(sample.standstill_s for sample in starts) * 1e3
    standstill_ms = max(sample.standstill_s for sample in loaded) * 1e3
    values = {
        "routers that know every member": (float(sum(map(_is_complete, starts))), "routers"),
        "directory, CPU": (directory.cpu_s_per_s, "cores"),
        "directory, period of the heartbeats": (directory.period_s, "s"),
        "directory, bytes of an answer": (directory.answer_bytes, "bytes"),
        "router, CPU": (router_share, "cores"),
        "router, messages": (num_messages, "1/s"),
        "router, bytes": (num_bytes / spec.num_routers, "bytes/s"),
        "router, open files": (float(max(sample.num_fds for sample in loaded)), "files"),
        "router, memory": (max(sample.memory_bytes for sample in loaded) / 2**20, "MiB"),
        "router under load, longest standstill": (standstill_ms, "ms CPU"),
        "router that starts, until every member has reported": (ready_s, "s CPU"),
        "router that starts, until every snapshot is loaded": (loaded_s, "s CPU"),
        "router that starts, longest standstill": (starting_ms, "ms CPU"),
    }
    earlier = _earlier()
    rows = [["what", "before", "now", "unit"]]
    for name, (value, unit) in values.items():
        before = f"{earlier[name]:.4g}" if name in earlier else "-"
        rows.append([name, before, f"{value:.4g}", unit])
    bars = [
        Bar("routers that know every member", values["routers that know every member"][0], spec.num_routers, "routers"),
        Bar("directory, CPU", directory.cpu_s_per_s, MAX_CORE_SHARE, "cores", is_max=True),
        Bar("router, CPU", router_share, MAX_CORE_SHARE, "cores", is_max=True),
        Bar("router that starts, until it is ready", ready_s, MAX_READY_S, "s CPU", is_max=True),
        Bar("router that starts, until every snapshot is loaded", loaded_s, MAX_READY_S, "s CPU", is_max=True),
        Bar("router under load, longest standstill", standstill_ms, MAX_STANDSTILL_MS, "ms CPU", is_max=True),
        Bar("router that starts, longest standstill", starting_ms, MAX_STANDSTILL_MS, "ms CPU", is_max=True),
    ]
    notes = [
        f"{spec.num_workers} workers with {spec.num_blocks} KV blocks each, {spec.num_encoders} encoders, "
        f"{spec.num_routers} routers; {spec.requests_per_s:g} requests/s at each worker "
        f"({spec.requests_per_s / FULL_RATE:.0%} of the full rate), the keys of the plane on.",
        f"A simulated second took {spec.stretch:g} real ones; {simulated_s:.1f} simulated seconds were measured.",
        "A router is ready when every member has reported; the CPU seconds are those of its process until then.",
        "A standstill is a turn of the event loop, in CPU time of its thread.",
    ]
    if not is_complete:
        notes.append("A router did not load everything, or its plane has ended.")
    return BenchResult(rows, bars, notes, variant=variant)


def _is_complete(sample: RouterSample) -> bool:
    return sample.is_alive and sample.snapshots is not None


def _earlier() -> dict[str, float]:
    """Returns the figures of the commit before the changes of ADR 56, by name."""
    path = RESULTS / "cluster-before.json"
    if not path.is_file():
        return {}
    return {name: float(value) for name, value in json.loads(path.read_text())["figures"].items()}
