"""Records what a router does, for machines and for people to read.

`router_metrics` exports counters and times for Prometheus, the router's own and those that members report, and
`usage_series` counts what each API key uses; `traces` keeps the plans and events of recent requests, and
`explained_request` computes from them where the time of a request went, and `record_words` has the words for it. The
router service creates the metrics and the
traces, a request's run writes to them, and `router.edge` shows them (`/metrics`, `/weft/requests`). The folder decides
nothing, and knows nothing of how requests are served.
"""

from router.observe.explained_request import item_stages, modality_class, worker_stages
from router.observe.record_words import milliseconds, moment, place_of, words
from router.observe.router_metrics import ClusterMetrics, PlannerSeries, RouterMetrics, Timing, report_exposition
from router.observe.traces import Found, RequestFilter, RequestTrace, TraceRing, TraceSearch

__all__ = [
    "ClusterMetrics",
    "Found",
    "PlannerSeries",
    "RequestFilter",
    "RequestTrace",
    "RouterMetrics",
    "Timing",
    "TraceRing",
    "TraceSearch",
    "item_stages",
    "milliseconds",
    "modality_class",
    "moment",
    "place_of",
    "report_exposition",
    "words",
    "worker_stages",
]
