"""Decodes items inside a decode process, and checks what was decoded against the plan.

The process is a sandbox (`fabric/sandbox/`), which runs `enter_decoding` once and then one item at a time. Where there
are no processes, `decode_item` runs in a thread of the serving process. The module knows nothing of batching, features
or requests.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fabric.contracts import EncodeFailed, InvalidMedia, MediaItem, WeftError
from fabric.sandbox import RunJob
from modalities.family import EncoderInput, Family, MediaOptions, MelOnDevice, Waveform, stream_units
from modalities.media import take_decode_s

logger = logging.getLogger(__name__)

OnUnits = Callable[[list[EncoderInput]], None]
"""Takes the next units of an item while the rest is being decoded."""
PART_S = 0.02
"""Units are collected for this long before they are delivered, because a message has a cost of its own."""
LOW_PRIORITY = 10
"""Sets the niceness (nice(2)) of work that yields. Such work gets about a tenth of a processor that another process
also wants."""


class Decoded(NamedTuple):
    inputs: list[EncoderInput]
    """Holds the units that were not delivered before; it is empty if the encoder's device makes the units."""
    decode_s: float
    """Holds the decoding time without waiting."""
    preprocess_s: float = 0.0
    """Holds the time from pixels or samples to the encoder's inputs."""
    waveform: Waveform | None = None
    """Holds a sound whose units the encoder's device makes."""


class DecodeJob(NamedTuple):
    """A `DecodeJob` describes to a decode process what to do with the bytes of an item."""

    item: MediaItem
    is_raw: bool
    """This is True if a sound is to be returned as a waveform (see `decode_item`)."""


def decode_item(family: Family, data: bytes, item: MediaItem, on_units: OnUnits, is_raw: bool = False) -> Decoded:
    """Decodes and preprocesses one item; passes units that are ready before the end to `on_units`. With `is_raw`, the
    item is a sound of a family that implements `MelOnDevice`, and it is decoded but not preprocessed. Raises
    InvalidMedia (broken, or different from the plan), or EncodeFailed (this program failed on it)."""
    started_s = time.perf_counter()
    take_decode_s()  # discards the time of an item that failed before
    inputs, waveform = list[EncoderInput](), None
    try:
        if is_raw:
            assert isinstance(family, MelOnDevice)
            waveform = family.decode_waveform(data, item)
        else:
            inputs = _last_units(family, data, item, on_units)
    except WeftError:
        raise
    except MemoryError as error:
        raise _too_large(item) from error
    except Exception as error:
        # This is one job of the loop of a decode process, which knows no requests: a bug on one file must not affect
        # others. The error ends the item in every request that waits for it.
        logger.exception("preprocessing of %s failed", item.mm_hash)
        raise EncodeFailed(f"preprocessing failed ({type(error).__name__})") from error
    decode_s = take_decode_s()
    return Decoded(inputs, decode_s, time.perf_counter() - started_s - decode_s, waveform)


def given_input(data: bytes, item: MediaItem) -> EncoderInput:
    """Returns the one unit of an item whose features a client has sent. Nothing is copied or decoded."""
    pixels = np.empty((0, 0), np.float32)
    return EncoderInput(item.work, pixels, item.grid, features=np.frombuffer(data, np.uint8))


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
    return InvalidMedia("decoding the medium needs more memory than the limit", param=item.part)


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
                f"the decoded medium is {unit.modality} of the grid {unit.grid}, but {item.modality} of the grid "
                f"{item.grid} was planned from its header"
            )
        if unit.pixels.dtype != np.float32:
            raise EncodeFailed(f"the preprocessed values must have dtype float32, not {unit.pixels.dtype}")
        if self.num_units < len(item.unit_tokens) and unit.grid[0] % self._num_pooled:
            raise EncodeFailed(
                f"a unit has {unit.grid[0]} frames, which cuts a group of {self._num_pooled} frames that are averaged"
            )

    def end(self) -> None:
        """Checks the number of units and patches. Raises InvalidMedia."""
        item = self._item
        if self.num_units != len(item.unit_tokens):
            raise InvalidMedia(
                f"the decoded medium has {self.num_units} units, but {len(item.unit_tokens)} were planned from its "
                "header"
            )
        if self._num_patches != item.cost:
            raise InvalidMedia(
                f"the decoded medium has {self._num_patches} patches, but {item.cost} were planned from its header"
            )


def check_inputs(inputs: list[EncoderInput], item: MediaItem) -> None:
    """Checks all units of an item at once. Raises what `PlanCheck` raises."""
    check = PlanCheck(item)
    for unit in inputs:
        check.add(unit)
    check.end()


def enter_decoding(model_dir: str) -> RunJob[DecodeJob]:
    """Loads the family (config files only, no torch) in a new process, and returns the function that decodes there."""
    from modalities.registry import REGISTRY

    return decoding_with(REGISTRY.load_family(Path(model_dir)))


def decoding_with(family: Family) -> RunJob[DecodeJob]:
    """Returns the function that decodes items of a family in a process. Its answers are lists of units that are ready
    before the last, and then a `Decoded` or a WeftError."""
    background = _yielding_thread()

    def decode(job: DecodeJob, data: bytes, answer: Callable[[object], None]) -> None:
        def outcome() -> Decoded | WeftError:
            try:
                return decode_item(family, data, job.item, answer, job.is_raw)
            except WeftError as error:
                return error

        # An item of many units yields to the forward pass and to a picture that arrives meanwhile: its next unit is
        # ready soon.
        is_long = len(job.item.unit_tokens) > 1
        decoded = background.submit(outcome).result() if is_long else outcome()
        try:
            answer(decoded)
        except MemoryError:  # serializing the outcome takes memory too
            answer(_too_large(job.item))

    return decode


def _yielding_thread() -> ThreadPoolExecutor:
    """Returns an executor with one thread, whose work yields the processors to all other work. It does so only on
    Linux: elsewhere niceness applies to the whole process, and the process cannot take it back."""
    if sys.platform != "linux":
        return ThreadPoolExecutor(1)
    return ThreadPoolExecutor(1, initializer=os.nice, initargs=(LOW_PRIORITY,))
