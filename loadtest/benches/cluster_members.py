"""Provides the fake members of `weft bench cluster`, many in one process.

A fake member has sockets and keys of its own, as a `ZmqPlane` has, so a router has the same connections and messages as
in a real cluster; one loop serves all members of a process, because thousands of I/O threads would measure the threads.
What a member sends, it sends through the code that real members use. Fake members live on a simulated clock: each
round of the loop is `ROUND_S` long, however long it takes.

The module knows nothing of bars, or of how the routers and the directory run (`cluster_routers`).
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

import zmq

from fabric.contracts import (
    KV_HASH_BYTES,
    WEFT_KV,
    ArenaStats,
    AttemptId,
    BlocksRemoved,
    BlocksStored,
    DeviceStats,
    EncodeCost,
    EncoderReport,
    EngineStats,
    FeatureEvents,
    FeatureStats,
    ItemStats,
    KvEvent,
    KvEvents,
    KvScheme,
    KvSnapshot,
    Member,
    MemberId,
    MmHash,
    PlaneMessage,
    RequestId,
    RouterHeartbeat,
    SnapshotRequest,
    WorkerReport,
    decode_bundle,
    encode_bundle,
    encode_message,
)
from fabric.transport import Handler, PlaneKeys, RouterTable

ROUND_S = 0.05
"""Each round of a process of fake members takes this many seconds of the simulated clock."""
BLOCK_TOKENS = 16
PROMPT_BLOCKS, COVERED_BLOCKS, ANSWER_TOKENS = 64, 32, 200
TOKEN_S = 0.03
"""A fake worker makes a token of each of its sequences in this time."""
MEDIA_SHARE, ENCODE_S = 0.3, 0.15
"""This share of the requests has a picture, which takes this long to encode."""
BUNDLE_MESSAGES = 64
"""A fake member sends at most this many messages to one router together."""
TICK_S = 0.2
"""Members look at their numbers this often."""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A `ClusterSpec` is the size of the cluster and the load on it."""

    num_workers: int
    num_encoders: int
    num_routers: int
    requests_per_s: float
    """This is the rate of requests at each worker."""
    num_blocks: int
    """Each worker holds this many blocks when a router asks for its snapshot."""
    stretch: float
    """A simulated second takes this many real ones, because the fake members and all routers share a few cores."""
    keys: PlaneKeys


class FleetCounts(NamedTuple):
    """Says how far a process of fake members is."""

    simulated_s: float
    bytes_sent: int
    messages_sent: int


# ------------------------------------------------------------ fake members


class SteppedClock:
    """A `SteppedClock` shows the simulated time of a process of fake members."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s


class Fleet:
    """A `Fleet` holds the fake members of one process, and one ZeroMQ context for the sockets of all of them."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.clock = SteppedClock()
        self.bytes_sent = self.messages_sent = 0
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        threading.Thread(target=self._admit, daemon=True).start()

    def _admit(self) -> None:
        while True:
            self._zap.send_multipart(self.spec.keys.zap_reply(self._zap.recv_multipart()))

    def pull(self) -> tuple[zmq.Socket[bytes], str]:
        """Returns the receiving socket of one member, and its address."""
        socket = self._context.socket(zmq.PULL)
        self.spec.keys.secure_receiver(socket)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        return socket, f"tcp://127.0.0.1:{port}"

    def push(self, address: str) -> zmq.Socket[bytes]:
        """Returns the socket by which one member sends to one peer."""
        socket = self._context.socket(zmq.PUSH)
        self.spec.keys.secure_sender(socket)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.connect(address)
        return socket


