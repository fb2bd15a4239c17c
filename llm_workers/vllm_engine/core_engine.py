"""Runs vLLM's engine core as the engine of a worker.

    command queue -> [ engine thread: vLLM's EngineCore, with the doorstep ] -> Update

The engine core runs in a thread of the worker's process, so the engine knows exactly what each step did, and one turn
is one update, as with Weft's own engine: no second book of requests is kept in step over a socket. The ranks run in
processes of their own where vLLM starts some. Each turn takes the queued commands and lets the core do one step; when
no sequence can compute a token, the thread waits for the next command.

`SequenceBook` keeps what the contract needs of each sequence, and `FeatureBoard` what it needs of features; vLLM keeps
blocks and decides what to compute. This module knows nothing of planes, futures or routers, and nothing of tensors.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

from fabric.contracts import (
    AttemptId,
    Clock,
    ConfigError,
    EngineFailed,
    EngineStats,
    GenerateRequest,
    ProtocolError,
    UnitKey,
    WeftError,
    WorkerLost,
    context_scale_tokens,
)
from llm_workers.engine_interface import AbortedSequence, Admitted, FailedAttempt, Update
from llm_workers.engine_thread import EngineThread, OpenSnapshots
from llm_workers.scheduling import (
    NOT_COVERED,
    AdmittedSequences,
    Arrival,
    FeatureReference,
    Guide,
    NeededUnit,
    Sequence,
    StepCosts,
    StepWork,
    prepare,
)
from llm_workers.vllm_engine.block_mirror import BlockMirror
from llm_workers.vllm_engine.doorstep_scheduler import Doorstep, attach
from llm_workers.vllm_engine.engine_outputs import BlockEventTaker, core_outputs
from llm_workers.vllm_engine.engine_requests import (
    adapters_of,
    check_supported,
    engine_request,
    request_name,
    warm_up_request,
)
from llm_workers.vllm_engine.feature_board import FeatureBoard, FeatureLoad
from llm_workers.vllm_engine.guide_grammar import GuideBackend, GuideGrammar, constrained
from llm_workers.vllm_engine.sequence_book import (
    BookedChoice,
    PlannedChunk,
    SequenceBook,
    StepOutcome,
    finished_sequence,
)
from llm_workers.worker_config import WorkerConfig
from modalities.family import Family, Positions

_LOG = logging.getLogger(__name__)
MakeCore = Callable[[Callable[[], None]], Any]
"""Creates vLLM's `EngineCore`, in the engine thread. The core calls the given function, in a thread of its own, when a
rank has died."""
WARM_UP_TOKENS = (16, 256, 2048)
"""Lists the lengths of the prompts that are computed at boot, to learn what steps cost."""


class VllmEngine:
    """A `VllmEngine` implements `WorkerEngine`."""

    def __init__(
        self,
        config: WorkerConfig,
        family: Family,
        make_core: MakeCore,
        clock: Clock,
        on_update: Callable[[Update], None],
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        """Creates an engine whose core is made by `prepare`. `config.block_size` must be the size of vLLM's blocks.
        `adapters` maps the name of each LoRA adapter to the directory of its files."""
        self._config, self._family, self._clock, self._on_update = config, family, clock, on_update
        self._make_core = make_core
        self._adapters = adapters_of(adapters or {})
        self._board = FeatureBoard(is_overlap_enabled=config.is_overlap_enabled)
        self._book = self._new_book()
        self._mirror = BlockMirror()
        self._core: Any = None
        self._doorstep: Doorstep | None = None
        self._max_model_len = family.shape.max_model_len
        self._snapshots = OpenSnapshots()
        self._update = Update()
        """Holds what the present turn has done since the last update was made."""
        self._ready: list[Update] = []
        """Holds the updates that are made. They are handed over when the ranks compute the next step, because the
        event loop then needs the interpreter lock for as long as it sends tokens, and this thread does not."""
        self._seconds = {"step": 0.0, "output": 0.0}
        self._is_idle = True
        self._costs: StepCosts | None = None
        self._is_prepared: asyncio.Future[None] | None = None
        self._may_start = threading.Event()
        self._thread = EngineThread(self._run)

    def _new_book(self) -> SequenceBook:
        return SequenceBook(self._board, self._clock, context_scale_tokens(self._family.shape.hidden_size))

    # ------------------------------------------------------------ any thread

    async def prepare(self, costs: StepCosts) -> None:
        """Creates vLLM's engine core and fits `costs` to the steps of a few prompts. Raises ConfigError if vLLM can't
        run this model with this config on this machine."""
        self._costs = costs
        self._is_prepared = asyncio.get_running_loop().create_future()
        self._thread.start()
        await self._is_prepared

    def start(self) -> None:
        self._may_start.set()

    def stop(self) -> None:
        """Ends the engine after its current step and stops the ranks. The call is idempotent."""
        self._may_start.set()
        self._thread.stop()

    def check_health(self) -> None:
        self._thread.check_health()

    def stats(self) -> EngineStats:
        return self._book.stats(0, 0, 0)

    def seconds_by_part(self) -> Mapping[str, float]:
        return dict(self._seconds)

    def add(self, request: GenerateRequest, positions: Positions, guide: Guide | None = None) -> None:
        try:
            check_supported(request, self._adapters)
            arrival = prepare(request, positions, self._config, self._max_model_len, self._clock.now(), guide)
        except WeftError as error:
            failed = FailedAttempt(AttemptId(request.request_id, request.attempt), error)
            self._thread.command(lambda update: update.failed.append(failed))
        else:
            self._thread.command(lambda update: self._add(request, arrival, update))

    def abort(self, attempt: AttemptId, choices: SequenceOf[int] = ()) -> None:
        self._thread.command(lambda update: self._abort(attempt, choices, update))

    def hold_feature(self, reference: FeatureReference) -> None:
        self._thread.command(lambda update: self._board.hold(reference))

    def evict_feature(self, unit: UnitKey) -> None:
        self._thread.command(lambda update: self._evict(unit, update))

    def request_snapshot(self, address: str) -> None:
        self._thread.command(lambda update: self._begin_snapshot(address))

    # ------------------------------------------------------------ engine thread

    def _run(self) -> None:
        if not self._is_opened():
            self._close()
            return
        self._may_start.wait()
        try:
            self._publish(self._update, is_forced=True)
            self._hand_over_updates()
            while self._turn():
                pass
            self._hand_over_updates()
        except Exception as error:
            # This is the loop of the engine's thread; the owner of the updates ends every request.
            _LOG.exception("vLLM's engine core has died")
            last = self._thread.died(WorkerLost(f"vLLM's engine core has died: {type(error).__name__}"))
            self._hand_over_updates()
            self._on_update(last)
        self._close()

    def _is_opened(self) -> bool:
        """Creates the core and ends the call of `prepare`. Returns False if vLLM can't run the model."""
        try:
            self._open()
        except Exception as error:
            # This is the top of the engine's thread; the caller of `prepare` gets the reason.
            _LOG.exception("vLLM's engine core can't be created")
            refused = error if isinstance(error, WeftError) else ConfigError(f"vLLM can't run this model: {error}")
            self._end_prepare(refused)
            return False
        self._end_prepare(None)
        return True

    def _end_prepare(self, error: WeftError | None) -> None:
        """Ends the call of `prepare`, whose caller may have left."""
        future = self._is_prepared
        assert future is not None

        def end() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        future.get_loop().call_soon_threadsafe(end)

    def _open(self) -> None:
        """Creates the core, learns its sizes, and puts the doorstep into it."""
        self._core = core = self._make_core(lambda: self._thread.command(_fail))
        scheduler = core.scheduler
        if scheduler.hash_block_size != self._config.block_size:
            size = scheduler.hash_block_size
            raise ConfigError(f"vLLM takes KV blocks of {size} tokens here: set workers.block_size to {size}")
        self._config = replace(self._config, num_blocks=scheduler.cache_config.num_gpu_blocks)
        self._doorstep = Doorstep(self._board, self, scheduler.encoder_cache_manager)
        attach(core, self._doorstep)
        core.collective_rpc("use_positions_of_requests")
        core.collective_rpc("use_tokens_of_requests")
        scheduler.kv_event_publisher = BlockEventTaker(self._mirror)
        core.structured_output_manager.backend = GuideBackend(core.vllm_config, None, self._family.shape.vocab_size)
        self._max_model_len = min(self._max_model_len, scheduler.max_model_len)
        self._load_adapters()
        self._warm_up()

    def _load_adapters(self) -> None:
        """Loads every adapter into every rank, so that a broken one is found now and no request waits for a disk."""
        for adapter in self._adapters.values():
            try:
                self._core.add_lora(adapter)
            except Exception as error:
                # vLLM and its ranks raise errors of many classes for a file that they can't use.
                raise ConfigError(f"vLLM can't load the adapter {adapter.name} ({adapter.path}): {error}") from error
            # A rank has the modules of its pipeline stage only.
            by_rank = self._core.collective_rpc("modules_without_place", args=(adapter.adapter_id,))
            if nowhere := sorted(set.intersection(*map(set, by_rank))):
                named = ", ".join(nowhere[:3])
                raise ConfigError(f"the adapter {adapter.name} changes {named}, which vLLM does not find in this model")

    def _close(self) -> None:
        if self._core is not None:
            self._core.shutdown()

    def _warm_up(self) -> None:
        """Computes a few prompts, and fits the costs of steps to them. The first prompt is not counted, because its
        steps may compile or load something."""
        most = min(self._max_model_len - 2, self._config.max_step_tokens)
        lengths = [min(length, most) for length in WARM_UP_TOKENS]
        steps: list[tuple[StepWork, float]] = []
        for number, length in enumerate((lengths[0], *lengths)):
            request = warm_up_request(number, length)
            positions = self._family.positions(request.token_ids, (), ())
            (sequence,) = prepare(
                request, positions, self._config, self._max_model_len, self._clock.now(), None
            ).sequences
            choice = self._choice(request, sequence)
            self._book.add([choice])
            self._submit(choice)
            while len(self._book) or self._core.batch_queue:
                update = self._update = Update()
                outputs, _ = self._step()
                self._commit(outputs, update)
                if update.step_work is not None and number:
                    steps.append((update.step_work, update.step_s))
        assert self._costs is not None
        self._costs.fit(steps)
        self._step()  # vLLM's ranks hear that the last request has ended.
        self._core.scheduler.reset_prefix_cache()
        self._take_block_events()
        self._mirror.drain_events()
        self._update, self._book = Update(), self._new_book()  # The reports count none of this.

    def _turn(self) -> bool:
        """Runs the queued commands and one step, and makes one update. Returns False after a call of `stop`."""
        self._update = Update()
        if not self._thread.run_commands(self._update, is_idle=self._is_idle):
            return False
        self._update.released += self._board.take_unneeded()
        began_s = self._clock.now()
        outputs, has_executed = self._step()
        stepped_s = self._clock.now()
        self._hand_over_updates()  # There was nothing to compute.
        update = self._update
        self._commit(outputs, update)
        update.released += self._board.take_unneeded()
        update.needed += self._board.drain_needed()
        if self._snapshots:
            update.snapshots.append(self._snapshots.next_page())
        is_busy = has_executed or outputs or self._core.batch_queue or update.needed or self._snapshots
        self._is_idle = not is_busy and not self._make_room()
        if self._is_idle and not len(self._book):
            self._board.check_at_rest()
        self._publish(update)
        if self._is_idle:
            self._hand_over_updates()
        self._seconds["step"] += stepped_s - began_s
        self._seconds["output"] += self._clock.now() - stepped_s
        return True

    def _step(self) -> tuple[Mapping[int, Any], bool]:
        """Lets the core do a step. Returns its outputs, and whether it has computed something."""
        if not (self._core.scheduler.has_requests() or self._core.batch_queue):
            return {}, False
        outputs, has_executed = self._core.step_fn()
        self._core.post_step(has_executed)
        return outputs or {}, has_executed

    def _commit(self, outputs: Mapping[int, Any], update: Update) -> None:
        """Adds to the update what the steps of this turn have done."""
        taken = self._book.take(core_outputs(outputs))
        for choice in taken.ended:
            self._abort_in_core(choice)  # vLLM has ended it as well, except where its rules differ.
            self._leave(choice, update)
        for failed in taken.failed:
            for choice in self._book.choices_of(failed.attempt):
                self._abort_in_core(choice)
                self._book.leave(choice)
            update.failed.append(failed)
        for attempt in taken.ready_attempts:
            self._submit_siblings(attempt, update)
        outcome, self._book.outcome = self._book.outcome, StepOutcome()
        update.events = outcome.events()
        if outcome.work is not None:
            update.step_work, update.step_s = outcome.work, outcome.ended_s - outcome.began_s

    def _publish(self, update: Update, *, is_forced: bool = False) -> None:
        self._take_block_events()
        first_seq, events = self._mirror.drain_events()
        if events:
            update.kv_first_seq = first_seq if not update.kv_events else update.kv_first_seq
            update.kv_events.extend(events)
        update.reads = self._board.drain_reads()
        if is_forced or not update.is_empty:
            update.stats = self._current_stats()
            update.at_s = self._clock.now()
            self._ready.append(update)

    def _hand_over_updates(self) -> None:
        ready, self._ready = self._ready, []
        for update in ready:
            self._on_update(update)

    def _current_stats(self) -> EngineStats:
        scheduler = self._core.scheduler
        pool, num_blocks = scheduler.kv_cache_manager.block_pool, self._config.num_blocks
        return self._book.stats(len(scheduler.running), num_blocks - 1 - pool.get_num_free_blocks(), num_blocks)

    # ------------------------------------------------------------ commands

    def _add(self, request: GenerateRequest, arrival: Arrival, update: Update) -> None:
        attempt, now_s = arrival.attempt_id, self._clock.now()
        if self._book.choices_of(attempt):
            error = ProtocolError(f"attempt {attempt.attempt} of {attempt.request_id} is already at this worker")
            update.failed.append(FailedAttempt(attempt, error))
            return
        ended = {one.sequence_id: reason for one in arrival.sequences if (reason := one.finish_reason()) is not None}
        running = [one for one in arrival.sequences if one.sequence_id not in ended]
        missing: list[UnitKey] = []
        try:
            choices = [self._choice(request, one) for one in running]
            self._book.add(choices)
            if choices:
                missing = self._submit(choices[0])
        except WeftError as error:
            self._refuse(attempt, error, update)
            return
        except Exception as error:
            # This is one command of the thread's loop: what vLLM refuses in one request must not end the others.
            name = attempt.request_id
            _LOG.exception("request %s could not be admitted", name, extra={"request_id": name})
            reason = f"the request could not be admitted: {type(error).__name__}"
            self._refuse(attempt, EngineFailed(reason), update)
            return
        update.admitted.append(
            Admitted(
                attempt,
                AdmittedSequences(
                    sequence_ids=tuple(one.sequence_id for one in running),
                    num_cached_tokens=min(running[0].num_covered, running[0].num_prompt) if running else 0,
                    missing_units=tuple(missing),
                    reason=NOT_COVERED,
                    finished=tuple(
                        finished_sequence(one, ended[one.sequence_id], now_s)
                        for one in arrival.sequences
                        if one.sequence_id in ended
                    ),
                ),
            )
        )

    def _refuse(self, attempt: AttemptId, error: WeftError, update: Update) -> None:
        for choice in self._book.choices_of(attempt):
            self._abort_in_core(choice)
            self._book.leave(choice)
        update.failed.append(FailedAttempt(attempt, error))

    def _choice(self, request: GenerateRequest, sequence: Sequence) -> BookedChoice:
        guide, sequence.guide = sequence.guide, None  # vLLM moves it from now on.
        num_drafts = self._core.vllm_config.num_speculative_tokens
        grammar = None if guide is None else GuideGrammar(guide, self._family.shape.vocab_size, num_drafts)
        return BookedChoice(sequence, request, request_name(sequence.sequence_id), grammar)

    def _submit(self, choice: BookedChoice) -> list[UnitKey]:
        """Hands a choice to vLLM. Returns the units that it lacks. Raises a WeftError if it can't be computed."""
        made = engine_request(choice, self._config.block_size, self._adapters)
        if choice.grammar is not None:
            made.structured_output_request = constrained(choice.grammar)
        choice.sequence.num_covered = self._num_covered(made)
        return self._hand_over(choice, made)

    def _hand_over(self, choice: BookedChoice, made: Any) -> list[UnitKey]:
        assert self._doorstep is not None
        missing = self._board.add(choice.request, choice.sequence)
        self._book.submitted(choice)
        self._doorstep.name_to_sequence[choice.name] = choice.sequence_id
        self._core.add_request(made)
        return missing

    def _num_covered(self, made: Any) -> int:
        """Counts the tokens that vLLM's prefix cache has now. It takes nothing, and counts as no query."""
        manager = self._core.scheduler.kv_cache_manager
        if not manager.prefix_cache_lookup_enabled(made):
            return 0
        return int(manager.coordinator.find_longest_cache_hit(made.block_hashes, made.num_tokens - 1)[1])

    def _submit_siblings(self, attempt: AttemptId, update: Update) -> None:
        """Hands over the choices of an attempt that waited for the first one, once that has the prompt or has left."""
        for choice in self._book.waiting_siblings(attempt):
            missing = self._submit(choice)
            update.needed += [NeededUnit(choice.sequence_id, unit, NOT_COVERED) for unit in missing]

    def _abort(self, attempt: AttemptId, choices: SequenceOf[int], update: Update) -> None:
        now_s = self._clock.now()
        for choice in self._book.choices_of(attempt):
            if not choices or choice.sequence_id.choice in choices:
                update.aborted.append(AbortedSequence(choice.sequence_id, choice.sequence.stopwatch.times(now_s)))
                self._abort_in_core(choice)
                self._leave(choice, update)

    def _abort_in_core(self, choice: BookedChoice) -> None:
        assert self._doorstep is not None
        if choice.is_submitted:
            self._core.abort_requests([choice.name])
            self._doorstep.name_to_sequence.pop(choice.name, None)

    def _leave(self, choice: BookedChoice, update: Update) -> None:
        self._book.leave(choice)
        self._submit_siblings(choice.sequence_id.attempt_id, update)

    def _evict(self, unit: UnitKey, update: Update) -> None:
        if (released := self._board.evict(unit)) is not None:
            update.released.append(released)

    # ------------------------------------------------------------ blocks

    def _take_block_events(self) -> None:
        """Gives the mirror the events that the core has not published yet."""
        scheduler = self._core.scheduler
        scheduler.kv_event_publisher.take(scheduler.kv_cache_manager.take_events())

    def _begin_snapshot(self, address: str) -> None:
        self._take_block_events()
        self._snapshots.begin(address, self._mirror.snapshot)

    def _make_room(self) -> bool:
        """Lets the youngest holder of the encoder cache begin again, if an older request has no room there and nothing
        goes on. Returns whether it has done so."""
        manager, scheduler = self._core.scheduler.encoder_cache_manager, self._core.scheduler
        if not manager.blocked:
            return False
        first = min(map(_rank, manager.blocked))
        holders = [each for each in scheduler.requests.values() if manager.get_cached_input_ids(each)]
        last = max(holders, key=_rank, default=None)
        if last is None or _rank(last) <= first:
            return False
        if last in scheduler.running:
            scheduler.running.remove(last)
            scheduler._preempt_request(last, time.monotonic())
        else:
            manager.free(last)
        return True

    # ------------------------------------------------------------ what the scheduler tells (StepListener)

    def planned(self, chunks: list[PlannedChunk]) -> None:
        """Makes an update that says what a step with prompt tokens is about to compute."""
        work = self._book.plan(chunks)
        if work.weighted_tokens:
            update = self._update
            update.begun_work = work
            update.needed += self._board.drain_needed()
            self._update = Update()
            if self._may_start.is_set():
                self._publish(update)

    def dispatched(self) -> None:
        self._hand_over_updates()

    def committed(self, chunks: list[PlannedChunk], loads: list[FeatureLoad]) -> None:
        self._update.released += self._board.end_loads([load.unit for load in loads])
        self._book.commit(chunks)

    def preempted(self, name: str) -> None:
        self._book.preempt(name)


def _rank(request: Any) -> tuple[int, float, str]:
    """Returns the order in which vLLM serves requests."""
    return request.priority, request.arrival_time, request.request_id


def _fail(update: Update) -> None:
    raise WorkerLost("a rank of vLLM has died")
