"""Prepares a process before it serves: the switches that libraries read from the environment, the limit of open files,
the event loop, and the use of memory.

The first part sets the switches of Ray and other libraries. Only this module writes them; it keeps the values that the
user has set. It also raises the limit of open files and chooses the event loop. The second part tunes the memory of
processes that compute: the process keeps what one step frees for the next, large tensors lie in large pages, and the
garbage collector ignores the objects that exist before the first request. They stand together because both act on the
whole process, and most of their functions must be called before a library is imported or first used.

By default glibc gives large blocks back to the kernel as soon as they are free, so every step's tensors are new pages,
each of which faults on its first access. Measured: without these faults, a prefill of 1,024 tokens of a 180M model
takes a tenth less time. In pages of 2 MB, decoding reads its keys and values in a sixth less time.

The module knows nothing of the config or of what the process serves.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import secrets
from pathlib import Path

# ------------------------------------------------------------ switches

SWITCHES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
    # Zero GPUs for a replica must not hide the machine's GPUs from Ray's accounting.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_LOG_LEVEL": "error",
    # Where no NVLink leaves a GPU, UCX would read the memory of another one over TCP instead of the bus (UCX's pull
    # request 7566; NIXL's 2208 sets this in later versions).
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    # Workers measure their workspace with torch's profiler at start, and without this the profiler would log it.
    "KINETO_LOG_LEVEL": "99",
}


def set_switches() -> None:
    """Sets the switches for this process and for the processes that it starts. Side effect: it changes environment
    variables. Call it before importing the libraries."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"
    # Without this, torch would create a folder in the one for temporary files, and leave it there.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)


def set_local_switches() -> None:
    """Sets the switches for a Ray that this process starts on this machine: NIXL stays on the loopback interface, and
    Ray's ports (which listen on every interface) require a token that only this cluster knows."""
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    keep_ranks_on_loopback()
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def show_token(token_file: Path | None) -> None:
    """Makes Ray show a token to the Ray that this process joins: that of the file, or else the one that Ray finds by
    itself. Without a mode in the environment, Ray would show none, also if it has one. Call it before importing Ray."""
    if token_file is not None and "RAY_AUTH_TOKEN" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN_PATH", str(token_file))
    named = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if named or (Path.home() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def keep_ranks_on_loopback() -> None:
    """Keeps the connections between ranks on the loopback interface; call it if all ranks are on this machine."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")


def switches_of_actors() -> dict[str, str]:
    """Returns the switches for actors on machines of a Ray that this process did not start, because its environment
    does not reach them."""
    return {name: os.environ.get(name, value) for name, value in SWITCHES.items()}


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


def allow_many_files() -> None:
    """Raises this process's limit of open files to the most that the system permits. A member has two connections to
    each other member, and some systems permit 1,024 files unless a process asks for more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Returns an event loop of the kind that Ray gives its actors: uvloop's where it is installed, or else asyncio's.
    With uvloop a short request costs a router about half the CPU time."""
    try:
        import uvloop
    except ImportError:  # It does not exist for every system.
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


# ------------------------------------------------------------ memory

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""The C library's mallopt takes these numbers for M_TRIM_THRESHOLD and M_MMAP_THRESHOLD (malloc.h)."""
LARGEST_KEPT_BYTES = 32 * 2**20
"""Blocks larger than this still go straight back to the kernel. glibc accepts no higher limit."""
KEPT_BYTES = 128 * 2**20
"""The process keeps this much free memory at the top of the heap."""


def keep_freed_memory() -> bool:
    """Makes the C library keep freed memory in this process: it sets the thresholds to `LARGEST_KEPT_BYTES` and
    `KEPT_BYTES`. Returns False if the C library has no such thresholds or refuses the values."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES))


def ask_for_large_pages() -> None:
    """Makes torch ask for large pages in this process, unless the environment says otherwise. Side effect: it sets an
    environment variable. Call it before torch first allocates memory, because torch reads the variable then."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def freeze_what_lives() -> None:
    """Removes every object that exists now from the view of the garbage collector permanently: libraries, the model and
    the service. Call it once, when the process is ready to serve.

    A full collection visits every object: 530,000 in a worker that serves the demo model. It pauses all requests of the
    worker for 255 ms, once in a few hundred steps of 1,024 sequences (measured on one of 2 shared cores). After this
    call the collector visits 20,000 objects in 3 to 5 ms. Its average cost per step fell from 1.0 ms to 0.24 ms."""
    gc.collect()
    gc.freeze()
