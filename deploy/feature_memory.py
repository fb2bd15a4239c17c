"""Allocates the memory in which encoders keep features and workers receive them: on the host or on a GPU, as the config
says.

Memory of the host is pinned where the process computes on CUDA, because only pinned memory is copied to and from a
device at full speed. A machine that refuses to pin so much gives plain memory, with a warning. The module decides no
sizes (`deploy.sizing`), and knows nothing of what a feature is.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import NamedTuple

from deploy.config import ClusterConfig
from deploy.sizing import arena_bytes, inbox_bytes, spill_bytes, staging_bytes
from fabric.contracts import ConfigError
from fabric.transport import HostBytes, HostMemory, MakeMemory, SlotMemory, device_memory, pinned_bytes

_LOG = logging.getLogger(__name__)


class FeatureMemory(NamedTuple):
    """Holds what a source or a sink needs to allocate its memory."""

    nbytes: int
    make: MakeMemory
    beside: SlotMemory | None
    """Holds memory of the host beside that on a device: a source spills into it, and a sink stages in it."""


def encoder_memory(config: ClusterConfig) -> FeatureMemory:
    """Returns the memory of an encoder's arena in this process. Raises ConfigError if the host has no room for what
    lies beside it."""
    return _memory(config.encoders.device, arena_bytes(config), spill_bytes(config), config.is_arena_on_device)


def worker_memory(config: ClusterConfig) -> FeatureMemory:
    """Returns the memory of a worker's inbox in this process. Raises ConfigError if the host has no room for what lies
    beside it."""
    return _memory(config.workers.device, inbox_bytes(config), staging_bytes(config), config.is_inbox_on_device)


def _memory(device: str, nbytes: int, beside_bytes: int, is_on_device: bool) -> FeatureMemory:
    on_host: MakeMemory = HostMemory if device == "cpu" else partial(HostMemory, allocate=_pinned)
    if not is_on_device:
        return FeatureMemory(nbytes, on_host, None)
    # A replica sees the GPUs that Ray reserved for it, and computes on the first one.
    return FeatureMemory(nbytes, device_memory(0), SlotMemory(beside_bytes, make_memory=on_host))


def _pinned(nbytes: int) -> HostBytes | None:
    """Allocates pinned memory, or returns None if that is impossible."""
    try:
        return pinned_bytes(nbytes)
    except ConfigError as error:
        _LOG.warning("the memory for features is not pinned, so copies to the GPU are slower: %s", error.message)
        return None
