"""Defines the error tree. Every failure that can reach a client or another process is a leaf of this tree.

    WeftError
    ├── RequestRefused            the request can't be served as it is; Weft never retries it
    │   ├── InvalidRequest            it is malformed, or has an unknown part or an out-of-range parameter
    │   ├── InvalidMedia              a media item is broken, too large or not what it claims to be
    │   ├── UrlRefused                the URL of a medium may not be asked
    │   ├── MediaUnreachable          the medium behind a URL could not be fetched
    │   ├── UnsupportedModality       the model can't take this modality
    │   ├── ContextLengthExceeded     the prompt (+ output) is longer than the context
    │   ├── BodyTooLarge
    │   ├── UnsupportedContentType    the header Content-Type names another type of body than the route takes
    │   ├── ModelNotFound
    │   ├── Unauthorized
    │   └── Forbidden                 the API key may not do this, or a page of another site asks
    ├── Busy                      the request may work later; Retry-After is sent
    │   ├── Overloaded                a budget is full
    │   ├── RateLimited               the key or its tenant has used up a quota per minute
    │   ├── DeadlineOutOfReach        the first token would come too late, so nothing was spent on the request
    │   ├── MachineBusy               work was not done in time because the machine did not get to it
    │   └── WorkerBackedUp            an encoder holds more for the named worker than its share; another may take it
    ├── Unavailable               a part is missing
    │   ├── NoCapacity                no worker or no encoder is there at all
    │   ├── Draining                  the cluster was asked to stop and takes no new requests
    │   ├── TargetGone                the replica that was named has left
    │   ├── WorkerLost                a worker died while it served the request
    │   ├── WorkerLeaving             the worker was stopped, and no other one could continue in time
    │   ├── EncoderLost
    │   └── StageStalled              the stage before has sent nothing for too long
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
The first paragraph of a leaf's docstring says what happened, and the second one tells the user what to do; the
documentation shows both. This module knows nothing of how a failure is handled.
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
    """The request is malformed, or a parameter is unknown or out of range.

    Correct what `message` says; `param` names the place in the request.
    """

    code = "invalid_request"


class InvalidMedia(RequestRefused):
    """A medium is broken, too large, or not what its part type says.

    Send another file; `param` names the part, and docs/media.md lists formats and limits.
    """

    code = "invalid_media"


class UrlRefused(RequestRefused):
    """The URL of a medium is malformed, or this server may not fetch from it: its scheme, host, port or address is not
    allowed, or its host has no address.

    Send the content of the medium as a `data:` URL. The operator sets under `media.fetch` what may be fetched.
    """

    code = "url_refused"


class MediaUnreachable(RequestRefused):
    """The medium behind a URL could not be fetched: its server was not reached, was too slow, or did not send it.

    Check that the URL works from where the cluster runs, or send the content of the medium as a `data:` URL.
    """

    code = "media_unreachable"


class UnsupportedModality(RequestRefused):
    """The model does not take this kind of medium, or the operator has turned it off.

    Leave the medium out, or ask a cluster whose model takes it.
    """

    code = "unsupported_modality"


class ContextLengthExceeded(RequestRefused):
    """The prompt and its answer are longer than the context of the model.

    Shorten the prompt, send fewer or smaller media, or lower `max_tokens`.
    """

    code = "context_length_exceeded"


class BodyTooLarge(RequestRefused):
    """The body of the request is larger than `server.max_body_bytes`.

    Send smaller media, or raise the limit.
    """

    code = "body_too_large"


class UnsupportedContentType(RequestRefused):
    """The header `Content-Type` of the request names a type of body that the route does not take, or the body is
    compressed.

    Send `Content-Type: application/json`, or a form (`multipart/form-data`) to `/v1/audio/transcriptions`, and no
    `Content-Encoding`. With curl, add `-H 'Content-Type: application/json'`.
    """

    code = "unsupported_content_type"


class ModelNotFound(RequestRefused):
    """The cluster does not serve a model of this name.

    Use the name that `GET /v1/models` returns.
    """

    code = "model_not_found"


class Unauthorized(RequestRefused):
    """The API key is missing, or is none of those that this cluster knows.

    Send the key as `Authorization: Bearer KEY`. The operator adds the digest of a key to `access.keys_file` or under
    `tenants` (docs/access.md).
    """

    code = "invalid_api_key"


class Forbidden(RequestRefused):
    """The API key is known, but it may not do this: metrics and records of requests need an operator's key, and
    answers need the key of a tenant. In a cluster without keys: a browser has sent the request for a page of another
    site, or under a name that is not the server's.

    Send a key with the right role; docs/access.md says how an operator makes one. In a cluster without keys, the
    operator can add the name or the site to `access.allowed_hosts` or `access.allowed_origins`.
    """

    code = "permission_denied"


class Busy(WeftError):
    code = "busy"
    retryable = True


class Overloaded(Busy):
    """A budget of the cluster is full, so the request was refused before any work.

    Send the request again after the time in `Retry-After`; add workers or encoders if it happens often.
    """

    code = "overloaded"


class RateLimited(Busy):
    """The API key or its tenant has used up what it may use in a minute: requests, tokens, or seconds of media.

    Send the request again after the time in `Retry-After`. The headers `x-ratelimit-*` say what is left.
    """

    code = "rate_limit_exceeded"


class DeadlineOutOfReach(Busy):
    """The first token of the answer would come after the deadline of the request, so it was refused before any work.

    Send the request again after the time in `Retry-After`, or with a later `weft.ttft_deadline_ms`; add workers or
    encoders if it happens often. Clients' libraries are told not to repeat it by themselves (`x-should-retry`).
    """

    code = "deadline_out_of_reach"


class MachineBusy(Busy):
    """A machine did not get to some work in time, which says nothing against the request.

    Send the request again after the time in `Retry-After`. Look at the load of the encoders if it happens often.
    """

    code = "machine_busy"


class WorkerBackedUp(Busy):
    """An encoder holds as many features as it may for one worker that does not read them, and no other worker is there.

    Send the request again after the time in `Retry-After`. Look at the worker if it happens often.
    """

    code = "worker_backed_up"


class Unavailable(WeftError):
    code = "unavailable"
    retryable = True


class NoCapacity(Unavailable):
    """No worker, or no encoder of a needed modality, was there for `router.capacity_wait_s`.

    Look at `GET /health/ready` and at the logs of the members that are missing; then send the request again.
    """

    code = "no_capacity"


class Draining(Unavailable):
    """The cluster was asked to stop and takes no new requests.

    Send the request again when the cluster has been started again, or to another cluster.
    """

    code = "draining"


class TargetGone(Unavailable):
    """The member that was to serve the request has left.

    Send the request again; the router then plans with the members that are left.
    """

    code = "target_gone"


class WorkerLost(Unavailable):
    """Workers were lost while they served the request, until the router had no attempt left.

    Send the request again. Look at the logs of the workers if it happens again.
    """

    code = "worker_lost"


class WorkerLeaving(Unavailable):
    """The worker of the request was stopped, and no other worker could continue the request in time.

    Send the request again. If it happens often, raise `server.drain_s`, or keep more workers.
    """

    code = "worker_leaving"


class EncoderLost(Unavailable):
    """Encoders were lost while they encoded a medium, until the router had no attempt left.

    Send the request again. Look at the logs of the encoders if it happens again.
    """

    code = "encoder_lost"


class StageStalled(Unavailable):
    """A stage of the pipeline has waited too long for the next chunk from the stage before it, which may have been
    lost.

    Send the request again. Look at the logs of the stage before if it happens again; raise `stall_s` of the stage if
    its machines are slow.
    """

    code = "stage_stalled"


class DeadlineExceeded(WeftError):
    """A stage took longer than its limit: an encoder was silent, or an attempt passed `router.dispatch_timeout_s`.

    Send the request again. Raise the limit if requests of this size take so long on your machines.
    """

    code = "deadline_exceeded"
    retryable = True


class StageFailed(WeftError):
    code = "stage_failed"


class EncodeFailed(StageFailed):
    """An encoder has failed on this medium.

    Do not send the same medium again; the log of the encoder has the cause. `on_encode_failure` can answer without the
    medium.
    """

    code = "encode_failed"


class EngineFailed(StageFailed):
    """The engine of a worker has failed on this request.

    Do not send the same request again; the log of the worker has the cause.
    """

    code = "engine_failed"


class FeatureMismatch(StageFailed):
    """A feature has another shape, dtype or count than the plan promised.

    Report a bug with the log of the worker; all members must run the same version with the same config.
    """

    code = "feature_mismatch"


class Aborted(WeftError):
    """The client left, or the request was cancelled.

    There is nothing to do.
    """

    code = "aborted"


class TransferError(WeftError):
    code = "transfer_error"
    retryable = True


class LeaseLost(TransferError):
    """The source slot of a feature was given to another feature before the worker had read it.

    There is nothing to do: the feature is encoded or announced again.
    """

    code = "lease_lost"


class TransferFailed(TransferError):
    """The transfer of a feature has failed.

    There is nothing to do, unless it happens often; then look at the network between the machines.
    """

    code = "transfer_failed"


class ArenaFull(TransferError):
    """An arena has no room now.

    There is nothing to do: the unit waits for room.
    """

    code = "arena_full"


class UnitTooLarge(TransferError):
    """A feature is larger than the whole arena or inbox.

    Raise `encoders.arena_bytes` or `workers.inbox_bytes`.
    """

    code = "unit_too_large"
    retryable = False


class ProtocolError(WeftError):
    """A member has sent something that the protocol forbids.

    Report a bug; all members must run the same version.
    """

    code = "protocol_error"


class ConfigError(WeftError):
    """The config or the checkpoint can't be used; the cluster does not start.

    Run `weft check FILE`, which names every problem with its line.
    """

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
        return cls(WeftError.code, f"an internal error occurred ({type(error).__name__})")

    def to_error(self) -> WeftError:
        kind = CODE_TO_ERROR.get(self.code, WeftError)
        return kind(self.message, param=self.param, retry_after_s=self.retry_after_s)


def leaves(root: type[WeftError] = WeftError) -> list[type[WeftError]]:
    """Returns every class of the tree that has no subclass, in order of definition."""
    below = root.__subclasses__()
    return [leaf for kind in below for leaf in leaves(kind)] if below else [root]


CODE_TO_ERROR: dict[str, type[WeftError]] = {leaf.code: leaf for leaf in leaves()}
