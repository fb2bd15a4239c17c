"""Hands what the thinker computes to the next stage: generated tokens, and hidden states of the prompt's media.

The engine owns a `ThinkerOutlet` and calls it in its thread: `begin` when a request is admitted, `committed` after each
step, and `abort` when a request ends early. Requests without a next stage never reach it, so they cost nothing.

The talker reads text by its token ids alone. Of media it needs the rows of one hidden layer, which the model's side
tensors store with the KV blocks; so the rows of a prompt whose beginning was found in the prefix cache are read from
its blocks, and those of a preempted request are not sent again. The module knows nothing of how chunks are built and
sent, which is the work of the transfer adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fabric.contracts import AttemptId, ErrorInfo, GenerateRequest, PlaceholderRange, StageRequest, WeftError
from llm_workers.scheduling import Chunk, StepEvents, StepPlan
from llm_workers.stages.stage_model import Payload, StageOutput

ReadRows = Callable[[npt.NDArray[np.int64], int, int], npt.NDArray[np.float32]]
"""Returns the stored hidden rows of the positions `[start, end)` of a sequence with the given block table, as float32
with shape `(end - start, hidden_size)`."""


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

    def __init__(self, sender: ChunkSender, read_rows: ReadRows | None = None) -> None:
        """Without `read_rows`, prompts with media can't be spoken about, and `begin` must not get them."""
        self._sender, self._read_rows = sender, read_rows
        self._spoken: dict[AttemptId, SpokenRequest] = {}

    def __len__(self) -> int:
        return len(self._spoken)

    def begin(self, request: GenerateRequest, is_finished: bool = False) -> None:
        """Takes an admitted request that has a next stage. Tokens that a former attempt has sent go out first. With
        `is_finished` these are all tokens, so that nothing follows them."""
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
        positions = media_positions(request.placeholders) if request.side_names else np.empty(0, dtype=np.int64)
        self._spoken[attempt] = SpokenRequest(sent, positions)
        self._sender.open(sent)
        if is_finished or (request.emitted and request.emitted[0]):
            self._send_tokens(self._spoken[attempt], 0, request.emitted[0], is_finished)
        if is_finished:
            del self._spoken[attempt]

    def committed(self, plan: StepPlan, events: StepEvents) -> None:
        """Sends what a committed step has made for the requests of this outlet."""
        if not self._spoken:
            return
        for chunk in plan.others:
            spoken = self._spoken.get(chunk.sequence_id.attempt_id)
            if spoken is not None and spoken.num_rows_sent < len(spoken.media_at):
                self._send_rows(spoken, chunk)
        for made in events.tokens:
            spoken = self._spoken.get(made.sequence_id.attempt_id)
            if spoken is not None:
                is_finished = made.finish_reason is not None
                self._send_tokens(spoken, made.first_index, made.token_ids, is_finished)
                if is_finished:
                    del self._spoken[made.sequence_id.attempt_id]
        for ended in events.finished:
            spoken = self._spoken.pop(ended.sequence_id.attempt_id, None)
            if spoken is not None:  # No token of this step has said that the request has ended.
                self._send_tokens(spoken, ended.num_tokens, (), is_finished=True)

    def abort(self, attempt: AttemptId, error: WeftError | None = None) -> None:
        """Ends a request early. An attempt that is not open here is ignored."""
        spoken = self._spoken.pop(attempt, None)
        if spoken is not None:
            self._sender.abort(spoken.request, None if error is None else ErrorInfo.of(error))

    def _send_rows(self, spoken: SpokenRequest, chunk: Chunk) -> None:
        """Sends the hidden rows of the media up to the end of the chunk, as far as they were not sent yet. They may
        begin before the chunk, in blocks that were found in the prefix cache."""
        assert self._read_rows is not None
        end = int(np.searchsorted(spoken.media_at, chunk.end))
        at = spoken.media_at[spoken.num_rows_sent : end]
        if not len(at):
            return
        first, last = int(at[0]), int(at[-1])
        rows = self._read_rows(chunk.block_ids, first, last + 1)[at - first]
        spoken.num_rows_sent = end
        values: Payload = {"prompt_hidden": np.ascontiguousarray(rows), "prompt_hidden_at": at}
        self._sender.save_async(StageOutput(values, is_finished=False), spoken.request)

    def _send_tokens(
        self, spoken: SpokenRequest, first_index: int, token_ids: Sequence[int], is_finished: bool
    ) -> None:
        values: Payload = {"token_ids": np.array(token_ids, dtype=np.int64), "first_index": first_index}
        self._sender.save_async(StageOutput(values, is_finished, len(token_ids)), spoken.request)


@dataclass(slots=True)
class SpokenRequest:
    """Holds what the outlet knows of one request."""

    request: StageRequest
    media_at: npt.NDArray[np.int64]
    """Holds the positions of the prompt whose hidden rows the next stage needs, in ascending order."""
    num_rows_sent: int = 0


def media_positions(placeholders: Sequence[PlaceholderRange]) -> npt.NDArray[np.int64]:
    """Returns the prompt positions that features fill, in ascending order."""
    ranges = [np.arange(each.offset, each.end, dtype=np.int64) for each in placeholders]
    return np.sort(np.concatenate(ranges)) if ranges else np.empty(0, dtype=np.int64)
