"""Holds FIXME."""

from router.observe.router_metrics import PlannerSeries, RouterMetrics, Timing
from router.observe.traces import RequestTrace, TraceRing

__all__ = [
    "PlannerSeries",
    "RequestTrace",
    "RouterMetrics",
    "Timing",
    "TraceRing",
]
