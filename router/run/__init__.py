"""Carries requests through the cluster, each from its prompt to its one terminal event.

`request_run` is the task of one request, and `attempt` is one try at it: planned, dispatched, then ended or aborted.
`encode_dispatcher` keeps the worker of an attempt supplied with features. `failures` decides what failures mean for
the request, and `request_output` carries its tokens and text to the reader; `joined_streams` reads several requests as
one. `admission` limits what is in flight and
charges tenants, `turn` lets a request wait for its turn and for room at workers, and `context` holds what else all
requests of one router share.

The router service creates the shared objects and starts a `RequestRun` for each request; `router.edge` reads the
`RequestStream`. The folder reaches members only through `Pools` and the message plane, and takes its decisions about
members from `router.planning`. It knows nothing of HTTP, and nothing of what a medium holds.
"""

from router.run.admission import Admission, RequestTerms, TenantBook, TenantLedger, Ticket
from router.run.context import CapacityGate, Pools, RouterContext
from router.run.failures import DegradationPolicy
from router.run.joined_streams import JoinedStreams
from router.run.request_output import ChoiceOutput, Delta, RequestStream
from router.run.request_run import RequestRun

__all__ = [
    "Admission",
    "CapacityGate",
    "ChoiceOutput",
    "DegradationPolicy",
    "Delta",
    "JoinedStreams",
    "Pools",
    "RequestRun",
    "RequestStream",
    "RequestTerms",
    "RouterContext",
    "TenantBook",
    "TenantLedger",
    "Ticket",
]
