"""Moves data between a stage and its connectors in background threads, so that no scheduler ever waits for a transfer.

`TransferAdapter` is the extensible part: one receive loop for each connector, which hands over what has arrived, and
one save loop, which puts data and repeats what has failed, later each time (`SaveRetries`). A subclass says what data
means: it implements `_arrived`, `_is_expecting`, `_saved` and `_save_failed`. `chunk_adapter` is the one for chunks.

The steps of both loops are methods of their own (`receive_once`, `save_once`), so that tests run them without threads.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from fabric.contracts import Clock, EngineFailed, StageKey, StageTarget, TransferError, TransferFailed, WeftError
from fabric.transport import InboxEntry, StageConnector

_LOG = logging.getLogger(__name__)
RECEIVE_S = 1.0
"""Limits the pause between two looks of a receive loop at its connector. A NIXL connector polls only while its owner
waits, so the loop waits at the connector only if data is expected."""
_FAILED_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class SaveRetries:
    """Holds the pauses after which a failed save is repeated: `first_s`, then twice the last one each time, but at most
    `longest_s`. After `give_up_s` since the first try, the save has failed for good."""

    first_s: float = 0.01
    longest_s: float = 1.0
    give_up_s: float = 10.0

    def pause_s(self, num_tries: int) -> float:
        """Returns the pause after so many failed tries."""
        return min(self.first_s * 2.0 ** min(num_tries - 1, 30), self.longest_s)


@dataclass(slots=True, eq=False)
class SaveTask:
    """A `SaveTask` is data on its way into the inbox of the next stage."""

    request: StageKey
    from_stage: int
    target: StageTarget
    name: str
    """Is the key in the connector."""
    data: bytes
    num_tries: int = 0
    begun_s: float = 0.0
    is_cancelled: bool = False


class TransferAdapter(ABC):
    """Owns the threads between a stage and its connectors. `connectors` maps the names of `StageTarget.connector` to
    the connectors of this replica."""

    def __init__(self, connectors: Mapping[str, StageConnector], clock: Clock, retries: SaveRetries) -> None:
        self._connectors, self._clock, self._retries = dict(connectors), clock, retries
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Is notified when there is something to save, when data is expected, and when the adapter stops."""
        self._saves: list[tuple[float, int, SaveTask]] = []
        """Holds the tasks by the time at which they are due."""
        self._order = itertools.count()
        self._stopping = threading.Event()
        receivers = [
            threading.Thread(target=self._receive_loop, args=(name,), name=f"weft-stage-receive-{name}", daemon=True)
            for name in self._connectors
        ]
        self._threads = [*receivers, threading.Thread(target=self._save_loop, name="weft-stage-save", daemon=True)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the threads. What was not saved is dropped. The call is idempotent and leaves the connectors open."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
        for connector in self._connectors.values():
            connector.wake()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    @property
    def is_alive(self) -> bool:
        """Returns False once a connector or a thread has died, or the adapter was stopped."""
        threads = all(thread.is_alive() for thread in self._threads)
        return threads and all(connector.is_alive for connector in self._connectors.values())

    @property
    def num_saves(self) -> int:
        """Counts the saves that have neither ended nor been cancelled."""
        with self._lock:
            return sum(not task.is_cancelled for _, _, task in self._saves)

    # ------------------------------------------------------------ what a subclass adds

    @abstractmethod
    def _arrived(self, connector: str, entry: InboxEntry) -> None:
        """Takes in data that lies in the inbox of a connector. It runs in the receive loop of that connector."""

    @abstractmethod
    def _is_expecting(self) -> bool:
        """Returns whether a request expects data, so that the receive loops wait for it."""

    @abstractmethod
    def _saved(self, task: SaveTask) -> None:
        """Notes that the data has reached the inbox. It runs in the save loop."""

    @abstractmethod
    def _save_failed(self, task: SaveTask, error: WeftError) -> None:
        """Notes that the data will never reach the inbox. It runs in the save loop."""

    def _receive_timeout_s(self) -> float:
        """Returns how long a receive loop may wait for data in its next round."""
        return RECEIVE_S if self._is_expecting() else 0.0

    def _before_receiving(self, connector: str) -> None:
        """Runs before each round of a receive loop; a subclass may do what is due."""
        return

    # ------------------------------------------------------------ receive

    def receive_once(self, name: str, timeout_s: float) -> None:
        """Hands over what has arrived at a connector; it waits at most so long for some."""
        self._before_receiving(name)
        for entry in self._connectors[name].arrivals(timeout_s):
            self._arrived(name, entry)

    def _notify_receivers(self) -> None:
        """Makes the receive loops look again at what is expected and due."""
        with self._changed:
            self._changed.notify_all()
        for connector in self._connectors.values():
            connector.wake()

    def _receive_loop(self, name: str) -> None:
        while not self._stopping.is_set():
            try:
                if not self._is_expecting():
                    with self._changed:
                        self._changed.wait_for(lambda: self._stopping.is_set() or self._is_expecting(), RECEIVE_S)
                self.receive_once(name, self._receive_timeout_s())
            except Exception:
                # This is the loop of the thread: one bad piece of data must not end the transfers of all requests.
                _LOG.exception("the receive loop of the connector %s failed once", name)
                if not self._connectors[name].is_alive:
                    return
                with self._changed:
                    self._changed.wait_for(self._stopping.is_set, _FAILED_PAUSE_S)

    # ------------------------------------------------------------ save

    def _enqueue(self, task: SaveTask) -> None:
        """Adds a task, which is due at once."""
        with self._changed:
            task.begun_s = self._clock.now()
            heapq.heappush(self._saves, (task.begun_s, next(self._order), task))
            self._changed.notify_all()

    def save_once(self) -> None:
        """Does all saves that are due."""
        while True:
            with self._lock:
                while self._saves and self._saves[0][2].is_cancelled:
                    heapq.heappop(self._saves)
                if not self._saves or self._saves[0][0] > self._clock.now():
                    return
                task = heapq.heappop(self._saves)[2]
            self._save(task)

    def _save(self, task: SaveTask) -> None:
        """Does one save, and enqueues it again or reports it as failed if it fails. A cancelled task does nothing."""
        error = None if task.is_cancelled else self._try(task)
        if error is None:
            self._saved(task)
            return
        task.num_tries += 1
        due_s = self._clock.now() + self._retries.pause_s(task.num_tries)
        if not error.retryable or due_s - task.begun_s > self._retries.give_up_s:
            self._save_failed(task, error)
            return
        with self._changed:
            heapq.heappush(self._saves, (due_s, next(self._order), task))

    def _try(self, task: SaveTask) -> WeftError | None:
        """Puts the data, and returns the error if that fails."""
        try:
            self._put(task)
        except TransferError as error:
            return error
        except Exception as error:
            # This is one save of the thread's loop: the request whose data can't be put must end alone.
            _LOG.exception("the data %s can't be saved", task.name, extra={"request_id": task.request})
            return EngineFailed(f"the data for the next stage could not be sent: {type(error).__name__}")
        return None

    def _put(self, task: SaveTask) -> None:
        connector = self._connectors.get(task.target.connector)
        if connector is None:
            known = ", ".join(self._connectors) or "none"
            raise TransferFailed(f"this replica has no connector `{task.target.connector}`; it has {known}")
        connector.put(task.from_stage, task.target.inbox, task.name, task.data)

    def _save_loop(self) -> None:
        while not self._stopping.is_set():
            self.save_once()
            with self._changed:
                if not self._stopping.is_set():
                    self._changed.wait(self._pause_s())

    def _pause_s(self) -> float | None:
        """Returns the seconds until the next save is due, or None if there is none."""
        return max(self._saves[0][0] - self._clock.now(), 0.0) if self._saves else None
