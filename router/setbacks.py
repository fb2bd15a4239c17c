"""What has gone wrong for one request so far: members that failed it, attempts that were lost, and who is to blame.

Shared by the request's attempts. Decides when a request is given up; knows neither plans nor calls.
"""

from __future__ import annotations

import math

from fabric.errors import Busy, EncodeFailed, EncoderLost, EngineFailed, WeftError, WorkerBackedUp, WorkerLost
from fabric.ids import MemberId

NUM_WORKERS_TO_BLAME = 2
"""So many workers lost with one request on them: it is taken for the cause, and clients are told not to retry."""
NUM_ENCODERS_TO_BLAME = 3
"""The same of encoders, for a medium. One more, because an encoder has many requests' items in one forward."""
EXCLUSION_GRID_S = 0.25
"""Ends of exclusions that a request waits for are multiples of this."""


class Setbacks:
    """Of one request, over all its attempts."""

    def __init__(self, exclusion_s: float) -> None:
        """`exclusion_s`: how long the request does not use a member that failed it."""
        self._exclusion_s = exclusion_s
        self._member_to_end_s: dict[MemberId, float] = {}
        self._losses: list[WeftError] = []
        self._lost_encoders: set[MemberId] = set()
        self._backed_up_workers: set[MemberId] = set()
        self.num_failed_attempts = 0
        """Those that count against `max_attempts`."""

    # ------------------------------------------------------------ members

    def exclusions(self, now: float) -> frozenset[tuple[MemberId, float]]:
        """Those that have not ended, each with its end. Ends are rounded up, so that requests that lost a member
        together wait for the same."""
        ends_s = ((each, math.ceil(until / EXCLUSION_GRID_S) * EXCLUSION_GRID_S) for each, until in self._ends(now))
        return frozenset(ends_s)

    def exclude(self, member_id: MemberId, error: WeftError, now: float, least_s: float = 0.0) -> None:
        """The member failed this request: for a while, and for `least_s`, another is preferred, or waited for. One that
        is busy has said itself when to come back."""
        is_told = isinstance(error, Busy) and error.retry_after_s is not None
        exclusion_s = error.retry_after_s or 0.0 if is_told else self._exclusion_s
        self._member_to_end_s[member_id] = now + max(least_s, exclusion_s)

    def excluded(self, now: float) -> frozenset[MemberId]:
        return frozenset(member_id for member_id, _ in self._ends(now))

    def _ends(self, now: float) -> list[tuple[MemberId, float]]:
        return [(member_id, until) for member_id, until in self._member_to_end_s.items() if until > now]

    def encoder_failed(self, encoder_id: MemberId, error: WeftError) -> None:
        """The encoder failed with items of this request: one that is lost counts once, however many items it had.
        Raises EncodeFailed once too many encoders died of them."""
        if isinstance(error, EncoderLost):
            self._lost_encoders.add(encoder_id)
        if len(self._lost_encoders) >= NUM_ENCODERS_TO_BLAME:
            raise EncodeFailed(f"it was given up: {len(self._lost_encoders)} encoders were lost while they encoded it")

    def worker_refused(self, worker_id: MemberId) -> None:
        """An encoder refused the request at once for its worker's sake. One that was taken, and was late for its
        worker's sake, has cost the request its time and is not told here."""
        self._backed_up_workers.add(worker_id)

    # ------------------------------------------------------------ attempts

    def attempt_lost(self, error: WeftError, is_counted: bool) -> None:
        """An attempt ended with what another may survive. One is not counted if all that it lacked was an encoder:
        what the wait for one may take is limited already; nor the first that an encoder refused at once for its
        worker's sake, for every worker may be tried."""
        self._losses.append(error)
        if isinstance(error, WorkerBackedUp):
            num_refused = sum(isinstance(one, WorkerBackedUp) for one in self._losses)
            is_counted = num_refused > len(self._backed_up_workers)
        self.num_failed_attempts += is_counted

    @property
    def is_to_blame(self) -> bool:
        """Whether the request is taken for the cause of what happened to its workers."""
        return sum(isinstance(error, WorkerLost) for error in self._losses) >= NUM_WORKERS_TO_BLAME

    @property
    def is_only_busy(self) -> bool:
        """Whether members refused the request for their load, and nothing else has happened to it."""
        return bool(self._losses) and all(isinstance(error, Busy) for error in self._losses)

    def verdict(self, default: WeftError | None = None) -> WeftError:
        """What the client is told when there will be no further attempt; `default` if no attempt was lost."""
        if self.is_to_blame:
            message = f"the request was given up: {len(self._losses)} workers were lost while they served it"
            return EngineFailed(message)
        last = self._losses[-1] if self._losses else default
        assert last is not None, "a request that has lost nothing is not given up"
        return last
