"""Chooses the port on which a part listens, and writes hosts and ports as one text.

Firewalls open ranges of ports. Everything of Weft that listens on an address of the machine takes its port from one
`PortRange` where the config sets one, and a port that the system chooses where it sets none. The module knows nothing
of what listens.
"""

from __future__ import annotations

import errno
import random
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import zmq

from fabric.contracts import ConfigError

Bound = TypeVar("Bound")
LOWEST_PORT, HIGHEST_PORT = 1024, 65535
"""A range may hold these ports; those below are for system services."""


@dataclass(frozen=True, slots=True)
class PortRange:
    """A `PortRange` holds the ports from `first` to `last`, both included."""

    first: int
    last: int

    @staticmethod
    def parse(text: str) -> PortRange:
        """Returns the range that is written as `21000-21999`. Raises ConfigError for text that is written otherwise,
        and for a range that is empty or leaves the permitted ports."""
        match = re.fullmatch(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", text)
        if match is None:
            raise ConfigError(f"{text!r} is not a range of ports; write the first and the last port, as in 21000-21999")
        first, last = int(match[1]), int(match[2])
        if not LOWEST_PORT <= first <= last <= HIGHEST_PORT:
            raise ConfigError(
                f"{text!r} is not a range of ports: the first port is at most the last, "
                f"and both are from {LOWEST_PORT} to {HIGHEST_PORT}"
            )
        return PortRange(first, last)

    def __contains__(self, port: int) -> bool:
        return self.first <= port <= self.last

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def from_somewhere(self) -> Iterator[int]:
        """Yields every port once, beginning at a random one, so that processes that start together rarely try the same
        port."""
        start = random.randrange(len(self))
        for offset in range(len(self)):
            yield self.first + (start + offset) % len(self)


def bind_free(ports: PortRange | None, bind: Callable[[int], Bound]) -> Bound:
    """Calls `bind` with ports of the range until one is free, and returns its result. Without a range it calls `bind`
    once with 0, which stands for a port that the system chooses. Raises ConfigError if every port of the range is
    taken, and what `bind` raises otherwise."""
    if ports is None:
        return bind(0)
    for port in ports.from_somewhere():
        try:
            return bind(port)
        except (OSError, zmq.ZMQError) as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise ConfigError(f"every port of {ports} is taken on this machine; make network.ports larger")


def listen(host: str, ports: PortRange | None = None) -> socket.socket:
    """Returns a TCP socket that listens on an address of the machine. Raises ConfigError as `bind_free` does, and
    OSError if the machine does not have the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET

    def bind(port: int) -> socket.socket:
        return socket.create_server((host, port), family=family)

    return bind_free(ports, bind)


def join_host_port(host: str, port: int) -> str:
    """Returns `host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