class FleetEndpoint:
    """A `FleetEndpoint` is a `fabric.transport.Plane` for one member of a fleet. Its owner calls `poll` in each round
    instead of starting a thread."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._pull, self.address = fleet.pull()
        self._pushes: dict[str, zmq.Socket[bytes]] = {}
        self._waiting: dict[str, deque[bytes]] = {}
        self.num_dropped = 0
        self.is_alive = True

    def start(self, handler: Handler) -> None:
        self._handler = handler

    def poll(self) -> None:
        """Delivers what has arrived."""
        while True:
            try:
                data = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            for message in decode_bundle(data):
                self._handler(message)

    def send(self, address: str, message: PlaneMessage) -> bool:
        data = encode_message(message)
        self._fleet.bytes_sent += len(data)
        self._fleet.messages_sent += 1
        self._waiting.setdefault(address, deque()).append(data)
        return True

    def flush(self) -> None:
        """Sends what waits. As from a `ZmqPlane`, what the member sent to a router in one turn travels together."""
        for address in list(self._waiting):
            self._flush(address)

    def _flush(self, address: str) -> None:
        push = self._pushes.get(address)
        if push is None:
            push = self._pushes[address] = self._fleet.push(address)
        waiting = self._waiting[address]
        while waiting:
            num_together = min(len(waiting), BUNDLE_MESSAGES)
            try:
                push.send(encode_bundle([waiting[index] for index in range(num_together)]), zmq.NOBLOCK)
            except zmq.Again:
                return
            for _ in range(num_together):
                waiting.popleft()
        del self._waiting[address]

    def forget(self, address: str) -> None:
        self._waiting.pop(address, None)
        if (push := self._pushes.pop(address, None)) is not None:
            push.close(linger=0)

    def close(self) -> None:
        self.is_alive = False


class SimulatedWorker:
    """A `SimulatedWorker` sends what a worker sends that computes `requests_per_s` requests and whose cache is full:
    each request stores the blocks of its prompt that no other has, then those of its answer, and evicts as many."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.spec, self.clock = fleet.spec, fleet.clock
        self.plane = FleetEndpoint(fleet)
        self.plane.start(self._handle)
        scheme = KvScheme(WEFT_KV, BLOCK_TOKENS)
        self.member = Member(MemberId(name), "worker", self.plane.address, f"host-{name}", 1, kv_scheme=scheme)
        self.routers = RouterTable(self.plane, fleet.clock)
        self._random = random.Random(name)
        self._blocks: deque[bytes] = deque(_hashes(self._random, fleet.spec.num_blocks))
        self._kv_seq = 0
        self._events: list[KvEvent] = []
        self._seq = 0
        self._open: dict[AttemptId, float] = {}
        self._answer_tokens = 0.0
        self._steps = 0
        self._tick_at_s = self._random.random() * TICK_S

    def _handle(self, message: PlaneMessage) -> None:
        if isinstance(message, RouterHeartbeat):
            if self.routers.heartbeat(message):
                self.routers.send_report_to(message.router_id, self._report())
        elif isinstance(message, SnapshotRequest):
            self._send_snapshot(message.address)

    def _send_snapshot(self, address: str) -> None:
        self._send_events()
        blocks = tuple(self._blocks)
        starts = range(0, len(blocks), PROMPT_BLOCKS)
        chains = tuple(BlocksStored(None, b"".join(blocks[start : start + PROMPT_BLOCKS])) for start in starts)
        self.plane.send(address, KvSnapshot(self.member.member_id, 1, self._kv_seq - 1, chains))

    def turn(self) -> None:
        """Does what the member does in one round."""
        self.plane.poll()
        now_s = self.clock.now()
        is_changed = False
        for attempt in [attempt for attempt, end_s in self._open.items() if end_s <= now_s]:
            del self._open[attempt]
            is_changed = True
        routers = list(self.routers)
        for _ in range(_poisson(self._random, self.spec.requests_per_s * ROUND_S) if routers else 0):
            attempt = _attempt(self._random)
            self._open[attempt] = now_s + ANSWER_TOKENS * TOKEN_S
            self.routers.received(self._random.choice(routers), attempt)
            self._store(PROMPT_BLOCKS - COVERED_BLOCKS)
            self._steps += 1
        for _ in range(round(ROUND_S / TOKEN_S) if self._open else 0):
            self._steps += 1
            self._answer_tokens += len(self._open)
            if self._answer_tokens >= BLOCK_TOKENS:
                self._store(int(self._answer_tokens // BLOCK_TOKENS))
                self._answer_tokens %= BLOCK_TOKENS
        if (self._events or is_changed) and self.routers.report_wait_s() <= 0:
            self._send()
        elif now_s >= self._tick_at_s:
            self._tick_at_s = now_s + TICK_S
            if self.routers.report_wait_s() <= 0 and self.routers.needs(self._report()):
                self._send()

    def _send(self) -> None:
        self._send_events()
        self.routers.send_report(self._report())

    def _send_events(self) -> None:
        if self._events:
            self.routers.broadcast(KvEvents(self.member.member_id, 1, self._kv_seq, tuple(self._events)))
            self._kv_seq += len(self._events)
            self._events.clear()

    def _store(self, num_blocks: int) -> None:
        """Makes one step's events of the cache."""
        new = _hashes(self._random, num_blocks)
        old = [self._blocks.popleft() for _ in range(num_blocks)]
        self._blocks.extend(new)
        self._events += [BlocksRemoved(b"".join(old)), BlocksStored(None, b"".join(new))]

    def _report(self) -> WorkerReport:
        self._seq += 1
        return WorkerReport(
            self.member.member_id,
            1,
            self._seq,
            (),
            self._engine_stats(),
            FeatureStats(8 << 20, 512 << 20),
            9.1e-6,
            0.0123,
            0.00021,
            6.01,
            8192,
            256,
        )

    def _engine_stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._open),
            queued_tokens=1024,
            queued_weighted_tokens=1030.5,
            num_decoding=len(self._open),
            kv_blocks_used=64 * len(self._open),
            kv_blocks_total=16384,
            steps=self._steps,
            tokens_generated=self._steps * 8,
            prompt_tokens_computed=self._steps * 512,
            prefix_hit_tokens=self._steps * 256,
            prefix_query_tokens=self._steps * 512,
        )


