"""Runs one simulated worker: the production scheduler, reporter and step costs, with the time of a step from a table.

A turn does what the engine's thread does in production (`llm_workers/engine.py`): it takes the queued commands, plans a
step, waits for as long as the step takes, commits it, and hands over one update. What the service does with an update
happens at the same moment: reports, block events, results, and features that are needed.

Where the next steps only decode the same sequences, the worker skips them: they are a *stretch*. A stretch ends after
its last step. If a command arrives before that, the stretch ends with the step that runs then. Features come through
the production `Receiver` into an inbox of limited size (`sim_transport`). The module knows nothing of routers' choices,
and nothing of encoders except their announcements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from fabric.contracts import (
    DTYPE_TO_BYTES,
    AttemptId,
    ChoiceResult,
    ErrorInfo,
    FeatureNeeded,
    GenerateRequest,
    GenerateResult,
    KvEvents,
    KvSnapshot,
    Member,
    MemberId,
    PlaneMessage,
    SequenceId,
    UnitKey,
    UnitReady,
    UnitRelease,
    WeftError,
    WorkerLost,
    WorkerReport,
)
from llm_workers.engine_interface import AbortedSequence, Admitted, FailedAttempt, Update
from llm_workers.features import FeatureEndpoint, Listener, MissingUnit, Receiver
from llm_workers.scheduling import (
    Arrival,
    FeatureReference,
    FinishedSequence,
    Scheduler,
    StepPlan,
    StepResult,
    StepWork,
)
from llm_workers.worker_config import WorkerConfig
from llm_workers.worker_reports import WorkerReporter
from loadtest.simulator.cost_tables import CostTable, LinkCosts
from loadtest.simulator.event_loop import VirtualLoop
from loadtest.simulator.sim_transport import FEATURE_DTYPE, SimInbox, SimPlane
from modalities.family import Positions

CALIBRATION = tuple(StepWork(decodes, tokens) for decodes, tokens in ((0, 16.0), (0, 512.0), (1, 0.0), (32, 0.0)))
"""Lists the steps to which a worker fits its costs at its start, as at boot in production."""
SNAPSHOT_PAGE_BLOCKS = 4096
_EMPTY = np.empty(0, dtype=np.uint8)
WorkerMessage = WorkerReport | KvEvents | KvSnapshot


class WorkerOutlets(Protocol):
    """A `WorkerOutlets` takes everything that leaves a worker."""

    def broadcast(self, message: WorkerMessage) -> None:
        """Sends a report or block events to every router."""
        ...

    def need(self, router_id: MemberId, message: FeatureNeeded) -> None: ...

    def release(self, encoder_address: str, message: UnitRelease) -> None: ...

    def first_token(self, request: GenerateRequest, at_s: float) -> None:
        """Takes the time at which the worker had the first token of an attempt."""
        ...

    def link_from(self, encoder_id: MemberId, worker: Member) -> LinkCosts: ...

    def device(self, member: SimWorker, begin_s: float, seconds: float, done: Callable[[], None]) -> None:
        """Calls `done` when a step that begins at `begin_s` at the earliest has ended on the worker's device."""
        ...


@dataclass(slots=True)
class OpenGeneration:
    """An `OpenGeneration` is an attempt at a worker, from its arrival to its result."""

    request: GenerateRequest
    first_output: int
    """Holds the token that is drawn first; the others follow by counting."""
    answer: Callable[[GenerateResult], None]
    num_cached: int = 0
    num_tokens: int = 0
    feature_bytes: int = 0
    """Sums the features that landed for the attempt."""


@dataclass(slots=True)
class Stretch:
    """A `Stretch` is a number of equal decode steps that are not planned one by one."""

    at_s: float
    """Holds the time at which the first step that is not advanced yet began."""
    step_s: float
    num_steps: int
    work: StepWork


class WorkerLimits(NamedTuple):
    """Holds what a worker may have and do besides its config."""

    max_model_len: int
    inbox_bytes: int
    report_spacing_s: float = 0.0
    """This is the shortest time between two reports."""


