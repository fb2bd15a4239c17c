"""Carries requests through the cluster, each from its prompt to its one terminal event.

`request_run` is the task of one request, and `attempt` is one try at it: planned, dispatched, then ended or aborted.
`encode_dispatcher` keeps the worker of an attempt supplied with features, `speech_calls` carries the calls to the
stages that speak the answer, and `audio_track` keeps its sound. `failures` decides what failures mean for the request,
and `request_output` carries its tokens and text to the reader; `joined_streams` reads several requests as one.
`key_book` knows the API keys and whose they are, `rate_limits` holds quotas per minute, `admission` limits what is in
flight and charges tenants, `turn` lets a request wait for its turn and for room at workers, and `context` holds what
else all requests of one router share.

The router service creates the shared objects and starts a `RequestRun` for each request; `router.edge` reads the
`RequestStream`. The folder reaches members only through `Pools` and the message plane, and takes its decisions about
members from `router.planning`. It knows nothing of HTTP, and nothing of what a medium holds.
"""

from router.run.admission import Admission, RequestTerms, TenantLedger, Ticket
from router.run.audio_track import AudioTrack
from router.run.context import CapacityGate, Pools, RouterContext
from router.run.failures import DegradationPolicy
from router.run.joined_streams import JoinedStreams
from router.run.key_book import (
    NO_TENANT,
    Caller,
    KeyBook,
    KeyFile,
    KeyFlaw,
    check_operator,
    check_tenant,
    new_key,
    parse_keys,
)
from router.run.rate_limits import rate_headers
from router.run.request_output import ChoiceOutput, Delta, RequestStream
from router.run.request_run import RequestRun

__all__ = [
    "NO_TENANT",
    "Admission",
    "AudioTrack",
    "Caller",
    "CapacityGate",
    "ChoiceOutput",
    "DegradationPolicy",
    "Delta",
    "JoinedStreams",
    "KeyBook",
    "KeyFile",
    "KeyFlaw",
    "Pools",
    "RequestRun",
    "RequestStream",
    "RequestTerms",
    "RouterContext",
    "TenantLedger",
    "Ticket",
    "check_operator",
    "check_tenant",
    "new_key",
    "parse_keys",
    "rate_headers",
]
