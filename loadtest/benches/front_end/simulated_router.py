"""Runs the router of `weft bench http` in a process of its own: the real app, service, prompt builder and server, over
members that answer without computing.

`PacedWorker` stands for the engine. It sends the tokens of all its requests step by step, as a real worker does, and
between two steps it gives the event loop a number of turns, so that readers take one token at a time, or many at once.
The worker runs in the router's process, so the CPU time of the process includes its own. The module knows nothing of
loads or bars.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import psutil

from deploy.demo.build import write_all_but_weights
from deploy.http_server import HttpServer
from deploy.process_setup import allow_many_files, freeze_what_lives, keep_freed_memory, new_event_loop
from deploy.testing import FakeEncoder, FakeWorker, fake_cluster
from fabric.contracts import (
    AbortAttempt,
    AttemptId,
    ChoiceResult,
    EncodeRequest,
    EncodeResult,
    GenerateRequest,
    GenerateResult,
    PlaneMessage,
    TokenFrame,
    TokenFrames,
)
from fabric.transport import LocalHub
from loadtest.benches.front_end.cpu_sampler import CpuSampler
from modalities.family import Family, stream_units
from modalities.registry import REGISTRY
from modalities.text import TextCodec
from router.edge import create_app
from router.observe import SPAN_THREAD, TracingSettings

WORDS = " the small red circle is left of a blue square"
MAX_IN_FLIGHT = 4096


class RouterUse(NamedTuple):
    """Holds what the router's process has used since it started."""

    cpu_s: float
    memory_bytes: int
    """This is the resident memory at present."""
    spans_cpu_s: float
    """This is the part of `cpu_s` that the thread took which sends spans."""


@dataclass
class PacedRequest:
    request: GenerateRequest
    result: asyncio.Future[GenerateResult]
    num_sent: int = 0


class PacedWorker(FakeWorker):
    """A `PacedWorker` sends one token of every open request in each step, and ends a request after its `max_tokens`. It
    waits for no features."""

    def __init__(self, hub: LocalHub, name: str, codec: TextCodec) -> None:
        super().__init__(hub, name, codec)
        self.num_turns = 4
        """Counts the turns of the event loop between two steps."""
        self.num_steps_at_once = 1
        """Counts the steps that follow each other without a turn between them."""
        self._words = codec.encode(WORDS)
        self._running: dict[AttemptId, PacedRequest] = {}
        self._stepping: asyncio.Task[None] | None = None

    def handle(self, message: PlaneMessage) -> None:
        if isinstance(message, AbortAttempt):
            self._running.pop(AttemptId(message.request_id, message.attempt), None)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
        attempt_id = AttemptId(request.request_id, request.attempt)
        self._running[attempt_id] = PacedRequest(request, result)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._steps(), name="bench-steps")
        try:
            return await result
        finally:
            self._running.pop(attempt_id, None)

    async def _steps(self) -> None:
        while self._running:
            for _ in range(self.num_steps_at_once):
                self._step()
            for _ in range(self.num_turns):
                await asyncio.sleep(0)

    def _step(self) -> None:
        address_to_frames: dict[str, list[TokenFrame]] = {}
        ended: list[PacedRequest] = []
        for each in self._running.values():
            request, at = each.request, each.num_sent
            if at >= request.stop.max_tokens:
                continue
            each.num_sent += 1
            reason = "length" if each.num_sent == request.stop.max_tokens else None
            token_ids = (self._words[at % len(self._words)],)
            frame = TokenFrame(request.request_id, request.attempt, 0, at, token_ids, reason)
            address_to_frames.setdefault(request.router_address, []).append(frame)
            if reason is not None:
                ended.append(each)
        for address, frames in address_to_frames.items():
            self.plane.send(address, TokenFrames(self.member_id, tuple(frames)))
        for each in ended:
            choices = (ChoiceResult(0, "length", each.num_sent),)
            num_prompt_tokens = len(each.request.token_ids)
            if not each.result.done():
                each.result.set_result(GenerateResult(self.member_id, choices, num_prompt_tokens, 0))


class LatestEncoder(FakeEncoder):
    """A `LatestEncoder` keeps the latest request alone, with its media."""

    async def encode(self, request: EncodeRequest, media: Sequence[bytes]) -> EncodeResult:
        self.requests.clear()
        self.media.clear()
        return await super().encode(request, media)

    def preprocess(self, family: Family) -> None:
        """Decodes the media of the latest request as an encoder does."""
        (request,) = self.requests
        for item, data in zip(request.items, self.media, strict=True):
            for _ in stream_units(family, data, item):
                pass


