"""Defines what a stage's engine knows of the model that it runs, and of the function that makes the next stage's input.

`StageModel` is the model of one stage: it takes chunks in, says how much of each request can be computed, and computes
batches. One rule covers prefill, decoding, and waiting for chunks: the computed units of a request catch up with the
units that are ready. A unit is a row of an autoregressive stage (one position of its sequence), or a codec frame of a
generation stage. The engine holds a scheduler of the right kind for each of the two (`WorkerType`).

This module contains Protocols and values only. It knows nothing of torch, of connectors or of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fabric.contracts import StageKey, StageRequest

WorkerType = Literal["ar", "generation"]
Payload = Mapping[str, "npt.NDArray[np.generic] | str | int | float | bool"]
"""Holds the named values of one chunk."""


class StageChunk(NamedTuple):
    """A `StageChunk` is one chunk of a request, as it arrives at a stage."""

    key: StageKey
    number: int
    """Counts the chunks of the request from this producer, from 0."""
    is_last: bool
    payload: Payload


class StageSpan(NamedTuple):
    """A `StageSpan` is what a step computes of one request: the units `[start, start + num_units)`."""

    key: StageKey
    start: int
    num_units: int
    block_ids: npt.NDArray[np.int64]
    """Holds the KV blocks of an autoregressive request, which cover all positions up to the last of these units; it is
    empty in a generation stage."""


class StageOutput(NamedTuple):
    """A `StageOutput` is what one step made for one request."""

    values: Payload
    is_finished: bool
    """Says that the model itself has ended the request with this output, for example by the end-of-speech token."""
    num_outputs: int = 0
    """Counts codec frames or samples."""


class StageModel(Protocol):
    """A `StageModel` computes one stage on one device. The engine's thread makes every call.

    The calls of one request are `open`, then `receive` and `execute` in any order, then `close` once, also after a
    failure. `close` frees everything that the request holds, and a closed key may be opened again.
    """

    def open(self, request: StageRequest) -> None:
        """Takes a request in. Raises InvalidRequest if its options are wrong."""
        ...

    def receive(self, chunk: StageChunk) -> None:
        """Takes the next chunk of an open request. Chunks come in ascending order, without gaps. Raises ProtocolError
        if the payload is not what this model expects."""
        ...

    def num_units_ready(self, key: StageKey) -> int:
        """Returns how many units from the beginning of the request could have been computed by now, computed ones
        included. An autoregressive model counts the row behind its latest output as soon as that output and everything
        else that the row needs are there."""
        ...

    def execute(self, spans: Sequence[StageSpan]) -> Mapping[StageKey, StageOutput]:
        """Computes a batch and returns the outputs of those requests that made one. A request that was preempted is
        computed again from unit 0; it makes each output once, and the same values as without the preemption. A failure
        of the whole batch raises; the engine then tries each request alone, so a call that raises has made no output
        and has moved no request on."""
        ...

    def is_complete(self, key: StageKey) -> bool:
        """Returns whether the last chunk has come and everything is computed, so that the request has ended (a
        generation stage), or whether an output was finished (an autoregressive stage)."""
        ...

    def close(self, key: StageKey) -> None: ...


@dataclass(slots=True)
class ChunkAccumulator:
    """Holds what the function that makes the next stage's input keeps of one request. The transfer adapter makes one
    for each request of a producing stage, and drops it at the request's end."""

    request: StageRequest
    is_async: bool
    """Is False in the sequential pipeline (`async_chunk: false`): the function returns one payload, at the end."""
    settings: Mapping[str, int | float | str]
    """Holds the stage's `extra` settings, for example `codec_chunk_frames`."""
    num_chunks: int = 0
    """Counts the payloads that were returned so far. The adapter raises it."""
    num_running: int = 1
    """Counts the requests that the stage has at the moment; the size of a first chunk may depend on it."""
    held: list[StageOutput] = field(default_factory=list)
    """Holds outputs that no payload has carried yet."""


NextStageInput = Callable[[ChunkAccumulator, StageOutput], Payload | None]
"""Takes the next output of a request and returns the payload of a chunk for the next stage, or None if no chunk is due.
When the output is finished it must return everything that is left (an empty payload if nothing is). It runs in the
engine's thread. A stage config names it by import path, `package.module:function`."""
