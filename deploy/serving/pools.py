"""Calls a named replica through Serve handles: the module implements the router's `WorkerPool` and `EncoderPool` on
Ray.

Serve counts the open call, so draining waits for it. Cancelling the awaiting task cancels the call, which aborts the
request.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from fabric.errors import EncoderLost, NoCapacity, Unavailable, WeftError, WorkerLost
from fabric.ids import MemberId
from fabric.messages import EncodeRequest, EncodeResult, GenerateRequest, GenerateResult

INLINE_BYTES = 64 * 1024
"""Calls carry media up to this size. Larger media are passed by reference through Ray's object store, which keeps one
copy for all processes of a host."""


async def call_pinned(handle: DeploymentHandle, member_id: MemberId, lost: type[Unavailable], *args: Any) -> Any:
    """Calls the replica `member_id` once and returns its result. Raises TargetGone, `lost`, or the WeftError that the
    replica raised.

    The call starts in an empty context: two concurrent calls to one deployment from one HTTP request would share
    Serve's internal request id, and one of them would hang."""
    pinned = handle.options(session_id=str(member_id))
    response = contextvars.Context().run(pinned.remote, *args)
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, WeftError):
            raise type(cause)(cause.message, param=cause.param, retry_after_s=cause.retry_after_s) from error
        raise lost(f"{member_id} failed ({type(cause).__name__})") from error
    except (RayActorError, TaskCancelledError) as error:
        raise lost(f"{member_id} is gone") from error
    except (RayError, RayServeException) as error:
        raise lost(f"{member_id} can't be reached ({type(error).__name__})") from error


class RayWorkerPool:
    """Implements `WorkerPool` with the worker deployment's handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._generate = handle.generate

    async def generate(self, worker_id: MemberId, request: GenerateRequest) -> GenerateResult:
        result: GenerateResult = await call_pinned(self._generate, worker_id, WorkerLost, request)
        return result


class RayEncoderPool:
    """Implements `EncoderPool` with the encoder deployment's handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._encode = handle.encode

    async def encode(self, encoder_id: MemberId, request: EncodeRequest, media: Sequence[bytes]) -> EncodeResult:
        # The media are top-level arguments, so that Ray resolves their references before the call.
        carried = [ray.put(data) if len(data) > INLINE_BYTES else data for data in media]
        result: EncodeResult = await call_pinned(self._encode, encoder_id, EncoderLost, request, *carried)
        return result


class NoEncoders:
    """Implements `EncoderPool` for a cluster without encoders. The planner never calls it, but a stale plan would."""

    async def encode(self, encoder_id: MemberId, request: EncodeRequest, media: Sequence[bytes]) -> EncodeResult:
        raise NoCapacity("this cluster has no encoders")
