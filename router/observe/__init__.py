"""Records what a router does, for machines and for people to read.

`router_metrics` exports counters and times for Prometheus, `usage_series` counts what each API key uses, and
`speech_series` measures spoken answers; `cluster_series` exports what members report, how well the planner predicts and
who is there, and puts the series of several routers or members together, and `scaling_series` shows the decisions about
the sizes of pools. `traces` keeps the plans and events of recent requests, and `explained_request` computes from them
where the time of a request went, and `record_words` has the words for it. `cluster_picture` makes a picture of what all
members do. `span_context` decides which requests are sampled for a tracing system, `record_spans` makes spans of their
records, and `span_export` sends these. The router service creates the metrics and the traces, a request's run writes to
them, and `router.edge` shows them (`/metrics`, `/weft/requests`). The folder decides nothing, and knows nothing of how
requests are served.
"""

from router.observe.cluster_picture import (
    ENCODER_NUMBERS,
    MAX_LINKS,
    WORKER_NUMBERS,
    PictureParts,
    listed_members,
    picture_of,
    scrape_targets,
)
from router.observe.cluster_series import (
    UP_TEXT,
    ClusterMetrics,
    MemberReports,
    MembershipSeries,
    PlannerSeries,
    merged,
    report_exposition,
    up_exposition,
)
from router.observe.explained_request import item_stages, modality_class, worker_stages
from router.observe.record_spans import chrome_trace
from router.observe.record_words import NAME_TO_WORDS, milliseconds, moment, place_of, words
from router.observe.router_metrics import RouterMetrics, Timing
from router.observe.span_context import SpanContext, TracingSettings, beside, read_traceparent
from router.observe.span_export import SPAN_THREAD, ExportCounts, SpanExport
from router.observe.speech_series import HeardAnswer
from router.observe.traces import Found, RequestFilter, RequestTrace, TraceRing, TraceSearch

__all__ = [
    "ENCODER_NUMBERS",
    "MAX_LINKS",
    "NAME_TO_WORDS",
    "SPAN_THREAD",
    "UP_TEXT",
    "WORKER_NUMBERS",
    "ClusterMetrics",
    "ExportCounts",
    "Found",
    "HeardAnswer",
    "MemberReports",
    "MembershipSeries",
    "PictureParts",
    "PlannerSeries",
    "RequestFilter",
    "RequestTrace",
    "RouterMetrics",
    "SpanContext",
    "SpanExport",
    "Timing",
    "TraceRing",
    "TraceSearch",
    "TracingSettings",
    "beside",
    "chrome_trace",
    "item_stages",
    "listed_members",
    "merged",
    "milliseconds",
    "modality_class",
    "moment",
    "picture_of",
    "place_of",
    "read_traceparent",
    "report_exposition",
    "scrape_targets",
    "up_exposition",
    "words",
    "worker_stages",
]
