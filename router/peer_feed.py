"""Exchanges news of dispatches with the other routers: `PeerFeed` sends what the planner's `NewsLog` has collected, and
hands over what the others send.

News leave at once, in the next turn of the event loop, because a request that another router sends meanwhile may go to
the same worker. A busy router sends at most one message to each other router per `NEWS_INTERVAL_S`. The module knows
nothing of what the news contain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from fabric.contracts import Clock, Member, MemberId, RouterNews
from fabric.transport import Plane
from router.planning import NEWS_INTERVAL_S, ClusterState


class PeerFeed:
    """A `PeerFeed` belongs to the event loop of one router."""

    def __init__(self, member_id: MemberId, plane: Plane, cluster: ClusterState, clock: Clock) -> None:
        self._member_id, self._plane, self._cluster, self._clock = member_id, plane, cluster, clock
        self._addresses: tuple[str, ...] = ()
        self._sent_at_s = -NEWS_INTERVAL_S

    def update_members(self, members: Iterable[Member]) -> None:
        """Takes the directory's list of members, of which only the other routers matter here. A router that is alone
        collects no news."""
        routers = (member for member in members if member.kind == "router" and member.member_id != self._member_id)
        self._addresses = tuple(sorted(member.address for member in routers))
        if self._addresses:
            self._cluster.news.start(self._send_soon)
        else:
            self._cluster.news.stop()

    def handle(self, news: RouterNews) -> None:
        """Takes another router's news."""
        self._cluster.take_news(news, self._clock.now())

    def _send_soon(self) -> None:
        pause_s = self._sent_at_s + NEWS_INTERVAL_S - self._clock.now()
        asyncio.get_running_loop().call_later(max(pause_s, 0.0), self._send)

    def _send(self) -> None:
        self._sent_at_s = self._clock.now()
        if (news := self._cluster.news.take(self._member_id, self._sent_at_s)) is not None:
            for address in self._addresses:
                self._plane.send(address, news)
