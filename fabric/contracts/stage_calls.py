"""Defines what the router sends to the stages behind the thinker, and what they send back, as msgspec structs.

A *stage* is one part of a pipeline, with replicas of its own: the thinker (an LLM worker), the talker, and code2wav. A
request that wants speech has one `StageRequest` open at each stage behind the thinker; the call ends with a
`StageResult`. The data of the request goes from stage to stage through a connector, never through the router; only what
the last stage makes travels to the router, in `StageFrames`.

This module knows nothing of how chunks travel, or of what a stage computes.
"""

from __future__ import annotations

from typing import Annotated, NewType

import msgspec

from fabric.contracts.calls import MediaItem, PlaceholderRange, PlaneWire, StageTarget, TraceEvent, Wire
from fabric.contracts.errors import ErrorInfo
from fabric.contracts.identity import MemberId, RequestId
from fabric.contracts.reported_metrics import LABELLED_AS_MEMBER, ProcessStats, counter, gauge

StageKey = NewType("StageKey", str)
"""Names one attempt of one request in a pipeline: `{request_id}.{attempt}`. It never comes again, because the router
mints the ids of requests."""


def stage_key(request_id: RequestId, attempt: int) -> StageKey:
    return StageKey(f"{request_id}.{attempt}")


class StagePrompt(Wire, frozen=True):
    """A `StagePrompt` is the prompt of the thinker, for stages that read it too. The fields mean the same as in
    `GenerateRequest`."""

    token_ids: tuple[int, ...]
    placeholders: tuple[PlaceholderRange, ...] = ()
    media: tuple[MediaItem, ...] = ()


class StageRequest(Wire, frozen=True):
    """The router sends this to a replica of a stage behind the thinker. The call stays open until the stage has ended
    its work on the request; the router aborts it by cancelling."""

    request_id: RequestId
    attempt: int
    router_id: MemberId
    router_address: str
    """Names the address on the message plane to which the last stage sends `StageFrames`."""
    stage_id: int
    age: tuple[float, str]
    next_stage: StageTarget | None = None
    """Is None at the last stage."""
    prompt: StagePrompt | None = None
    options: dict[str, str | int | float] = msgspec.field(default_factory=dict)
    """Holds what the client chose for this pipeline, for example `voice`, `seed`, or `initial_codec_chunk_frames`."""

    @property
    def key(self) -> StageKey:
        return stage_key(self.request_id, self.attempt)


class StageResult(Wire, frozen=True):
    """A replica of a stage sends this to the router as the one terminal event of a `StageRequest`."""

    member_id: MemberId
    stage_id: int
    num_chunks_in: int = 0
    num_chunks_out: int = 0
    num_outputs: int = 0
    """Counts what the stage made: codec frames at the talker, samples at code2wav."""
    first_chunk_s: float = 0.0
    """Holds the time from the call's receipt to the first chunk from the stage before."""
    first_output_s: float = 0.0
    """Holds the time from the call's receipt to the first output that left the stage."""
    waited_s: float = 0.0
    """Sums the seconds for which the request waited for a chunk after its first one."""
    computed_s: float = 0.0
    """Sums the seconds of the steps that computed this request, which may contain other requests."""
    trace: tuple[TraceEvent, ...] = ()
    error: ErrorInfo | None = None


class StageFrame(Wire, frozen=True):
    """Holds the next samples of one request. The router drops duplicates by `first_sample`, and frames of old
    attempts."""

    request_id: RequestId
    attempt: int
    first_sample: int
    samples: bytes
    """Holds int16 values, little-endian, one channel."""
    sample_rate: int
    is_last: bool = False


class StageFrames(PlaneWire, frozen=True):
    """The last stage sends this to the router: everything that one of its steps made for one router."""

    member_id: MemberId
    frames: tuple[StageFrame, ...]


class StageReport(PlaneWire, frozen=True):
    """A replica of a stage sends this to every router, at the pace that the router asks for."""

    member_id: MemberId
    stage_id: int
    model_stage: str
    """Names what the stage computes, for example `talker`."""
    epoch: int
    seq: int
    num_waiting: Annotated[
        int, gauge("weft_stage_waiting_requests", "Requests that wait for a place in a batch of a stage.")
    ] = 0
    num_running: Annotated[int, gauge("weft_stage_running_requests", "Requests that a stage computes.")] = 0
    num_waiting_for_chunk: Annotated[
        int,
        gauge("weft_stage_requests_waiting_for_chunk", "Requests of a stage that wait for a chunk."),
    ] = 0
    max_num_seqs: int = 0
    step_s: Annotated[float, gauge("weft_stage_step_seconds", "Mean time of the latest steps of a stage.")] = 0.0
    num_steps: Annotated[int, counter("weft_stage_steps", "Steps that a stage has computed.")] = 0
    num_chunks_in: Annotated[int, counter("weft_stage_chunks_received", "Chunks that a stage has received.")] = 0
    num_chunks_out: Annotated[int, counter("weft_stage_chunks_sent", "Chunks that a stage has sent.")] = 0
    num_outputs: Annotated[
        int, counter("weft_stage_outputs", "Codec frames that a talker, or samples that a code2wav has made.")
    ] = 0
    num_stalls: Annotated[
        int,
        counter("weft_stage_stalls", "Requests of a stage that ended because no chunk came within the stall time."),
    ] = 0
    pool_used: Annotated[
        int, gauge("weft_stage_pool_used", "Blocks (talker) or states (code2wav) that requests of a stage hold.")
    ] = 0
    pool_size: Annotated[int, gauge("weft_stage_pool_size", "Blocks or states that a stage has.")] = 0
    is_lost: bool = False
    process: Annotated[ProcessStats, LABELLED_AS_MEMBER] = msgspec.field(default_factory=ProcessStats)
