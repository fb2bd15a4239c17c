"""Provides the two users of `fabric/sandbox/` behind one interface, for the suite that both must pass. Their files are
commands of `HostilePlugin`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from hostile_modality import HostilePlugin, hostile_registry

from encoder_pool.decode_process import DecodeJob, decoding_with
from encoder_pool.decoder import DecodePool
from encoder_pool.encoder_config import DEFAULT_LIMITS
from fabric.contracts import MediaItem, MmHash
from fabric.sandbox import RunJob, SandboxProcess
from modalities.family import EncoderInput, ImageHeader
from modalities.probing import ProbeLimits, ProbePool

PARAM = "messages.0.content.1"
MEMORY_BYTES = 2**31


class SandboxUser(Protocol):
    """Has one process, which reads files."""

    @property
    def processes(self) -> Sequence[SandboxProcess[Any]]: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def read(self, data: bytes) -> tuple[int, int]:
        """Returns the id of the process that has read a file, and the size of the file there."""
        ...


class ProbeUser:
    """Probes files as a router does."""

    def __init__(self, cpu_s: float, timeout_s: float) -> None:
        limits = ProbeLimits({"hostile": cpu_s}, MEMORY_BYTES, timeout_s, wait_s=60.0)
        self._pool = ProbePool(1, limits, hostile_registry)
        self.start, self.close = self._pool.start, self._pool.close
        self.processes = [helper.process for helper in self._pool._helpers]

    async def read(self, data: bytes) -> tuple[int, int]:
        header = await self._pool.probe("hostile", data, PARAM)
        assert isinstance(header, ImageHeader)
        return header.width, header.height


class HostileFamily:
    """Preprocesses a file to one unit of two numbers: the process id and the size of the file."""

    def preprocess(self, data: bytes, item: MediaItem) -> list[EncoderInput]:
        header = HostilePlugin().probe(data, item.part)
        assert isinstance(header, ImageHeader)
        return [EncoderInput("hostile", np.array([[header.width, header.height]], np.float32), item.grid)]


def enter_hostile_decoding() -> RunJob[DecodeJob]:
    return decoding_with(HostileFamily())


class DecodeUser:
    """Decodes files as an encoder does."""

    def __init__(self, cpu_s: float, timeout_s: float) -> None:
        limits = DEFAULT_LIMITS.__class__({"hostile": cpu_s}, {"hostile": timeout_s}, MEMORY_BYTES)
        self._pool = DecodePool(HostileFamily(), "", 1, limits)
        self.start, self.close = self._pool.start, self._pool.close
        self.processes = self._pool._processes
        for process in self.processes:
            process._enter = enter_hostile_decoding

    async def read(self, data: bytes) -> tuple[int, int]:
        item = MediaItem(0, "hostile", MmHash("file"), (1, 1, 1), (1,), 1, PARAM, decode_bytes=2**28)
        decoded = await self._pool.decode(data, item, lambda units: None)
        ((pid, size),) = decoded.inputs[0].pixels.astype(int).tolist()
        return pid, size


USERS: dict[str, type[ProbeUser] | type[DecodeUser]] = {"probe": ProbeUser, "decode": DecodeUser}
