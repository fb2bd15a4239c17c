"""Starts a Ray in processes of its own, as `ray start` does for a user, and ends all of them."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from cluster_process import eventually

PATIENCE = ("RAY_gcs_rpc_server_reconnect_timeout_s", "300")
"""Ray's processes end themselves when their head has not answered for this long; Ray's default is 60 s. On a machine
whose cores are all busy the head may only be slow. A dead head still fails the tests, through their own time limits."""
RAY = (sys.executable, "-m", "ray.scripts.scripts")


@dataclass
class OwnRay:
    """An `OwnRay` is the head of a Ray that this test process started."""

    process: psutil.Process
    folder: Path
    """Holds the files of the Ray, and nothing else does."""
    said: str
    """Is what `ray start` has printed."""

    @property
    def is_running(self) -> bool:
        return self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE

    def actors(self, name: str) -> list[psutil.Process]:
        """Returns the live processes below the Ray whose command line contains the name."""
        found = []
        for process in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if name in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def last_words(self) -> str:
        """Returns the ends of the logs that the parts of the Ray wrote."""
        logs = self.folder / "session_latest" / "logs"
        names = ("ray_process_exit.log", "gcs_server.out", "raylet.out", "dashboard_agent.log", "runtime_env_agent.log")
        files = [self.folder / "log", *(logs / name for name in names)]
        return "\n".join(f"--- {file.name}\n{file.read_text()[-1500:]}" for file in files if file.is_file())


@contextlib.contextmanager
def own_ray(environment: Mapping[str, str], *options: str) -> Iterator[OwnRay]:
    """Runs the head of a Ray with these options and with nothing in its environment but these variables. It chooses its
    port itself: a port that another process chose and released may be taken by the time that Ray listens on it."""
    folder = Path(tempfile.mkdtemp(prefix="r-"))
    command = [*RAY, "start", "--head", "--block", "--port=0", "--node-ip-address=127.0.0.1", "--num-cpus=4"]
    command += ["--disable-usage-stats", f"--temp-dir={folder}", *options]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=dict(environment), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        eventually(lambda: "Ray runtime started" in (folder / "log").read_text() or process.poll() is not None)
        said = (folder / "log").read_text()
        assert process.poll() is None, said
        yield OwnRay(psutil.Process(process.pid), folder, said)
    finally:
        end_at_once(tree_of([process.pid]))
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def tree_of(pids: Iterable[int]) -> list[psutil.Process]:
    """Returns the live processes with these ids, and all below them."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found += [*process.children(recursive=True), process]
    return found


def end_at_once(processes: Sequence[psutil.Process]) -> None:
    """Kills the processes and waits for their end. If a Ray is asked to end, it drains for half a minute."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
