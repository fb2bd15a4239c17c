"""Runs `weft bench cluster`: what a large cluster costs its routers and its directory, with the real protocol and fake
members.

The directory is the real Ray actor, and its callers send the heartbeats of all members. The routers are real router
services on real message planes with keys, and fake members in two processes send them reports, events and snapshots
(`cluster_members`). The fake members share the machine's cores with the routers, so they run at a tenth of the rate
that a full cluster would have, and times are CPU seconds per second of the simulated clock of the fake members. The
last router starts when the others serve. The module knows nothing of requests' answers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

from fabric.contracts import Member
from fabric.transport import PlaneKeys
from loadtest.benches.bench_result import Bar, BenchResult
from loadtest.benches.cluster_members import ClusterSpec, FleetCounts, RouterSample, serve_fleet, serve_router

NUM_FLEETS = 2
MAX_CORE_SHARE = 0.5
MAX_READY_S = 10.0
MAX_STANDSTILL_MS = 50.0
FULL_RATE = 10.0
"""A worker of a full cluster gets this many requests per second."""
SETTLE_S = 120.0


class BenchProcess(NamedTuple):
    process: multiprocessing.process.BaseProcess
    channel: Connection

    def ask(self, question: str = "sample") -> object:
        self.channel.send(question)
        return self.channel.recv()

    def stop(self) -> None:
        try:
            self.channel.send("stop")
        except OSError:
            pass
        self.process.join(8)
        self.process.kill()


def run(options: Sequence[str] = ()) -> BenchResult:
    parser = argparse.ArgumentParser(prog="weft bench cluster")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--encoders", type=int, default=200)
    parser.add_argument("--routers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=FULL_RATE / 10)
    parser.add_argument("--blocks", type=int, default=2048)
    parser.add_argument("--stretch", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    chosen = parser.parse_args(list(options))
    spec = ClusterSpec(
        chosen.workers, chosen.encoders, chosen.routers, chosen.rate, chosen.blocks, chosen.stretch, PlaneKeys.make()
    )
    names = [f"worker-{index}" for index in range(spec.num_workers)]
    names += [f"encoder-{index}" for index in range(spec.num_encoders)]
    context = multiprocessing.get_context("spawn")
    processes: list[BenchProcess] = []

    def start(target: object, *args: object) -> BenchProcess:
        here, there = context.Pipe()
        process = context.Process(target=target, args=(there, *args), daemon=True)  # type: ignore[arg-type]
        process.start()
        processes.append(BenchProcess(process, here))
        return processes[-1]

    try:
        fleets = [start(serve_fleet, spec, names[index::NUM_FLEETS]) for index in range(NUM_FLEETS)]
        members: list[Member] = [member for fleet in fleets for member in fleet.channel.recv()]
        routers = []
        samples: list[RouterSample] = []
        for index in range(spec.num_routers):
            router = start(serve_router, spec, f"router-{index}")
            router.channel.recv()
            router.channel.send(members)
            samples.append(_settled(router))
            print(index, samples[-1], flush=True)
            routers.append(router)
        for router in routers:
            router.ask()
        before = [fleet.ask() for fleet in fleets]
        time.sleep(chosen.seconds * chosen.stretch)
        loaded = [router.ask() for router in routers]
        after = [fleet.ask() for fleet in fleets]
        print(before, after)
        simulated_s = min(b.simulated_s - a.simulated_s for a, b in zip(before, after))
        for s in loaded:
            print(s.cpu_s / simulated_s, s)
        print("bytes/s", sum(b.bytes_sent - a.bytes_sent for a, b in zip(before, after)) / simulated_s)
    finally:
        for each in processes:
            each.stop()
    return BenchResult([["a"]], [])


def _settled(router: BenchProcess) -> RouterSample:
    """Waits until the router has everything, and returns a sample of all of it."""
    deadline_s = time.monotonic() + SETTLE_S
    total = RouterSample(0.0, 0.0)
    while time.monotonic() < deadline_s:
        time.sleep(0.5)
        sample = router.ask()
        assert isinstance(sample, RouterSample)
        total.cpu_s += sample.cpu_s
        total.standstill_s = max(total.standstill_s, sample.standstill_s)
        total.reported, total.snapshots = sample.reported, sample.snapshots
        total.is_alive = sample.is_alive
        total.num_fds, total.memory_bytes = sample.num_fds, sample.memory_bytes
        if sample.snapshots is not None or not sample.is_alive:
            break
    return total
