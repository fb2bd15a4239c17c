"""Decides what failures mean for one request, over all its attempts. `DegradationPolicy` decides what happens when a
medium could not be encoded: the medium is made smaller, then removed, or the request fails. `Setbacks` records what
else has gone wrong (members that failed the request, attempts that were lost), whether the request itself is to blame,
and so when the request is given up.

Both belong to one request, outlive its attempts, and turn errors into the choice between going on and giving up. The
module makes no attempt and no call itself: it knows nothing of plans, calls or tokens.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from fabric.contracts import (
    Busy,
    DeadlineExceeded,
    EncodeFailed,
    EncoderLost,
    EngineFailed,
    MediaItem,
    MemberId,
    WeftError,
    WorkerBackedUp,
    WorkerLeaving,
    WorkerLost,
)
from router.prompt import NOTHING_LOST, ItemKey, Losses, Prompt
from router.router_config import Policy

# ------------------------------------------------------------ the degradation policy

REDUCED, REMOVED = "reduced", "removed"
FAILURES = (EncodeFailed, DeadlineExceeded)
"""These are failures that an encoder may avoid with less work. A deadline is one that a silent encoder missed. A broken
medium, a lost member and an encoder that reports that it is busy are never among them."""
MAX_REDUCTIONS = 1


class DegradationPolicy:
    """A `DegradationPolicy` decides for one request what happens to a medium that could not be encoded. Each step down
    ends the attempt and plans a new prompt, and the answer reports the step.

        on_encode_failure   steps
        error               none: the failure is the answer (the default)
        reduce              the item once at half its size (every other frame, half the side of a picture)
        text_only           the same, and if that fails too, or can't be done, without the item

    The policy asks its owner what an item would become: `is_reducible(item, times)` returns whether the item, already
    reduced `times` times, could be reduced once more; `replan` makes the prompt without what was lost."""

    def __init__(
        self,
        policy: Policy,
        is_reducible: Callable[[ItemKey, int], bool],
        replan: Callable[[Losses], Awaitable[Prompt]],
    ) -> None:
        self.degraded: tuple[StepDown, ...] = ()
        """Holds the last step of each item, in the order of their first steps."""
        self._policy = policy
        self._is_reducible = is_reducible
        self._replan = replan
        self._losses = NOTHING_LOST

    async def step_down(self, error: WeftError, items: Sequence[MediaItem]) -> tuple[Prompt, list[StepDown]] | None:
        """Takes a step down after `items` failed with `error`, and returns the new prompt and the steps that lead to
        it. It reduces the items that can be reduced; only if none can, it removes the items. Returns None, and changes
        nothing, if the policy allows no further step."""
        if self._policy == "error" or not items or not isinstance(error, FAILURES):
            return None
        keys = list(dict.fromkeys(ItemKey(item.part, item.modality) for item in items))
        smaller = [key for key in keys if self._can_reduce(key)]
        if not smaller and self._policy != "text_only":
            return None
        steps = [StepDown(key, REDUCED if smaller else REMOVED, error) for key in smaller or keys]
        losses = self._with(steps)
        prompt = await self._replan(losses)
        self._losses = losses
        self.degraded = tuple(
            ({step.key: step for step in self.degraded} | {step.key: step for step in steps}).values()
        )
        return prompt, steps

    def _can_reduce(self, key: ItemKey) -> bool:
        times = self._losses.item_to_reduction.get(key, 0)
        return times < MAX_REDUCTIONS and self._is_reducible(key, times)

    def _with(self, steps: Sequence[StepDown]) -> Losses:
        before = self._losses
        reduced = {step.key: before.item_to_reduction.get(step.key, 0) + 1 for step in steps if step.action == REDUCED}
        removed = {step.key for step in steps if step.action == REMOVED}
        return Losses({**before.item_to_reduction, **reduced}, before.removed | removed)


class StepDown(NamedTuple):
    """A `StepDown` is one medium that the model did not get as the client sent it."""

    key: ItemKey
    action: str
    """This is `reduced` or `removed`."""
    reason: WeftError

    def to_json(self) -> dict[str, object]:
        return {
            "part": self.key.part,
            "modality": self.key.modality,
            "action": self.action,
            "reason": self.reason.code,
            "message": self.reason.message,
        }


# ------------------------------------------------------------ the setbacks of a request

NUM_WORKERS_TO_BLAME = 2
"""A request is considered the cause once this many workers were lost while serving it; its client then gets an error
that says not to retry."""
NUM_ENCODERS_TO_BLAME = 3
"""A medium is considered the cause once this many encoders were lost while encoding it. It is one more than for
workers, because an encoder has items of many requests in one forward pass."""
EXCLUSION_GRID_S = 0.25
"""When a request waits, the ends of its exclusions are rounded up to a multiple of this."""


class Setbacks:
    """A `Setbacks` records what has gone wrong for one request so far: members that failed it, attempts that were lost,
    and whether the request is to blame. All attempts of the request share it."""

    def __init__(self, exclusion_s: float) -> None:
        """Starts without setbacks. For `exclusion_s` seconds the request does not use a member that failed it."""
        self._exclusion_s = exclusion_s
        self._member_to_end_s: dict[MemberId, float] = {}
        self._losses: list[WeftError] = []
        self._lost_encoders: set[MemberId] = set()
        self._backed_up_workers: set[MemberId] = set()
        self.num_failed_attempts = 0
        """Counts the lost attempts that count against `max_attempts`."""

    # ------------------------------------------------------------ members

    def exclusions(self, now: float) -> frozenset[tuple[MemberId, float]]:
        """Returns the exclusions that have not ended, each with its end. Ends are rounded up to `EXCLUSION_GRID_S`, so
        that requests that lost a member together wait for the same end."""
        ends_s = ((each, math.ceil(until / EXCLUSION_GRID_S) * EXCLUSION_GRID_S) for each, until in self._ends(now))
        return frozenset(ends_s)

    def exclude(self, member_id: MemberId, error: WeftError, now: float, least_s: float = 0.0) -> None:
        """Excludes a member that failed this request: until the exclusion ends, the request goes to other members or
        waits for them. The exclusion takes the `retry_after_s` that a busy member gave, or else `exclusion_s`, and
        never less than `least_s` seconds."""
        has_retry_time = isinstance(error, Busy) and error.retry_after_s is not None
        exclusion_s = error.retry_after_s or 0.0 if has_retry_time else self._exclusion_s
        self._member_to_end_s[member_id] = now + max(least_s, exclusion_s)

    def excluded(self, now: float) -> frozenset[MemberId]:
        return frozenset(member_id for member_id, _ in self._ends(now))

    def _ends(self, now: float) -> list[tuple[MemberId, float]]:
        return [(member_id, until) for member_id, until in self._member_to_end_s.items() if until > now]

    def encoder_failed(self, encoder_id: MemberId, error: WeftError) -> None:
        """Records that an encoder failed with items of this request; a lost encoder counts once, however many items it
        had. Raises EncodeFailed once too many encoders were lost with such items."""
        if isinstance(error, EncoderLost):
            self._lost_encoders.add(encoder_id)
        if len(self._lost_encoders) >= NUM_ENCODERS_TO_BLAME:
            message = (
                f"{len(self._lost_encoders)} encoders were lost while they encoded the medium, so it is not tried again"
            )
            raise EncodeFailed(message)

    def worker_refused(self, worker_id: MemberId) -> None:
        """Records that an encoder refused the request at once because the worker is backed up. An encoding that was
        accepted, and came late because of the worker, has cost the request its time and is not recorded here."""
        self._backed_up_workers.add(worker_id)

    # ------------------------------------------------------------ attempts

    def attempt_lost(self, error: WeftError, is_counted: bool) -> None:
        """Records an attempt that ended with an error that another attempt may survive. `is_counted` is False if the
        attempt lacked only an encoder, because the wait for an encoder is limited already. An attempt that an encoder
        refused at once because its worker is backed up is not counted either, the first time for each worker, because
        every worker may be tried, and one whose worker is leaving never counts."""
        self._losses.append(error)
        if isinstance(error, WorkerBackedUp):
            num_refused = sum(isinstance(one, WorkerBackedUp) for one in self._losses)
            is_counted = num_refused > len(self._backed_up_workers)
        if isinstance(error, WorkerLeaving):
            is_counted = False
        self.num_failed_attempts += is_counted

    @property
    def is_to_blame(self) -> bool:
        """Tells whether the request is considered the cause of what happened to its workers."""
        return self._num_lost_workers >= NUM_WORKERS_TO_BLAME

    @property
    def _num_lost_workers(self) -> int:
        return sum(isinstance(error, WorkerLost) for error in self._losses)

    @property
    def is_only_busy(self) -> bool:
        """Tells whether members refused the request for their load, and nothing else has happened to it."""
        return bool(self._losses) and all(isinstance(error, Busy) for error in self._losses)

    def verdict(self, default: WeftError | None = None) -> WeftError:
        """Returns the error that the client gets when there will be no further attempt; returns `default` if no attempt
        was lost."""
        if self.is_to_blame:
            message = (
                f"{self._num_lost_workers} workers were lost while they served the request, so it is not tried again"
            )
            return EngineFailed(message)
        last = self._losses[-1] if self._losses else default
        assert last is not None, "a request that has lost nothing is not given up"
        return last
