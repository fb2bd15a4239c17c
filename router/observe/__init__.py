"""Records what a router does, for machines and for people to read.

`router_metrics` exports counters and times for Prometheus, the router's own and those that members report; `traces`
keeps the plans and events of recent requests. The router service creates both, a request's run writes to them, and
`router.edge` shows them (`/metrics`, `/weft/requests`). The folder decides nothing, and knows nothing of how requests
are served.
"""

from router.observe.router_metrics import ClusterMetrics, PlannerSeries, RouterMetrics, Timing, report_exposition
from router.observe.traces import RequestTrace, TraceRing

__all__ = [
    "ClusterMetrics",
    "PlannerSeries",
    "RequestTrace",
    "RouterMetrics",
    "Timing",
    "TraceRing",
    "report_exposition",
]
