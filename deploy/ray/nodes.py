"""Knows the nodes of the Ray on which a cluster runs: what a replica needs to know of its own node, and whether all
nodes can hold the cluster at all.

`check_nodes` runs before a cluster is deployed on a Ray that Weft did not start. It finds nodes that lack Weft or have
another version, nodes whose address can't be chosen, and pairs of nodes that do not reach each other, and names them.
Without it, replicas would fail one by one while Serve starts them again, or wait for messages that never arrive.

The module knows nothing of what replicas compute.
"""

from __future__ import annotations

import os
import pickle
import platform
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy import compose
from deploy.config import ClusterConfig, EncoderSection
from deploy.network import NodeAddress, own_address
from deploy.process_setup import switches_of_actors
from deploy.worker_pools import ranks_per_replica
from deploy.workers_config import WorkerSection
from fabric.contracts import ConfigError, Unavailable
from fabric.transport import join_host_port, listen

VERSION_VARIABLE = "WEFT_SERVER_VERSION"
"""Names the variable with the version of the server that started a replica."""
EXAMINE_S = 60.0
"""All nodes together may take this many seconds to answer; a busy node takes some to start a process of Python."""
CONNECT_S = 5.0
MAX_PEERS = 32
"""Each node tries to reach this many others, and is tried by as many."""


# ------------------------------------------------------------ a replica's own node


def this_node(config: ClusterConfig) -> NodeAddress:
    """Returns the address at which this node's members reach each other: loopback if Weft started Ray itself, on this
    machine alone. Side effect: it binds this process's transports to the interface of the address (environment
    variables). Raises ConfigError, which names the node, if its Weft has another version than the server, or if no
    address fits the config."""
    try:
        check_version(os.environ.get(VERSION_VARIABLE))
        return own_address(config.network, None if config.ray.address is None else ray.util.get_node_ip_address())
    except ConfigError as error:
        raise ConfigError(f"node {platform.node()}: {error.message}") from error


def check_version(expected: str | None) -> None:
    """Raises ConfigError if this node's Weft has another version than expected; None expects none."""
    version = metadata.version("weft")
    if expected not in (None, version):
        raise ConfigError(f"it has Weft {version}, but the server has Weft {expected}; install the same on every node")


def actor_environment(config: ClusterConfig) -> dict[str, Any]:
    """Returns Ray's `runtime_env` of every actor of Weft. It is empty for a Ray that Weft started itself: such a Ray
    inherits the environment, and starts actors without a `runtime_env` sooner."""
    if config.ray.address is None:
        return {}
    return {"env_vars": switches_of_actors() | {VERSION_VARIABLE: metadata.version("weft")}}


# ------------------------------------------------------------ all nodes, before a cluster is deployed


class RayNode(NamedTuple):
    """Describes one node of a Ray."""

    node_id: str
    host: str
    address: str
    resources: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.host} ({self.address})"


def live_nodes() -> list[RayNode]:
    return [
        RayNode(each["NodeID"], each["NodeManagerHostname"], each["NodeManagerAddress"], each["Resources"])
        for each in ray.nodes()
        if each["Alive"]
    ]


def asked_resources(config: ClusterConfig) -> list[dict[str, float]]:
    """Returns what each part asks of one node: a router, an encoder, a worker with vLLM with all of its ranks, or one
    rank of a worker with Weft's own engine. Raises ConfigError for a pool whose ranks can't be counted."""
    router, encoders = config.router, config.encoders
    asked = [router.ray_resources | {"CPU": router.cpus_per_replica}]
    for each in config.by_pool():
        one_rank, num_ranks = _asked_by(each.workers), ranks_per_replica(each)
        asked.append({name: amount * num_ranks for name, amount in one_rank.items()})
    if encoders.replicas:
        asked.append(_asked_by(encoders))
    return asked


def _asked_by(section: EncoderSection | WorkerSection) -> dict[str, float]:
    return section.ray_resources | {"GPU": section.gpus_per_replica, "CPU": section.cpus_per_replica}


