"""Hands what the thinker computes to the next stage: generated tokens, and the hidden rows that the talker needs.

The engine owns a `ThinkerOutlet` and calls it in its thread: `begin` when a request is admitted, `committed` after each
step, and `abort` when a request ends early. Requests without a next stage never reach it, so they cost nothing.

A talker takes the rows of one hidden layer of the thinker, at the positions of media or at all positions. In the second
case a generated token has a row once it was fed back, so its row comes one step after it, and the last token never has
one. The model's side tensors store these rows with the KV blocks, so those of a prefix hit are read from its blocks.
A row is sent once: a request that was preempted computes its rows again and sends those that follow. A new attempt has
new calls to the stages, so it sends everything from the beginning, also the rows of tokens that an earlier attempt has
generated. The module knows nothing of how chunks are built and sent, which is the work of the transfer adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fabric.contracts import (
    AttemptId,
    ErrorInfo,
    GenerateRequest,
    PlaceholderRange,
    ProtocolError,
    StageRequest,
    WeftError,
)
from llm_workers.scheduling import StepEvents, StepPlan
from llm_workers.stages.stage_model import StageOutput

Ints = npt.NDArray[np.int64]
Value = npt.NDArray[np.generic] | int
ThinkerRows = npt.NDArray[np.float32] | npt.NDArray[np.uint16]
"""Holds hidden rows: float32, or bfloat16 as uint16, which takes half of the bytes."""
ReadRows = Callable[[Ints, int, int], ThinkerRows]
"""Returns the stored hidden rows of the positions `[start, end)` of a sequence with the given block table, with shape
`(end - start, hidden_size)`."""


class ChunkSender(Protocol):
    """A `ChunkSender` is the part of the transfer adapter that a producing stage uses. No call blocks."""

    def open(self, request: StageRequest) -> None: ...

    def save_async(self, output: StageOutput, request: StageRequest) -> None:
        """Takes the next output of an open request. A finished output is the last one."""
        ...

    def abort(self, request: StageRequest, error: ErrorInfo | None = None) -> None:
        """Ends a request early: nothing of it is sent any more, except for the error, if one is given."""
        ...


class ThinkerOutlet:
    """A `ThinkerOutlet` belongs to the engine's thread."""

    def __init__(self, sender: ChunkSender, read_rows: ReadRows | None = None, *, needs_all_rows: bool = False) -> None:
        """Without `read_rows`, the next stage can't get rows, and `begin` must not get a request that asks for them.
        With `needs_all_rows`, such a request gets the rows of all positions instead of those of media."""
        self._sender, self._read_rows, self._needs_all_rows = sender, read_rows, needs_all_rows
        self._spoken: dict[AttemptId, SpokenRequest] = {}

    def __len__(self) -> int:
        return len(self._spoken)

    def begin(self, request: GenerateRequest, is_finished: bool = False) -> None:
        """Takes an admitted request that has a next stage. Tokens that a former attempt has sent go out first. With
        `is_finished` these are all tokens, so that nothing follows them. Raises ProtocolError if rows of a finished
        request are needed, because nothing of it is computed."""
        assert request.next_stage is not None
        attempt = AttemptId(request.request_id, request.attempt)
        sent = StageRequest(
            request_id=request.request_id,
            attempt=request.attempt,
            router_id=request.router_id,
            router_address=request.router_address,
            stage_id=0,
            age=request.age,
            next_stage=request.next_stage,
        )
        spoken = SpokenRequest(sent, self._needed_rows(request))
        if is_finished and spoken.is_lacking_rows:
            raise ProtocolError("the next stage needs hidden rows of a request that has nothing left to compute")
        self._spoken[attempt] = spoken
        self._sender.open(sent)
        if is_finished or (request.emitted and request.emitted[0]):
            self._send(spoken, 0, request.emitted[0], is_finished=is_finished)
        if is_finished:
            del self._spoken[attempt]

    def committed(self, plan: StepPlan, events: StepEvents) -> None:
        """Sends what a committed step has made for the requests of this outlet. Tokens go out with the rows of the same
        step, which are those of positions before them."""
        if not self._spoken:
            return
        attempt_to_rows = self._rows_of_step(plan, events)
        for made in events.tokens:
            attempt = made.sequence_id.attempt_id
            spoken = self._spoken.get(attempt)
            if spoken is not None:
                is_finished = made.finish_reason is not None
                rows = attempt_to_rows.pop(attempt, None)
                self._send(spoken, made.first_index, made.token_ids, rows, is_finished=is_finished)
                if is_finished:
                    del self._spoken[attempt]
        for attempt, rows in attempt_to_rows.items():
            self._sender.save_async(StageOutput(rows, is_finished=False), self._spoken[attempt].request)
        for ended in events.finished:
            spoken = self._spoken.pop(ended.sequence_id.attempt_id, None)
            if spoken is not None:  # No token of this step has said that the request has ended.
                self._send(spoken, ended.num_tokens, (), is_finished=True)

    def abort(self, attempt: AttemptId, error: WeftError | None = None) -> None:
        """Ends a request early. An attempt that is not open here is ignored."""
        spoken = self._spoken.pop(attempt, None)
        if spoken is not None:
            self._sender.abort(spoken.request, None if error is None else ErrorInfo.of(error))

    def _needed_rows(self, request: GenerateRequest) -> Ints | None:
        """Returns the positions of the rows that the next stage needs, or None if it needs all."""
        if not request.side_names:
            return np.empty(0, dtype=np.int64)
        return None if self._needs_all_rows else media_positions(request.placeholders)

    def _rows_of_step(self, plan: StepPlan, events: StepEvents) -> dict[AttemptId, dict[str, Value]]:
        """Returns the rows that a step has made due, for each request that has some. A sequence that stores rows never
        decodes plainly, so it has a chunk."""
        found = [(chunk, self._spoken.get(chunk.sequence_id.attempt_id)) for chunk in plan.others]
        lacking = [(chunk, spoken) for chunk, spoken in found if spoken is not None and spoken.is_lacking_rows]
        if not lacking:
            return {}
        attempt_to_num_drawn = {made.sequence_id.attempt_id: len(made.token_ids) for made in events.tokens}
        attempt_to_rows = {}
        for chunk, spoken in lacking:
            attempt = chunk.sequence_id.attempt_id
            # All but the last of the drawn tokens were guessed right, so the chunk has computed their positions too.
            num_right = max(0, attempt_to_num_drawn.get(attempt, 0) - 1)
            rows = self._due_rows(spoken, chunk.block_ids, chunk.end - chunk.num_drafts + num_right)
            if rows:
                attempt_to_rows[attempt] = rows
        return attempt_to_rows

    def _due_rows(self, spoken: SpokenRequest, block_ids: Ints, end: int) -> dict[str, Value]:
        """Returns the needed rows of the positions before `end` that were not sent yet, and notes that they are sent.
        They may begin before the step's chunk, in blocks that were found in the prefix cache."""
        assert self._read_rows is not None
        at = spoken.due_positions(end)
        if not len(at):
            return {}
        first, last = int(at[0]), int(at[-1])
        rows = self._read_rows(block_ids, first, last + 1)[at - first]
        spoken.num_rows_sent += len(at)
        return {"prompt_hidden": np.ascontiguousarray(rows), "prompt_hidden_at": at}

    def _send(
        self,
        spoken: SpokenRequest,
        first_index: int,
        token_ids: Sequence[int],
        rows: dict[str, Value] | None = None,
        *,
        is_finished: bool = False,
    ) -> None:
        """Sends tokens, of which the first has the given index, with rows of positions before them."""
        tokens: dict[str, Value] = {"token_ids": np.array(token_ids, dtype=np.int64), "first_index": first_index}
        self._sender.save_async(StageOutput((rows or {}) | tokens, is_finished, len(token_ids)), spoken.request)


@dataclass(slots=True)
class SpokenRequest:
    """Holds what the outlet knows of one request."""

    request: StageRequest
    needed_at: Ints | None
    """Holds the positions whose rows the next stage needs, in ascending order, or None for all positions."""
    num_rows_sent: int = 0

    @property
    def is_lacking_rows(self) -> bool:
        """Returns whether rows are still to be sent."""
        return self.needed_at is None or self.num_rows_sent < len(self.needed_at)

    def due_positions(self, end: int) -> Ints:
        """Returns the needed positions before `end` whose rows were not sent."""
        if self.needed_at is None:
            return np.arange(self.num_rows_sent, end, dtype=np.int64)
        return self.needed_at[self.num_rows_sent : int(np.searchsorted(self.needed_at, end))]


def media_positions(placeholders: Sequence[PlaceholderRange]) -> Ints:
    """Returns the prompt positions that features fill, in ascending order."""
    ranges = [np.arange(each.offset, each.end, dtype=np.int64) for each in placeholders]
    return np.sort(np.concatenate(ranges)) if ranges else np.empty(0, dtype=np.int64)
