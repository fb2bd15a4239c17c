"""Adds a modality whose files harm their reader like the worst containers. Helpers of a probe pool register it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from fabric.contracts import InvalidMedia
from modalities.family import ImageHeader, MediaHeader
from modalities.media import MediaLimits
from modalities.registry import Registry, builtin_registry


class HostilePlugin:
    """Runs a file as a command when it is probed. A file that is no command gives a picture whose width is the process
    id."""

    modality = "hostile"
    part_types = ("hostile_url",)
    needs_process = True

    def parse(self, part: Mapping[str, object], param: str, limits: MediaLimits) -> bytes:
        raise AssertionError("it is only probed")

    def probe(self, data: bytes, param: str) -> MediaHeader:
        if data == b"die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if data.startswith(b"hang"):
            if data != b"hang":  # This names a pipe. Opening it tells its reader that the command has begun.
                Path(os.fsdecode(data[4:])).write_bytes(b"")
            threading.Event().wait()
        if data.startswith(b"wait"):  # The first pipe reports the start; the second one ends the wait.
            begun, ended = (Path(os.fsdecode(name)) for name in data[4:].split(b"\0"))
            begun.write_bytes(b"")
            with ended.open("rb") as pipe:
                pipe.read(1)
        while data == b"burn":
            pass
        if data == b"deaf":  # A library may replace the handlers of signals.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait()
        if data == b"garbage":
            os.write(pipe_of_this_process().fileno(), b"a library writes to the wrong file\n")
        if data == b"mute":
            pipe_of_this_process().close()
            threading.Event().wait()
        if data == b"exit":
            os._exit(7)
        if data == b"stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if data == b"oom":  # The kernel does this to the largest process when memory is short.
            os.kill(os.getpid(), signal.SIGKILL)
        if data == b"grow":
            return ImageHeader("HOSTILE", len(bytearray(2**34)), 1, "")
        if data == b"bug":
            raise RuntimeError("a bug")
        if data == b"broken":
            raise InvalidMedia(f"{param}: broken", param=param)
        return ImageHeader("HOSTILE", os.getpid(), len(data), "")

    def validate(self, header: MediaHeader, limits: MediaLimits, param: str) -> None:
        raise AssertionError("it is only probed")


def pipe_of_this_process() -> Connection:
    """Returns the pipe through which this helper answers."""
    pipe: Connection = multiprocessing.current_process()._args[0]
    return pipe


def hostile_registry() -> Registry:
    registry = builtin_registry()
    registry.register_modality(HostilePlugin())
    return registry
