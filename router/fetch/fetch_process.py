"""Runs a `UrlFetcher` in a process beside the router, and is its client.

The process reads what strangers send: TLS, HTTP, and files of any size. The router does not wait for its work, and
survives its end. It is spawned, ends with the router, and may take a limited amount of memory. A fetched file comes as
a descriptor of sealed memory, so no byte of it passes through a socket; the router copies it once, in a thread if it is
large. If the process ends, its fetches fail as `NoCapacity`, which clients try again, and the next fetch starts another
process.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import NamedTuple, Protocol

import msgspec
from blake3 import blake3

from fabric.contracts import ErrorInfo, MachineBusy, NoCapacity, WeftError
from fabric.sandbox import bind_to_parent, limit_memory
from modalities.family import ImageHeader
from modalities.probing import shipped_registry
from modalities.registry import Registry
from router.fetch.fetch_settings import FetchSettings
from router.fetch.packet_channel import PacketChannel
from router.fetch.pinned_network import NameResolver, SystemResolver
from router.fetch.stored_file import read_file
from router.fetch.url_fetcher import HeldFile, UrlFetcher, WantedMedium
from router.fetch.url_policy import UrlPolicy, parse_url

_LOG = logging.getLogger(__name__)
START_TIMEOUT_S = 60.0
"""Limits the start of the process's interpreter and its imports on a machine under load."""
GRACE_S = 10.0
"""A process that answers this much later than all its limits allow is stuck, and is ended."""
READ_IN_THREAD_BYTES = 2**20
"""A file of at most this many bytes is copied in the event loop, which takes less than half a millisecond."""
ENDED = "the process that fetches media has ended"


class FetchedFile(NamedTuple):
    """A `FetchedFile` is the medium behind a URL."""

    data: bytes
    digest: bytes
    """Holds the digest of `data`, which was computed while the bytes arrived."""
    is_cached: bool
    header: ImageHeader | None = None
    """This is the header of an ordinary picture, which was read when the file was complete."""


class MediaFetcher(Protocol):
    """A `MediaFetcher` fetches the media of requests; it belongs to one event loop."""

    async def start(self) -> None:
        """Makes ready, so that the first request does not wait. Raises NoCapacity."""
        ...

    async def close(self) -> None:
        """Ends all fetches, and returns when they have ended."""
        ...

    def check(self, url: str) -> None:
        """Raises UrlRefused if the text of the URL says that it may not be asked."""
        ...

    async def fetch(self, wanted: WantedMedium, take: Callable[[int], None]) -> FetchedFile:
        """Fetches a medium for a request. `take` is called with the size before the bytes are copied into this process;
        what it raises ends the fetch. Raises UrlRefused, MediaUnreachable, InvalidMedia if the file is too large or its
        first bytes say that it will be refused, and Busy or Unavailable if it can't be fetched now. Cancelling the call
        ends the fetch."""
        ...


