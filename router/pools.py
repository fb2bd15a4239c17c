"""Calls to named replicas, as the router sees them. `deploy` implements them: in one process, and over Ray Serve.

A call is cancelled by cancelling the task that awaits it; that is the abort.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from fabric.ids import MemberId
from fabric.messages import EncodeRequest, EncodeResult, GenerateRequest, GenerateResult


class WorkerPool(Protocol):
    async def generate(self, worker_id: MemberId, request: GenerateRequest) -> GenerateResult:
        """Open until the attempt's terminal event. Raises TargetGone (the worker had left before the call),
        WorkerLost (it died during the call), or what the worker raised."""
        ...


class EncoderPool(Protocol):
    async def encode(self, encoder_id: MemberId, request: EncodeRequest, media: Sequence[bytes]) -> EncodeResult:
        """`media` is one encoded file per item of the request. Raises TargetGone, EncoderLost, or what the encoder
        raised (Overloaded when its queue is full, WorkerBackedUp when only the share of the request's worker is)."""
        ...


class Pools(NamedTuple):
    workers: WorkerPool
    encoders: EncoderPool