def hosting_nodes(nodes: Sequence[RayNode], asked: Sequence[Mapping[str, float]]) -> list[RayNode]:
    """Returns the nodes that have what at least one part asks for. Raises ConfigError if a part finds no node."""
    for each in asked:
        if not any(_has(node, each) for node in nodes):
            wanted = ", ".join(f"{name}: {amount:g}" for name, amount in each.items() if amount)
            found = "; ".join(f"{node} has {_resources(node)}" for node in nodes)
            raise ConfigError(f"no node of the Ray has the resources {{{wanted}}} that a replica asks for: {found}")
    return [node for node in nodes if any(_has(node, each) for each in asked)]


def _has(node: RayNode, asked: Mapping[str, float]) -> bool:
    return all(node.resources.get(name, 0.0) >= amount for name, amount in asked.items())


def _resources(node: RayNode) -> str:
    shown = {name: amount for name, amount in node.resources.items() if not name.startswith("node:")}
    shown = {name: amount for name, amount in shown.items() if not name.endswith("memory")}
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in sorted(shown.items())) + "}"


def check_nodes(config: ClusterConfig) -> None:
    """Looks at every node that may hold a part of the cluster. Raises ConfigError that names each node with a flaw, and
    each pair of nodes that can't connect, and Unavailable if a node does not answer."""
    nodes = hosting_nodes(live_nodes(), asked_resources(config))
    version = metadata.version("weft")
    examine, packed = ray.remote(num_cpus=0, max_retries=0)(_examination()), pickle.dumps(config)
    answers = _gather(nodes, [examine.options(**_on(node)).remote(version, packed) for node in nodes])
    flaws = [f"node {node}: {answer}" for node, answer in zip(nodes, answers, strict=True) if answer]
    if flaws:
        raise ConfigError("\n".join(["nodes of the Ray can't hold the cluster:", *flaws]))
    if len(nodes) > 1:
        _check_reach(config, nodes)


def _on(node: RayNode) -> dict[str, Any]:
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node.node_id, soft=False)}


def _gather(nodes: Sequence[RayNode], running: Sequence[Any]) -> list[Any]:
    """Returns what each node has answered, or a text with the reason why it could not. Raises Unavailable if a node
    does not answer in time."""
    done, late = ray.wait(list(running), num_returns=len(running), timeout=EXAMINE_S)
    if late:
        names = ", ".join(str(node) for node, each in zip(nodes, running, strict=True) if each in late)
        raise Unavailable(f"these nodes of the Ray did not answer within {EXAMINE_S:g} s: {names}")
    assert len(done) == len(running)
    return [_answer(each) for each in running]


def _answer(running: Any) -> Any:
    try:
        return ray.get(running)
    except RayError as error:
        return f"it can't run a process of Weft: {str(error).strip().splitlines()[-1]}"


def _examination() -> Callable[[str, bytes], str]:
    """Returns the function that a node runs to say what is wrong with it. Ray ships a nested function as code, so it
    runs also where Weft is not installed. It takes the config as bytes, which only a node with the same Weft reads."""

    def examine(expected: str, packed: bytes) -> str:
        import sys
        from importlib import metadata

        try:
            version = metadata.version("weft")
        except metadata.PackageNotFoundError:
            return f"it has no Weft (no package weft in {sys.prefix}); install Weft {expected} on every node"
        if version != expected:
            return f"it has Weft {version}, but the server has Weft {expected}; install the same on every node"
        import pickle

        from deploy.ray.nodes import flaw_of_this_node

        return flaw_of_this_node(pickle.loads(packed))

    return examine


def flaw_of_this_node(config: ClusterConfig) -> str:
    """Returns what keeps this node from holding members of the cluster, or an empty string."""
    from fabric.transport import check_installed

    try:
        check_installed()
        this_node(config)
    except ConfigError as error:
        return error.message.removeprefix(f"node {platform.node()}: ")
    return ""


