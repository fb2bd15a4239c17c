"""One spawned process that decodes, and the pipe to it. The kernel keeps its limits of processor time and memory.

Spawned, never forked (threads of NIXL and gRPC exist); it ends with its parent. It works on one item at a time, so
when it dies, it is known over which. What is late by the clock is its owner's to end. Knows nothing of batching,
features or requests.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from encoder_pool.array_pipe import receive, send
from encoder_pool.decode_limits import DecodeLimits
from fabric.errors import EncodeFailed, InvalidMedia, WeftError
from fabric.helper_process import bind_to_parent, exit_code_of, is_out_of_cpu, limit_memory, limited, yielding_thread
from fabric.messages import MediaItem
from modalities.family import EncoderInput, Family, MediaOptions
from modalities.stopwatch import take_decode_s
from modalities.unit_stream import stream_units
from modalities.waveform import HearsOnDevice, Waveform

logger = logging.getLogger(__name__)

OnUnits = Callable[[list[EncoderInput]], None]
"""Takes the next units of an item while the rest is being decoded."""
PART_S = 0.02
"""How long units are collected before they are handed over: a message has its price."""
START_TIMEOUT_S = 60.0
"""For a process's interpreter and imports, on a machine under load."""


class Decoded(NamedTuple):
    inputs: list[EncoderInput]
    """The units that were not handed over before; none of what is left to the encoder's device."""
    decode_s: float
    """Without waiting."""
    preprocess_s: float = 0.0
    """From pixels or samples to what the encoder takes."""
    waveform: Waveform | None = None
    """A sound whose units the encoder's device makes."""


class ProcessDied(Exception):
    """The process ended over what it was given."""

    def __init__(self, is_out_of_cpu: bool) -> None:
        super().__init__("out of processor time" if is_out_of_cpu else "died")
        self.is_out_of_cpu = is_out_of_cpu


class DiedIdle(Exception):
    """The process was gone, or out of step, before it was given anything: nothing is to blame."""


