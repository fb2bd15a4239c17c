"""Carries one request from admission to its terminal event, over as many attempts as it takes. `RequestRun` is the task
of the request; its `Account` measures the request over all attempts (first token, time between tokens, time at workers)
for the metrics and the trace, and decides nothing.

Tokens that were sent are kept: the next attempt gets them and continues after them. Exactly one terminal event reaches
the stream in every case. Before the first token, the `DegradationPolicy` may reduce or remove a medium that could not
be encoded; the prompt then changes, and a new attempt starts. While no worker is there or has room, or no encoder is
there for one of its media, the request waits at the `CapacityGate` and holds nothing on any member. A request that can
never have room, or whose first token would come after its deadline, is refused before any member is asked.

The module knows nothing of HTTP, or of how a prompt is made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from fabric.contracts import (
    Aborted,
    AttemptId,
    Busy,
    ChoiceResult,
    DeadlineOutOfReach,
    FeatureNeeded,
    GenerateResult,
    MachineBusy,
    MemberId,
    NoCapacity,
    ProtocolError,
    RequestRefused,
    StageFrame,
    TargetGone,
    TokenFrame,
    TransferError,
    TransferFailed,
    Unavailable,
    WeftError,
    WorkerLost,
)
from router.api import Usage
from router.observe import HeardAnswer, RequestTrace, Timing, modality_class
from router.planning import RoutePlan
from router.prompt import Prompt
from router.run.admission import AttemptUsage, RequestTerms
from router.run.attempt import Attempt
from router.run.context import CapacityGate, RouterContext
from router.run.failures import DegradationPolicy, Setbacks
from router.run.key_book import Caller
from router.run.request_output import RequestStream
from router.run.turn import Turn

logger = logging.getLogger(__name__)
RETRIED = (Unavailable, TransferError, Busy)
"""Another attempt may survive these errors. MachineBusy is not retried, although it is a `Busy`: the failed attempt has
already tried the other encoders, as far as its time allowed."""


class RequestRun:
    """A `RequestRun` carries one request through all its attempts, in a task of its own. The message plane's handler
    passes frames and messages to it in the same event loop."""

    def __init__(
        self,
        context: RouterContext,
        prompt: Prompt,
        stream: RequestStream,
        age: tuple[float, str],
        trace: RequestTrace,
        degradation: DegradationPolicy,
        gate: CapacityGate,
        terms: RequestTerms,
    ) -> None:
        self.stream = stream
        self._context = context
        self._prompt = prompt
        self._age = age
        self._trace = trace
        self._degradation = degradation
        self._account = Account(context, stream, trace)
        self._attempt: Attempt | None = None
        self._gate = gate
        self._charge: tuple[float, int] | None = None
        """Holds what the open attempt was charged, and the tokens that were sent before it."""
        self._setbacks = Setbacks(context.config.exclusion_s)
        self._turn = Turn(context, gate, terms, age, self._setbacks, trace)
        self._all_finished = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopped_choices: set[int] = set()
        self._is_concluded = False
        self._stages_by_s = 0.0
        """Is the time until which the request waits for a missing stage; it is 0 if it has not waited."""
        self._on_end: Callable[[], None] = lambda: None

    def start(self, admitted_at_s: float, on_end: Callable[[], None]) -> None:
        """Starts the request. `admitted_at_s` is the time at which the request arrived, for its timing. `on_end` is
        called once, after the terminal event."""
        self._account.start(admitted_at_s)
        self._on_end = on_end
        self._task = self._context.tasks.spawn(self._run(), f"run {self.stream.request_id}")
        self._task.add_done_callback(lambda _: self._conclude())

    def cancel(self) -> None:
        """Ends the request now: sends aborts to the members of open calls, and cancels the calls, before it returns."""
        if self._attempt is not None:
            self._attempt.close()
        if self._task is not None:
            self._task.cancel()

    # ------------------------------------------------------------ incoming messages

    def on_frame(self, worker_id: MemberId, frame: TokenFrame) -> None:
        """Takes a frame of new tokens. Drops frames of another attempt, another worker or an unknown choice. A bug that
        a frame meets ends this request."""
        try:
            self._take_frame(worker_id, frame)
        except Exception as error:
            # This is one frame in the loop of the message plane: the same message has frames of other requests.
            self._break(error)
            self.cancel()

    def _take_frame(self, worker_id: MemberId, frame: TokenFrame) -> None:
        attempt = self._attempt
        if (
            attempt is None
            or attempt.plan is None
            or attempt.attempt_id.attempt != frame.attempt
            or attempt.plan.worker_id != worker_id
        ):
            self._context.metrics.frames_dropped.labels("old_attempt").inc()
            return
        if not 0 <= frame.choice < len(self.stream.choices):
            self._context.metrics.frames_dropped.labels("unknown_choice").inc()
            return
        choice = self.stream.choices[frame.choice]
        if choice.is_finished:
            self._context.metrics.frames_dropped.labels("finished_choice").inc()
            if self.stream.audio is None:  # A spoken answer may be drawn again for its speech alone.
                self._end_choice(attempt, frame.choice)
            return
        before = choice.num_tokens
        text = choice.push(frame.first_index, frame.token_ids, frame.finish_reason, frame.logprobs)
        self._turn.token_arrived()
        if choice.num_tokens > before:
            attempt.speak()
            if not before:
                self._context.cluster.note_first_token(attempt.attempt_id, self._context.clock.now())
            self._account.observe_tokens(attempt, frame.choice, choice.num_tokens - before)
            self._turn.terms.spend_tokens(choice.num_tokens - before)
        if choice.num_tokens > before or choice.is_finished:
            self.stream.write(frame.choice, text)
        if choice.is_cut:
            self._end_choice(attempt, frame.choice)
        self._check_finished()

    def on_samples(self, member_id: MemberId, frame: StageFrame) -> None:
        """Takes samples of the spoken answer. Drops those of another attempt or another member."""
        attempt = self._attempt
        if attempt is None or attempt.attempt_id.attempt != frame.attempt:
            self._context.metrics.frames_dropped.labels("old_attempt").inc()
            return
        track = self.stream.audio
        num_before = 0 if track is None else track.num_samples
        if track is not None and attempt.take_frame(member_id, frame):
            self._account.observe_audio((track.num_samples - num_before) / track.sample_rate)
            self.stream.write_audio()

    def on_feature_needed(self, message: FeatureNeeded) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.attempt_id.attempt == message.attempt:
            attempt.feature_needed(message)

    def member_left(self, member_id: MemberId) -> None:
        if self._attempt is not None:
            self._attempt.member_left(member_id)

    def worker_leaves(self, member_id: MemberId) -> None:
        if self._attempt is not None:
            self._attempt.worker_leaves(member_id)

    def _end_choice(self, attempt: Attempt, choice: int) -> None:
        """Asks the worker, once, to stop a choice that it still continues although the router has ended it (by a stop
        string, or in a former attempt)."""
        if choice not in self._stopped_choices:
            self._stopped_choices.add(choice)
            attempt.abort_choices((choice,))

    def _check_finished(self) -> None:
        if self.stream.are_choices_finished and self._attempt is not None:
            self._all_finished.set()
            self._attempt.settle(self._context.config.settle_timeout_s)
            self._turn.end_wait()

    # ------------------------------------------------------------ attempts

    async def _run(self) -> None:
        """Runs the request to its end. The stream gets its one terminal event also if something fails."""
        try:
            result = await self._serve()
            self._take_outputs(result)
            self.stream.finish(self._account.usage(self._prompt, result))
        except WeftError as error:
            self.stream.fail(error)
        except asyncio.CancelledError:
            self.stream.fail(Aborted("the request was cancelled"))
            raise
        except Exception as error:  # This is the top of a request's task.
            self._break(error)
        finally:
            self._conclude()

    def _take_outputs(self, result: GenerateResult | None) -> None:
        """Gives the stream what the request wants of its prompt. Raises WorkerLost if it was lost with a worker that
        had sent all tokens."""
        wanted, stream = self._prompt.prompt_outputs, self.stream
        if result is not None:
            stream.embedding, stream.prompt_logprobs = result.embedding, result.prompt_logprobs
        is_scored = stream.prompt_logprobs is not None or wanted.num_top_logprobs is None
        if not is_scored or bool(stream.embedding) != bool(wanted.pooling):
            raise WorkerLost("the worker was lost before it sent what the request wants of its prompt")

    def _break(self, error: Exception) -> None:
        """Logs an error that no part of the router expects, and ends the stream with it. It must be called in the
        `except` block that caught the error."""
        name = self.stream.request_id
        logger.exception("request %s failed with an unexpected exception", name, extra={"request_id": name})
        self.stream.fail(WeftError(f"an internal error occurred ({type(error).__name__})"))

    def _conclude(self) -> None:
        """Ends everything that the request holds, once, however its task ended: also if the task was cancelled before
        it ran at all."""
        if not self._is_concluded:
            self._is_concluded = True
            self._turn.leave()
            self.stream.fail(Aborted("the request was cancelled"))
            self._turn.terms.keep_prompt(self._num_counted_tokens)
            self._account.close(self._prompt, self._turn.terms.caller)
            self._count_refusal()
            self._on_end()

    @property
    def _num_counted_tokens(self) -> int:
        """Counts the tokens of the prompt for the caller's quotas: none if the prompt never reached a member, or if the
        cluster failed before the first token. A client that leaves, or whose own fault ends the request, has used what
        the members may have computed until then."""
        error = self.stream.error
        is_own_fault = isinstance(error, RequestRefused | Aborted) and self._turn.is_dispatched
        return 0 if error is not None and not self._num_sent and not is_own_fault else len(self._prompt.token_ids)

    def _count_refusal(self) -> None:
        """Counts a request that ended before it was dispatched."""
        terms, error = self._turn.terms, self.stream.error
        if error is not None and not self._turn.is_dispatched:
            self._context.metrics.observe_admission(terms.tenant.name, terms.service_class, error.code)

    async def _serve(self) -> GenerateResult | None:
        number = 0
        while self._setbacks.num_failed_attempts < self._context.config.max_attempts:
            await self._turn.take(
                self._prompt, self._num_generated, lambda kept_out: self._make_attempt(0, kept_out).preview()
            )
            if self._is_served():
                return None  # Only the worker's own account of the request is missing.
            attempt = self._make_attempt(number, self._turn.kept_out)
            try:
                return await self._try(attempt)
            except WeftError as error:
                if self._is_served():
                    return None
                if await self._steps_down(attempt, error):
                    number += 1
                    continue
                if not isinstance(error, RETRIED) or isinstance(error, MachineBusy | DeadlineOutOfReach):
                    raise
                if attempt.lacks_stage:
                    await self._await_stages(error)
                    continue
                if attempt.plan is None:
                    await self._await_capacity(error)
                    continue
                number += 1  # A number that a member has seen is never used again.
                self._setbacks.attempt_lost(error, isinstance(error, Busy) or not attempt.lacks_encoder)
                self._context.metrics.attempts.labels(error.code).inc()
                request_id, failed = attempt.attempt_id
                logger.warning("attempt %d of request %s failed: %s", failed, request_id, error.message)
        raise self._setbacks.verdict()

    def _is_served(self) -> bool:
        """Tells whether the client has, or can read, the whole answer."""
        track = self.stream.audio
        return self.stream.are_choices_finished and (track is None or track.is_ended)

    @property
    def _num_generated(self) -> int:
        return max(choice.num_tokens for choice in self.stream.choices)

    def _make_attempt(self, number: int, kept_out: frozenset[MemberId]) -> Attempt:
        attempt_id = AttemptId(self.stream.request_id, number)
        priority = self._turn.terms.member_priority(self._prompt.priority, self._context.clock.now())
        prompt = self._prompt if priority == self._prompt.priority else replace(self._prompt, priority=priority)
        attempt = Attempt(self._context, prompt, attempt_id, self._age, self._setbacks, self._trace, kept_out)
        attempt.track = self.stream.audio
        return attempt

    async def _try(self, attempt: Attempt) -> GenerateResult | None:
        """Dispatches an attempt and awaits its result. Until the dispatch, tokens that the former attempt still sends
        count, because one of them may have been the last token."""
        try:
            emitted, max_tokens = self._continued()
            self._note_dispatched(attempt.dispatch(emitted, self._turn.first_token_by_s, max_tokens))
            for choice in self.stream.choices:
                choice.order.restart()
            if self.stream.audio is not None:
                self.stream.audio.restart()
            self._stopped_choices.clear()
            self._attempt = attempt
            result = await attempt.result()
            if result is not None:
                await self._settle(result)
            await self._hear(attempt)
            self._context.metrics.attempts.labels("ok").inc()
            self._settle_charge(attempt, result)
            return result
        finally:
            self._account.attempt_ended(attempt)
            attempt.close()
            self._settle_charge(attempt, None)
            self._turn.leave()
            self._gate.changed()

    def _continued(self) -> tuple[list[tuple[int, ...]], int | None]:
        """Returns, per choice, the tokens after which the next attempt continues, and the limit of all tokens if it is
        not that of the prompt. If a choice is finished and only its speech is missing, its last token alone is drawn
        again where the talker may need hidden rows: a worker computes the rows of a request that has something to
        draw."""
        settings, choices = self._context.config.speech, self.stream.choices
        needs_rows = settings is not None and (settings.needs_all_rows or bool(self._prompt.media))
        if self.stream.audio is not None and needs_rows and choices[0].is_finished:
            return [choices[0].emitted[:-1]], len(choices[0].emitted)
        return [choice.emitted for choice in choices], None

    async def _hear(self, attempt: Attempt) -> None:
        """Waits until all sound of the answer is there. Raises the error with which the speech has failed."""
        track = self.stream.audio
        if track is not None:
            await attempt.spoken()
            track.end()
            self.stream.write(0, "")  # A given answer has no frame of tokens that would have brought its finish.

    async def _await_stages(self, error: WeftError) -> None:
        """Waits until a replica of the missing stage may be there. Raises the error once `capacity_wait_s` is over."""
        context, now = self._context, self._context.clock.now()
        self._stages_by_s = self._stages_by_s or now + context.config.capacity_wait_s
        if now >= self._stages_by_s:
            raise self._setbacks.verdict(error) from error
        await context.stage_news.wait(max(0.01, min(self._stages_by_s - now, context.stages.next_change_s(now))))

    async def _steps_down(self, attempt: Attempt, error: WeftError) -> bool:
        """Tries to continue the request without what could not be encoded, and returns whether it continues. It never
        does so once a token was sent, because an answer is about one prompt."""
        if self.stream.is_started or not attempt.failed_items:
            return False
        self._attempt = None  # Its prompt no longer holds, so frames that it still sends are dropped.
        below = await self._degradation.step_down(error, attempt.failed_items)
        if below is None:
            return False
        self._prompt, steps = below
        self.stream.restart(self._prompt.token_ids, self._degradation.degraded)
        self._context.metrics.attempts.labels("degraded").inc()
        for step in steps:
            self._context.metrics.degraded.labels(step.key.modality, step.action, step.reason.code).inc()
            self._trace.add("degraded", attempt=attempt.attempt_id.attempt, **step.to_json())
        degraded = [step.to_json() for step in self._degradation.degraded]
        self._trace.note(**self._prompt.facts, degraded=degraded)
        return True

    async def _settle(self, result: GenerateResult) -> None:
        """Brings the choices to the ends that the terminal event names. Token frames travel on another path and may
        arrive after it; tokens that do not arrive in time were lost, and a new attempt draws them again. Raises
        TargetGone (the router's lease at the worker had expired), TransferFailed, or ProtocolError."""
        named = {each.choice: each for each in result.choices}
        for index, choice in enumerate(self.stream.choices):
            if not choice.is_finished:
                self._end_as_reported(index, named.get(index), result.worker_id)
        self._check_finished()
        try:
            async with asyncio.timeout(self._context.config.gap_timeout_s):
                await self._all_finished.wait()
        except TimeoutError:
            missing = sum(choice.order.num_missing for choice in self.stream.choices if not choice.is_finished)
            raise TransferFailed(f"{missing} tokens of {result.worker_id} did not arrive") from None

    def _end_as_reported(self, index: int, ending: ChoiceResult | None, worker_id: MemberId) -> None:
        if ending is None:
            raise ProtocolError(f"{worker_id} has ended the attempt without the end of choice {index}")
        if ending.finish_reason == "abort":
            raise TargetGone(f"{worker_id} has aborted the attempt because the lease of its router has expired")
        choice = self.stream.choices[index]
        if ending.num_tokens < choice.num_tokens:
            raise ProtocolError(
                f"{worker_id} reports {ending.num_tokens} tokens of choice {index}, but has sent {choice.num_tokens}"
            )
        text = choice.end(ending.num_tokens, ending.finish_reason)
        if choice.is_finished:
            self.stream.write(index, text)

    # ------------------------------------------------------------ waiting

    def _note_dispatched(self, plan: RoutePlan) -> None:
        """Charges the request's tenant by the plan."""
        prompt, terms, metrics = self._prompt, self._turn.terms, self._context.metrics
        charge = self._context.ledger.charge(terms.tenant.name, plan, prompt.stop.max_tokens, prompt.num_choices)
        self._charge = charge, self._num_sent
        if not self._turn.is_dispatched:
            self._turn.is_dispatched = True
            metrics.observe_admission(terms.tenant.name, terms.service_class, "dispatched")
        self._trace.add("charged", tenant=terms.tenant.name, service_class=terms.service_class, tokens=charge)

    def _settle_charge(self, attempt: Attempt, result: GenerateResult | None) -> None:
        """Corrects the charge of an attempt, once. Of an attempt without a result it is known only what it has sent,
        and that its prompt was computed if it has sent something."""
        if attempt.plan is None or self._charge is None:
            return
        (charge, num_before), self._charge = self._charge, None
        num_generated = self._num_sent - num_before
        num_computed = attempt.plan.explanation.winner.num_prefill_tokens if num_generated else 0
        if result is not None:
            num_computed = result.num_prompt_tokens - result.num_cached_tokens
        usage = AttemptUsage(
            num_computed, num_generated, attempt.encoder_s, len(self.stream.choices), is_complete=result is not None
        )
        caller = self._turn.terms.caller
        self._context.ledger.settle(caller.tenant.name, charge, usage)
        self._context.metrics.usage.observe_encoding(caller.tenant.name, caller.key_name, attempt.encoder_s)

    @property
    def _num_sent(self) -> int:
        return sum(choice.num_tokens for choice in self.stream.choices)

    async def _await_capacity(self, error: WeftError) -> None:
        """Waits until the members that the prompt needs are there, for what is left of `capacity_wait_s`. Raises the
        error that ends the request: at once if the request is blamed for lost workers, or if it has not waited yet and
        members were only busy; otherwise when the time is over."""
        is_refused = self._setbacks.is_only_busy and not self._turn.waited_s
        if self._setbacks.is_to_blame or is_refused:
            raise self._setbacks.verdict(error) from error
        shortage = self._turn.shortage(error)
        if not await self._turn.await_members(self._prompt, self._num_generated, shortage):
            message = f"{shortage}, and none came within {self._turn.waited_s:.3g} s"
            raise self._setbacks.verdict(NoCapacity(message)) from error


# ------------------------------------------------------------ the request's measurements


class Account:
    """An `Account` measures one request over all its attempts. At the request's end it writes the measurements to the
    metrics and to the trace."""

    def __init__(self, context: RouterContext, stream: RequestStream, trace: RequestTrace) -> None:
        self._context = context
        self._stream = stream
        self._trace = trace
        self._admitted_at_s = context.clock.now()
        self._started_at_s = self._admitted_at_s
        self._first_token_at_s: float | None = None
        self._last_token_at_s: dict[int, float] = {}
        self._between_tokens_s, self._num_later_tokens = 0.0, 0
        self._worker_s = 0.0
        self._heard: HeardAnswer | None = None

    def start(self, admitted_at_s: float) -> None:
        self._admitted_at_s, self._started_at_s = admitted_at_s, self._context.clock.now()

    def observe_tokens(self, attempt: Attempt, choice: int, num_tokens: int) -> None:
        """Records that `num_tokens` new tokens of a choice have arrived now."""
        assert attempt.plan is not None
        now = self._context.clock.now()
        if self._first_token_at_s is None:
            self._first_token_at_s = now
            self._trace.add("first_token", attempt=attempt.attempt_id.attempt, choice=choice)
            plan = attempt.plan
            actual_s = attempt.first_token_s = now - attempt.dispatched_at_s
            self._context.metrics.observe_first_token(
                attempt.modality, plan.predicted_ttft_s, plan.lower_bound_s, actual_s
            )
        elif choice in self._last_token_at_s:
            each_s = (now - self._last_token_at_s[choice]) / num_tokens
            for _ in range(num_tokens):
                self._context.metrics.itl.observe(each_s)
            self._between_tokens_s += now - self._last_token_at_s[choice]
            self._num_later_tokens += num_tokens
        self._last_token_at_s[choice] = now

    def observe_audio(self, length_s: float) -> None:
        """Records that so much more sound has arrived now."""
        now = self._context.clock.now()
        if self._heard is None:
            self._heard = HeardAnswer(self._context.metrics.speech, self._admitted_at_s)
            self._trace.add("first_audio")
        self._heard.note_piece(length_s, now)

    def attempt_ended(self, attempt: Attempt) -> None:
        if attempt.plan is not None:
            self._worker_s += self._context.clock.now() - attempt.dispatched_at_s

    def usage(self, prompt: Prompt, result: GenerateResult | None) -> Usage:
        return Usage(
            num_prompt_tokens=len(prompt.token_ids),
            num_completion_tokens=sum(choice.num_tokens for choice in self._stream.choices),
            num_cached_tokens=0 if result is None else result.num_cached_tokens,
            modality_to_tokens=prompt.modality_to_tokens,
        )

    def close(self, prompt: Prompt, caller: Caller) -> None:
        """Records the end of the request in the metrics, also those of its caller, and in the trace."""
        now = self._context.clock.now()
        metrics, usage, error = self._context.metrics, self._stream.usage, self._stream.error
        first = self._first_token_at_s
        code = "ok" if error is None else error.code
        timing = Timing(
            total_s=now - self._admitted_at_s,
            prompt_s=self._started_at_s - self._admitted_at_s,
            worker_s=self._worker_s,
            first_token_s=None if first is None else first - self._admitted_at_s,
            each_token_s=self._between_tokens_s / self._num_later_tokens if self._num_later_tokens else None,
        )
        metrics.observe_request(code, modality_class(item.modality for item in prompt.media), timing)
        num_generated = sum(choice.num_tokens for choice in self._stream.choices)
        num_cached = 0 if usage is None else usage.num_cached_tokens
        metrics.prompt_tokens.inc(len(prompt.token_ids))
        metrics.completion_tokens.inc(num_generated)
        metrics.prefix_hit_tokens.inc(num_cached)
        metrics.usage.observe(caller.tenant.name, caller.key_name, len(prompt.token_ids), num_cached, num_generated)
        if self._heard is not None:
            self._trace.note(**self._heard.facts())
            if error is None:
                self._heard.close()
        self._trace.add("aborted" if isinstance(error, Aborted) else "finished", code=code)
        self._trace.end(
            outcome=code,
            message=None if error is None else error.message,
            finish_reasons=[choice.finish_reason for choice in self._stream.choices],
            timing=timing,
            usage=None if usage is None else usage.to_json(),
        )