# ------------------------------------------------------------ whether nodes reach each other


class NodeEndpoint(NamedTuple):
    """Says where a node listens."""

    address: str
    interface: str
    port: int

    def __str__(self) -> str:
        return f"{join_host_port(self.address, self.port)} ({self.interface})"


class NodeProbe:
    """Listens on a node's advertised address while other nodes try to connect, and tries those of the others."""

    def __init__(self, config: ClusterConfig) -> None:
        self._node = this_node(config)
        self._socket = listen(self._node.address, compose.port_range(config))
        threading.Thread(target=self._accept, name="weft-probe", daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            connection.close()

    def endpoint(self) -> NodeEndpoint:
        return NodeEndpoint(*self._node, self._socket.getsockname()[1])

    def unreachable(self, others: Sequence[NodeEndpoint]) -> list[tuple[NodeEndpoint, str]]:
        """Returns the endpoints to which no connection could be made, each with the reason."""
        with ThreadPoolExecutor(max(len(others), 1)) as pool:
            reasons = list(pool.map(why_unreachable, others))
        return [(other, reason) for other, reason in zip(others, reasons, strict=True) if reason]


def why_unreachable(endpoint: NodeEndpoint) -> str:
    """Returns why no connection to an endpoint could be made, or an empty string."""
    try:
        socket.create_connection((endpoint.address, endpoint.port), CONNECT_S).close()
    except TimeoutError:
        return f"no answer within {CONNECT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def peers_of(index: int, num_nodes: int) -> list[int]:
    """Returns the nodes that one tries to reach: the next ones in a ring, so that each is tried by as many."""
    return [(index + step) % num_nodes for step in range(1, min(num_nodes, MAX_PEERS + 1))]


def _check_reach(config: ClusterConfig, nodes: Sequence[RayNode]) -> None:
    probe = ray.remote(num_cpus=0, max_restarts=0)(NodeProbe)
    environment = actor_environment(config)
    probes = [probe.options(runtime_env=environment, **_on(node)).remote(config) for node in nodes]
    try:
        endpoints = _gather(nodes, [each.endpoint.remote() for each in probes])
        answered = zip(nodes, endpoints, strict=True)
        flaws = [f"node {node}: {answer}" for node, answer in answered if not isinstance(answer, NodeEndpoint)]
        if flaws:
            raise ConfigError("\n".join(["nodes of the Ray can't hold the cluster:", *flaws]))
        tries = [
            each.unreachable.remote([endpoints[peer] for peer in peers_of(index, len(nodes))])
            for index, each in enumerate(probes)
        ]
        problems = unreached(nodes, endpoints, _gather(nodes, tries))
    finally:
        for each in probes:
            ray.kill(each)
    if problems:
        raise ConfigError("\n".join(problems))


def unreached(
    nodes: Sequence[RayNode],
    endpoints: Sequence[NodeEndpoint],
    failures: Sequence[Sequence[tuple[NodeEndpoint, str]] | str],
) -> list[str]:
    """Returns the lines of a message about the pairs of nodes that can't connect; no lines if all can. `failures` has
    the endpoints that each node could not reach with the reasons, or a text if the node could not try."""
    owner = dict(zip(endpoints, nodes, strict=True))
    lines = [
        f"node {node} can't connect to {other} of node {owner[other]}: {reason}"
        for node, failed in zip(nodes, failures, strict=True)
        if not isinstance(failed, str)
        for other, reason in failed
    ]
    lines += [f"node {node}: {failed}" for node, failed in zip(nodes, failures, strict=True) if isinstance(failed, str)]
    if not lines:
        return []
    tried = ", ".join(f"{each.address} ({each.interface}) of {node}" for each, node in owner.items())
    return [
        "nodes of the Ray do not reach each other at the addresses that their members would advertise:",
        *lines,
        f"the addresses are {tried}",
        "choose the network that all nodes share with network.interface or network.subnet, "
        "and open the ports of network.ports between the nodes",
    ]
