"""Implements `weft node start`: starts Ray on this machine, as one of several, with what Weft needs there.

Some settings are read by Ray's own processes, so they have no effect unless they are set where `ray start` runs: the
switches of `deploy/process_setup.py`, the token, and Ray's ports. The command sets all of them and then becomes
`ray start --block`, so a service manager sees one process. On clusters that already have a way to start Ray (KubeRay,
a template of a cloud), `--print` shows what to set there.

The module knows nothing of how a cluster is deployed on the Ray.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from deploy.config import NetworkSection
from deploy.config_file import load_config
from deploy.network import choose_address, local_interfaces
from deploy.process_setup import SWITCHES
from fabric.contracts import ConfigError
from fabric.transport import PortRange, join_host_port

FIRST_PORT = 6379
"""Is the port of a Ray's head, by which the other nodes find it."""
NODE_PORTS = (
    "node-manager-port",
    "object-manager-port",
    "runtime-env-agent-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "metrics-export-port",
)
"""Names Ray's options for the ports that each node listens on; they take the ports after the first."""
HEAD_PORT_VARIABLES = ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT")
"""Names the variables for the ports that only a head listens on. They take the next ports, and Ray's client server the
one after them."""
NUM_PORTS = 1 + len(NODE_PORTS) + len(HEAD_PORT_VARIABLES) + 1
PROCESS_PORTS = PortRange(10002, 19999)
"""Every process of Ray listens on one of these; it is Ray's own default, written out."""
DEFAULT_TOKEN_FILE = Path(".ray") / "auth_token"
"""Is the file in the user's home in which Ray looks for the token."""


class RayCommand(NamedTuple):
    """Holds a command and the variables that it needs in addition to the environment."""

    words: tuple[str, ...]
    variables: Mapping[str, str]

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " \\\n  ".join((*variables, shlex.join(self.words)))


def start_node(arguments: argparse.Namespace) -> int:
    """Runs `weft node start`. It returns only with `--print`; else this process becomes Ray's."""
    network = NetworkSection() if arguments.config is None else load_config(arguments.config).network
    token_file = arguments.token_file or Path.home() / DEFAULT_TOKEN_FILE
    if not arguments.print:
        ensure_token(token_file, arguments.head, os.environ)
    command = node_command(arguments, network, token_file, os.environ)
    if arguments.print:
        print(command)
        return 0
    if arguments.head:
        address = next(word.partition("=")[2] for word in command.words if word.startswith("--node-ip-address="))
        joined = join_host_port(address, arguments.first_port)
        print(f"weft: start each other node with the same token file ({token_file}) and:", flush=True)
        print(f"weft:   weft node start --address {joined}", flush=True)
        print(f"weft: then deploy with `ray: {{address: {joined}}}` in the config and `weft serve`", flush=True)
    os.execvpe(command.words[0], command.words, os.environ | command.variables)


def node_command(
    arguments: argparse.Namespace, network: NetworkSection, token_file: Path, environment: Mapping[str, str]
) -> RayCommand:
    """Returns the `ray start` of this node. Ray takes the same address as the members of Weft, so that the one network
    that the config chooses carries everything. Raises ConfigError if no address fits, or if ports overlap."""
    first = arguments.first_port
    if network.ports is not None:
        _check_overlap(PortRange.parse(network.ports), first)
    address = arguments.node_address or _address(network, environment)
    ports = {name: first + 1 + index for index, name in enumerate(NODE_PORTS)}
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    variables = {name: environment.get(name, value) for name, value in SWITCHES.items()}
    variables["RAY_AUTH_MODE"] = environment.get("RAY_AUTH_MODE", "token")
    if variables["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in environment:
        variables["RAY_AUTH_TOKEN_PATH"] = str(token_file)
    if arguments.head:
        free = first + 1 + len(NODE_PORTS)
        variables |= {name: str(free + index) for index, name in enumerate(HEAD_PORT_VARIABLES)}
        words += ["--head", f"--port={first}", "--include-dashboard=false"]
        words.append(f"--ray-client-server-port={free + len(HEAD_PORT_VARIABLES)}")
    else:
        words.append(f"--address={arguments.address}")
    words += [f"--node-ip-address={address}", *(f"--{name}={port}" for name, port in ports.items())]
    words += [f"--min-worker-port={PROCESS_PORTS.first}", f"--max-worker-port={PROCESS_PORTS.last}"]
    passed = {"num-gpus": arguments.num_gpus, "resources": arguments.resources, "labels": arguments.labels}
    words += [f"--{name}={value}" for name, value in passed.items() if value is not None]
    return RayCommand((*words, *arguments.ray_options), variables)


def _address(network: NetworkSection, environment: Mapping[str, str]) -> str:
    from ray.util import get_node_ip_address

    return choose_address(network, local_interfaces(), str(get_node_ip_address()), environment).address


def _check_overlap(ports: PortRange, first: int) -> None:
    for taken in (PortRange(first, first + NUM_PORTS - 1), PROCESS_PORTS):
        if ports.first <= taken.last and taken.first <= ports.last:
            raise ConfigError(f"network.ports is {ports}, but Ray itself takes the ports {taken}; choose another range")


def ensure_token(path: Path, is_head: bool, environment: Mapping[str, str]) -> None:
    """Makes the file with Ray's token if this node is the head and has none. Raises ConfigError if another node has
    none: everybody who reaches a Ray without a token can run code on it."""
    if environment.get("RAY_AUTH_MODE", "token") != "token" or environment.get("RAY_AUTH_TOKEN"):
        return
    if path.is_file() and path.read_text().strip():
        return
    if not is_head:
        raise ConfigError(
            f"the file of Ray's token {path} is missing or empty; copy it from the head, "
            "or name another with --token-file"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    print(f"weft: a new token of Ray is in {path}", flush=True)
