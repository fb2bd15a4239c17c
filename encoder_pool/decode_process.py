"""Runs one spawned process that decodes, and the pipe to it. The kernel enforces its limits of processor time and
memory.

The process is spawned and never forked, because threads of NIXL and gRPC exist, and it ends with its parent. It works
on one item at a time, so when it dies, the item that caused it is known. Its owner must end it when it exceeds its time
limit by the clock. The module knows nothing of batching, features or requests.
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
"""Units are collected for this long before they are delivered, because a message has a cost of its own."""
START_TIMEOUT_S = 60.0
"""Limits the start of a process's interpreter and its imports on a machine under load."""


class Decoded(NamedTuple):
    inputs: list[EncoderInput]
    """Holds the units that were not delivered before; it is empty if the encoder's device makes the units."""
    decode_s: float
    """Holds the decoding time without waiting."""
    preprocess_s: float = 0.0
    """Holds the time from pixels or samples to the encoder's inputs."""
    waveform: Waveform | None = None
    """Holds a sound whose units the encoder's device makes."""


class ProcessDied(Exception):
    """Means that the process ended while it worked on an item."""

    def __init__(self, is_out_of_cpu: bool) -> None:
        super().__init__("out of processor time" if is_out_of_cpu else "died")
        self.is_out_of_cpu = is_out_of_cpu


class DiedIdle(Exception):
    """Means that the process was gone, or out of step, before it received an item, so no item is to blame."""


class DecodeProcess:
    """A `DecodeProcess` is the parent's side of one process. It must be made in a thread that lives as long as the
    service (the thread of an event loop), because the parent-death signal of prctl(2) follows the thread that spawned
    the process."""

    def __init__(self, model_dir: str, limits: DecodeLimits) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, model_dir, os.getpid(), limits), name="weft-decode", daemon=True
        )
        self._process.start()
        theirs.close()
        self._number = 0
        """Holds the number of the newest message that was sent; answers to it carry the same number."""
        self.is_clean = True
        """This is True if no answer is outstanding. Otherwise the process must not receive the next item."""
        self.is_at_work = False
        """This is True if the process received an item and has not answered in full."""

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Blocks until the process has loaded the family and reads messages. Raises DiedIdle, and the process has then
        been killed."""
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
        """Decodes one item and blocks until it is done; calls `on_units` in this thread. Raises what `decode_item`
        raises, DiedIdle, or ProcessDied."""
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
        """Ends the process at once; a thread that waits for it gets ProcessDied. Idempotent."""
        self._process.kill()

    def join(self) -> None:
        """Blocks until the process has ended."""
        self._process.join()
        self._pipe.close()

    def _send(self, message: tuple[bytes, MediaItem, bool] | None) -> None:
        self.is_clean = False
        self._number += 1
        send(self._pipe, (self._number, message))

    def _receive(self) -> object:
        """Returns the next answer to the newest message. Raises ProcessDied, also if the answer belongs to another
        message."""
        try:
            number, outcome = receive(self._pipe)
        except (EOFError, OSError):
            raise self._death() from None
        if number != self._number:
            logger.error("a decode process answers message %s, not %d", number, self._number)
            raise self._death()
        return outcome

    def _death(self) -> ProcessDied:
        self._process.kill()  # this does nothing to a process that has ended
        return ProcessDied(is_out_of_cpu(exit_code_of(self._process)))


def decode_item(family: Family, data: bytes, item: MediaItem, on_units: OnUnits, is_raw: bool = False) -> Decoded:
    """Decodes and preprocesses one item; passes units that are ready before the end to `on_units`. With `is_raw`, the
    item is a sound of a family that implements `HearsOnDevice`, and it is decoded but not preprocessed. Raises
    InvalidMedia (broken, or different from the plan), or EncodeFailed (this program failed on it)."""
    started_s = time.perf_counter()
    take_decode_s()  # discards the time of an item that failed before
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
    except Exception as error:  # this runs in the loop of a decode process: a bug on one file must not affect others
        logger.exception("preprocessing of %s failed", item.mm_hash)
        raise EncodeFailed(f"preprocessing failed ({type(error).__name__})") from error
    decode_s = take_decode_s()
    return Decoded(inputs, decode_s, time.perf_counter() - started_s - decode_s, waveform)


def _last_units(family: Family, data: bytes, item: MediaItem, on_units: OnUnits) -> list[EncoderInput]:
    """Returns the units that were not passed to `on_units`."""
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
    """Compares what was decoded with the plan, unit by unit; the plan is a contract."""

    def __init__(self, item: MediaItem) -> None:
        self._item = item
        self._num_patches = 0
        self._num_pooled = MediaOptions.decode(item.options).num_pooled_frames if item.modality == "video" else 1
        self.num_units = 0

    def add(self, unit: EncoderInput) -> None:
        """Checks the next unit. Raises InvalidMedia, or EncodeFailed for a unit that cuts a group of temporal patches
        whose rows are to be averaged."""
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
        """Checks the number of units and patches. Raises InvalidMedia."""
        item = self._item
        if self.num_units != len(item.unit_tokens):
            raise InvalidMedia(f"decoded into {self.num_units} units where {len(item.unit_tokens)} were planned")
        if self._num_patches != item.cost:
            raise InvalidMedia(f"decoded into {self._num_patches} patches where {item.cost} were planned")


def check_inputs(inputs: list[EncoderInput], item: MediaItem) -> None:
    """Checks all units of an item at once. Raises what `PlanCheck` raises."""
    check = PlanCheck(item)
    for unit in inputs:
        check.add(unit)
    check.end()


def _serve(pipe: Connection, model_dir: str, parent_pid: int, limits: DecodeLimits) -> None:
    """Runs the process until the parent's end of the pipe is closed."""
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
            # An item of many units yields to the forward pass and to a picture that arrives meanwhile: its next unit is
            # ready soon.
            outcome = background.submit(work).result() if len(message[1].unit_tokens) > 1 else work()
            try:
                answer(outcome)
            except MemoryError:  # serializing the outcome takes memory too
                answer(_too_large(message[1]))
            del work, outcome  # otherwise their memory would count against the next item
        del message


def _answer(pipe: Connection, number: int, outcome: object) -> None:
    send(pipe, (number, outcome))


def _decode_within(
    limits: DecodeLimits, family: Family, message: tuple[bytes, MediaItem, bool], on_units: OnUnits
) -> Decoded | WeftError:
    """Decodes one item within the limits. The kernel ends the process when its processor time is over, because nothing
    else can stop a codec that hangs."""
    data, item, is_raw = message
    try:
        with limited(limits.cpu_s(item.modality), item.decode_bytes):
            return decode_item(family, data, item, on_units, is_raw)
    except WeftError as error:
        error.__cause__ = error.__context__ = None  # their frames would keep the decoded data alive after this item
        return error.with_traceback(None)


def _enter(model_dir: str, parent_pid: int, memory_bytes: int) -> Family:
    """Binds a new process to its parent's life, loads the family (config files only, no torch) and limits the process's
    memory."""
    bind_to_parent(parent_pid)
    from modalities.registry import REGISTRY

    family = REGISTRY.load_family(Path(model_dir))
    limit_memory(memory_bytes)
    return family
