"""Counts the work that this router dispatched and that the members' reports do not contain yet. Without it, all
requests of a burst between two reports would go to the one member that was idle in its last report.

Each dispatched attempt puts load on a member (tokens on a worker, patches on an encoder). The load is *pending* until a
report acknowledges it, and *open* until the attempt ends on that member. When reports stop, only the open load is left
to balance by. This module knows nothing of reports or costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fabric.ids import AttemptId, MemberId


@dataclass(slots=True)
class MemberLoad:
    """Holds sums over one member's attempts; the units are tokens or patches."""

    num_open: int = 0
    open_units: int = 0
    num_pending: int = 0
    pending_units: int = 0
    pending_blocks: int = 0


@dataclass(slots=True)
class _Share:
    """A `_Share` is the load of one attempt on one member."""

    units: int = 0
    pending_units: int = 0
    pending_blocks: int = 0
    is_pending: bool = False


class InFlight:
    """Keeps the shares by attempt and member, and their sums by member. To end or acknowledge a share twice does
    nothing the second time."""

    def __init__(self) -> None:
        self._attempt_to_shares: dict[AttemptId, dict[MemberId, _Share]] = {}
        self._member_to_load: dict[MemberId, MemberLoad] = {}

    def load(self, member_id: MemberId) -> MemberLoad:
        """Returns the member's load. The object is not a copy, because a copy would cost more than it protects; callers
        read it and do not keep it."""
        return self._member_to_load.get(member_id) or MemberLoad()

    def add(self, attempt_id: AttemptId, member_id: MemberId, units: int, num_blocks: int = 0) -> None:
        """Adds load to an attempt's share on a member. If more of an attempt goes to the same member, its share grows,
        and the new part is pending."""
        share = self._attempt_to_shares.setdefault(attempt_id, {}).get(member_id)
        load = self._member_to_load.setdefault(member_id, MemberLoad())
        if share is None:
            share = self._attempt_to_shares[attempt_id][member_id] = _Share()
            load.num_open += 1
        load.num_pending += not share.is_pending
        share.is_pending = True
        share.units += units
        share.pending_units += units
        share.pending_blocks += num_blocks
        load.open_units += units
        load.pending_units += units
        load.pending_blocks += num_blocks

    def acknowledge(self, member_id: MemberId, attempt_ids: Iterable[AttemptId]) -> None:
        """Records that the member's report contains these attempts."""
        for attempt_id in attempt_ids:
            share = self._attempt_to_shares.get(attempt_id, {}).get(member_id)
            if share is not None:
                self._settle(member_id, share)

    def end(self, attempt_id: AttemptId) -> None:
        """Ends the attempt on all members."""
        for member_id, share in self._attempt_to_shares.pop(attempt_id, {}).items():
            self._drop(member_id, share)

    def end_at(self, attempt_id: AttemptId, member_id: MemberId) -> None:
        """Ends the attempt on one member, as when an encoder has delivered."""
        shares = self._attempt_to_shares.get(attempt_id, {})
        self._drop(member_id, shares.pop(member_id, None))
        if not shares:
            self._attempt_to_shares.pop(attempt_id, None)

    def forget_member(self, member_id: MemberId) -> None:
        """Drops all load of a member that has left."""
        if self._member_to_load.pop(member_id, None) is None:
            return
        for attempt_id in [attempt for attempt, shares in self._attempt_to_shares.items() if member_id in shares]:
            del self._attempt_to_shares[attempt_id][member_id]
            if not self._attempt_to_shares[attempt_id]:
                del self._attempt_to_shares[attempt_id]

    def check_invariants(self) -> None:
        """Raises AssertionError unless the sums equal the shares."""
        sums: dict[MemberId, MemberLoad] = {member_id: MemberLoad() for member_id in self._member_to_load}
        for shares in self._attempt_to_shares.values():
            assert shares, "an attempt without shares is dropped"
            for member_id, share in shares.items():
                load = sums[member_id]
                load.num_open += 1
                load.open_units += share.units
                load.num_pending += share.is_pending
                load.pending_units += share.pending_units
                load.pending_blocks += share.pending_blocks
        assert sums == self._member_to_load, (sums, self._member_to_load)

    def _settle(self, member_id: MemberId, share: _Share) -> None:
        if not share.is_pending:
            return
        load = self._member_to_load[member_id]
        load.num_pending -= 1
        load.pending_units -= share.pending_units
        load.pending_blocks -= share.pending_blocks
        share.pending_units = share.pending_blocks = 0
        share.is_pending = False

    def _drop(self, member_id: MemberId, share: _Share | None) -> None:
        if share is None:
            return
        self._settle(member_id, share)
        load = self._member_to_load[member_id]
        load.num_open -= 1
        load.open_units -= share.units
