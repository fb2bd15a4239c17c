"""One request from admission to its terminal event, over as many attempts as it takes.

Tokens that were sent are kept: the next attempt is told of them and goes on from there. Exactly one terminal event
reaches the stream, whatever happens. A medium that could not be encoded may be taken away before the first token
(`ladder`): then the prompt is another, and the attempt starts anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from fabric.errors import (
    Aborted,
    Busy,
    EngineFailed,
    NoCapacity,
    ProtocolError,
    TargetGone,
    TransferError,
    TransferFailed,
    WeftError,
    WorkerLost,
)
from fabric.ids import AttemptId, MemberId
from fabric.messages import ChoiceResult, FeatureNeeded, GenerateResult, TokenFrame
from router.account import Account
from router.attempt import Attempt
from router.ladder import Ladder
from router.parts import RouterParts
from router.prompt import Prompt
from router.streams import RequestStream
from router.traces import RequestTrace

logger = logging.getLogger(__name__)

CAPACITY_POLL_S = 0.1
RETRIED = (TargetGone, WorkerLost, TransferError, Busy)
"""What another attempt may survive."""
NUM_LOST_TO_BLAME = 2
"""So many workers lost with one request on them: it is taken for the cause, and clients are told not to retry."""


class Flight:
    """Runs in a task of its own; frames and messages come in from the plane's handler in the same loop."""

    def __init__(
        self,
        parts: RouterParts,
        prompt: Prompt,
        stream: RequestStream,
        age: tuple[float, str],
        trace: RequestTrace,
        ladder: Ladder,
    ) -> None:
        self.stream = stream
        self._parts = parts
        self._prompt = prompt
        self._age = age
        self._trace = trace
        self._ladder = ladder
        self._account = Account(parts, stream, trace)
        self._attempt: Attempt | None = None
        self._excluded: set[MemberId] = set()
        self._losses: list[WeftError] = []
        self._lost_at_s = 0.0
        self._all_finished = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._told: set[int] = set()
        self._is_concluded = False
        self._on_end: Callable[[], None] = lambda: None

    def start(self, admitted_at_s: float, on_end: Callable[[], None]) -> None:
        """`admitted_at_s`: when the request arrived, for its timing. `on_end` is called once, after the terminal
        event."""
        self._account.start(admitted_at_s)
        self._on_end = on_end
        self._task = self._parts.tasks.spawn(self._run(), f"flight {self.stream.request_id}")
        self._task.add_done_callback(lambda _: self._conclude())

    def cancel(self) -> None:
        """Ends the request now: open calls are cancelled and their members told, before this returns."""
        if self._attempt is not None:
            self._attempt.close()
        if self._task is not None:
            self._task.cancel()

    # ------------------------------------------------------------ what comes in

    def on_frame(self, worker_id: MemberId, frame: TokenFrame) -> None:
        """New tokens. Frames of another attempt, another worker or an unknown choice are dropped."""
        attempt = self._attempt
        if (
            attempt is None
            or attempt.plan is None
            or attempt.attempt_id.attempt != frame.attempt
            or attempt.plan.worker_id != worker_id
        ):
            self._parts.metrics.frames_dropped.labels("old_attempt").inc()
            return
        if not 0 <= frame.choice < len(self.stream.choices):
            self._parts.metrics.frames_dropped.labels("unknown_choice").inc()
            return
        choice = self.stream.choices[frame.choice]
        if choice.is_finished:
            self._parts.metrics.frames_dropped.labels("finished_choice").inc()
            self._end_choice(attempt, frame.choice)
            return
        before = choice.num_tokens
        text = choice.push(frame.first_index, frame.token_ids, frame.finish_reason, frame.logprobs)
        if choice.num_tokens > before:
            self._account.observe_tokens(attempt, frame.choice, choice.num_tokens - before)
        if choice.num_tokens > before or choice.is_finished:
            self.stream.write(frame.choice, text)
        if choice.is_cut:
            self._end_choice(attempt, frame.choice)
        self._check_finished()

    def on_feature_needed(self, message: FeatureNeeded) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.attempt_id.attempt == message.attempt:
            attempt.feature_needed(message)

    def member_left(self, member_id: MemberId) -> None:
        if self._attempt is not None:
            self._attempt.member_left(member_id)

    def _end_choice(self, attempt: Attempt, choice: int) -> None:
        """The worker goes on with a choice that we ended (a stop string, or a former attempt did): told once."""
        if choice not in self._told:
            self._told.add(choice)
            attempt.abort_choices((choice,))

    def _check_finished(self) -> None:
        if self.stream.are_choices_finished and self._attempt is not None:
            self._all_finished.set()
            self._attempt.settle(self._parts.config.settle_timeout_s)

    # ------------------------------------------------------------ attempts

    async def _run(self) -> None:
        """A process's loop for one request: whatever breaks, the stream gets its one terminal event."""
        try:
            result = await self._serve()
            self.stream.finish(self._account.usage(self._prompt, result))
        except WeftError as error:
            self.stream.fail(error)
        except asyncio.CancelledError:
            self.stream.fail(Aborted("the request was cancelled"))
            raise
        except Exception as error:
            logger.exception("request %s broke", self.stream.request_id)
            self.stream.fail(WeftError(f"internal error ({type(error).__name__})"))
        finally:
            self._conclude()

    def _conclude(self) -> None:
        """Once, however the task ended: also when it was cancelled before it ran at all."""
        if not self._is_concluded:
            self._is_concluded = True
            self.stream.fail(Aborted("the request was cancelled"))
            self._account.close(self._prompt)
            self._on_end()

    async def _serve(self) -> GenerateResult | None:
        number = num_steps_down = 0
        while number - num_steps_down < self._parts.config.max_attempts:
            try:
                return await self._try(number)
            except WeftError as error:
                if self.stream.are_choices_finished:
                    return None  # Nothing is missing but the worker's own account.
                if await self._steps_down(error):
                    number += 1
                    num_steps_down += 1
                    continue
                if isinstance(error, NoCapacity) and self._losses:
                    if not await self._may_capacity_return():
                        raise self._verdict() from error
                    number += self._was_dispatched  # what a member has seen once is never used again
                    continue
                if not isinstance(error, RETRIED):
                    raise
                number += 1
                self._losses.append(error)
                self._lost_at_s = self._parts.clock.now()
                self._parts.metrics.attempts.labels(error.code).inc()
                logger.warning("request %s: attempt %d ended: %s", self.stream.request_id, number, error.message)
        raise self._verdict()

    async def _try(self, number: int) -> GenerateResult | None:
        attempt = Attempt(
            self._parts,
            self._prompt,
            AttemptId(self.stream.request_id, number),
            self._age,
            self._excluded,
            self._trace,
        )
        for choice in self.stream.choices:
            choice.order.restart()
        self._told.clear()
        self._attempt = attempt
        try:
            attempt.dispatch([choice.emitted for choice in self.stream.choices] if number else ())
            result = await attempt.result()
            if result is not None:
                await self._settle(result)
            self._parts.metrics.attempts.labels("ok").inc()
            return result
        finally:
            self._account.attempt_ended(attempt)
            attempt.close()

    async def _steps_down(self, error: WeftError) -> bool:
        """Whether the request goes on without what could not be encoded. Never once a token was sent: an answer is
        about one prompt."""
        attempt = self._attempt
        if attempt is None or self.stream.is_started or not attempt.failed_items:
            return False
        self._attempt = None  # what it still sends is void: its prompt is
        below = await self._ladder.step_down(error, attempt.failed_items)
        if below is None:
            return False
        self._prompt, steps = below
        self.stream.restart(self._prompt.token_ids, self._ladder.degraded)
        self._parts.metrics.attempts.labels("degraded").inc()
        for step in steps:
            self._parts.metrics.degraded.labels(step.key.modality, step.action, step.reason.code).inc()
            self._trace.add("degraded", attempt=attempt.attempt_id.attempt, **step.to_json())
        degraded = [step.to_json() for step in self._ladder.degraded]
        self._trace.note(**self._prompt.facts, degraded=degraded)
        return True

    async def _settle(self, result: GenerateResult) -> None:
        """Brings the choices to the ends that the terminal event names. Frames may trail it on another way; what
        doesn't come in time was lost, and is drawn again by a new attempt. Raises TargetGone (our lease had expired
        there), TransferFailed, ProtocolError."""
        named = {each.choice: each for each in result.choices}
        for index, choice in enumerate(self.stream.choices):
            if not choice.is_finished:
                self._end_as_told(index, named.get(index), result.worker_id)
        self._check_finished()
        try:
            async with asyncio.timeout(self._parts.config.gap_timeout_s):
                await self._all_finished.wait()
        except TimeoutError:
            missing = sum(choice.order.num_missing for choice in self.stream.choices if not choice.is_finished)
            raise TransferFailed(f"{missing} tokens of {result.worker_id} did not arrive") from None

    def _end_as_told(self, index: int, ending: ChoiceResult | None, worker_id: MemberId) -> None:
        if ending is None:
            raise ProtocolError(f"{worker_id} ended without a word on choice {index}")
        if ending.finish_reason == "abort":
            raise TargetGone(f"{worker_id} gave the attempt up")
        choice = self.stream.choices[index]
        if ending.num_tokens < choice.num_tokens:
            raise ProtocolError(f"{worker_id} counts {ending.num_tokens} tokens, but sent {choice.num_tokens}")
        text = choice.end(ending.num_tokens, ending.finish_reason)
        if choice.is_finished:
            self.stream.write(index, text)

    @property
    def _was_dispatched(self) -> bool:
        """Whether the attempt that just ended had got as far as to its members."""
        return self._attempt is not None and self._attempt.plan is not None

    async def _may_capacity_return(self) -> bool:
        """Waits a moment. False once the wait since the last loss was too long, if the request kills workers, or if
        nobody was lost: who is busy is told so at once."""
        has_waited_s = self._parts.clock.now() - self._lost_at_s
        if (
            self._is_to_blame
            or isinstance(self._losses[-1], Busy)
            or has_waited_s >= self._parts.config.capacity_wait_s
        ):
            return False
        await asyncio.sleep(CAPACITY_POLL_S)
        return True

    @property
    def _is_to_blame(self) -> bool:
        return sum(isinstance(error, WorkerLost) for error in self._losses) >= NUM_LOST_TO_BLAME

    def _verdict(self) -> WeftError:
        """What the client is told after the last attempt."""
        last = self._losses[-1]
        if self._is_to_blame:
            return EngineFailed(f"the request was given up: {len(self._losses)} workers were lost while they served it")
        return last