class SimulatedEncoder:
    """A `SimulatedEncoder` sends what an encoder sends that encodes its share of the requests' pictures and whose arena
    is full."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.spec, self.clock = fleet.spec, fleet.clock
        self.plane = FleetEndpoint(fleet)
        self.plane.start(self._handle)
        self.member = Member(MemberId(name), "encoder", self.plane.address, f"host-{name}", 1, ("image",), name)
        self.routers = RouterTable(self.plane, fleet.clock)
        self._random = random.Random(name)
        self._items: deque[MmHash] = deque(_mm_hash(self._random) for _ in range(64))
        self._event_seq = 0
        self._is_changed = False
        self._seq = 0
        self._open: dict[AttemptId, float] = {}
        self._tick_at_s = self._random.random() * TICK_S

    def _handle(self, message: PlaneMessage) -> None:
        if isinstance(message, RouterHeartbeat):
            if self.routers.heartbeat(message):
                self._send_snapshot(message.address)
                self.routers.send_report_to(message.router_id, self._report())
        elif isinstance(message, SnapshotRequest):
            self._send_snapshot(message.address)

    def _send_snapshot(self, address: str) -> None:
        items = tuple(self._items)
        self.plane.send(address, FeatureEvents(self.member.member_id, 1, self._event_seq - 1, items, is_snapshot=True))

    def turn(self) -> None:
        """Does what the member does in one round."""
        self.plane.poll()
        now_s, spec, routers = self.clock.now(), self.spec, list(self.routers)
        ended = [attempt for attempt, end_s in self._open.items() if end_s <= now_s]
        rate = spec.requests_per_s * MEDIA_SHARE * spec.num_workers / max(1, spec.num_encoders)
        num_new = _poisson(self._random, rate * ROUND_S) if routers else 0
        for _ in range(num_new):
            attempt = _attempt(self._random)
            self._open[attempt] = now_s + ENCODE_S
            self.routers.received(self._random.choice(routers), attempt)
        for attempt in ended:
            del self._open[attempt]
            new, old = _mm_hash(self._random), self._items.popleft()
            self._items.append(new)
            self.routers.broadcast(FeatureEvents(self.member.member_id, 1, self._event_seq, (new,), (old,)))
            self._event_seq += 2
        self._is_changed |= bool(num_new or ended)
        is_due = self._is_changed or now_s >= self._tick_at_s
        if is_due and self.routers.report_wait_s() <= 0:
            self._tick_at_s = now_s + TICK_S
            if self.routers.needs(report := self._report()):
                self.routers.send_report(report)
            self._is_changed = False

    def _report(self) -> EncoderReport:
        self._seq += 1
        return EncoderReport(
            self.member.member_id,
            1,
            self._seq,
            (),
            ItemStats(self._event_seq, 0, self._event_seq, self._event_seq),
            DeviceStats(self._event_seq, self._event_seq, self._event_seq * 1024, self._event_seq * 0.02),
            ArenaStats(64 << 20, 128 << 20, 512 << 20),
            len(self._open),
            1024 * len(self._open),
            encode_s_per_cost=2.1e-5,
            batch_overhead_s=0.004,
            costs=(EncodeCost("image", 2.1e-5, 0.004),),
        )


def serve_fleet(channel: Connection, spec: ClusterSpec, names: Sequence[str]) -> None:
    """Runs fake members until the other end of `channel` asks it to stop. Sends their records first; then it answers
    every message with its `FleetCounts`."""
    fleet = Fleet(spec)
    members: list[SimulatedWorker | SimulatedEncoder] = [
        SimulatedWorker(fleet, name) if name.startswith("worker") else SimulatedEncoder(fleet, name) for name in names
    ]
    channel.send([each.member for each in members])
    gc.collect()
    gc.freeze()
    began_s = time.monotonic()
    while True:
        for each in members:
            each.turn()
            each.plane.flush()
        fleet.clock.now_s += ROUND_S
        ahead_s = began_s + spec.stretch * fleet.clock.now_s - time.monotonic()
        if channel.poll(max(0.0, ahead_s)):
            if channel.recv() == "stop":
                os._exit(0)  # Thousands of sockets would take seconds to close, and nothing waits for them.
            channel.send(FleetCounts(fleet.clock.now_s, fleet.bytes_sent, fleet.messages_sent))


def _hashes(random_source: random.Random, number: int) -> list[bytes]:
    data = random_source.randbytes(KV_HASH_BYTES * number)
    return [data[start : start + KV_HASH_BYTES] for start in range(0, len(data), KV_HASH_BYTES)]


def _attempt(random_source: random.Random) -> AttemptId:
    return AttemptId(RequestId(f"req-{random_source.getrandbits(96):024x}"), 1)


def _mm_hash(random_source: random.Random) -> MmHash:
    return MmHash(f"{random_source.getrandbits(256):064x}")


def _poisson(random_source: random.Random, mean: float) -> int:
    """Draws a number of arrivals by adding up the times between them."""
    number, left = 0, random_source.expovariate(1.0)
    while left < mean:
        number += 1
        left += random_source.expovariate(1.0)
    return number
