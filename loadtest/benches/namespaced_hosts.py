"""Makes several hosts out of one machine, for tests and benches of a cluster on several machines.

A `NamespacedHost` is a set of Linux namespaces: it has its own network, processes, host name, shared memory and folder
for temporary files, and shares the processors and the other files. A cable (a veth pair) joins each further host to the
first. Nothing has a name outside of the namespaces, and the kernel removes a host, with its cable and everything that
runs on it, when the process that made it dies in any way. So there is nothing to clean up.

The module knows nothing of Ray or Weft. It works on Linux only, for root or where users may make namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_TOOLS = ("unshare", "nsenter", "ip", "mount")
_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
_SET_PDEATHSIG = 1
"""This option of prctl(2) gives a process a signal when its parent dies."""
_NETWORK = "10.77"
_START = """set -e
mount -t tmpfs weft-shm /dev/shm
mount -t tmpfs weft-tmp "$1"
mount -t sysfs weft-sys /sys
if [ -x /bin/hostname ]; then hostname "$2"; else echo "$2" > /proc/sys/kernel/hostname; fi
ip link set lo up
echo ready
exec sleep infinity
"""


@dataclass(frozen=True)
class NamespacedHost:
    """A `NamespacedHost` is one of the hosts; `pid` is its first process, as this machine counts processes."""

    name: str
    pid: int
    temp_dir: Path
    """Is a folder that has the same path on every host and other content on each."""
    cables: dict[str, str]
    """Maps each interface that leads to another host to the address that this host has there."""
    started: list[subprocess.Popen[str]]
    """Holds what was started on the host."""

    @property
    def address(self) -> str:
        """Returns the host's address on its first cable."""
        return next(iter(self.cables.values()))

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: IO[str] | int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        """Starts a command on the host, with exactly this environment."""
        process = subprocess.Popen(
            [*_enter(self.pid), *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def terminate(self, process: subprocess.Popen[str]) -> None:
        """Sends SIGTERM to a command that `start` started. The process itself only entered the namespaces, and its
        child is the command."""
        if process.poll() is None:
            for child in _children(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGTERM)

    def run(self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float = 60.0) -> str:
        """Runs a command on the host and returns what it printed. Raises subprocess.CalledProcessError if it fails."""
        done = subprocess.run(
            [*_enter(self.pid), *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
            timeout=timeout_s,
        )
        return done.stdout

    def cut(self) -> None:
        """Takes the host's cables down, as if they were pulled out."""
        self._set_cables("down")

    def plug_in(self) -> None:
        """Brings the cables up again."""
        self._set_cables("up")

    def _set_cables(self, state: str) -> None:
        for interface in self.cables:
            _call([*_enter(self.pid, "--net"), "ip", "link", "set", interface, state])

    def received_bytes(self) -> int:
        """Returns the bytes that have arrived over the host's cables so far."""
        lines = (Path(f"/proc/{self.pid}/net/dev")).read_text().splitlines()[2:]
        counts = {line.split(":")[0].strip(): int(line.split(":")[1].split()[0]) for line in lines}
        return sum(counts[interface] for interface in self.cables)

    def file(self, path: Path) -> Path:
        """Returns the path at which this machine sees a file of the host."""
        return Path(f"/proc/{self.pid}/root") / path.relative_to("/")


def why_no_hosts() -> str:
    """Returns why this machine can't make hosts, or an empty string. It tries to make one."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"the commands {', '.join(missing)} are not installed"
    try:
        with namespaced_hosts(2):
            return ""
    except OSError as error:
        return f"namespaces can't be made here: {error}"


@contextlib.contextmanager
def namespaced_hosts(num_hosts: int, num_cables: int = 1) -> Iterator[list[NamespacedHost]]:
    """Yields hosts, the first of which has `num_cables` to each other. They end with the `with` block, and with this
    process. Raises OSError if the system does not permit it."""
    folder = Path(tempfile.mkdtemp(prefix="h-"))  # The name is short because Ray puts sockets below it.
    try:
        with contextlib.ExitStack() as stack:
            hosts = [stack.enter_context(_host(f"host-{chr(97 + index)}", folder)) for index in range(num_hosts)]
            for index, host in enumerate(hosts[1:], start=1):
                for cable in range(num_cables):
                    _join(hosts[0], host, index, cable)
            yield hosts
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _host(name: str, folder: Path) -> Iterator[NamespacedHost]:
    as_user = () if os.geteuid() == 0 else ("--map-root-user",)
    holder = subprocess.Popen(
        ["unshare", *as_user, *_NAMESPACES, "sh", "-c", _START, "sh", str(folder), name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_die_with_parent,
    )
    host: NamespacedHost | None = None
    try:
        assert holder.stdout is not None
        said = holder.stdout.readline()
        if said != "ready\n":
            holder.kill()
            raise OSError(f"{said}{holder.stdout.read()}".strip())
        host = NamespacedHost(name, _children(holder.pid)[0], folder, {}, [])
        yield host
    finally:
        holder.kill()  # Its child, the first process of the host, dies with it, and the host with that.
        holder.wait()
        for process in () if host is None else host.started:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if holder.stdout is not None:
            holder.stdout.close()


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # The process has ended.
        return []


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)


def _join(first: NamespacedHost, other: NamespacedHost, index: int, cable: int) -> None:
    """Lays a cable, in a network of its own."""
    ours, theirs = f"to{other.name[-1]}{cable}", f"to{first.name[-1]}{cable}"
    add = ["ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", str(other.pid)]
    _call([*_enter(first.pid, "--net"), *add])
    for host, interface, last in ((first, ours, 1), (other, theirs, 2)):
        address = f"{_NETWORK}.{index * 10 + cable}.{last}"
        _call([*_enter(host.pid, "--net"), "ip", "address", "add", f"{address}/24", "dev", interface])
        _call([*_enter(host.pid, "--net"), "ip", "link", "set", interface, "up"])
        host.cables[interface] = address


def _enter(pid: int, *namespaces: str) -> list[str]:
    keep = () if os.geteuid() == 0 else ("--preserve-credentials", "--user")
    return ["nsenter", "--target", str(pid), *keep, *(namespaces or ("--net", "--mount", "--uts", "--ipc", "--pid"))]


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
