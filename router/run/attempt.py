"""An attempt is one try at a request: it is planned, dispatched to the worker and the encoders at the same moment, and
then ended or aborted.

The module knows nothing of text, of clients or of other attempts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from fabric.contracts import (
    AbortAttempt,
    AttemptId,
    DeadlineExceeded,
    EncodeResult,
    FeatureNeeded,
    GenerateRequest,
    GenerateResult,
    MediaItem,
    MemberId,
    NoCapacity,
    StageFrame,
    StagePrompt,
    Unavailable,
    WeftError,
    WorkerLeaving,
    WorkerLost,
)
from router.observe import RequestTrace, modality_class, worker_stages
from router.planning import RoutePlan, RouteQuery
from router.prompt import Prompt
from router.run.admission import check_deadline
from router.run.audio_track import AudioTrack
from router.run.context import RouterContext
from router.run.encode_dispatcher import ELSEWHERE, Dispatch, EncodeDispatcher
from router.run.failures import Setbacks
from router.run.speech_calls import SpeechCalls, SpokenAttempt

MAX_SHOWN_PAIRS = 256
"""A record that keeps the scores of pairs keeps so many at most, which takes some 25 ms of the router."""


class Attempt:
    """An `Attempt` is used in this order: its owner calls `dispatch`, awaits `result` and calls `close`. The owner may
    call the other methods in between."""

    def __init__(
        self,
        context: RouterContext,
        prompt: Prompt,
        attempt_id: AttemptId,
        age: tuple[float, str],
        setbacks: Setbacks,
        trace: RequestTrace,
        kept_out: frozenset[MemberId] = frozenset(),
    ) -> None:
        """Creates an attempt that is not yet planned. `setbacks` belong to the request; the attempt records there which
        members failed it. No plan of the attempt uses the members in `kept_out`."""
        self.attempt_id = attempt_id
        self.plan: RoutePlan | None = None
        self.dispatched_at_s = 0.0
        self.first_token_s = 0.0
        """Holds the time from the dispatch to the first token of the request; it is 0 until then."""
        self.modality = modality_class(item.modality for item in prompt.media)
        self._context = context
        self._prompt = prompt
        self._age = age
        self._setbacks = setbacks
        self._trace = trace
        self._kept_out = kept_out
        self.track: AudioTrack | None = None
        """Takes the sound of the answer; None if the client wants text alone."""
        self.lacks_stage = False
        """Tells whether the attempt has no plan because a stage behind the worker has no replica that can be used."""
        self._speech: SpeechCalls | None = None
        self._generate: asyncio.Task[GenerateResult] | None = None
        self._dispatcher: EncodeDispatcher | None = None
        self._ended: asyncio.Queue[asyncio.Task[GenerateResult] | asyncio.Task[EncodeResult] | WeftError] = (
            asyncio.Queue()
        )
        self._host, self._sent_at_s = "", 0.0
        self._deadline: asyncio.Timeout | None = None
        self._is_settling = False
        self._is_answered = False
        self._is_closed = False

    # ------------------------------------------------------------ dispatch

    def preview(self) -> RoutePlan:
        """Returns the plan of an attempt that would be dispatched now, and changes nothing. Raises NoCapacity."""
        return self._context.cluster.plan(self._query(), self._context.clock.now())

    def dispatch(
        self,
        emitted: Sequence[tuple[int, ...]],
        first_token_by_s: float | None = None,
        max_tokens: int | None = None,
    ) -> RoutePlan:
        """Plans the attempt and starts all its calls; awaits nothing. `emitted` holds, per choice, the tokens that
        former attempts sent, and `max_tokens` limits all tokens of a choice if not the prompt is to do it. Raises
        NoCapacity, and DeadlineOutOfReach if the first token would come after `first_token_by_s`."""
        context, (request_id, attempt) = self._context, self.attempt_id
        now = context.clock.now()
        query = self._query()
        plan = context.cluster.plan(query, now)
        check_deadline(plan.predicted_ttft_s, first_token_by_s, now)
        self._speech = self._plan_speech(plan, query.excluded, now)
        pairs = context.cluster.score_pairs(query, now, MAX_SHOWN_PAIRS) if self._trace.keeps_pairs else None
        self.plan, self.dispatched_at_s = plan, now
        context.cluster.note_dispatched(query, plan, now)
        context.metrics.covered_items.inc(len(plan.covered_items))
        facts = {"worker": plan.worker_id, "predicted_ttft_s": plan.predicted_ttft_s}
        self._trace.add("planned", attempt=attempt, from_s=now, **facts)
        self._trace.add_plan(plan, pairs)
        self._host, self._sent_at_s = context.machine_of(plan.worker_id), context.clock.now()
        call = context.pools.workers.generate(plan.worker_id, self._generate_request(plan, emitted, max_tokens))
        self._generate = context.tasks.spawn(call, f"generate {request_id}/{attempt}")
        self._generate.add_done_callback(self._ended.put_nowait)
        self._trace.add("dispatched", to=plan.worker_id, attempt=attempt)
        dispatch = Dispatch(self.attempt_id, self._age, self._query, plan, now + context.config.dispatch_timeout_s)
        self._dispatcher = EncodeDispatcher(
            context, self._prompt, dispatch, self._setbacks, self._trace, self._ended.put_nowait
        )
        self._dispatcher.start()
        return plan

    def speak(self) -> None:
        """Opens the calls to the stages that speak the answer, because its first token is there."""
        if self._speech is not None:
            self._speech.start()

    def _plan_speech(self, plan: RoutePlan, excluded: frozenset[MemberId], now: float) -> SpeechCalls | None:
        """Chooses the stages that speak the answer, if the client wants to hear it. Raises NoCapacity."""
        prompt, worker = self._prompt, self._context.members.get(plan.worker_id)
        if self.track is None or prompt.speech is None:
            return None
        if worker is None:
            raise NoCapacity(f"the worker {plan.worker_id} has left the cluster")
        try:
            stage_plan = self._context.stages.plan(worker, excluded, now)
        except NoCapacity:
            self.lacks_stage = True
            raise
        spoken = SpokenAttempt(
            self.attempt_id,
            self._age,
            StagePrompt(prompt.token_ids, prompt.placeholders, prompt.media),
            prompt.speech.to_stage(prompt.sampling.seed),
        )
        self._trace.add("speech_planned", attempt=self.attempt_id.attempt, cost_s=stage_plan.cost_s)
        failed = self._ended.put_nowait
        return SpeechCalls(self._context, spoken, stage_plan, self.track, self._setbacks, self._trace, failed)

    def _query(self) -> RouteQuery:
        prompt = self._prompt
        return RouteQuery(
            attempt_id=self.attempt_id,
            token_count=len(prompt.token_ids),
            scheme_to_hashes=prompt.scheme_to_hashes(self._context.cluster.kv_schemes()),
            media=prompt.media,
            placeholders=prompt.placeholders,
            feature_row_bytes=self._context.feature_row_bytes,
            excluded=self._setbacks.excluded(self._context.clock.now()) | self._kept_out,
            priority=prompt.priority,
        )

    def _generate_request(
        self, plan: RoutePlan, emitted: Sequence[tuple[int, ...]], max_tokens: int | None
    ) -> GenerateRequest:
        prompt = self._prompt
        stop = prompt.stop if max_tokens is None else msgspec.structs.replace(prompt.stop, max_tokens=max_tokens)
        return GenerateRequest(
            request_id=self.attempt_id.request_id,
            attempt=self.attempt_id.attempt,
            router_id=self._context.member_id,
            router_address=self._context.plane.address,
            token_ids=prompt.token_ids,
            placeholders=prompt.placeholders,
            media=prompt.media,
            sampling=prompt.sampling,
            stop=stop,
            age=self._age,
            num_choices=prompt.num_choices,
            cache_salt=prompt.cache_salt,
            priority=prompt.priority,
            dispatched_items=tuple(assignment.item_index for assignment in plan.assignments),
            emitted=tuple(emitted) if any(emitted) else (),
            prompt_outputs=prompt.prompt_outputs,
            side_names=self._side_names,
            next_stage=None if self._speech is None else self._speech.first_stage,
            adapter=prompt.adapter,
        )

    @property
    def _side_names(self) -> tuple[str, ...]:
        """Returns the side tensor whose rows the talker needs; none if it needs those of media and there are none."""
        settings = self._context.config.speech
        if self._speech is None or settings is None or not settings.talker_rows:
            return ()
        return (settings.talker_rows,) if settings.needs_all_rows or self._prompt.media else ()

    # ------------------------------------------------------------ awaiting the result

    async def result(self) -> GenerateResult | None:
        """Returns the terminal event, or None if it does not come within the time given to `settle`. Raises the error
        that ended the attempt: TargetGone, WorkerLost, an error of the worker or of an item, or DeadlineExceeded."""
        limit_s = self._context.config.dispatch_timeout_s
        try:
            async with asyncio.timeout(limit_s) as self._deadline:
                return await self._until_answered()
        except TimeoutError:
            if self._is_settling:
                return None
            raise DeadlineExceeded(f"the attempt to answer the request has not ended within {limit_s:g} s") from None
        finally:
            self._deadline = None

    async def _until_answered(self) -> GenerateResult:
        assert self._dispatcher is not None
        while True:
            ended = await self._ended.get()
            if isinstance(ended, WeftError):
                raise ended
            if ended is self._generate:
                return self._answered(self._generate)
            self._dispatcher.take(ended)  # type: ignore[arg-type]  # Every other task is a call to an encoder.

    def _answered(self, task: asyncio.Task[GenerateResult]) -> GenerateResult:
        assert self.plan is not None
        try:
            if task.cancelled():
                raise WorkerLost(f"the call to {self.plan.worker_id} was cancelled")
            result = task.result()
            self._is_answered = True
            self._trace.add_answer(self.attempt_id.attempt, self._host, self._sent_at_s, result)
            if result.error is not None and not self._is_settling:
                raise result.error.to_error()
        except WeftError as error:
            self._worker_failed(self.plan.worker_id, error)
            raise
        if result.error is None:
            now, first_token_s = self._context.clock.now(), self.first_token_s
            self._context.cluster.observe_generate(self.plan, result, now, first_token_s)
            self._context.metrics.observe_stages(self.modality, worker_stages(self.plan, result))
        return result

    def _worker_failed(self, worker_id: MemberId, error: WeftError) -> None:
        self._context.metrics.dispatch_errors.labels("generate", error.code).inc()
        self._trace.add("generate_failed", worker=worker_id, code=error.code, attempt=self.attempt_id.attempt)
        if isinstance(error, Unavailable):
            self._context.exclude(worker_id)
        if isinstance(error, ELSEWHERE):
            self._setbacks.exclude(worker_id, error, self._context.clock.now())

    @property
    def encoder_s(self) -> float:
        """Returns the seconds of encoders' forward passes that the attempt has used so far."""
        return 0.0 if self._dispatcher is None else self._dispatcher.encoder_s

    @property
    def failed_items(self) -> tuple[MediaItem, ...]:
        """Returns the media that failed to encode, if that failure ended the attempt."""
        indexes = () if self._dispatcher is None else self._dispatcher.failed_items
        return tuple(self._prompt.media[index] for index in indexes)

    @property
    def lacks_encoder(self) -> bool:
        """Tells whether the attempt ended because no encoder was left for one of its items."""
        return self._dispatcher is not None and self._dispatcher.lacks_encoder

    async def spoken(self) -> None:
        """Waits until the speech of the answer is complete, if there is any. Raises the error with which it failed, or
        DeadlineExceeded."""
        if self._speech is None:
            return
        limit_s = self._context.config.dispatch_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._speech.complete()
        except TimeoutError:
            raise DeadlineExceeded(f"the speech of the answer has not ended within {limit_s:g} s") from None

    def take_frame(self, member_id: MemberId, frame: StageFrame) -> bool:
        """Takes samples of the speech. Returns whether new ones became readable."""
        return self._speech is not None and self._speech.take_frame(member_id, frame)

    def settle(self, timeout_s: float) -> None:
        """Limits the wait for the terminal event to `timeout_s` from now, because all text has arrived."""
        if self._deadline is not None and not self._is_settling:
            self._is_settling = True
            self._deadline.reschedule(asyncio.get_running_loop().time() + timeout_s)

    def feature_needed(self, message: FeatureNeeded) -> None:
        """Requests the encoding of units that the worker lacks. If they can't be supplied, the attempt ends."""
        if self._dispatcher is None or self._is_settling or self._is_closed:
            return
        try:
            self._dispatcher.needed(message)
        except WeftError as error:
            self._ended.put_nowait(error)

    def member_left(self, member_id: MemberId) -> None:
        """Ends open calls to a member as lost, because the directory no longer lists the member. A drained member
        finishes its calls before it leaves, so only a dead or frozen member has any."""
        if self._is_closed or self.plan is None or self._dispatcher is None:
            return
        if self.plan.worker_id == member_id and self._generate is not None:
            self._generate.cancel()
        if self._speech is not None:
            self._speech.member_left(member_id)
        self._dispatcher.encoder_left(member_id)

    def worker_leaves(self, member_id: MemberId) -> None:
        """Ends the attempt if it is still on this worker, whose time to finish is over. The next attempt continues
        after the tokens that were sent."""
        if self._is_closed or self._is_settling or self.plan is None or self.plan.worker_id != member_id:
            return
        self._trace.add("moved", worker=member_id, attempt=self.attempt_id.attempt)
        self._ended.put_nowait(WorkerLeaving(f"the worker {member_id} is being stopped, so the request moves"))

    # ------------------------------------------------------------ abort and close

    def abort_choices(self, choices: Iterable[int]) -> None:
        """Asks the worker to stop generating tokens for these choices."""
        if self.plan is not None:
            self._context.send(self.plan.worker_id, AbortAttempt(*self.attempt_id, tuple(choices)))

    def close(self) -> None:
        """Ends the attempt: sends an abort at once to the worker and the encoders that still work on it, then cancels
        open calls. The method is idempotent."""
        if self.plan is None or self._is_closed:
            return
        self._is_closed = True
        if not self._is_answered:
            self._context.send(self.plan.worker_id, AbortAttempt(*self.attempt_id))
        if self._dispatcher is not None:
            self._dispatcher.close()
        if self._speech is not None:
            self._speech.close()
        if self._generate is not None:
            self._generate.cancel()
        self._context.cluster.note_ended(self.attempt_id, self._context.clock.now())
