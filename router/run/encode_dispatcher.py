"""Keeps one attempt's worker supplied with features. It requests an encoding for each item that the worker lacks,
requests it again when a feature is lost, and uses another encoder when one fails.

The module knows nothing of tokens or of the worker's call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn

import msgspec

from fabric.contracts import (
    AbortAttempt,
    Aborted,
    AttemptId,
    Busy,
    DeadlineExceeded,
    Destination,
    EncodeFailed,
    EncodeRequest,
    EncodeResult,
    EncoderLost,
    FeatureNeeded,
    ItemResult,
    MachineBusy,
    MemberId,
    NoCapacity,
    TargetGone,
    TransferError,
    Unavailable,
    WeftError,
    WorkerBackedUp,
    WorkerLost,
)
from router.observe import RequestTrace, item_stages, modality_class
from router.planning import RoutePlan, RouteQuery
from router.prompt import MediumFile, Prompt
from router.run.context import RouterContext
from router.run.failures import FAILURES, Setbacks

ELSEWHERE = (Unavailable, Busy, TransferError)
"""Lists failures of one member that may not happen on another."""
NOT_COVERED, LOST = "not_covered", "lost"
SHORTEST_CALL_S = 0.1
"""An encoder gets this much time if the attempt has less left; no call is sent without a limit."""


class OpenEncode(NamedTuple):
    """An `OpenEncode` is a call to an encoder that has not ended."""

    encoder_id: MemberId
    items: tuple[int, ...]
    host: str
    """Names the machine of the encoder."""
    sent_at_s: float
    """Holds the time of the call on the router's clock."""


class Dispatch(NamedTuple):
    """A `Dispatch` holds what is the same for all encodings of one attempt. `query` is called again for each plan,
    because exclusions grow."""

    attempt_id: AttemptId
    age: tuple[float, str]
    query: Callable[[], RouteQuery]
    plan: RoutePlan
    deadline_s: float
    """This is the time on the router's clock at which the attempt ends."""


