"""Takes one request through the gate: a `Turn` finds out whether workers have room for its prompt, lets it wait while
others are ahead of it or there is no room, and refuses it where waiting would not help, before any member is asked.

A request is refused at once if no worker can ever hold its KV blocks or its largest feature, or if its first token is
predicted after its deadline; it is refused later if it has waited too long. The module knows nothing of attempts beyond
the preview of a plan, and nothing of results.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fabric.contracts import (
    ADAPTERS,
    EMBEDDINGS,
    SPEECH,
    ContextLengthExceeded,
    InvalidMedia,
    MemberId,
    NoCapacity,
    Overloaded,
    WeftError,
)
from fabric.transport import ALIGNMENT_BYTES, HEADER_BYTES
from router.observe import RequestTrace
from router.planning import BATCH_HEADROOM, CapacityNeed, KvRoom, RoomNeed, RoutePlan, Waiter
from router.prompt import Prompt
from router.run.admission import RequestTerms, check_deadline
from router.run.context import CapacityGate, RouterContext, Wait
from router.run.failures import Setbacks

Preview = Callable[[frozenset[MemberId]], RoutePlan]
"""Returns the plan that the request would get now without these workers."""


class Turn:
    """A `Turn` belongs to one request for all its attempts. Its owner calls `take` before each attempt, `await_members`
    if the plan finds that members are missing, and `leave` when the first token is there or the attempt has ended."""

    def __init__(
        self,
        context: RouterContext,
        gate: CapacityGate,
        terms: RequestTerms,
        age: tuple[float, str],
        setbacks: Setbacks,
        trace: RequestTrace,
    ) -> None:
        self.terms = terms
        self.waited_s = 0.0
        self.is_dispatched = False
        """The owner sets this once an attempt was dispatched: from then on no deadline refuses the request."""
        self._context = context
        self._gate = gate
        self._age = age
        self._setbacks = setbacks
        self._trace = trace
        self._wait: Wait | None = None
        self._too_small: frozenset[MemberId] = frozenset()
        self._unable: frozenset[MemberId] = frozenset()

    @property
    def left_to_wait_s(self) -> float:
        return self._context.config.capacity_wait_s - self.waited_s

    @property
    def first_token_by_s(self) -> float | None:
        """Returns the time by which the first token must be predicted, or None if no time is stated or the request was
        dispatched."""
        return None if self.is_dispatched else self.terms.first_token_by_s

    @property
    def kept_out(self) -> frozenset[MemberId]:
        """Returns the workers that no plan of the request may use: those that are too small for it, those that can't do
        what it asks for, and those that other requests have reserved."""
        return self._too_small | self._unable | self._gate.reserved_from(self._wait)

    async def take(self, prompt: Prompt, num_generated: int, preview: Preview) -> None:
        """Waits for the request's turn, if requests are ahead of it or no worker has room for it. Raises
        ContextLengthExceeded or InvalidMedia if every worker is too small for it, Overloaded if none has had room in
        time, and DeadlineOutOfReach if its first token would come too late. A request that was dispatched before is
        not refused after its wait: it then queues at a worker, where its age ranks it."""
        room = self._room(prompt, num_generated)
        if self._wait is not None or self.left_to_wait_s <= 0:
            return
        waiter = self._waiter(prompt, num_generated)
        if not self._gate.must_wait(waiter, room):
            return
        self._check_prediction(waiter, room, preview)
        is_full = room.verdict == "later"
        reason = "no worker has room for the request's KV blocks" if is_full else "other requests are served first"
        if not await self._stand_in_line(waiter, prompt, reason) and (is_full or self._is_late()):
            room = self._room(prompt, num_generated)
            if not self.is_dispatched and (room.verdict == "later" or self._is_late()):
                self._check_deadline(room.wait_s or 0.0)
                message = f"no worker has had room for a prompt of {len(prompt.token_ids)} tokens within"
                raise Overloaded(f"{message} {self.waited_s:.3g} s", retry_after_s=room.wait_s)
        self._room(prompt, num_generated)

    async def await_members(self, prompt: Prompt, num_generated: int, reason: str) -> bool:
        """Waits until the members that the prompt needs are there, for what is left of `capacity_wait_s`. Returns False
        if the time was over first. Raises DeadlineOutOfReach if the request's own deadline was."""
        waiter = self._waiter(prompt, num_generated, lacks_members=True)
        if self.left_to_wait_s > 0 and await self._stand_in_line(waiter, prompt, reason):
            return True
        self._check_deadline(0.0)
        return False

    def shortage(self, error: WeftError) -> str:
        """Returns what is missing for a plan that failed with `error`. The planner does not know of workers that can't
        take the request."""
        excluded = self._setbacks.excluded(self._context.clock.now()) | self.kept_out
        if self._unable and not self._context.cluster.can_serve(frozenset(), excluded, self._context.clock.now()):
            return "no worker that can take the request is available"
        return error.message

    def leave(self, has_arrived: bool = False) -> None:
        """Gives up the place in the queue, because the request has its first token or its attempt has ended."""
        if self._wait is not None:
            self._wait.leave(has_arrived)
            self._wait = None

    def token_arrived(self) -> None:
        """Notes a token: a request that was released has arrived."""
        if self._wait is not None and self._wait.is_over:
            self.leave(has_arrived=True)

    def end_wait(self) -> None:
        """Ends a wait, because the request has all its tokens."""
        if self._wait is not None:
            self._wait.end(is_served=True)

    # ------------------------------------------------------------ the room

    def _room(self, prompt: Prompt, num_generated: int) -> KvRoom:
        """Returns whether workers have room for the prompt. Raises the error of a request for which none ever has."""
        now = self._context.clock.now()
        need = self._room_need(prompt, num_generated, self.terms.standing(prompt.priority).is_spare(now))
        self._unable = self._find_unable(prompt, num_generated)
        room = self._context.cluster.room(need, self._setbacks.excluded(now) | self._unable, now)
        self._too_small = room.too_small
        if room.verdict != "never":
            return room
        num_tokens = len(prompt.token_ids)
        if num_tokens > room.max_tokens > 0:
            message = f"the prompt has {num_tokens} tokens, but the largest worker has room for {room.max_tokens}"
            raise ContextLengthExceeded(message, param="messages")
        max_unit_bytes, part = self._max_unit(prompt)
        raise InvalidMedia(
            f"the largest part of the medium takes {max_unit_bytes} bytes as a feature, but the largest inbox of a "
            f"worker has {room.max_unit_bytes}; send a smaller medium",
            param=part,
        )

    def _find_unable(self, prompt: Prompt, num_generated: int) -> frozenset[MemberId]:
        """Returns the workers that can't do what the request asks for."""
        asked = {
            EMBEDDINGS: bool(prompt.prompt_outputs.pooling),
            SPEECH: prompt.speech is not None,
            ADAPTERS: bool(prompt.adapter),
        }
        needed = [ability for ability, is_asked in asked.items() if is_asked]
        return self._context.unable(needed, len(prompt.token_ids) + num_generated)

    def _room_need(self, prompt: Prompt, num_generated: int, is_spare: bool) -> RoomNeed:
        return RoomNeed(
            num_prompt_tokens=len(prompt.token_ids),
            num_generated_tokens=num_generated,
            num_choices=prompt.num_choices,
            scheme_to_hashes=prompt.scheme_to_hashes(self._context.cluster.kv_schemes()),
            max_unit_bytes=self._max_unit(prompt)[0],
            headroom=BATCH_HEADROOM if is_spare else 0.0,
        )

    def _max_unit(self, prompt: Prompt) -> tuple[int, str]:
        """Returns the bytes that the largest feature of the prompt takes in an inbox, and the part that it is of."""
        row_bytes, levels = self._context.feature_row_bytes, self._context.num_levels
        sizes = ((max(item.unit_tokens) * (item.num_levels or levels) * row_bytes, item.part) for item in prompt.media)
        payload, part = max(sizes, default=(0, ""))
        return -(-(HEADER_BYTES + payload) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if payload else 0, part

    # ------------------------------------------------------------ the wait

    def _waiter(self, prompt: Prompt, num_generated: int, lacks_members: bool = False) -> Waiter:
        """Returns the request's place in the queue as of now. It waits at most until its first token would come too
        late."""
        now = self._context.clock.now()
        modalities = frozenset(item.modality for item in prompt.media)
        unable = frozenset((each, math.inf) for each in self._find_unable(prompt, num_generated))
        need = CapacityNeed(modalities, self._setbacks.exclusions(now) | unable)
        deadline_s = now + self.left_to_wait_s
        if self.first_token_by_s is not None:
            deadline_s = min(deadline_s, self.first_token_by_s)
        standing = self.terms.standing(prompt.priority)
        room_need = self._room_need(prompt, num_generated, is_spare=self.terms.is_batch)
        return Waiter(self._age, need, deadline_s, standing, room_need, now, lacks_members)

    async def _stand_in_line(self, waiter: Waiter, prompt: Prompt, reason: str) -> bool:
        """Waits in the queue for what the prompt needs. Returns False if the time was over before that was there."""
        began_s = self._context.clock.now()
        if waiter.room is not None:
            barred = self._too_small | self._unable
            waiter.work = self._context.cluster.predicted_work(waiter.room, prompt, barred, began_s)
        self._trace.add("waiting", reason=reason)
        self._wait = wait = self._gate.join(waiter)
        is_served = False
        try:
            is_served = await wait.ended()
        finally:
            self.waited_s += wait.waited_s
            if not is_served:
                self.leave()
        self._trace.add("waited", waited_s=wait.waited_s, is_served=is_served, from_s=began_s)
        return is_served

    # ------------------------------------------------------------ the deadline

    def _check_prediction(self, waiter: Waiter, room: KvRoom, preview: Preview) -> None:
        """Raises DeadlineOutOfReach if the first token of a request that must wait is predicted after its deadline. The
        prediction contains the time until the requests that wait ahead of it, and then this one, have room."""
        ahead_s = self._gate.wait_ahead_s(waiter, room.tokens_per_s)
        wait_s = ahead_s + (room.wait_s or 0.0)
        self._trace.add("admission", verdict=room.verdict, nearest=room.nearest, predicted_wait_s=wait_s)
        if self.first_token_by_s is not None:
            try:
                plan = preview(self.kept_out)
            except NoCapacity:
                return  # Members are missing; the request waits for them until its deadline.
            idle_s = plan.predicted_ttft_s - plan.explanation.winner.queue_s
            self._check_deadline(max(plan.predicted_ttft_s, wait_s + idle_s))

    def _check_deadline(self, predicted_s: float) -> None:
        check_deadline(predicted_s, self.first_token_by_s, self._context.clock.now())

    def _is_late(self) -> bool:
        return self.first_token_by_s is not None and self._context.clock.now() >= self.first_token_by_s
