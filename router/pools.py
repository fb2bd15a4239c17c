"""Defines calls to named replicas as the router sees them. `deploy` implements them in one process and over Ray Serve.

Cancelling the task that awaits a call cancels the call; that is the abort. The module knows nothing of plans or
attempts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from fabric.ids import MemberId
from fabric.messages import EncodeRequest, EncodeResult, GenerateRequest, GenerateResult


class WorkerPool(Protocol):
    async def generate(self, worker_id: MemberId, request: GenerateRequest) -> GenerateResult:
        """Runs an attempt on a worker; the call stays open until the attempt's terminal event. Raises TargetGone (the
        worker had left before the call), WorkerLost (it died during the call), or what the worker raised."""
        ...


class EncoderPool(Protocol):
    async def encode(self, encoder_id: MemberId, request: EncodeRequest, media: Sequence[bytes]) -> EncodeResult:
        """Encodes the items of a request; `media` is one encoded file per item. Raises TargetGone, EncoderLost, or what
        the encoder raised (Overloaded when its queue is full, WorkerBackedUp when only the share of the request's
        worker is full)."""
        ...


class Pools(NamedTuple):
    workers: WorkerPool
    encoders: EncoderPool
