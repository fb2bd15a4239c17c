"""Holds the settings of fetching: what may be asked, and how much time and memory it may take. This module reads them
from nowhere; `deploy` fills them in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from modalities.media import MediaLimits

MIB = 2**20


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """A `FetchSettings` is frozen; each router has one. The defaults fetch from public addresses by https alone."""

    schemes: tuple[str, ...] = ("https",)
    """Lists the schemes that URLs may have: `https`, `http`, and `file` if `file_root` is set."""
    allowed_hosts: tuple[str, ...] = ("*",)
    """Lists patterns of the hosts that may be asked: a name, `*.example.com` for every name below it, or `*`."""
    denied_hosts: tuple[str, ...] = ()
    """Lists patterns of hosts that may not be asked, even if `allowed_hosts` names them."""
    allowed_ports: tuple[int, ...] = (80, 443)
    allowed_networks: tuple[str, ...] = ()
    """Lists networks (`10.1.0.0/16`) that may be asked although their addresses are not public."""
    denied_networks: tuple[str, ...] = ()
    """Lists networks that may not be asked although their addresses are public, or `allowed_networks` names them."""
    max_redirects: int = 3
    max_request_bytes: int = 256 * MIB
    """Limits what is fetched for one request."""
    connect_timeout_s: float = 5.0
    """Limits the time to find the addresses of a host, to connect to one of them, and to agree on TLS."""
    read_timeout_s: float = 10.0
    """Limits the time in which a server sends nothing."""
    total_timeout_s: float = 60.0
    """Limits the time of one fetch, redirects included."""
    wait_s: float = 10.0
    """Limits the wait for a place among the fetches in progress."""
    max_concurrent: int = 64
    """Limits the fetches in progress of one router. One tenant alone gets at most half of them, and one host at most
    half where requests have no tenant, else a third (`fair_shares`)."""
    max_waiting: int = 256
    """Limits the fetches that wait for a place; one tenant alone may have half of them."""
    in_flight_bytes: int = 512 * MIB
    """Limits the bytes that are being fetched or were not handed over yet, of all requests of one router together."""
    cache_bytes: int = 256 * MIB
    """Limits the bytes of fetched files that are kept for later requests; 0 keeps none."""
    file_root: Path | None = None
    """Names the folder in which `file:` URLs must lie; None refuses all of them."""
    ca_file: Path | None = None
    """Names a file of certificates that are trusted in addition to those of the system."""
    media_limits: MediaLimits = field(default_factory=MediaLimits)
    """Limits what files may be, as for media of every origin."""
    memory_bytes: int = 1024 * MIB
    """Limits the data of the process that fetches, as Linux counts it; the files themselves do not count here."""