class DecodeProcess:
    """To be made in a thread that lives as long as the service (an event loop's): the parent-death signal of prctl(2)
    follows the thread that spawned the process."""

    def __init__(self, model_dir: str, limits: DecodeLimits) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, model_dir, os.getpid(), limits), name="weft-decode", daemon=True
        )
        self._process.start()
        theirs.close()
        self._number = 0
        """Of the newest message that was sent; its answers carry it."""
        self.is_clean = True
        """No answer is still to come. Otherwise the next item must not meet this process."""
        self.is_at_work = False
        """It was given an item and has not answered in full."""

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Blocks until it has loaded the family, and listens. Raises DiedIdle; then it has ended."""
        try:
            self._send(None)
            if self._pipe.poll(START_TIMEOUT_S) and self._receive() is None:
                self.is_clean = True
                return
        except (OSError, ProcessDied):
            pass
        self.kill()
        raise DiedIdle("a decode process does not answer")

    def decode(self, data: bytes, item: MediaItem, on_units: OnUnits, is_raw: bool = False) -> Decoded:
        """Blocks; `on_units` is called in this thread. Raises what `decode_item` does, DiedIdle, or ProcessDied."""
        self.wait_until_ready()
        self.is_at_work = True
        try:
            self._send((data, item, is_raw))
        except OSError:
            raise self._death() from None
        outcome = self._receive()
        while isinstance(outcome, list):
            on_units(outcome)
            outcome = self._receive()
        self.is_clean, self.is_at_work = True, False
        if isinstance(outcome, WeftError):
            raise outcome
        assert isinstance(outcome, Decoded)
        return outcome

    def kill(self) -> None:
        """Ends it at once; whoever waits for it gets ProcessDied. Idempotent."""
        self._process.kill()

    def join(self) -> None:
        """Blocks until it has ended."""
        self._process.join()
        self._pipe.close()

    def _send(self, message: tuple[bytes, MediaItem, bool] | None) -> None:
        self.is_clean = False
        self._number += 1
        send(self._pipe, (self._number, message))

    def _receive(self) -> object:
        """The next answer to the newest message. Raises ProcessDied, also for an answer to another."""
        try:
            number, outcome = receive(self._pipe)
        except (EOFError, OSError):
            raise self._death() from None
        if number != self._number:
            logger.error("a decode process answers message %s, not %d", number, self._number)
            raise self._death()
        return outcome

    def _death(self) -> ProcessDied:
        self._process.kill()  # no matter to one that has ended
        return ProcessDied(is_out_of_cpu(exit_code_of(self._process)))


def decode_item(family: Family, data: bytes, item: MediaItem, on_units: OnUnits, is_raw: bool = False) -> Decoded:
    """Decodes and preprocesses one item; `on_units` is given what is ready before the end. `is_raw`: a sound, of a
    family that keeps `HearsOnDevice`, is decoded alone. Raises InvalidMedia (broken, or not what was planned), or
    EncodeFailed (our own failure on it)."""
    started_s = time.perf_counter()
    take_decode_s()  # of an item that failed before
    inputs, waveform = list[EncoderInput](), None
    try:
        if is_raw:
            assert isinstance(family, HearsOnDevice)
            waveform = family.decode_waveform(data, item)
        else:
            inputs = _last_units(family, data, item, on_units)
    except WeftError:
        raise
    except MemoryError as error:
        raise _too_large(item) from error
    except Exception as error:  # the loop of a decode process: a bug on one file must not end the others
        logger.exception("preprocessing of %s failed", item.mm_hash)
        raise EncodeFailed(f"preprocessing failed ({type(error).__name__})") from error
    decode_s = take_decode_s()
    return Decoded(inputs, decode_s, time.perf_counter() - started_s - decode_s, waveform)


def _last_units(family: Family, data: bytes, item: MediaItem, on_units: OnUnits) -> list[EncoderInput]:
    """Those that `on_units` was not given."""
    part_s = time.perf_counter()
    check, inputs = PlanCheck(item), list[EncoderInput]()
    for unit in stream_units(family, data, item):
        check.add(unit)
        inputs.append(unit)
        if time.perf_counter() - part_s >= PART_S and check.num_units < len(item.unit_tokens):
            on_units(inputs)
            inputs, part_s = [], time.perf_counter()
    check.end()
    return inputs


def _too_large(item: MediaItem) -> InvalidMedia:
    return InvalidMedia("decoding it takes more memory than it may", param=item.part)


class PlanCheck:
    """Holds what was decoded against the plan, which is a contract, unit by unit."""

    def __init__(self, item: MediaItem) -> None:
        self._item = item
        self._num_patches = 0
        self._num_pooled = MediaOptions.decode(item.options).num_pooled_frames if item.modality == "video" else 1
        self.num_units = 0

    def add(self, unit: EncoderInput) -> None:
        """Raises InvalidMedia, or EncodeFailed for a unit that cuts a group of temporal patches whose rows are to be
        averaged."""
        item = self._item
        self.num_units += 1
        self._num_patches += unit.num_patches
        if unit.modality != item.modality or unit.grid[1:] != item.grid[1:]:
            raise InvalidMedia(
                f"decoded into {unit.modality} {unit.grid} where {item.modality} {item.grid} was planned"
            )
        if unit.pixels.dtype != np.float32:
            raise EncodeFailed(f"preprocessing gave {unit.pixels.dtype}, not float32")
        if self.num_units < len(item.unit_tokens) and unit.grid[0] % self._num_pooled:
            raise EncodeFailed(f"units cut groups of {self._num_pooled} frames that are to be averaged")

    def end(self) -> None:
        """Raises InvalidMedia."""
        item = self._item
        if self.num_units != len(item.unit_tokens):
            raise InvalidMedia(f"decoded into {self.num_units} units where {len(item.unit_tokens)} were planned")
        if self._num_patches != item.cost:
            raise InvalidMedia(f"decoded into {self._num_patches} patches where {item.cost} were planned")


def check_inputs(inputs: list[EncoderInput], item: MediaItem) -> None:
    """All units of an item at once. Raises as `PlanCheck` does."""
    check = PlanCheck(item)
    for unit in inputs:
        check.add(unit)
    check.end()


def _serve(pipe: Connection, model_dir: str, parent_pid: int, limits: DecodeLimits) -> None:
    """The life of the process: ends when the parent's end of the pipe is closed."""
    family = _enter(model_dir, parent_pid, limits.memory_bytes)
    background = yielding_thread()
    while True:
        try:
            number, message = receive(pipe)
        except (EOFError, OSError):
            return
        answer = partial(_answer, pipe, number)
        if message is None:
            answer(None)
        else:
            work = partial(_decode_within, limits, family, message, answer)
            # Of many units the next is soon there: the forward goes first, and a picture that comes meanwhile.
            outcome = background.submit(work).result() if len(message[1].unit_tokens) > 1 else work()
            try:
                answer(outcome)
            except MemoryError:  # of what it is sent as
                answer(_too_large(message[1]))
            del work, outcome  # what is left here would be counted against the next item's memory
        del message


def _answer(pipe: Connection, number: int, outcome: object) -> None:
    send(pipe, (number, outcome))


def _decode_within(
    limits: DecodeLimits, family: Family, message: tuple[bytes, MediaItem, bool], on_units: OnUnits
) -> Decoded | WeftError:
    """The kernel ends the process when its processor time is up: a codec that hangs listens to nobody else."""
    data, item, is_raw = message
    try:
        with limited(limits.cpu_s(item.modality), item.decode_bytes):
            return decode_item(family, data, item, on_units, is_raw)
    except WeftError as error:
        error.__cause__ = error.__context__ = None  # their frames hold what was decoded, and outlive this item
        return error.with_traceback(None)


def _enter(model_dir: str, parent_pid: int, memory_bytes: int) -> Family:
    """Binds a fresh process to its parent's life, loads the family (config files only, no torch) and limits its
    memory."""
    bind_to_parent(parent_pid)
    from modalities.registry import REGISTRY

    family = REGISTRY.load_family(Path(model_dir))
    limit_memory(memory_bytes)
    return family
