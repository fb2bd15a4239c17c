"""Provides fake stages behind the thinker for tests of the router: a talker that only answers, and a code2wav that
sends samples. Both work without chunks, and know the fake worker only by the request that they have in common.

A test can make a stage pause, send its samples in an order of its own, fail or die.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from fabric.contracts import (
    AbortAttempt,
    Member,
    MemberId,
    MemberStage,
    PlaneMessage,
    StageFrame,
    StageFrames,
    StageReport,
    StageRequest,
    StageResult,
    WeftError,
)
from fabric.transport import LocalHub, LocalPlane

SAMPLE_RATE = 24_000
NUM_PIECES, PIECE_SAMPLES = 6, 100


def spoken_samples() -> bytes:
    """Returns the samples that every fake code2wav sends for every request, as int16."""
    return np.arange(NUM_PIECES * PIECE_SAMPLES, dtype="<i2").tobytes()


@dataclass
class StageScript:
    """Holds a test's instructions for a fake stage."""

    die_at: int | None = None
    """The stage raises `error` before this piece."""
    error: WeftError | None = None
    pause_at: int | None = None
    """The stage waits for `resume` before this piece."""
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    frames: Callable[[list[StageFrame]], list[StageFrame]] = lambda frames: frames
    """Returns the frames of a piece that the stage sends instead."""


class FakeStage:
    """A `FakeStage` is a member of one stage. The last stage sends samples."""

    def __init__(self, hub: LocalHub, name: str, stage_id: int, model_stage: str, is_last: bool) -> None:
        self.member_id = MemberId(name)
        self.plane = LocalPlane(hub, f"local://{name}")
        self.stage = MemberStage(stage_id, model_stage, (("local", f"inbox-{name}"),), max_num_seqs=4)
        self.script = StageScript()
        self.requests: list[StageRequest] = []
        self.aborted: list[AbortAttempt] = []
        self.num_open = 0
        self.host = "host-0"
        self._is_last = is_last

    @property
    def member(self) -> Member:
        return Member(self.member_id, "stage", self.plane.address, self.host, 1, stage=self.stage)

    def handle(self, message: PlaneMessage) -> None:
        if isinstance(message, AbortAttempt):
            self.aborted.append(message)

    async def run(self, request: StageRequest) -> StageResult:
        self.requests.append(request)
        self.num_open += 1
        try:
            return await self._run(request)
        finally:
            self.num_open -= 1

    async def _run(self, request: StageRequest) -> StageResult:
        for piece in range(NUM_PIECES):
            if piece == self.script.pause_at:
                await self.script.resume.wait()
            if piece == self.script.die_at and self.script.error is not None:
                raise self.script.error
            await asyncio.sleep(0)
            if self._is_last:
                self._send(request, piece)
        return StageResult(self.member_id, self.stage.stage_id, num_outputs=NUM_PIECES * PIECE_SAMPLES)

    def _send(self, request: StageRequest, piece: int) -> None:
        first = piece * PIECE_SAMPLES
        samples = spoken_samples()[2 * first : 2 * (first + PIECE_SAMPLES)]
        is_last = piece == NUM_PIECES - 1
        frame = StageFrame(request.request_id, request.attempt, first, samples, SAMPLE_RATE, is_last)
        frames = self.script.frames([frame])
        if frames:
            self.plane.send(request.router_address, StageFrames(self.member_id, tuple(frames)))

    def report(self, seq: int, num_running: int = 0, step_s: float = 0.0) -> StageReport:
        own = (self.member_id, self.stage.stage_id, self.stage.model_stage, 1, seq)
        return StageReport(*own, num_running=num_running, max_num_seqs=self.stage.max_num_seqs, step_s=step_s)
