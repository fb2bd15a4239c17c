"""Says in which memory encoders keep features and workers receive them: on the host or on a GPU, as the config says."""

from __future__ import annotations

from deploy.config import ClusterConfig
from deploy.sizing import arena_bytes, inbox_bytes, spill_bytes, staging_bytes
from fabric.transport import FeatureMemory, feature_memory


def encoder_memory(config: ClusterConfig) -> FeatureMemory:
    """Returns the memory of an encoder's arena in this process. Raises ConfigError if the host has no room for what
    lies beside it."""
    device, is_on_device = config.encoders.device, config.is_arena_on_device
    return feature_memory(device, arena_bytes(config), spill_bytes(config), is_on_device=is_on_device)


def worker_memory(config: ClusterConfig) -> FeatureMemory:
    """Returns the memory of a worker's inbox in this process. Raises ConfigError if the host has no room for what lies
    beside it."""
    device, is_on_device = config.workers.device, config.is_inbox_on_device
    return feature_memory(device, inbox_bytes(config), staging_bytes(config), is_on_device=is_on_device)
