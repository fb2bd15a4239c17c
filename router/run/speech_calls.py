"""Carries the calls of one attempt to the stages behind the thinker, and says when its speech is complete.

`SpeechCalls` opens one call at each stage shortly after the first token came, so that opening them delays no text;
chunks that the worker has sent before are kept at the talker. The stages then pass their chunks to each other; the last
one sends samples to the router. The speech is complete when every call has ended well and all samples that the last
stage has counted are there. The first failure of a call is the failure of the attempt, which then ends as a whole.

The module knows nothing of text, or of the worker's call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from fabric.contracts import (
    AbortAttempt,
    AttemptId,
    MemberId,
    StageFrame,
    StagePrompt,
    StageRequest,
    StageResult,
    StageTarget,
    TransferFailed,
    Unavailable,
    WeftError,
    WorkerLost,
)
from router.observe import RequestTrace
from router.planning import StageHop, StagePlan
from router.run.audio_track import AudioTrack
from router.run.context import RouterContext
from router.run.encode_dispatcher import ELSEWHERE
from router.run.failures import Setbacks

_LOG = logging.getLogger(__name__)
FIRST_TEXT_S = 0.002
"""Is the time that the first token has to reach the client before calls are opened: opening one takes about a
millisecond of the event loop on Ray."""


class SpokenAttempt(NamedTuple):
    """Holds what the stages need to know of an attempt."""

    attempt_id: AttemptId
    age: tuple[float, str]
    prompt: StagePrompt
    options: dict[str, str | int | float]


class SpeechCalls:
    """A `SpeechCalls` belongs to one attempt. It counts as open at its replicas from its construction on. Its owner
    calls `start` when the first token is there, passes frames to `take_frame`, awaits `complete`, and calls `close` in
    any case."""

    def __init__(
        self,
        context: RouterContext,
        attempt: SpokenAttempt,
        plan: StagePlan,
        track: AudioTrack,
        setbacks: Setbacks,
        trace: RequestTrace,
        failed: Callable[[WeftError], None],
    ) -> None:
        """`failed` is called once with the error of the first call that fails."""
        self._context, self._attempt, self._plan, self._track = context, attempt, plan, track
        self._setbacks, self._trace, self._failed = setbacks, trace, failed
        self._calls: dict[asyncio.Task[StageResult], StageHop] = {}
        self._error: WeftError | None = None
        self._num_samples: int | None = None
        """Counts the samples of the whole speech, once the last stage has said so."""
        self._news = asyncio.Event()
        self._is_started = self._is_closed = False
        self._opening: asyncio.TimerHandle | None = None
        for hop in plan.hops:
            context.stages.note_opened(hop.member_id, attempt.attempt_id)

    @property
    def first_stage(self) -> StageTarget:
        """Returns the replica that takes what the thinker makes."""
        return _target(self._plan.hops[0])

    def start(self) -> None:
        """Opens all calls soon. Awaits nothing. A second time, and after `close`, it changes nothing."""
        if self._is_started or self._is_closed:
            return
        self._is_started = True
        self._opening = asyncio.get_running_loop().call_later(FIRST_TEXT_S, self._open)

    def _open(self) -> None:
        """Opens all calls, if they are due and not open yet."""
        if self._opening is None:
            return
        self._opening.cancel()
        self._opening, hops = None, self._plan.hops
        for hop, following in zip(hops, [*hops[1:], None], strict=True):
            request = self._request(hop, following)
            stages = self._context.pools.stages
            assert stages is not None, "only a cluster with stages plans speech"
            name = f"stage {hop.stage.stage_id} {request.key}"
            call = self._context.tasks.spawn(stages.run(hop.member_id, request), name)
            self._calls[call] = hop
            call.add_done_callback(self._ended)
            self._trace.add("dispatched", to=hop.member_id, attempt=self._attempt.attempt_id.attempt)

    def take_frame(self, member_id: MemberId, frame: StageFrame) -> bool:
        """Takes samples of the last stage. Returns whether new ones became readable."""
        if self._is_closed or member_id != self._plan.hops[-1].member_id:
            return False
        is_new = self._track.push(frame.first_sample, frame.samples)
        self._news.set()
        return is_new

    def member_left(self, member_id: MemberId) -> None:
        """Ends open calls to a member that the directory no longer lists."""
        for call, hop in list(self._calls.items()):
            if hop.member_id == member_id:
                call.cancel()

    async def complete(self) -> None:
        """Waits until the speech is complete, and opens its calls if none is open yet. Raises the error of a call, or
        TransferFailed if samples that the last stage has made do not arrive in time."""
        self.start()
        self._open()
        while self._error is None and self._calls:
            await self._next_news()
        try:
            async with asyncio.timeout(self._context.config.gap_timeout_s):
                while self._error is None and self._track.num_samples < (self._num_samples or 0):
                    await self._next_news()
        except TimeoutError:
            missing = (self._num_samples or 0) - self._track.num_samples
            raise TransferFailed(f"{missing} samples of the speech did not arrive") from None
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the calls that are open: sends an abort at once to their members, then cancels them. It is
        idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        for call, hop in list(self._calls.items()):
            self._context.send(hop.member_id, AbortAttempt(*self._attempt.attempt_id))
            call.cancel()
        for hop in self._plan.hops:
            self._context.stages.note_ended(hop.member_id, self._attempt.attempt_id)

    # ------------------------------------------------------------ one call

    def _request(self, hop: StageHop, following: StageHop | None) -> StageRequest:
        attempt = self._attempt
        return StageRequest(
            request_id=attempt.attempt_id.request_id,
            attempt=attempt.attempt_id.attempt,
            router_id=self._context.member_id,
            router_address=self._context.plane.address,
            stage_id=hop.stage.stage_id,
            age=attempt.age,
            next_stage=None if following is None else _target(following),
            prompt=attempt.prompt if hop is self._plan.hops[0] else None,
            options=attempt.options,
        )

    def _ended(self, call: asyncio.Task[StageResult]) -> None:
        hop = self._calls.pop(call)
        self._context.stages.note_ended(hop.member_id, self._attempt.attempt_id)
        self._news.set()
        if self._is_closed:
            return
        try:
            if call.cancelled():
                raise WorkerLost(f"the call to {hop.member_id} was cancelled")
            result = call.result()
            if result.error is not None:
                raise result.error.to_error()
        except WeftError as error:
            self._fail(hop, error)
        except Exception as error:
            # This is the end of a call's task, which no one awaits: whatever it is ends this attempt and no other.
            _LOG.exception("a call to %s has failed", hop.member_id)
            self._fail(hop, WorkerLost(f"the call to {hop.member_id} failed ({type(error).__name__})"))
        else:
            self._trace.add_stage(self._attempt.attempt_id.attempt, hop.stage.model_stage, result)
            if hop is self._plan.hops[-1]:
                self._num_samples = result.num_outputs

    def _fail(self, hop: StageHop, error: WeftError) -> None:
        context, attempt = self._context, self._attempt.attempt_id.attempt
        context.metrics.dispatch_errors.labels(hop.stage.model_stage, error.code).inc()
        self._trace.add("stage_failed", member=hop.member_id, code=error.code, attempt=attempt)
        now = context.clock.now()
        if isinstance(error, Unavailable):
            context.stages.exclude(hop.member_id, now + context.config.exclusion_s)
        if isinstance(error, ELSEWHERE):
            self._setbacks.exclude(hop.member_id, error, now)
        if self._error is None:
            self._error = error
            self._failed(error)

    async def _next_news(self) -> None:
        await self._news.wait()
        self._news.clear()


def _target(hop: StageHop) -> StageTarget:
    inbox = dict(hop.stage.connector_to_inbox)[hop.connector]
    return StageTarget(hop.stage.stage_id, hop.member_id, inbox, hop.connector)
