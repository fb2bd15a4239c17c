"""Owns the life of the chunks of each request between two stages: their keys, their order, and their end.

A chunk has the key `{request}_{stage}_{number}`; the stage is the one that has made it. On the way out, `save_async`
makes the payload in the caller's thread, with the function that the stage's config names, and enqueues it. On the way
in, the receive loop reads each chunk of an open request as soon as it has arrived; `load_async` says that a request
waits for its next one, and `get_finished_requests` names those whose wait is over. `chunk_inputs` is the bookkeeping of
this direction.

The end of a request is a fence in both directions. After `abort` nothing of it is put any more, except for an error
chunk if the request has failed, which ends it at the next stage too. After `close` nothing of it is delivered, and
chunks that are or come into the inbox are removed. A put that is under way in the other thread at that moment may end.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fabric.contracts import (
    Clock,
    EngineFailed,
    ErrorInfo,
    ProtocolError,
    StageKey,
    StageRequest,
    StageTarget,
    TransferError,
    WeftError,
)
from fabric.transport import InboxEntry, StageConnector
from llm_workers.stages.chunk_inputs import ChunkInputs, ChunkPatience, Disposition, LoadedChunks
from llm_workers.stages.chunk_payload import ChunkName, decode_chunk, encode_chunk
from llm_workers.stages.stage_model import ChunkAccumulator, NextStageInput, StageChunk, StageOutput
from llm_workers.stages.transfer_adapter import SaveRetries, SaveTask, TransferAdapter

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChunkSettings:
    """Holds what the adapter of a stage knows of its pipeline."""

    make_payload: NextStageInput | None = None
    """Makes the input of the next stage; it is None at the last stage."""
    is_async: bool = True
    """Is False in the sequential pipeline, where a stage sends one chunk, at its end."""
    extra: Mapping[str, int | float | str] = field(default_factory=dict)
    patience: ChunkPatience = field(default_factory=ChunkPatience)
    retries: SaveRetries = field(default_factory=SaveRetries)


@dataclass(slots=True)
class ChunkOutput:
    """A `ChunkOutput` is what the adapter holds of one request that has a next stage."""

    accumulator: ChunkAccumulator
    target: StageTarget
    tasks: dict[int, SaveTask] = field(default_factory=dict)
    """Holds the chunks that were not put yet, by number."""
    is_complete: bool = False
    """Says whether the last chunk was made."""


class ChunkTransferAdapter(TransferAdapter):
    """Implements `thinker_outlet.ChunkSender`, and the side of the schedulers. Its methods are thread-safe and do not
    block. The callbacks run in its threads: `on_loaded` when a waiting request can go on, and `on_saved` when the last
    chunk of a request has reached the next stage, or with the error if a chunk can't reach it."""

    def __init__(
        self,
        connectors: Mapping[str, StageConnector],
        clock: Clock,
        settings: ChunkSettings,
        on_loaded: Callable[[], None] = lambda: None,
        on_saved: Callable[[StageKey, WeftError | None], None] = lambda key, error: None,
    ) -> None:
        super().__init__(connectors, clock, settings.retries)
        self._settings = settings
        self._on_loaded, self._on_saved = on_loaded, on_saved
        self._inputs: ChunkInputs[tuple[str, InboxEntry]] = ChunkInputs(settings.patience)
        self._outputs: dict[StageKey, ChunkOutput] = {}
        self._due: dict[str, deque[tuple[InboxEntry, bool]]] = {name: deque() for name in connectors}
        """Holds early chunks that a receive loop has to look at again, by connector, and whether it drops them."""
        self.num_running: int | None = None
        """Counts the requests that the stage runs, for the function that makes payloads. Without it, those whose output
        is open count."""

    # ------------------------------------------------------------ requests

    def open(self, request: StageRequest) -> None:
        """Begins a request: its input, unless this is the first stage, and its output, if a next stage is named."""
        key = request.key
        with self._lock:
            if request.stage_id > 0:
                for connector, entry in self._inputs.open(key, request.age):
                    self._due[connector].append((entry, False))
            if request.next_stage is not None:
                accumulator = ChunkAccumulator(request, self._settings.is_async, self._settings.extra)
                self._outputs[key] = ChunkOutput(accumulator, request.next_stage)
        if request.stage_id > 0:
            self._notify_receivers()

    def close(self, key: StageKey) -> None:
        """Ends the input of a request: nothing of it is delivered any more. What was made of it is still sent."""
        with self._lock:
            self._inputs.close(key)

    def abort(self, request: StageRequest, error: ErrorInfo | None = None) -> None:
        """Ends a request early: nothing of it is sent or delivered any more, except for the error, if one is given.
        A request that is not open is ignored."""
        key = request.key
        with self._lock:
            self._inputs.close(key)
            output = self._outputs.pop(key, None)
            if output is None:
                return
            for task in output.tasks.values():
                task.is_cancelled = True
            if error is not None:
                chunk = StageChunk(key, output.accumulator.num_chunks, True, {})
                self._enqueue(self._task(output, chunk, error))

    @property
    def num_open(self) -> int:
        """Counts the requests whose input or output is open."""
        with self._lock:
            return len(self._inputs) + len(self._outputs)

    @property
    def num_held(self) -> int:
        """Counts the chunks that the adapter holds in either direction."""
        with self._lock:
            return self._inputs.num_held + self.num_saves + sum(map(len, self._due.values()))

    # ------------------------------------------------------------ out

    def save_async(self, output: StageOutput, request: StageRequest) -> None:
        """Does what `save` does."""
        self.save(output, request)

    def save(self, output: StageOutput, request: StageRequest) -> bool:
        """Takes the next output of an open request, makes a payload of it if one is due, and enqueues that. Returns
        whether a chunk was made. A finished output is the last one. If the payload can't be made, the request fails:
        `on_saved` says so, and an error chunk tells the next stage."""
        with self._lock:
            held = self._outputs.get(request.key)
            if held is None or held.is_complete:
                return False
            held.accumulator.num_running = len(self._outputs) if self.num_running is None else self.num_running
            try:
                return self._accumulate(held, output)
            except WeftError as failed:
                error = failed
            except Exception as failed:
                # The function is code of a pipeline: one request that it can't handle must end alone.
                _LOG.exception("the input of the next stage can't be made", extra={"request_id": request.request_id})
                error = EngineFailed(f"the input of the next stage can't be made: {type(failed).__name__}")
            self.abort(request, ErrorInfo.of(error))
        self._on_saved(request.key, error)
        return False

    def _accumulate(self, held: ChunkOutput, output: StageOutput) -> bool:
        make_payload = self._settings.make_payload
        if make_payload is None:
            raise ProtocolError("a request names a next stage, but the config has no function that makes its input")
        payload = make_payload(held.accumulator, output)
        if payload is None and not output.is_finished:
            return False
        number = held.accumulator.num_chunks
        chunk = StageChunk(held.accumulator.request.key, number, output.is_finished, payload or {})
        task = self._task(held, chunk)
        held.accumulator.num_chunks += 1
        held.is_complete = output.is_finished
        held.tasks[number] = task
        self._enqueue(task)
        return True

    def _task(self, held: ChunkOutput, chunk: StageChunk, error: ErrorInfo | None = None) -> SaveTask:
        request = held.accumulator.request
        name = str(ChunkName(chunk.key, request.stage_id, chunk.number))
        data = encode_chunk(chunk, request.age, error)
        return SaveTask(chunk.key, request.stage_id, held.target, name, data)

    def _saved(self, task: SaveTask) -> None:
        with self._lock:
            held = self._output_of(task)
            if held is None:
                return
            if held.tasks or not held.is_complete:
                return
            del self._outputs[task.request]
        self._on_saved(task.request, None)

    def _save_failed(self, task: SaveTask, error: WeftError) -> None:
        with self._lock:
            held = self._output_of(task)
            if held is None:
                return
            for other in held.tasks.values():
                other.is_cancelled = True
            del self._outputs[task.request]
        self._on_saved(task.request, error)

    def _output_of(self, task: SaveTask) -> ChunkOutput | None:
        """Returns the open output to which a task belongs, which no longer holds the task then. An error chunk, and a
        chunk of an earlier request of the same key, belong to none."""
        held = self._outputs.get(task.request)
        if held is None:
            return None
        for number, other in held.tasks.items():
            if other is task:
                del held.tasks[number]
                return held
        return None

    # ------------------------------------------------------------ in

    def load_async(self, key: StageKey) -> None:
        """Records that an open request waits for its next chunk. Its stall clock starts."""
        with self._lock:
            self._inputs.wait(key, self._clock.now())

    def get_finished_requests(self) -> list[StageKey]:
        """Returns the waiting requests whose next chunk is here, or which have failed, each once."""
        with self._lock:
            return self._inputs.loaded()

    def take(self, key: StageKey) -> LoadedChunks:
        """Returns the chunks of a request that have come since the last call, in order, and ends its wait."""
        with self._lock:
            return self._inputs.take(key)

    def expire(self) -> list[StageKey]:
        """Ends the waits that have stalled; `get_finished_requests` returns them. Early chunks whose request has not
        come are dropped."""
        with self._lock:
            stalled, dropped = self._inputs.expire(self._clock.now())
            for connector, entry in dropped:
                self._due[connector].append((entry, True))
        if dropped:
            self._notify_receivers()
        return stalled

    def _is_expecting(self) -> bool:
        with self._lock:
            return bool(len(self._inputs)) or any(self._due.values())

    def _receive_timeout_s(self) -> float:
        """Returns the time until the next wait stalls, but at most that of the other adapters."""
        with self._lock:
            stall_s = self._inputs.next_stall_s() - self._clock.now()
        return min(max(stall_s, 0.0), super()._receive_timeout_s())

    def _before_receiving(self, connector: str) -> None:
        """Ends the waits that have stalled, and reads or drops the early chunks that are due."""
        if self.expire():
            self._on_loaded()
        due = self._due[connector]
        while due:
            entry, is_dropped = due.popleft()
            if is_dropped:
                self._connectors[connector].get(entry.from_stage, self._connectors[connector].inbox, entry.key, 0.0)
            else:
                self._arrived(connector, entry)

    def _arrived(self, connector: str, entry: InboxEntry) -> None:
        name = ChunkName.parse(entry.key)
        with self._lock:
            now_s = self._clock.now()
            what = Disposition.DROP if name is None else self._inputs.announce(name.key, (connector, entry), now_s)
        if what is Disposition.KEEP:
            return
        inbox = self._connectors[connector].inbox
        try:
            data = self._connectors[connector].get(entry.from_stage, inbox, entry.key, 0.0)
            received = None if data is None or what is Disposition.DROP else decode_chunk(data)
        except (TransferError, ProtocolError) as error:
            _LOG.warning("the chunk %s can't be read: %s", entry.key, error)
            with self._lock:
                is_loaded = name is not None and self._inputs.fail(name.key, error)
        else:
            with self._lock:
                is_loaded = received is not None and self._inputs.deliver(received)
        if is_loaded:
            self._on_loaded()
