"""Sets the switches that Ray and other libraries read from the environment. Only this module writes them; it keeps the
values that the user has set."""

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
    # Workers measure their workspace with torch's profiler at start, and without this the profiler would log it.
    "KINETO_LOG_LEVEL": "99",
}


def switches_of_actors() -> dict[str, str]:
    """Returns the switches for actors on machines of a Ray that this process did not start, because its environment
    does not reach them."""
    return {name: os.environ.get(name, value) for name, value in SWITCHES.items()}


def set_local_switches() -> None:
    """Sets the switches for a Ray that this process starts on this machine: NIXL stays on the loopback interface, and
    Ray's ports (which listen on every interface) require a token that only this cluster knows."""
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    keep_ranks_on_loopback()
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def keep_ranks_on_loopback() -> None:
    """Keeps the connections between ranks on the loopback interface; call it if all ranks are on this machine."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")


def show_logs_as_written() -> None:
    """Makes Ray copy every line of the replicas' logs to the terminal, without a prefix. Call it before importing
    Ray."""
    os.environ.setdefault("RAY_DISABLE_WORKER_LOG_PREFIX", "1")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")


def use_cuda_device(index: int) -> None:
    """Makes this process use only the device with this index among the devices that it may use. Call it before torch
    has touched a device."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)


def set_switches() -> None:
    """Sets the switches for this process and for the processes that it starts. Side effect: it changes environment
    variables. Call it before importing the libraries."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"
    # Without this, torch would create a folder in the one for temporary files, and leave it there.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)
