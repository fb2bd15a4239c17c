"""Serves the metrics of one machine: one member answers `GET /metrics` on a fixed port for all members there.

A machine with eight GPUs runs many members, each in a process of its own with a free port, but Kubernetes' PodMonitor
and firewalls know fixed ports only. So every member tries to listen on the port of the config (`network.metrics_port`),
and the kernel lets one of them have it. That one asks the members at the same address for their series and puts them
together. When its process ends, the kernel frees the port, and another member has it within `RETRY_S`. No member is
asked twice, because the directory lists each once, and one that does not answer within `ANSWER_S` is missing and has
`weft_member_up` 0.

`MemberMetrics` is what a member serves: its own series on its own port, and perhaps the machine's. The module knows
nothing of what the series mean (`router.observe`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import NamedTuple

import httpx
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deploy.http_server import METRICS_TYPE, HttpServer
from fabric.contracts import ConfigError, Member, MemberId
from fabric.transport import PortRange, join_host_port, listen
from router.observe import merged, up_exposition

_LOG = logging.getLogger(__name__)
RETRY_S = 1.0
"""A member that does not have the machine's port tries again after this time."""
ANSWER_S = 2.0
"""A scrape of a machine waits this long for its members. Prometheus itself gives up after 10 s by default."""
CLUSTER_HEADER = "x-weft-cluster"
"""Names the cluster in the answers of a machine, so that members can tell which cluster has the port."""

Exposition = Callable[[], bytes]
"""Returns series in Prometheus text format."""


class MetricsPage:
    """A `MetricsPage` is an ASGI app that answers `GET /metrics` and nothing else."""

    def __init__(self, text: Callable[[], Awaitable[bytes]], headers: dict[str, str] | None = None) -> None:
        self._text, self._headers = text, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/metrics":
            response = Response("this port answers only GET /metrics\n", 404)
        elif scope["method"] != "GET":
            response = Response("this port answers only GET /metrics\n", 405)
        else:
            response = Response(await self._text(), media_type=METRICS_TYPE, headers=self._headers)
        await response(scope, receive, send)


class NodePort(NamedTuple):
    """A `NodePort` is the port of a machine's scrape endpoint, 0 for none, and the cluster that uses it."""

    port: int
    cluster: str


class MemberMetrics:
    """Serves the series of one member on a free port of its own, in the member's event loop, and those of its machine
    while it has the machine's port."""

    def __init__(
        self, member_id: MemberId, exposition: Exposition, host: str, node: NodePort, ports: PortRange | None = None
    ) -> None:
        """Takes the member's own series, and the address at which members of this machine listen. Its own port is one
        of `ports`, or a free one. Raises ConfigError if all of them are taken."""
        self._member_id, self._exposition, self._host, self._node = member_id, exposition, host, node
        self._own = HttpServer(MetricsPage(self._own_text), host, 0, sock=listen(host, ports))
        self._neighbours: dict[str, Member] = {}
        """Maps the name of each member of this machine to its record."""
        self._client = httpx.AsyncClient(timeout=ANSWER_S, trust_env=False)
        self._serving: asyncio.Task[None] | None = None
        self.has_port = False
        """Says whether this member serves the machine's series now."""

    async def start(self) -> str:
        """Starts to listen. Returns the host and port of the member itself."""
        await self._own.start()
        if self._node.port:
            self._serving = asyncio.create_task(self._serve_node(), name="weft-node-metrics")
        return join_host_port(self._host, self._own.port)

    async def stop(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        await self._client.aclose()
        await self._own.stop()

    def update_members(self, members: Iterable[Member]) -> None:
        """Takes the directory's list of members, of which those at this machine's address matter."""
        own_host = join_host_port(self._host, 0).rpartition(":")[0]
        self._neighbours = {
            str(member.member_id): member
            for member in members
            if member.http_address and member.http_address.rpartition(":")[0] == own_host
        }

    # ------------------------------------------------------------ the machine

    async def _serve_node(self) -> None:
        """Serves the machine's series whenever this member can have the port."""
        is_warned = False
        while True:
            try:
                sock = listen(self._host, PortRange(self._node.port, self._node.port))
            except ConfigError:
                if not is_warned and not await self._is_served():
                    is_warned = True
                    _LOG.warning(
                        "another program or cluster has port %d of %s, so nothing serves the metrics of this machine; "
                        "set network.metrics_port to another port",
                        self._node.port,
                        self._host,
                    )
                await asyncio.sleep(RETRY_S)
                continue
            page = MetricsPage(self.node_text, {CLUSTER_HEADER: self._node.cluster})
            server = HttpServer(page, self._host, self._node.port, sock=sock)
            try:
                await server.start()
                self.has_port = True
                _LOG.info("this member serves the metrics of its machine on port %d", self._node.port)
                await asyncio.Event().wait()
            finally:
                self.has_port = False
                await server.stop()

    async def _is_served(self) -> bool:
        """Returns whether a member of this cluster has the machine's port."""
        try:
            answer = await self._client.get(f"http://{join_host_port(self._host, self._node.port)}/metrics")
        except httpx.HTTPError:
            return False
        return bool(answer.headers.get(CLUSTER_HEADER) == self._node.cluster)

    async def node_text(self) -> bytes:
        """Returns the series of all members of this machine."""
        neighbours = dict(self._neighbours)
        others = {name: each for name, each in neighbours.items() if name != self._member_id}
        texts = await asyncio.gather(*map(self._text_of, others.values()))
        answered = [name for name, text in zip(others, texts, strict=True) if text is not None]
        found = [text for text in texts if text is not None]
        if str(self._member_id) in neighbours:
            answered.append(str(self._member_id))
            found.insert(0, await self._own_text())
        up = up_exposition({name: each.kind for name, each in neighbours.items()}, answered)
        return await asyncio.to_thread(partial(merged, [*found, up]))

    async def _text_of(self, member: Member) -> bytes | None:
        """Returns the series of a member, or None if it does not answer in time."""
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                answer = await self._client.get(f"http://{member.http_address}/metrics")
            if answer.status_code == 200:
                return answer.content
        return None

    async def _own_text(self) -> bytes:
        return self._exposition()
