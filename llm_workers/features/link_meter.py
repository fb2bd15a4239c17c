"""Counts what a worker pulls, by the class of the link on which it comes, and measures how fast it comes.

The class of a link follows from the places of its two ends. The composition root passes the rule in, because it belongs
to the planner. The module is pure, and knows nothing of what classes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy

from fabric.contracts import LinkStats, Member, MemberId

KEPT_PART = 0.9
"""With each pull, this part remains of the earlier bytes and seconds behind a rate: about the last ten pulls count."""
LinkClassOf = Callable[[Member, Member], str]
"""Returns the name of the class of the link over which the second member reads from the first."""
UNKNOWN = "unknown"
"""Stands for the class of a link whose ends are not both known."""


class LinkMeter:
    """Counts the pulls of one worker. There are no more sums than classes."""

    def __init__(self, member_id: MemberId) -> None:
        self._member_id = member_id
        self._class_of: LinkClassOf = lambda source, target: UNKNOWN
        self._source_to_link: dict[str, str] = {}
        self._link_to_stats: dict[str, LinkStats] = {}
        self._link_to_recent: dict[str, tuple[float, float]] = {}
        """Maps each class to the bytes and seconds of its latest reads, which fade."""

    def classify(self, class_of: LinkClassOf) -> None:
        """Takes the rule. Without it, all links are of the class `unknown`."""
        self._class_of = class_of

    def update(self, members: Iterable[Member]) -> None:
        """Takes the list of current members, in which the worker itself and the encoders matter."""
        agents = {member.transfer_agent: member for member in members if member.transfer_agent}
        own = next((member for member in agents.values() if member.member_id == self._member_id), None)
        others = {} if own is None else {name: each for name, each in agents.items() if each is not own}
        self._source_to_link = {name: self._class_of(each, own) for name, each in others.items() if own is not None}
        for link in self._source_to_link.values():  # Their series begin with 0, so that the first pulls have a rate.
            self._stats_of(link)

    def landed(
        self, source: str, num_bytes: int, seconds: float, read_s: float = 0.0, *, is_staged: bool = False
    ) -> None:
        """Counts a pull from a transfer agent that brought a unit. `read_s` is the time of the read alone; with 0 it
        was not measured."""
        stats = self._stats(source)
        stats.num_pulls += 1
        stats.pulled_bytes += num_bytes
        stats.pull_s += max(0.0, seconds)
        stats.num_staged += is_staged
        if read_s > 0.0:
            recent_bytes, recent_s = self._link_to_recent.get(stats.link, (0.0, 0.0))
            recent = (KEPT_PART * recent_bytes + num_bytes, KEPT_PART * recent_s + read_s)
            self._link_to_recent[stats.link] = recent
            stats.bytes_per_s = recent[0] / recent[1]

    def failed(self, source: str) -> None:
        """Counts a pull from a transfer agent that brought nothing."""
        self._stats(source).num_failed += 1

    def stats(self) -> tuple[LinkStats, ...]:
        """Returns copies of the sums, in the order of the classes' names."""
        return tuple(copy(stats) for _, stats in sorted(self._link_to_stats.items()))

    def _stats(self, source: str) -> LinkStats:
        return self._stats_of(self._source_to_link.get(source, UNKNOWN))

    def _stats_of(self, link: str) -> LinkStats:
        return self._link_to_stats.setdefault(link, LinkStats(link))
