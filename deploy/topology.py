"""Finds what a member runs on and what that is connected to: its hardware, its NVLink domain, its RDMA fabric and the
labels of its node. A router makes the classes of links from it (`router.planning.link_classes`).

The sources are those that UCX itself reads when it chooses a transport, because NIXL does not say which one it uses:
the kernel's list of RDMA devices, and the variables by which an operator restricts UCX (`UCX_TLS`, `UCX_NET_DEVICES`).
NVLink is found by `nvidia-smi`, which comes with the driver. What can't be found out counts as absent: the link then
has a class with a higher first cost, and the real cost is learned. The module knows nothing of costs.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from fabric.contracts import ConfigError, MemberPlace

_LOG = logging.getLogger(__name__)
LABELS_VARIABLE = "WEFT_NODE_LABELS"
"""Names the variable with the labels of a node, as `name=value,name=value`. A pod can get it from its own labels."""
SYSTEM_ROOT = Path("/sys")
_QUERY_TIMEOUT_S = 20.0
_RDMA_TRANSPORT = re.compile(r"all|ib|(?:rc|dc|ud)(?:_\w+)?")
"""Matches the values of `UCX_TLS` that let UCX use RDMA."""
_DEFAULT_SUBNET = "fe80:0000:0000:0000"


def find_place(
    device: str,
    num_devices: int = 1,
    node_labels: Mapping[str, str] | None = None,
    are_features_on_device: bool = False,
) -> MemberPlace:
    """Returns what is known of the place of a member that computes on `num_devices` of the kind `device`, `cpu` or
    `cuda`. `node_labels` come from Ray; those of the environment replace them. With `are_features_on_device`, features
    travel from or to the memory of the device; otherwise they lie in host memory, so no link is NVLink. Raises
    ConfigError for labels that are not written as `name=value`."""
    labels = dict(node_labels or {}) | parse_labels(os.environ.get(LABELS_VARIABLE, ""))
    domain = nvlink_domain(_device_uuid(), run_nvidia_smi) if device == "cuda" and are_features_on_device else ""
    return MemberPlace(
        hardware=_hardware(device, num_devices),
        nvlink_domain=domain,
        rdma_fabric=rdma_fabric(SYSTEM_ROOT, os.environ),
        labels=tuple(sorted(labels.items())),
    )


def parse_labels(text: str) -> dict[str, str]:
    """Returns the labels in `name=value,name=value`. Raises ConfigError for text that is written otherwise."""
    labels: dict[str, str] = {}
    for each in text.split(",") if text.strip() else ():
        name, is_pair, value = each.partition("=")
        if not is_pair or not name.strip():
            raise ConfigError(
                f"{LABELS_VARIABLE} has the part {each!r}, but labels are written as `name=value,name=value`"
            )
        labels[name.strip()] = value.strip()
    return labels


def _hardware(device: str, num_devices: int) -> str:
    """Returns the name of the devices and their number, or the name of the processor and its number of cores."""
    if device == "cuda":
        import torch

        return f"{torch.cuda.get_device_name()} x {num_devices}"
    return f"{_processor()} x {os.cpu_count()}"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


# ------------------------------------------------------------ RDMA


def rdma_fabric(system_root: Path, environment: Mapping[str, str]) -> str:
    """Returns the name of the RDMA fabric that UCX can use here, or an empty string.

    All RoCE devices count as one fabric, because Ethernet is usually routed everywhere in a cluster. InfiniBand fabrics
    are told apart by the prefix of their subnet; all with the prefix of the factory count as one."""
    transports = [name.strip() for name in environment.get("UCX_TLS", "all").split(",")]
    if not _allows(transports):
        return ""
    allowed = [name.strip() for name in environment.get("UCX_NET_DEVICES", "all").split(",")]
    fabrics: set[str] = set()
    for device, port in _active_ports(system_root):
        if "all" in allowed or device in allowed:
            if _read(port / "link_layer") == "InfiniBand":
                subnet = _read(port / "gids" / "0")[: len(_DEFAULT_SUBNET)]
                fabrics.add("infiniband" if subnet in ("", _DEFAULT_SUBNET) else f"infiniband-{subnet}")
            else:
                fabrics.add("roce")
    return min(fabrics, default="")  # InfiniBand sorts before RoCE, which is often the network for management.


def rdma_ports(system_root: Path) -> tuple[str, ...]:
    """Returns the RDMA devices with an active port, as UCX names them: `mlx5_0:1`."""
    return tuple(device for device, _ in _active_ports(system_root))


def _active_ports(system_root: Path) -> Iterator[tuple[str, Path]]:
    """Yields the name and the folder of each active port of an RDMA device."""
    for port in sorted((system_root / "class" / "infiniband").glob("*/ports/*")):
        if _read(port / "state").endswith("ACTIVE"):
            yield f"{port.parent.parent.name}:{port.name}", port


def _allows(transports: Iterable[str]) -> bool:
    """Returns whether a value of `UCX_TLS` lets UCX use RDMA. A value that begins with `^` lists what is left out."""
    names = list(transports)
    if names[0].startswith("^"):
        left_out = {names[0][1:], *names[1:]}
        return "ib" not in left_out and not {"rc", "ud", "dc"} <= left_out
    return any(_RDMA_TRANSPORT.fullmatch(name) for name in names)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# ------------------------------------------------------------ NVLink

RunNvidiaSmi = Callable[[list[str]], str]
"""Returns what `nvidia-smi` prints for these arguments. Raises OSError if it fails."""


def run_nvidia_smi(arguments: list[str]) -> str:
    command = ["nvidia-smi", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True)
    except subprocess.SubprocessError as error:
        raise OSError(f"nvidia-smi failed: {error}") from error
    return done.stdout


def nvlink_domain(uuid: str, run: RunNvidiaSmi) -> str:
    """Returns the name of the group of devices that NVLink joins to the device `uuid`, or an empty string if there is
    none. It is the clique of the fabric where one spans several machines, and else the group on this machine."""
    if not uuid:
        return ""
    try:
        clique = _clique(run(["-q", "-i", uuid]))
        if clique:
            return clique
        listed = run(["--query-gpu=index,uuid", "--format=csv,noheader"])
        matrix = run(["topo", "-m"])
    except OSError as error:
        _LOG.warning("links over NVLink can't be found, so other links are assumed: %s", error)
        return ""
    index_to_uuid = dict(re.findall(r"^\s*(\d+)\s*,\s*(\S+)\s*$", listed, re.MULTILINE))
    own = next((index for index, name in index_to_uuid.items() if name == uuid), "")
    group = _joined(own, _nvlinks(matrix))
    return min(index_to_uuid[index] for index in group) if len(group) > 1 else ""


def _device_uuid() -> str:
    """Returns the id of this process's device, as `nvidia-smi` writes it, or an empty string if torch can't say it."""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    return "" if uuid is None else f"GPU-{uuid}"


def _clique(details: str) -> str:
    """Returns the name of the device's clique in a fabric of several machines. On one machine with NVSwitch the fabric
    has no id, and there is none."""
    section = re.search(r"^\s*Fabric\s*$(.*?)(?=^    \S|\Z)", details, re.MULTILINE | re.DOTALL)
    if section is None:
        return ""
    found = dict(re.findall(r"^\s*(State|CliqueId|ClusterUUID)\s*:\s*(\S+)\s*$", section[1], re.MULTILINE))
    cluster = found.get("ClusterUUID", "")
    if found.get("State") != "Completed" or not re.search(r"[1-9a-f]", cluster):
        return ""
    return f"{cluster}.{found.get('CliqueId', '0')}"


def _nvlinks(matrix: str) -> dict[str, set[str]]:
    """Maps each device of `nvidia-smi topo -m` to those to which NVLink joins it."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix.splitlines()]
    header = next((row for row in rows if row and re.fullmatch(r"GPU\d+", row[0])), [])
    columns = [name for name in header if re.fullmatch(r"(?:GPU|NIC|mlx)\S*\d+", name)]
    links: dict[str, set[str]] = {}
    for row in rows:
        if row is header or not row or not re.fullmatch(r"GPU\d+", row[0]):
            continue
        cells = zip(columns, row[1:], strict=False)
        joined = {name[3:] for name, cell in cells if name.startswith("GPU") and re.fullmatch(r"NV\d+", cell)}
        links[row[0][3:]] = joined
    return links


def _joined(start: str, links: Mapping[str, set[str]]) -> set[str]:
    """Returns the devices that can be reached from `start`, itself included."""
    found, open_ends = {start}, [start]
    while open_ends:
        for index in links.get(open_ends.pop(), set()) - found:
            found.add(index)
            open_ends.append(index)
    return found
