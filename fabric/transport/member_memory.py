"""Allocates the memory of a source or a sink: on the host or on a GPU, with host memory beside that of a GPU.

Memory of the host is pinned where the process computes on CUDA, because only pinned memory is copied to and from a
device at full speed. A machine that refuses to pin so much gives plain memory, with a warning. The module decides no
sizes, and knows nothing of what a feature is.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import NamedTuple

from fabric.contracts import ConfigError
from fabric.transport.cuda_memory import device_memory, pinned_bytes
from fabric.transport.feature_channel import SlotMemory
from fabric.transport.transfer_memory import HostBytes, HostMemory, MakeMemory

_LOG = logging.getLogger(__name__)


class FeatureMemory(NamedTuple):
    """Holds what a source or a sink needs to allocate its memory."""

    nbytes: int
    make: MakeMemory
    beside: SlotMemory | None
    """Holds memory of the host beside that on a device: a source spills into it, and a sink stages in it."""


def feature_memory(
    device: str, nbytes: int, beside_bytes: int, *, is_on_device: bool, device_id: int = 0
) -> FeatureMemory:
    """Returns `nbytes` of memory for features in a process that computes on `device` (`cpu` or `cuda`). On a device
    there are `beside_bytes` of the host beside it. Raises ConfigError if the host has no room for these."""
    on_host: MakeMemory = HostMemory if device == "cpu" else partial(HostMemory, allocate=_pinned)
    if not is_on_device:
        return FeatureMemory(nbytes, on_host, None)
    return FeatureMemory(nbytes, device_memory(device_id), SlotMemory(beside_bytes, make_memory=on_host))


def _pinned(nbytes: int) -> HostBytes | None:
    """Allocates pinned memory, or returns None if that is impossible."""
    try:
        return pinned_bytes(nbytes)
    except ConfigError as error:
        _LOG.warning("the memory for features is not pinned, so copies to the GPU are slower: %s", error.message)
        return None
