"""Defines the error tree. Every failure that can reach a client or another process is a leaf of this tree.

    WeftError
    ├── RequestRefused            the request can't be served as it is; Weft never retries it
    │   ├── InvalidRequest            it is malformed, or has an unknown part or an out-of-range parameter
    │   ├── InvalidMedia              a media item is broken, too large or not what it claims to be
    │   ├── UnsupportedModality       the model can't take this modality
    │   ├── ContextLengthExceeded     the prompt (+ output) is longer than the context
    │   ├── BodyTooLarge
    │   ├── ModelNotFound
    │   └── Unauthorized
    ├── Busy                      the request may work later; Retry-After is sent
    │   ├── Overloaded                a budget is full
    │   ├── MachineBusy               work was not done in time because the machine did not get to it
    │   └── WorkerBackedUp            an encoder holds more for the named worker than its share; another may take it
    ├── Unavailable               a part is missing
    │   ├── NoCapacity                no worker or no encoder is there at all
    │   ├── Draining                  the cluster was asked to stop and takes no new requests
    │   ├── TargetGone                the replica that was named has left
    │   ├── WorkerLost                a worker died while it served the request
    │   └── EncoderLost
    ├── DeadlineExceeded          a stage passed its deadline
    ├── StageFailed               a stage broke on this request
    │   ├── EncodeFailed
    │   ├── EngineFailed
    │   └── FeatureMismatch           a feature landed with a shape, dtype or count that was not promised
    ├── Aborted                   the client left or the request was cancelled (499, logs only)
    ├── TransferError             it stays inside the fabric, which handles it; a client never sees it as such
    │   ├── LeaseLost                 the source slot was given to another feature
    │   ├── TransferFailed
    │   ├── ArenaFull                 there is no room now
    │   └── UnitTooLarge              there is never room
    ├── ProtocolError             a peer sent what the contract forbids
    └── ConfigError               a config or checkpoint can't be used; it is raised before serving

Each class carries a stable `code` (the name on the wire) and `retryable` (whether the same call may succeed later).
This module knows nothing of how a failure is handled.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class WeftError(Exception):
    """A `WeftError` is the root of the tree. `param` names the offending part of the request (`messages.0.content.1`),
    or is None."""

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.param, self.retry_after_s))


def _rebuild(kind: type[WeftError], message: str, param: str | None, retry_after_s: float | None) -> WeftError:
    return kind(message, param=param, retry_after_s=retry_after_s)


class RequestRefused(WeftError):
    code = "invalid_request"


class InvalidRequest(RequestRefused):
    code = "invalid_request"


class InvalidMedia(RequestRefused):
    code = "invalid_media"


class UnsupportedModality(RequestRefused):
    code = "unsupported_modality"


class ContextLengthExceeded(RequestRefused):
    code = "context_length_exceeded"


class BodyTooLarge(RequestRefused):
    code = "body_too_large"


class ModelNotFound(RequestRefused):
    code = "model_not_found"


class Unauthorized(RequestRefused):
    code = "invalid_api_key"


class Busy(WeftError):
    code = "busy"
    retryable = True


class Overloaded(Busy):
    code = "overloaded"


class MachineBusy(Busy):
    code = "machine_busy"


class WorkerBackedUp(Busy):
    code = "worker_backed_up"


class Unavailable(WeftError):
    code = "unavailable"
    retryable = True


class NoCapacity(Unavailable):
    code = "no_capacity"


class Draining(Unavailable):
    code = "draining"


class TargetGone(Unavailable):
    code = "target_gone"


class WorkerLost(Unavailable):
    code = "worker_lost"


class EncoderLost(Unavailable):
    code = "encoder_lost"


class DeadlineExceeded(WeftError):
    code = "deadline_exceeded"
    retryable = True


class StageFailed(WeftError):
    code = "stage_failed"


class EncodeFailed(StageFailed):
    code = "encode_failed"


class EngineFailed(StageFailed):
    code = "engine_failed"


class FeatureMismatch(StageFailed):
    code = "feature_mismatch"


class Aborted(WeftError):
    code = "aborted"


class TransferError(WeftError):
    code = "transfer_error"
    retryable = True


class LeaseLost(TransferError):
    code = "lease_lost"


class TransferFailed(TransferError):
    code = "transfer_failed"


class ArenaFull(TransferError):
    code = "arena_full"


class UnitTooLarge(TransferError):
    code = "unit_too_large"
    retryable = False


class ProtocolError(WeftError):
    code = "protocol_error"


class ConfigError(WeftError):
    code = "config_error"


class ErrorInfo(msgspec.Struct, frozen=True):
    """An `ErrorInfo` is an error on the wire. `to_error` returns an error of the class that `of` received, by its
    code."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        """Returns the info of any exception. An exception outside the tree becomes `internal_error` without its text,
        because the text may leak information."""
        if isinstance(error, WeftError):
            return cls(error.code, error.message, error.param, error.retry_after_s)
        return cls(WeftError.code, f"internal error ({type(error).__name__})")

    def to_error(self) -> WeftError:
        kind = CODE_TO_ERROR.get(self.code, WeftError)
        return kind(self.message, param=self.param, retry_after_s=self.retry_after_s)


def leaves(root: type[WeftError] = WeftError) -> list[type[WeftError]]:
    """Returns every class of the tree that has no subclass, in order of definition."""
    below = root.__subclasses__()
    return [leaf for kind in below for leaf in leaves(kind)] if below else [root]


CODE_TO_ERROR: dict[str, type[WeftError]] = {leaf.code: leaf for leaf in leaves()}