# ------------------------------------------------------------ the process


class SimulatedRouter:
    """A `SimulatedRouter` is the other end of the router's process."""

    def __init__(self, pipe: Connection, port: int) -> None:
        self.port = port
        self._pipe = pipe

    def use(self) -> RouterUse:
        """Returns what the process has used up to now."""
        self._pipe.send("use")
        use: RouterUse = self._pipe.recv()
        return use

    def encode_ms(self) -> float:
        """Returns the CPU time in which an encoder decodes and preprocesses the media of the latest request."""
        self._pipe.send("encode")
        milliseconds: float = self._pipe.recv()
        return milliseconds

    def start_sampling(self) -> None:
        """Begins to sample where the process spends its CPU time, which costs it a few per cent."""
        self._pipe.send("sample")
        self._pipe.recv()

    def samples(self) -> dict[str, int]:
        """Ends sampling. Returns the number of samples for each folder (`CpuSampler`)."""
        self._pipe.send("samples")
        samples: dict[str, int] = self._pipe.recv()
        return samples

    def trace_with(self, settings: TracingSettings) -> None:
        """Changes how many requests are sampled, and where their spans go."""
        self._pipe.send(settings)
        self._pipe.recv()

    def set_pace(self, num_turns: int, num_steps_at_once: int = 1) -> None:
        """Lets the worker give the event loop this many turns after this many steps."""
        self._pipe.send((num_turns, num_steps_at_once))
        self._pipe.recv()


@contextmanager
def simulated_router(loop_kind: str) -> Iterator[SimulatedRouter]:
    """Yields a router in a process of its own, which runs in an event loop of `loop_kind`, `uvloop` or `asyncio`."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, loop_kind), daemon=True)
    process.start()
    try:
        yield SimulatedRouter(here, here.recv())
    finally:
        here.send(None)
        process.join(timeout=20)
        process.kill()


def _serve(pipe: Connection, loop_kind: str) -> None:
    factory = new_event_loop if loop_kind == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_run(pipe))


async def _run(pipe: Connection) -> None:
    allow_many_files()
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        write_all_but_weights(Path(folder))
        model = REGISTRY.load_family(Path(folder)), TextCodec.load(Path(folder))
    async with fake_cluster(model=model, max_in_flight=MAX_IN_FLIGHT) as cluster:
        worker = PacedWorker(cluster.hub, "paced", cluster.codec)
        worker.plane.start(worker.handle)
        encoder = LatestEncoder(cluster.hub, "latest")
        encoder.plane.start(encoder.handle)
        cluster.remove(cluster.workers[0])
        cluster.remove(cluster.encoders[0])
        cluster.pools.workers[worker.member_id] = worker
        cluster.pools.encoders[encoder.member_id] = encoder
        cluster.publish()
        server = HttpServer(create_app(cluster.service), "127.0.0.1", 0)
        await server.start()
        freeze_what_lives()
        pipe.send(server.port)
        await _obey(pipe, worker, lambda: encoder.preprocess(model[0]), cluster.service.spans.reconfigure)
        await server.stop()
        worker.plane.close()


async def _obey(
    pipe: Connection, worker: PacedWorker, encode: Callable[[], None], trace_with: Callable[[TracingSettings], None]
) -> None:
    """Answers the commands of a `SimulatedRouter` until it asks for the end."""
    commands: asyncio.Queue[object] = asyncio.Queue()
    sampler = CpuSampler()
    loop = asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), lambda: commands.put_nowait(pipe.recv()))
    while (command := await commands.get()) is not None:
        if isinstance(command, tuple):
            worker.num_turns, worker.num_steps_at_once = command
            pipe.send(None)
        elif isinstance(command, TracingSettings):
            trace_with(command)
            pipe.send(None)
        elif command == "encode":
            began_s = time.process_time()
            encode()
            pipe.send(1000 * (time.process_time() - began_s))
        elif command == "sample":
            sampler.start()
            pipe.send(None)
        elif command == "samples":
            pipe.send(sampler.stop())
        else:
            pipe.send(_own_use())
    loop.remove_reader(pipe.fileno())


def _own_use() -> RouterUse:
    """Returns the CPU time of this process with that of its children that have ended, and its resident memory."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = time.process_time() + children.ru_utime + children.ru_stime
    spans_cpu_s = sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.name == SPAN_THREAD and thread.ident is not None
    )
    return RouterUse(cpu_s, psutil.Process().memory_info().rss, spans_cpu_s)