class EncodeDispatcher:
    """An `EncodeDispatcher` makes the encoding calls of one attempt. When a call ends, `ended` is called in the loop
    with the call's task; the owner then passes the task to `take`."""

    def __init__(
        self,
        context: RouterContext,
        prompt: Prompt,
        dispatch: Dispatch,
        setbacks: Setbacks,
        trace: RequestTrace,
        ended: Callable[[asyncio.Task[EncodeResult]], None],
    ) -> None:
        self._context = context
        self._prompt = prompt
        self._dispatch = dispatch
        self._setbacks = setbacks
        self._trace = trace
        self._ended = ended
        self.failed_items: tuple[int, ...] = ()
        """Holds the indexes of items that failed to encode, if that failure ended the attempt."""
        self.lacks_encoder = False
        """This is True if the attempt ended because no encoder was left for an item."""
        self.encoder_s = 0.0
        """Sums the shares of forward passes that the attempt's items have taken."""
        self._calls: dict[asyncio.Task[EncodeResult], OpenEncode] = {}
        self._num_encodes = [0] * len(prompt.media)
        self._num_refusals = [0] * len(prompt.media)
        """Counts, per item, the encodings that an encoder refused because it was too busy."""

    def start(self) -> None:
        """Sends all encodings that the plan assigns. Awaits nothing."""
        self._send(self._dispatch.plan.assignments)

    def take(self, task: asyncio.Task[EncodeResult]) -> None:
        """Takes a call that has ended, and sends items that failed but may succeed elsewhere to another encoder. Raises
        the error that ends the attempt."""
        encoder_id, items, host, sent_at_s = self._calls.pop(task)
        if not any(call.encoder_id == encoder_id for call in self._calls.values()):
            # A call that failed leaves no work and no feature at the encoder, which other requests might wait for.
            now = self._context.clock.now()
            self._context.cluster.note_encoding_ended(self._dispatch.attempt_id, encoder_id, now)
        try:
            if task.cancelled():
                raise EncoderLost(f"the call to {encoder_id} was cancelled")
            result = task.result()
        except WorkerBackedUp as error:
            self._setbacks.worker_refused(self._dispatch.plan.worker_id)
            self._worker_backed_up(error)
        except ELSEWHERE as error:
            self._encoder_failed(encoder_id, items, error)
            return
        except WeftError as error:
            self._give_up(items, error)
        plan, modality = self._dispatch.plan, modality_class(item.modality for item in self._prompt.media)
        self._trace.add_answer(plan.attempt_id.attempt, host, sent_at_s, result)
        self._context.cluster.observe_encode(plan, self._encoded(result), self._context.clock.now())
        self._context.metrics.observe_stages(modality, item_stages(plan, result))
        self.encoder_s += sum(self._share_s(item) for item in result.items)
        failed: dict[int, WeftError] = {}
        code_to_moved: dict[str, tuple[WeftError, list[int]]] = {}
        for each in result.items:
            if each.error is None or (failure := self._item_failed(encoder_id, each, each.error.to_error())) is None:
                continue
            if isinstance(failure, ELSEWHERE):
                code_to_moved.setdefault(failure.code, (failure, []))[1].append(each.index)
            else:
                failed[each.index] = failure
        if failed:
            refused = [index for index, error in failed.items() if not isinstance(error, FAILURES)]
            self._give_up(refused or list(failed), failed[refused[0] if refused else min(failed)])
        for failure, moved in code_to_moved.values():
            self._encoder_failed(encoder_id, moved, failure)

    def _encoded(self, result: EncodeResult) -> EncodeResult:
        """Returns the result without features that the client has sent, from which no cost of encoding is learned."""
        encoded = tuple(each for each in result.items if not self._prompt.media[each.index].is_given)
        return msgspec.structs.replace(result, items=encoded)

    def needed(self, message: FeatureNeeded) -> None:
        """Requests encodings of units that the worker turns out to lack. If the reason is `not_covered` or `lost`,
        items that an open call will still deliver are not requested twice. Raises the error that ends the attempt."""
        self._trace.add("feature_needed", num_units=len(message.units), reason=message.reason)
        hashes = {unit.mm_hash for unit in message.units}
        may_be_coming = message.reason in (NOT_COVERED, LOST)
        coming = {index for call in self._calls.values() for index in call.items} if may_be_coming else set()
        hash_to_index = {item.mm_hash: item.index for item in reversed(self._prompt.media) if item.mm_hash in hashes}
        wanted = sorted(index for index in hash_to_index.values() if index not in coming)
        if wanted:
            self._again(
                wanted, NoCapacity(f"no encoder is available for units that the worker needs ({message.reason})")
            )

    def encoder_left(self, encoder_id: MemberId) -> None:
        """Ends the calls to an encoder as lost, because the directory no longer lists the encoder (a frozen process
        answers no call)."""
        for task, call in self._calls.items():
            if call.encoder_id == encoder_id:
                task.cancel()

    def close(self) -> None:
        """Sends an abort to the encoders that still work for the attempt, and cancels their calls."""
        for encoder_id in {call.encoder_id for call in self._calls.values()}:
            self._context.send(encoder_id, AbortAttempt(*self._dispatch.attempt_id))
        for task in self._calls:
            task.cancel()
        self._calls.clear()

    # ------------------------------------------------------------ failures

    def _give_up(self, items: Sequence[int], error: WeftError) -> NoReturn:
        """Ends the attempt with `error`, and records that `items`, and all items with the same content, are the
        reason."""
        hashes = {self._prompt.media[index].mm_hash for index in items}
        self.failed_items = tuple(item.index for item in self._prompt.media if item.mm_hash in hashes)
        error.param = error.param or self._prompt.media[min(items)].part
        self._context.metrics.dispatch_errors.labels("encode", error.code).inc()
        raise error

    def _share_s(self, item: ItemResult) -> float:
        """Returns the item's share of the forward passes that it was part of, by cost."""
        times, own_cost = item.times, self._prompt.media[item.index].cost
        return times.encode_s * own_cost / max(times.batch_cost, own_cost) if own_cost > 0 else 0.0

    def _item_failed(self, encoder_id: MemberId, item: ItemResult, error: WeftError) -> WeftError | None:
        """Handles the error of one item. Returns the error if it is still to be handled, or None if the item's encoding
        was requested again. Raises an error that ends the attempt for a reason other than the encoder."""
        error.param = error.param or self._prompt.media[item.index].part
        if isinstance(error, Aborted):  # The router's lease had expired at the encoder, which itself is healthy.
            self._again(
                (item.index,),
                TargetGone(f"{encoder_id} has aborted the attempt because the lease of its router has expired"),
            )
            return None
        # The encoder noticed before this router that the worker has left; the encoder is not at fault.
        if isinstance(error, WorkerLost):
            self._context.exclude(self._dispatch.plan.worker_id)
            raise error
        if isinstance(error, WorkerBackedUp):
            self._worker_backed_up(error)
        return error

    def _worker_backed_up(self, error: WorkerBackedUp) -> NoReturn:
        """Ends the attempt, because its worker does not take what the encoder holds for it; another worker would."""
        worker_id = self._dispatch.plan.worker_id
        self._context.metrics.dispatch_errors.labels("encode", error.code).inc()
        self._trace.add("worker_backed_up", worker=worker_id)
        # The backed-up worker looks idle; the request tries it again only after the other workers.
        least_s = self._asked_s(range(len(self._prompt.media))) * self._context.config.max_encodes_per_item
        self._setbacks.exclude(worker_id, error, self._context.clock.now(), least_s)
        raise error

    def _encoder_failed(self, encoder_id: MemberId, items: Sequence[int], error: WeftError) -> None:
        self._context.metrics.dispatch_errors.labels("encode", error.code).inc()
        self._trace.add("encode_failed", encoder=encoder_id, code=error.code, items=list(items))
        if isinstance(error, Unavailable):
            self._context.exclude(encoder_id)
        for index in items if isinstance(error, Busy) else ():
            self._num_refusals[index] += 1
        # An encoder that has used up its time is asked again only after the other encoders have had theirs.
        least_s = self._asked_s(items) * self._context.config.max_encodes_per_item
        least_s = least_s if isinstance(error, MachineBusy) else 0.0
        self._setbacks.exclude(encoder_id, error, self._context.clock.now(), least_s)
        try:
            self._setbacks.encoder_failed(encoder_id, error)
        except EncodeFailed as end:
            self._give_up(items, end)
        self._again(items, error)

    def _again(self, items: Sequence[int], cause: WeftError) -> None:
        """Requests encodings of `items` again, on the encoders that the planner finds best now. Raises `cause` if no
        encoder is left; also if `cause` is a Busy, and no time is left or encoders have refused an item too often.
        Raises EncodeFailed if an item's encodings failed, or its feature was lost, too often."""
        most = self._context.config.max_encodes_per_item
        is_refused = any(self._num_refusals[index] >= most for index in items)
        if isinstance(cause, Busy) and (is_refused or self._left_s() <= 0):
            raise cause
        spent = next((index for index in items if self._num_encodes[index] - self._num_refusals[index] >= most), None)
        if spent is not None:
            message = (
                f"the feature of the medium was not delivered in {most} tries; the last one failed with {cause.code}"
            )
            self._give_up((spent,), EncodeFailed(message))
        query, now = self._dispatch.query(), self._context.clock.now()
        try:
            chosen = self._context.cluster.plan_encoding(query, self._dispatch.plan.worker_id, items, now)
        except NoCapacity:
            self.lacks_encoder = True
            raise cause from None
        self._context.cluster.note_encoding(self._dispatch.attempt_id, chosen, now, self._prompt.priority)
        self._send([(terms.item_index, terms.encoder_id) for terms in chosen])

    # ------------------------------------------------------------ calls

    def _send(self, assignments: Iterable[tuple[int, MemberId]]) -> None:
        """Makes one call per encoder. A picture that a request contains twice is encoded, and announced, once."""
        encoder_to_items: dict[MemberId, list[int]] = {}
        seen: set[str] = set()
        for index, encoder_id in assignments:
            identity = self._prompt.media[index].mm_hash
            if identity not in seen:
                seen.add(identity)
                encoder_to_items.setdefault(encoder_id, []).append(index)
        for encoder_id, items in encoder_to_items.items():
            self._call(encoder_id, tuple(items))

    def _call(self, encoder_id: MemberId, items: tuple[int, ...]) -> None:
        (request_id, attempt), age, _, plan, _ = self._dispatch
        for index in items:
            self._num_encodes[index] += 1
        request = EncodeRequest(
            request_id=request_id,
            attempt=attempt,
            router_id=self._context.member_id,
            items=tuple(self._prompt.media[index] for index in items),
            destination=Destination(plan.worker_id, plan.worker_address),
            age=age,
            priority=self._prompt.priority,
            time_left_s=min(self._asked_s(items), max(SHORTEST_CALL_S, self._left_s())),
        )
        media = [self._prompt.media_files[index] for index in items]
        task = self._context.tasks.spawn(self._encode(encoder_id, request, media), f"encode {request_id}/{attempt}")
        host = self._context.machine_of(encoder_id)
        self._calls[task] = OpenEncode(encoder_id, items, host, self._context.clock.now())
        task.add_done_callback(self._ended)
        self._trace.add("dispatched", to=encoder_id, attempt=attempt, items=list(items))

    def _asked_s(self, items: Iterable[int]) -> float:
        """Returns the time for a call, which is the sum of the times of its items."""
        return sum(self._context.config.encode_timeout_s(self._prompt.media[index].modality) for index in items)

    def _left_s(self) -> float:
        """Returns how much time an encoder has to answer so that its answer still counts in this attempt."""
        return self._dispatch.deadline_s - self._context.clock.now() - self._context.config.encode_grace_s

    async def _encode(self, encoder_id: MemberId, request: EncodeRequest, media: Sequence[MediumFile]) -> EncodeResult:
        """Calls an encoder and returns its result. A working encoder answers within the time that the call has left,
        however busy it is. An encoder that does not answer is considered silent, and the call is cancelled, which frees
        what the call holds there. Raises DeadlineExceeded for a silent encoder, and what the encoder raised."""
        limit_s = request.time_left_s + self._context.config.encode_grace_s
        call = self._context.tasks.spawn(self._context.pools.encoders.encode(encoder_id, request, media), "encode call")
        try:
            await asyncio.wait([call], timeout=limit_s)
            if call.done():  # An answer that has arrived counts, even if this loop reaches it late.
                return call.result()
            raise DeadlineExceeded(f"the encoder {encoder_id} has not answered within {limit_s:g} s")
        finally:
            call.cancel()
