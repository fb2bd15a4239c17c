"""Switches that Ray and other libraries read from the environment. Written here and nowhere else; what the user has
set stays."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

SWITCHES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
    # Zero GPUs for a replica must not hide the machine's GPUs from Ray's accounting.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_LOG_LEVEL": "error",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    # torch's profiler counts a worker's workspace at boot and would tell of it.
    "KINETO_LOG_LEVEL": "99",
}


def switches_of_actors() -> dict[str, str]:
    """For actors on machines of a Ray that others have started: this process's environment does not reach them."""
    return {name: os.environ.get(name, value) for name, value in SWITCHES.items()}


def set_local_switches() -> None:
    """For a Ray of our own on this machine: NIXL stays on the loopback, and Ray's ports (which listen on every
    interface) ask for a token that only this cluster knows."""
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    keep_ranks_on_loopback()
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def keep_ranks_on_loopback() -> None:
    """For ranks that are all on this machine."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")


def show_logs_as_written() -> None:
    """For replicas whose lines Ray carries to the terminal: without a prefix, and every one. Call before importing
    Ray."""
    os.environ.setdefault("RAY_DISABLE_WORKER_LOG_PREFIX", "1")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")


def use_cuda_device(index: int) -> None:
    """Of those that this process may use, it uses that one. Call before torch has touched a device."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)


def set_switches() -> None:
    """Side effect: environment variables of this process and of what it starts. Call before importing the libraries."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"
    # torch would make a folder in the temporary one, and leave it there.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)
