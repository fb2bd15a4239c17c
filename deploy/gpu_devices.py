"""Finds the GPUs of this machine and their memory, or reads what an operator names in their place (`8x80GB`, `2xL40S`).

`nvidia-smi`, which comes with the driver, says what is here, so nothing opens a device. Slices of GPUs (MIG) count in
place of the GPUs that have them. The module knows nothing of what runs on a device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from deploy.topology import RunNvidiaSmi
from fabric.contracts import ConfigError

GIB = 2**30
MIB = 2**20
MODEL_TO_MIB: Mapping[str, int] = {
    "t4": 15_360,
    "l4": 23_034,
    "a10": 23_028,
    "rtx3090": 24_576,
    "rtx4090": 24_564,
    "rtx5090": 32_607,
    "v100": 32_768,
    "a100-40gb": 40_960,
    "a6000": 49_140,
    "l40s": 46_068,
    "a100": 81_920,
    "h100": 81_559,
    "h200": 143_771,
    "b200": 183_359,
}
"""Maps names of common GPUs to their memory as `nvidia-smi` reports it, which is a little less than vendors write."""
_SLICE = re.compile(r"^\s+MIG\s+\S*?(\d+)gb\S*\s+Device\s+\d+:\s+\(UUID:\s*(MIG-[^)\s]+)\)", re.MULTILINE)
_WHOLE = re.compile(r"^GPU (\d+): (.*?) \(UUID: (GPU-[^)\s]+)\)", re.MULTILINE)
_NAMED = re.compile(r"(\d+)x(?:(\d+(?:\.\d+)?)\s*(?:GB|GiB)?|([a-z][a-z0-9-]*))", re.IGNORECASE)
MAX_NAMED = 64


class GpuDevice(NamedTuple):
    """A `GpuDevice` is a GPU, or a slice of one (MIG). `device_id` is what `CUDA_VISIBLE_DEVICES` takes."""

    device_id: str
    name: str
    memory_bytes: int
    is_slice: bool = False


def find_devices(run: RunNvidiaSmi, environment: Mapping[str, str]) -> list[GpuDevice]:
    """Returns the GPUs that this process may use, or none if there is no driver. A GPU that is cut into slices counts
    by its slices."""
    try:
        listed = run(["-L"])
        query = run(["--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits"])
    except OSError:
        return []
    uuid_to_bytes = {
        uuid: int(mib) * MIB for uuid, mib in re.findall(r"^\s*(\S+?)\s*,\s*(\d+)\s*$", query, re.MULTILINE)
    }
    devices: list[GpuDevice] = []
    ends = [*(found.start() for found in _WHOLE.finditer(listed)), len(listed)]
    for found, end in zip(_WHOLE.finditer(listed), ends[1:], strict=True):
        slices = _SLICE.findall(listed[found.end() : end])
        if slices:
            devices += [
                GpuDevice(uuid, f"{found[2]} ({size} GB slice)", int(size) * GIB, True) for size, uuid in slices
            ]
        elif found[3] in uuid_to_bytes:
            devices.append(GpuDevice(found[1], found[2], uuid_to_bytes[found[3]]))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return devices
    uuids = {found[1]: found[3] for found in _WHOLE.finditer(listed)}
    named = [name.strip() for name in visible.split(",")]
    return [
        device
        for device in devices
        if any(
            name and (device.device_id == name or uuids.get(device.device_id, device.device_id).startswith(name))
            for name in named
        )
    ]


def named_devices(text: str) -> list[GpuDevice]:
    """Returns devices as `8x80GB`, `2x80GB,4x24GB` or `8xH100` names them, or none for `none`. Raises ConfigError for
    another text."""
    if text == "none":
        return []
    devices: list[GpuDevice] = []
    for part in text.split(","):
        found = _NAMED.fullmatch(part.strip())
        count, memory_bytes = (0, 0) if found is None else (int(found[1]), _memory_bytes(found[2], found[3]))
        if not 1 <= count <= MAX_NAMED or memory_bytes <= 0:
            raise ConfigError(
                f"--gpus {text!r} is not written as NUMBERxSIZE or NUMBERxMODEL, for example 8x80GB or 8xH100, or "
                f"none; known models are {', '.join(sorted(MODEL_TO_MIB))}"
            )
        begin = len(devices)
        devices += [GpuDevice(str(begin + at), "named with --gpus", memory_bytes) for at in range(count)]
    return devices


def _memory_bytes(size: str | None, model: str | None) -> int:
    """Returns the memory of a named device, or 0 for an unknown model."""
    if size is not None:
        return int(float(size) * GIB)  # Vendors write GB and mean GiB.
    return MODEL_TO_MIB.get((model or "").lower(), 0) * MIB
