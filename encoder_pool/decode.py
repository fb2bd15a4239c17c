"""Media bytes to encoder inputs, outside of the serving process: hostile files and slow codecs meet spawned helpers.

Spawned, never forked (threads of NIXL and gRPC exist); each ends with its parent. A file that kills its process
breaks the pool for whatever ran beside it: everybody's second try runs alone, in a process of its own, so the guilty
one is found and no innocent one fails. Time and memory of an item are limited in the helper, by the kernel: a codec
that hangs listens to nobody else. Knows nothing of batching, features or requests.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import resource
import signal
import sys
import time
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from fabric.errors import EncodeFailed, InvalidMedia, WeftError
from fabric.messages import MediaItem
from modalities.family import EncoderInput, Family

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
"""prctl(2)."""

_process_family: Family | None = None
"""The family of a decode process, loaded once by its initialiser."""


class Decoded(NamedTuple):
    inputs: list[EncoderInput]
    seconds: float
    """Spent decoding and preprocessing, without waiting."""


class DecodeLimits(NamedTuple):
    """Of one item, in a decode process. A thread of this process has none: it can't be ended."""

    timeout_s: float = 30.0
    memory_bytes: int = 4 * 2**30
    """Of the process, as Linux counts its data; the interpreter's own is a part of it."""


DEFAULT_LIMITS = DecodeLimits()


class DecodeBroke(Exception):
    """The process died over this item, or over one beside it. Transient: a second try runs alone."""


class Decoder(Protocol):
    @property
    def num_parallel(self) -> int:
        """Items worth giving it at once."""
        ...

    async def decode(self, data: bytes, item: MediaItem, *, is_second_try: bool) -> Decoded:
        """Decodes and preprocesses one item into the units that were planned.

        Raises InvalidMedia (broken, or not what was planned), EncodeFailed (our own failure on it), or DecodeBroke:
        the item may be tried once more.
        """
        ...


class DecodePool:
    """Keeps `Decoder`, with `num_processes` processes (0: one thread of this process, using `family`). Lives in one
    event loop."""

    def __init__(
        self, family: Family, model_dir: str, num_processes: int, limits: DecodeLimits = DEFAULT_LIMITS
    ) -> None:
        self._family = family
        self._model_dir = model_dir
        self._num_processes = num_processes
        self._limits = limits
        self._executor = self._build(num_processes)
        self._alone = asyncio.Lock()

    @property
    def num_parallel(self) -> int:
        return max(1, self._num_processes)

    async def start(self) -> None:
        """Starts every process and loads the family there, so that the first request doesn't wait for it.

        To be called in a thread that lives as long as the service (an event loop's): the parent-death signal of
        prctl(2) follows the thread that spawned the process.
        """
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._executor, _ready) for _ in range(self.num_parallel)))

    async def decode(self, data: bytes, item: MediaItem, *, is_second_try: bool) -> Decoded:
        """DecodeBroke: the pool was built anew; a second try runs alone, in a process of its own."""
        if is_second_try and self._num_processes > 0:
            async with self._alone:
                return await self._run_alone(data, item)
        return await self._run(self._executor, data, item)

    def close(self) -> None:
        """Ends processes and threads, after the item each works on."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    async def _run_alone(self, data: bytes, item: MediaItem) -> Decoded:
        lone = self._build(1)
        processes = lone._processes  # type: ignore[attr-defined]  # how it ended is not told otherwise
        try:
            return await self._run(lone, data, item)
        except DecodeBroke:
            await asyncio.to_thread(lone.shutdown)
            if any(process.exitcode == -signal.SIGALRM for process in processes.values()):
                message = f"it could not be decoded within {self._limits.timeout_s:g} s"
                raise InvalidMedia(message, param=item.part) from None
            raise
        finally:
            lone.shutdown(wait=False, cancel_futures=True)

    async def _run(self, executor: Executor, data: bytes, item: MediaItem) -> Decoded:
        family = None if self._num_processes > 0 else self._family
        try:
            decoded = await asyncio.get_running_loop().run_in_executor(
                executor, _decode, family, data, item, self._limits.timeout_s
            )
        except BrokenExecutor as error:
            if executor is self._executor:
                logger.warning("a decode process died; the pool is built anew")
                self._executor = self._build(self._num_processes)
                executor.shutdown(wait=False, cancel_futures=True)
            raise DecodeBroke(f"decoding of {item.mm_hash} broke: {error}") from error
        return decoded

    def _build(self, num_processes: int) -> Executor:
        if num_processes == 0:
            return ThreadPoolExecutor(1, thread_name_prefix="decode")
        return ProcessPoolExecutor(
            num_processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_enter_process,
            initargs=(self._model_dir, os.getpid(), self._limits.memory_bytes),
        )


def check_inputs(inputs: list[EncoderInput], item: MediaItem) -> None:
    """Holds what was decoded against the plan, which is a contract. Raises InvalidMedia."""
    if len(inputs) != len(item.unit_tokens):
        raise InvalidMedia(f"decoded into {len(inputs)} units where {len(item.unit_tokens)} were planned")
    num_patches = sum(unit.num_patches for unit in inputs)
    if num_patches != item.cost:
        raise InvalidMedia(f"decoded into {num_patches} patches where {item.cost} were planned")
    for unit in inputs:
        if unit.modality != item.modality or unit.grid[1:] != item.grid[1:]:
            raise InvalidMedia(
                f"decoded into {unit.modality} {unit.grid} where {item.modality} {item.grid} was planned"
            )
        if unit.pixels.dtype != np.float32:
            raise EncodeFailed(f"preprocessing gave {unit.pixels.dtype}, not float32")


def _decode(family: Family | None, data: bytes, item: MediaItem, timeout_s: float) -> Decoded:
    """Runs in a decode process (`family` None), which the alarm ends when the time is up, or in a thread."""
    if family is not None:
        return _preprocess(family, data, item)
    assert _process_family is not None, "the initialiser loads it"
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        return _preprocess(_process_family, data, item)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _preprocess(family: Family, data: bytes, item: MediaItem) -> Decoded:
    started_s = time.perf_counter()
    try:
        inputs = family.preprocess(data, item)
    except WeftError:
        raise
    except MemoryError as error:
        raise InvalidMedia("decoding it takes more memory than it may", param=item.part) from error
    except Exception as error:  # the loop of a decode process: a bug on one file must not end the others
        logger.exception("preprocessing of %s failed", item.mm_hash)
        raise EncodeFailed(f"preprocessing failed ({type(error).__name__})") from error
    check_inputs(inputs, item)
    return Decoded(inputs, time.perf_counter() - started_s)


def _enter_process(model_dir: str, parent_pid: int, memory_bytes: int) -> None:
    """Binds a fresh decode process to its parent's life, loads the family (config files only, no torch) and limits
    its memory."""
    global _process_family
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the signal was set
        os._exit(1)
    from modalities.registry import REGISTRY

    _process_family = REGISTRY.load_family(Path(model_dir))
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def _ready() -> None:
    """Something to run while a process starts."""
