"""Keeps the members that are leaving: they finish what they have, and get nothing new.

A member that Serve stops is still in the directory, because it finishes its calls and workers still read its features.
Its router learns that it leaves long before it is gone, and from then on `LeavingMembers` keeps it out of what the
planner sees: no plan uses it, and nothing that it has cached is found. Messages to it go on, and so do the requests on
it. A request that is still on a leaving worker after `grace_s` is moved to another one.

The module knows nothing of Ray, of plans, or of how a request moves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from fabric.contracts import Member, MemberId

_LOG = logging.getLogger(__name__)


class LeavingMembers:
    """A `LeavingMembers` belongs to the event loop of one router."""

    def __init__(self, grace_s: float, move: Callable[[MemberId], None]) -> None:
        """Calls `move` with a member's id when the member has been leaving for `grace_s` seconds."""
        self._grace_s = grace_s
        self._move = move
        self._timers: dict[MemberId, asyncio.TimerHandle] = {}
        """Holds a timer for each leaving member, which has ended if the grace is over."""

    def update(self, member_ids: Iterable[MemberId]) -> bool:
        """Takes the ids of all members that are leaving or have left; who calls this forgets those that left long ago,
        and then they are forgotten here too. Returns whether this changed anything: a member
        that is no longer named stays after all."""
        named = set(member_ids)
        loop = asyncio.get_running_loop()
        changed = named ^ self._timers.keys()
        for member_id in changed - named:
            self._timers.pop(member_id).cancel()
        for member_id in changed & named:
            self._timers[member_id] = loop.call_later(self._grace_s, self._move, member_id)
        return bool(changed)

    def staying(self, members: Sequence[Member]) -> list[Member]:
        """Returns the members that are not leaving."""
        return [each for each in members if each.member_id not in self._timers]

    def close(self) -> None:
        """Ends all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
