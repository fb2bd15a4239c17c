"""Provides test doubles that drive an encoder pipeline by hand: a decoder, a forward and a plane, each of which acts
only when the test says so."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from encoder_pool.decode_process import Decoded, OnUnits
from encoder_pool.planning import ForwardResult, ForwardUnit, SoundJob, SoundResult
from fabric.contracts import MediaItem, PlaneMessage, UnitReady
from fabric.transport import Handler
from modalities.family import EncoderInput


@dataclass(eq=False)
class OpenDecode:
    """An `OpenDecode` is an item that is being decoded; its first `num_given` units have been handed over."""

    item: MediaItem
    on_units: OnUnits
    future: asyncio.Future[Decoded]
    num_given: int = 0

    def inputs(self, number: int) -> list[EncoderInput]:
        self.num_given += number
        pixels, features = np.zeros((1, 1), np.float32), np.zeros(1, np.uint8) if self.item.is_given else None
        return [EncoderInput(self.item.work, pixels, self.item.grid, features=features) for _ in range(number)]

    @property
    def num_left(self) -> int:
        return len(self.item.unit_tokens) - self.num_given


class HandDecoder:
    """Implements `Decoder`; the test decides when units are handed over and when a decoding ends."""

    def __init__(self) -> None:
        self.open: list[OpenDecode] = []
        self.hash_to_num_started: Counter[str] = Counter()

    @property
    def num_parallel(self) -> int:
        return 2

    async def decode(self, data: bytes, item: MediaItem, on_units: OnUnits) -> Decoded:
        assert data, "the file must be there for as long as somebody wants it"
        entry = OpenDecode(item, on_units, asyncio.get_running_loop().create_future())
        self.open.append(entry)
        self.hash_to_num_started[item.mm_hash] += 1
        try:
            return await entry.future
        finally:
            self.open.remove(entry)


class HandForward:
    """Implements `Forward`; the test decides when the batch ends."""

    def __init__(self, max_batch_cost: int) -> None:
        self._max_batch_cost = max_batch_cost
        self.job: tuple[Sequence[ForwardUnit], Callable[[ForwardResult], None]] | None = None
        self.sounds: tuple[Sequence[SoundJob], Callable[[SoundResult], None]] | None = None

    @property
    def is_busy(self) -> bool:
        return self.job is not None or self.sounds is not None

    def submit(self, units: Sequence[ForwardUnit], done: Callable[[ForwardResult], None]) -> None:
        assert not self.is_busy, "one batch at a time"
        assert len({(unit.input.modality, unit.input.features is None) for unit in units}) == 1
        self.job = (units, done)

    def submit_sounds(self, sounds: Sequence[SoundJob], done: Callable[[SoundResult], None]) -> None:
        assert not self.is_busy, "one batch at a time"
        assert len(sounds) == 1 or sum(sound.item.cost for sound in sounds) <= self._max_batch_cost
        self.sounds = (sounds, done)


class RecordingPlane:
    """A `RecordingPlane` is a plane that records what is sent and never delivers a message; while `is_refusing` is set
    it refuses to send, as a full queue does."""

    address = "local://encoder-1"
    num_dropped = 0

    def __init__(self) -> None:
        self.sent: list[UnitReady] = []
        self.is_refusing = False

    def start(self, handler: Handler) -> None:
        raise AssertionError("the pipeline takes no messages")

    def send(self, address: str, message: PlaneMessage) -> bool:
        assert isinstance(message, UnitReady)
        if not self.is_refusing:
            self.sent.append(message)
        return not self.is_refusing

    def forget(self, address: str) -> None: ...

    def close(self) -> None: ...