class SimWorker:
    """A `SimWorker` is one worker. `broadcast` takes its reports and block events, `need` takes the units that it needs
    again, and `release` returns leases to encoders. `is_fast` says whether it skips stretches."""

    def __init__(
        self,
        member: Member,
        config: WorkerConfig,
        table: CostTable,
        loop: VirtualLoop,
        outlets: WorkerOutlets,
        limits: WorkerLimits,
        *,
        is_fast: bool = True,
    ) -> None:
        max_model_len, inbox_bytes, self._spacing_s = limits
        self.member = member
        self.slowness = 1.0
        """Multiplies the time of every step; a fault changes it."""
        self.is_alive = True
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_planned = 0
        """Counts the steps that were planned; the others were skipped."""
        self.num_stretches = 0
        self.max_kept_bytes = self.kept_bytes = 0
        """Counts the bytes that the worker would have if it kept features until the ends of their requests."""
        self.max_kv_blocks = 0
        self._config, self._table, self._loop, self._outlets, self._is_fast = config, table, loop, outlets, is_fast
        self.scheduler = Scheduler(config, max_model_len, loop, table.worker.scale_tokens)
        self.inbox = SimInbox(inbox_bytes, loop, lambda source: outlets.link_from(MemberId(source), member))
        endpoint = FeatureEndpoint(member.member_id, SimPlane(member.address, self._send), self.inbox, loop)
        listener = Listener(self._unit_event, self._needed, self._fail, self._broken)
        self._receiver = receiver = Receiver(endpoint, config, (1, table.worker.hidden_size), self, listener)
        stats, windows = self.scheduler.stats(), receiver.pull_log.windows
        self._reporter = WorkerReporter(member.member_id, config, stats, receiver.stats, windows)
        self._reporter.epoch = member.epoch
        self._commands: deque[Callable[[Update], None]] = deque()
        self._attempt_to_open: dict[AttemptId, OpenGeneration] = {}
        self._sequence_to_open: dict[SequenceId, OpenGeneration] = {}
        """Holds the same ones by their only sequence, for what is done for every token."""
        self._is_turning = False
        """Says whether a step is on the device, or a turn is about to begin."""
        self._stretch: Stretch | None = None
        self._is_report_due = False
        self._reported_at_s = -self._config.report_interval_s
        self._admitted_since: list[AttemptId] = []

    # ------------------------------------------------------------ calls and messages

    def generate(self, request: GenerateRequest, first_output: int, answer: Callable[[GenerateResult], None]) -> None:
        """Takes a request; `answer` gets the result, once."""
        attempt_id = AttemptId(request.request_id, request.attempt)
        opened = OpenGeneration(request, first_output, answer)
        if not self.is_alive:
            answer(self._failure(opened, WorkerLost(f"{self.member.member_id} is gone")))
            return
        self._attempt_to_open[attempt_id] = self._sequence_to_open[SequenceId(*attempt_id, 0)] = opened
        num_tokens = len(request.token_ids)
        positions = Positions(np.arange(num_tokens, dtype=np.int64)[None], 0)
        try:
            arrival = self.scheduler.prepare(request, positions)
            if request.media:
                self._receiver.expect(attempt_id, request)
        except WeftError as error:
            self._close(attempt_id)
            answer(self._failure(opened, error))
            return
        if attempt_id in self._attempt_to_open:  # A feature that is here may differ from the plan.
            self._post(lambda update: self._add(arrival, update))

    def announce(self, message: UnitReady) -> None:
        """Takes an announcement, which may come before its request."""
        if self.is_alive:
            self._receiver.announce(message)

    def abort(self, attempt_id: AttemptId) -> None:
        self._post(lambda update: self._abort(attempt_id, update))

    def send_snapshot(self, send: Callable[[WorkerMessage], None]) -> None:
        """Sends all findable blocks, after the events that led to them."""
        if self.is_alive:
            self._settle()
            self._send_blocks()
            worker_id, epoch = self.member.member_id, self.member.epoch
            for last_seq, chains, number, is_last in self.scheduler.kv_snapshot(SNAPSHOT_PAGE_BLOCKS):
                send(KvSnapshot(worker_id, epoch, last_seq, tuple(chains), number, is_last))

    def start(self, first_report_s: float) -> None:
        """Fits the worker's costs to its steps, as at boot in production, and begins to report: first after
        `first_report_s`, and then at the configured interval."""
        self._reporter.costs.fit([(work, self._step_s(work)) for work in CALIBRATION])
        self._loop.soon(self._receiver.start)
        self._loop.after(first_report_s, self._tick)

    def die(self) -> list[tuple[OpenGeneration, int]]:
        """Ends the worker. Returns its open attempts with the number of tokens that each had generated."""
        self._settle()
        self.is_alive = False
        self._stretch = None
        self._commands.clear()
        self._receiver.stop()
        lost = [(opened, opened.num_tokens) for opened in self._attempt_to_open.values()]
        self._attempt_to_open.clear()
        self._sequence_to_open.clear()
        return lost

    @property
    def num_open(self) -> int:
        return len(self._attempt_to_open)

    def report(self) -> WorkerReport:
        """Returns the report of this moment, without acknowledgements."""
        self._settle()
        return self._reporter.report(self._loop.now())

    def busy_until_now_s(self) -> float:
        """Returns the time of all steps that have ended."""
        self._settle()
        return self.busy_s

    # ------------------------------------------------------------ features

    def encoder_left(self, encoder_id: MemberId) -> None:
        """Gives up what an encoder that died has announced or was sending."""
        if self.is_alive:
            self.inbox.peer_dead(encoder_id)
            self._receiver.drop_source(encoder_id)

    def hold_feature(self, reference: FeatureReference) -> None:
        """Hands the scheduler a reference; the receiver calls it."""
        self._post(lambda update: self.scheduler.hold_feature(reference))

    def evict_feature(self, unit: UnitKey) -> None:
        """Asks the scheduler to give up a unit; the receiver calls it to make room."""
        self._post(lambda update: self._evict(unit, update))

    def _evict(self, unit: UnitKey, update: Update) -> None:
        released = self.scheduler.evict_feature(unit)
        if released is not None:
            update.released.append(released)

    def _unit_event(self, attempt_id: AttemptId, event: str, unit: UnitKey) -> None:
        """Counts what the worker would have if it kept features until the ends of their requests."""
        opened, shape = self._attempt_to_open.get(attempt_id), self._receiver.store.planned_shape(attempt_id, unit)
        if event == "unit_landed" and opened is not None and shape is not None:
            nbytes = prod(shape) * DTYPE_TO_BYTES[FEATURE_DTYPE]
            opened.feature_bytes += nbytes
            self.kept_bytes += nbytes
            self.max_kept_bytes = max(self.max_kept_bytes, self.kept_bytes)

    def _needed(self, needs: Sequence[MissingUnit]) -> None:
        """Asks the routers of the attempts for units."""
        grouped: dict[tuple[AttemptId, str], list[UnitKey]] = {}
        for need in needs:
            grouped.setdefault((need.attempt, need.reason), []).append(need.unit)
        for (attempt_id, reason), units in grouped.items():
            if opened := self._attempt_to_open.get(attempt_id):
                message = FeatureNeeded(self.member.member_id, *attempt_id, tuple(units), reason)
                self._outlets.need(opened.request.router_id, message)

    def _broken(self, error: WeftError) -> None:
        raise RuntimeError(f"the features of {self.member.member_id} are in disorder: {error.message}")

    def _fail(self, attempt_id: AttemptId, error: WeftError) -> None:
        """Ends an attempt whose features are not those that it planned."""
        if opened := self._close(attempt_id):
            opened.answer(self._failure(opened, error))
            self.abort(attempt_id)

    def _send(self, address: str, message: PlaneMessage) -> None:
        assert isinstance(message, UnitRelease)
        self._outlets.release(address, message)

    # ------------------------------------------------------------ turns

    def slow_down(self, slowness: float) -> None:
        """Sets the factor on the times of the steps that begin from now on."""
        if self._stretch is not None:
            self._interrupt()  # The step that runs now ends as it began.
        self.slowness = slowness

    def _post(self, command: Callable[[Update], None]) -> None:
        if not self.is_alive:
            return
        self._commands.append(command)
        if self._stretch is not None:
            self._interrupt()
        elif not self._is_turning:
            self._is_turning = True
            self._loop.soon(self._turn)

    def _turn(self) -> None:
        """Takes the commands and begins a step or a stretch."""
        if not self.is_alive:
            return
        update = Update()
        while self._commands:
            self._commands.popleft()(update)
        update.released += self.scheduler.release_unneeded()
        if self._is_fast and update.is_empty and (num_steps := self.scheduler.num_steady_steps()) > 1:
            self._begin_stretch(num_steps)
            return
        plan = self.scheduler.plan_step()
        if plan.num_sequences:
            self._begin_step(plan, update)
        else:
            self._is_turning = False
            self._publish(update)

    def _begin_step(self, plan: StepPlan, update: Update) -> None:
        self._is_turning = True
        self.num_planned += 1
        begun_s = self._loop.now()
        work = self.scheduler.work(plan)
        step_s = self._step_s(work)
        if work.weighted_tokens:
            update.begun_work = work
            self._publish(update)
            update = Update()
        self._outlets.device(self, begun_s, step_s, lambda: self._end_step(plan, update, begun_s))

    def _end_step(self, plan: StepPlan, update: Update, begun_s: float) -> None:
        if not self.is_alive:
            return
        now_s = self._loop.now()
        drawn: dict[SequenceId, tuple[int, ...]] = {}
        for chunk in plan.others:
            if chunk.sampling is not None:
                drawn[chunk.sequence_id] = self._drawn(chunk.sequence_id, chunk.draw_index)
        if plan.decodes is not None:
            rows = zip(plan.decodes.sequence_ids, plan.decodes.draw_indexes.tolist(), strict=True)
            opens = self._sequence_to_open
            drawn.update({sequence_id: (opens[sequence_id].first_output + index,) for sequence_id, index in rows})
        update.events = self.scheduler.commit(plan, StepResult(drawn))
        update.step_work, update.step_s = self.scheduler.work(plan), now_s - begun_s
        update.released += self.scheduler.release_unneeded()
        self.busy_s += update.step_s
        self.num_steps += 1
        self._publish(update, is_plain=not plan.others)
        self._turn()

    def _step_s(self, work: StepWork) -> float:
        return self._table.worker.step_s(work) * self.slowness

    def _drawn(self, sequence_id: SequenceId, index: int) -> tuple[int, ...]:
        opened = self._sequence_to_open.get(sequence_id)
        return (index if opened is None else opened.first_output + index,)

    # ------------------------------------------------------------ stretches

    def _begin_stretch(self, num_steps: int) -> None:
        now_s = self._loop.now()
        work = StepWork(self.scheduler.stats().num_decoding, 0.0)
        step_s = self._step_s(work)
        self._is_turning = True
        self.num_stretches += 1
        self._stretch = stretch = Stretch(now_s, step_s, num_steps, work)
        end_s = now_s
        for _ in range(num_steps):  # A product would round otherwise than the sums of single steps.
            end_s += step_s
        self._loop.at(end_s, self._end_stretch, stretch)

    def _end_stretch(self, stretch: Stretch) -> None:
        if stretch is self._stretch:
            self._settle()
            self._stretch = None
            self._turn()

    def _interrupt(self) -> None:
        """Ends the stretch with the step that runs now, because a command has to be taken after it."""
        self._settle()
        stretch = self._stretch
        assert stretch is not None
        if stretch.num_steps <= 1:
            return  # The event that ends the stretch comes with the end of this step.
        self._stretch = last = replace(stretch, num_steps=1)
        self._loop.at(stretch.at_s + stretch.step_s, self._end_stretch, last)

    def _settle(self) -> None:
        """Advances the scheduler by the steps of the stretch that have ended."""
        stretch, now_s = self._stretch, self._loop.now()
        if stretch is None:
            return
        num_ended, ends = 0, stretch.at_s
        while num_ended < stretch.num_steps and ends + stretch.step_s <= now_s:
            begun_s, ends = ends, ends + stretch.step_s
            self._reporter.observe_step(stretch.work, ends - begun_s, ends)
            self.busy_s += ends - begun_s
            num_ended += 1
        if not num_ended:
            return
        for tokens in self.scheduler.run_steady_steps(num_ended, self._draw_many):
            if opened := self._sequence_to_open.get(tokens.sequence_id):
                opened.num_tokens += num_ended
        self.num_steps += num_ended
        stretch.at_s, stretch.num_steps = ends, stretch.num_steps - num_ended
        first_seq, events = self.scheduler.drain_kv_events()
        self._reporter.take(Update(stats=self.scheduler.stats(), kv_first_seq=first_seq, kv_events=events, at_s=ends))

    def _draw_many(self, sequence_id: SequenceId, first: int, count: int) -> range:
        opened = self._sequence_to_open.get(sequence_id)
        base = 0 if opened is None else opened.first_output
        return range(base + first, base + first + count)

    # ------------------------------------------------------------ commands

    def _add(self, arrival: Arrival, update: Update) -> None:
        try:
            update.admitted.append(Admitted(arrival.attempt_id, self.scheduler.add(arrival)))
        except WeftError as error:
            update.failed.append(FailedAttempt(arrival.attempt_id, error))

    def _abort(self, attempt_id: AttemptId, update: Update) -> None:
        times = self.scheduler.times_of(attempt_id)
        for sequence_id in self.scheduler.abort(attempt_id):
            update.aborted.append(AbortedSequence(sequence_id, times[sequence_id]))
        self._close(attempt_id)

    def _close(self, attempt_id: AttemptId) -> OpenGeneration | None:
        """Forgets an attempt, and returns it if it was open."""
        self._sequence_to_open.pop(SequenceId(*attempt_id, 0), None)
        opened = self._attempt_to_open.pop(attempt_id, None)
        if opened is not None and opened.request.media:
            self.kept_bytes -= opened.feature_bytes
            self._receiver.end(attempt_id)
        return opened

    # ------------------------------------------------------------ what the service does with an update

    def _publish(self, update: Update, *, is_plain: bool = False) -> None:
        """Hands out what a turn changed. A step that only decodes sends its block events with a later one, so that it
        can be skipped."""
        update.needed.extend(self.scheduler.drain_needed())
        update.stats, update.at_s = self.scheduler.stats(), self._loop.now()
        # Events are taken before the next step is planned, because planning may evict blocks for that step.
        update.kv_first_seq, update.kv_events = self.scheduler.drain_kv_events()
        self.max_kv_blocks = max(self.max_kv_blocks, update.stats.kv_blocks_used)
        self._apply_to_features(update)
        for failed in update.failed:
            if opened := self._close(failed.attempt):
                opened.answer(self._failure(opened, failed.error))
        finished = () if update.events is None else update.events.finished
        if update.events is not None:
            self._count_tokens(update)
        self._reporter.take(update)
        for one in finished:
            self._finish(one)
        self._admitted_since += [admitted.attempt for admitted in update.admitted]
        if not is_plain or update.released or update.admitted or finished:
            self._report_soon()

    def _count_tokens(self, update: Update) -> None:
        assert update.events is not None
        for tokens in update.events.tokens:
            opened = self._sequence_to_open.get(tokens.sequence_id)
            if opened is not None:
                if not opened.num_tokens:
                    self._outlets.first_token(opened.request, self._loop.now())
                opened.num_tokens += len(tokens.token_ids)

    def _apply_to_features(self, update: Update) -> None:
        """Tells the receiver what a turn did to features, in the order of production (`WorkerService`)."""
        receiver = self._receiver
        for released in update.released:
            receiver.release(released)
        if reads := self.scheduler.drain_reads():
            receiver.update_reads(reads)
        for attempt_id, admission in update.admitted:
            receiver.admit(attempt_id, admission.missing_units)
        for sequence_id, unit, reason in update.needed:
            receiver.need(sequence_id.attempt_id, unit, reason)
        if receiver.store.num_held or receiver.store.num_attempts:
            receiver.settle()

    def _finish(self, finished: FinishedSequence) -> None:
        attempt_id = finished.sequence_id.attempt_id
        opened = self._close(attempt_id)
        if opened is None:
            return
        times = finished.times
        choice = ChoiceResult(0, finished.finish_reason, finished.num_tokens)
        opened.answer(
            GenerateResult(
                worker_id=self.member.member_id,
                choices=(choice,),
                num_prompt_tokens=finished.num_prompt_tokens,
                num_cached_tokens=finished.num_cached_tokens,
                queue_s=times.queue_s,
                prefill_s=times.prefill_s,
                held_s=times.held_s,
                first_token_s=times.first_token_s,
            )
        )

    def _failure(self, opened: OpenGeneration, error: WeftError) -> GenerateResult:
        num_prompt = len(opened.request.token_ids)
        return GenerateResult(self.member.member_id, (), num_prompt, 0, error=ErrorInfo.of(error))

    def _send_blocks(self) -> None:
        if (message := self._reporter.take_kv_events()) is not None:
            self._outlets.broadcast(message)

    def _report_soon(self) -> None:
        if not self._is_report_due:
            self._is_report_due = True
            self._loop.at(self._reported_at_s + self._spacing_s, self._report)

    def _report(self) -> None:
        self._is_report_due = False
        if not self.is_alive:
            return
        self._settle()
        self._send_blocks()
        # No message is lost in a simulation, so one report acknowledges a dispatch, and routers ignore those of others.
        report = msgspec.structs.replace(
            self._reporter.report(self._loop.now()),
            acknowledged=tuple(self._admitted_since),
        )
        self._receiver.pull_log.forget_windows()
        self._admitted_since, self._reported_at_s = [], self._loop.now()
        self._outlets.broadcast(report)

    def _tick(self) -> None:
        if self.is_alive:
            self._receiver.settle()
            self._receiver.check_at_rest()
            if self._loop.now() - self._reported_at_s >= self._config.report_interval_s:
                self._report()
            self._loop.after(self._config.report_interval_s, self._tick)