# ------------------------------------------------------------ messages


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    number: int
    url: str
    salt: str
    request: int
    modality: str = ""
    tenant: str = ""


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Says that the router has copied a file, or no longer waits for it."""

    number: int


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag="arrived"):
    """Says that a file is complete; its descriptor comes with the packet."""

    number: int
    num_bytes: int
    digest: bytes
    is_cached: bool
    header: ImageHeader | None = None


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    number: int
    error: ErrorInfo


READY = b"ready"
_ENCODER = msgspec.msgpack.Encoder()
_TO_PROCESS = msgspec.msgpack.Decoder(Ask | Drop)
_FROM_PROCESS = msgspec.msgpack.Decoder(Arrived | Failed)


# ------------------------------------------------------------ the router's side


class _Landed(NamedTuple):
    answer: Arrived
    descriptor: int


class FetchProcess:
    """A `FetchProcess` is the router's side of one process, and of those that replace it (a `MediaFetcher`)."""

    def __init__(
        self,
        settings: FetchSettings,
        make_resolver: Callable[[], NameResolver] = SystemResolver,
        registry: Callable[[], Registry] = shipped_registry,
    ) -> None:
        """Starts nothing yet. `make_resolver` and `registry` run in the process, and must be importable there."""
        self._settings = settings
        self._policy = UrlPolicy(settings)
        self._make_resolver = make_resolver
        self._registry = registry
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="fetch-spawn")
        """Has the one thread that spawns the process, which would die with its thread (`bind_to_parent`)."""
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="fetch-read")
        self._process: BaseProcess | None = None
        self._channel: PacketChannel | None = None
        self._starting: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[_Landed]] = {}
        self._number = 0
        self._is_closed = False
        self.num_ended = 0
        """Counts the processes that have ended since the start, without being asked to."""

    @property
    def pid(self) -> int | None:
        """Returns the id of the process, or None if there is none."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts the process unless there is one. Raises NoCapacity."""
        if self._is_closed:
            raise NoCapacity("the process that fetches media was stopped")
        if self._channel is not None:
            return
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="fetch process")
            self._starting.add_done_callback(_note_failure)
        await asyncio.shield(self._starting)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._starting is not None:
            with suppress(NoCapacity):
                await self._starting
        self._end()
        await asyncio.get_running_loop().run_in_executor(self._spawner, self._reap)
        self._spawner.shutdown(wait=False)
        self._readers.shutdown(wait=False)

    def check(self, url: str) -> None:
        self._policy.check(parse_url(url))

    async def fetch(self, wanted: WantedMedium, take: Callable[[int], None]) -> FetchedFile:
        self.check(wanted.url)
        await self.start()
        channel = self._channel
        if channel is None:
            raise NoCapacity(ENDED)
        self._number += 1
        number = self._number
        landed: asyncio.Future[_Landed] = asyncio.get_running_loop().create_future()
        self._waiting[number] = landed
        salt = blake3(wanted.salt.encode()).hexdigest()
        channel.send(_ENCODER.encode(Ask(number, wanted.url, salt, wanted.request, wanted.modality, wanted.tenant)))
        descriptor = -1
        try:
            answer, descriptor = await self._answer(landed)
            take(answer.num_bytes)
            if answer.num_bytes <= READ_IN_THREAD_BYTES:
                data = read_file(descriptor, answer.num_bytes)
            else:
                data = await self._read(descriptor, answer.num_bytes)
            return FetchedFile(data, answer.digest, answer.is_cached, answer.header)
        except OSError as error:
            raise NoCapacity("the fetched medium could not be read from the process that fetches") from error
        finally:
            del self._waiting[number]
            if descriptor >= 0:
                os.close(descriptor)
            channel.send(_ENCODER.encode(Drop(number)))

    async def _answer(self, landed: asyncio.Future[_Landed]) -> _Landed:
        """Returns the answer to a fetch. Ends a process that is stuck, and raises MachineBusy."""
        settings = self._settings
        try:
            async with asyncio.timeout(2 * settings.wait_s + settings.total_timeout_s + GRACE_S):
                return await landed
        except TimeoutError as error:
            _LOG.error("the process that fetches media does not answer, and is ended")
            self._end()
            raise MachineBusy("the process that fetches media does not get to its work") from error
        except asyncio.CancelledError:
            if landed.done() and not landed.cancelled() and landed.exception() is None:
                os.close(landed.result().descriptor)
            raise

    async def _read(self, descriptor: int, num_bytes: int) -> bytes:
        """Copies a file in a thread, which reads from a descriptor of its own: a cancelled call closes the other."""
        copy = os.dup(descriptor)

        def read() -> bytes:
            try:
                return read_file(copy, num_bytes)
            finally:
                os.close(copy)

        return await asyncio.get_running_loop().run_in_executor(self._readers, read)

    # ------------------------------------------------------------ the process

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            end = await loop.run_in_executor(self._spawner, self._spawn)
            self._channel = PacketChannel(end, self._on_packet, self._on_end)
        finally:
            self._starting = None

    def _spawn(self) -> socket.socket:
        """Starts a process, blocks until it is ready, and returns the router's end of the channel. Raises
        NoCapacity."""
        self._reap()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        is_ready = False
        try:
            with theirs:
                arguments = (theirs, os.getpid(), self._settings, self._make_resolver, self._registry)
                context = multiprocessing.get_context("spawn")
                self._process = context.Process(target=serve_fetches, args=arguments, name="weft-fetch", daemon=True)
                self._process.start()
            ours.settimeout(START_TIMEOUT_S)
            is_ready = ours.recv(len(READY)) == READY
        except OSError as error:
            raise NoCapacity("the process that fetches media could not be started") from error
        finally:
            if not is_ready:
                ours.close()
                self._reap()
        if not is_ready:
            raise NoCapacity("the process that fetches media died at its start")
        return ours

    def _reap(self) -> None:
        """Ends the process, if there is one, and blocks until it has ended."""
        process, self._process = self._process, None
        if process is not None and process.pid is not None:
            process.kill()
            process.join()
            with suppress(ValueError):  # Its exit code may be known a moment later, see `fabric.sandbox`.
                process.close()

    def _on_packet(self, packet: bytes, descriptor: int | None) -> None:
        answer = _FROM_PROCESS.decode(packet)
        landed = self._waiting.get(answer.number)
        if landed is None or landed.done():
            if descriptor is not None:
                os.close(descriptor)
        elif isinstance(answer, Failed):
            landed.set_exception(answer.error.to_error())
        elif descriptor is None:
            landed.set_exception(NoCapacity("the router has no file descriptor left for a fetched medium"))
        else:
            landed.set_result(_Landed(answer, descriptor))

    def _on_end(self) -> None:
        _LOG.warning("the process that fetches media has ended; the next fetch starts another one")
        self.num_ended += 1
        self._end()

    def _end(self) -> None:
        """Closes the channel, which ends the process, and fails the fetches that wait."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        for landed in self._waiting.values():
            if not landed.done():
                landed.set_exception(NoCapacity(ENDED))


def _note_failure(starting: asyncio.Task[None]) -> None:
    """Takes note of a failure, for the case that no request waits any more."""
    if not starting.cancelled() and (error := starting.exception()) is not None:
        _LOG.warning("%s", error)


# ------------------------------------------------------------ the process itself


def serve_fetches(
    end: socket.socket,
    parent_pid: int,
    settings: FetchSettings,
    make_resolver: Callable[[], NameResolver],
    registry: Callable[[], Registry],
) -> None:
    """Runs the process: it fetches until the router closes its end."""
    bind_to_parent(parent_pid)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limit_memory(settings.memory_bytes)
    asyncio.run(_FetchServer(settings).run(end, make_resolver, registry))


class _FetchServer:
    """A `_FetchServer` answers the router. A descriptor stays open here until the router says that it has copied the
    file, because its memory counts until then."""

    def __init__(self, settings: FetchSettings) -> None:
        self._settings = settings
        self._number_to_task: dict[int, asyncio.Task[None]] = {}

    async def run(
        self, end: socket.socket, make_resolver: Callable[[], NameResolver], registry: Callable[[], Registry]
    ) -> None:
        is_over = asyncio.Event()
        self._fetcher = UrlFetcher(self._settings, make_resolver(), registry(), time.monotonic)
        end.send(READY)
        self._channel = PacketChannel(end, self._on_packet, is_over.set)
        await is_over.wait()
        os._exit(0)  # A thread that resolves a name would hold up the end, and nothing here is worth an orderly one.

    def _on_packet(self, packet: bytes, descriptor: int | None) -> None:
        message = _TO_PROCESS.decode(packet)
        if isinstance(message, Ask):
            task = asyncio.create_task(self._serve(message), name=f"fetch {message.number}")
            self._number_to_task[message.number] = task
            task.add_done_callback(lambda _: self._number_to_task.pop(message.number, None))
        elif (task_of := self._number_to_task.get(message.number)) is not None:
            task_of.cancel()

    async def _serve(self, ask: Ask) -> None:
        """Fetches, hands the file over, and holds it until the task is cancelled."""
        held: HeldFile | None = None
        try:
            wanted = WantedMedium(ask.url, ask.salt, ask.request, ask.modality, ask.tenant)
            held = await self._fetcher.fetch(wanted)
            answer = Arrived(ask.number, held.file.num_bytes, held.file.digest, held.is_cached, held.header)
            self._channel.send(_ENCODER.encode(answer), held.file.descriptor)
            await asyncio.Event().wait()
        except WeftError as error:
            self._channel.send(_ENCODER.encode(Failed(ask.number, ErrorInfo.of(error))))
        finally:
            if held is not None:
                held.close()
