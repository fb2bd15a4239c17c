"""Runs a Ray of several nodes on this machine with `ray.cluster_utils`. A node is a raylet with its own resources, and
the processes below it. So a test can place members on nodes, take a node away and add another one."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from cluster_process import eventually
from own_ray import end_at_once, tree_of
from ray.cluster_utils import Cluster

OBJECT_STORE_BYTES = 100 * 2**20


class RayNode(NamedTuple):
    """A `RayNode` is one node of a `RayOfNodes`: Ray's own handle, and its raylet."""

    handle: Any
    raylet: psutil.Process

    def has(self, pid: int) -> bool:
        """Returns whether the process with this id runs below the node's raylet."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return any(child.pid == pid for child in self.raylet.children(recursive=True))
        return False


@dataclass
class RayOfNodes:
    """A `RayOfNodes` is a running Ray to which nodes are added, and from which they are taken."""

    cluster: Cluster
    folder: Path

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, resources: Mapping[str, float]) -> RayNode:
        """Starts a node with these custom resources, and waits until the Ray has it. The first node is the head."""
        head: dict[str, Any] = {}
        if not self.cluster.head_node:
            # With the default port of the dashboard, Ray would try that port even without a dashboard. Where another
            # Ray has it, the head logs the error, and pytest's record of the log keeps the open socket alive.
            head = {"include_dashboard": False, "dashboard_port": None, "temp_dir": str(self.folder / "ray")}
        with pytest.MonkeyPatch.context() as patch:
            # The head writes its address into this folder, whichever it gets for its other files.
            patch.setenv("RAY_TMPDIR", str(self.folder))
            before = set(psutil.Process().children())
            try:
                handle = self.cluster.add_node(
                    num_cpus=1,
                    resources=dict(resources),
                    object_store_memory=OBJECT_STORE_BYTES,
                    **head,
                )
            except BaseException:
                # Ray keeps no handle of a node that did not start, but its processes would go on.
                end_at_once(tree_of(child.pid for child in set(psutil.Process().children()) - before))
                raise
        (raylet,) = handle.all_processes["raylet"]
        return RayNode(handle, psutil.Process(raylet.process.pid))

    def kill(self, node: RayNode) -> None:
        """Ends a node as a machine ends that loses its power: nothing on it gets a signal that it could handle."""
        end_at_once(node.raylet.children(recursive=True))
        self.cluster.remove_node(node.handle, allow_graceful=False)


@contextlib.contextmanager
def ray_of_nodes(head: Mapping[str, float]) -> Iterator[RayOfNodes]:
    """Runs a Ray whose head offers these custom resources. At its end every process of it has ended."""
    folder = Path(tempfile.mkdtemp(prefix="r-"))
    before = signal.getsignal(signal.SIGTERM)  # Ray sets a handler of its own.
    running = RayOfNodes(Cluster(shutdown_at_exit=False), folder)
    try:
        running.add(head)
        yield running
    finally:
        signal.signal(signal.SIGTERM, before)
        nodes = running.cluster.list_all_nodes()
        infos = [info for node in nodes for each in node.all_processes.values() for info in each]
        tree = tree_of(info.process.pid for info in infos)
        end_at_once(tree)
        for node in nodes:
            running.cluster.remove_node(node, allow_graceful=False)
        eventually(lambda: not any(process.is_running() for process in tree), 10)
        shutil.rmtree(folder, ignore_errors=True)
