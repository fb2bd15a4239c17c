"""Hands each message that arrives on the router's message plane to the part that it concerns: the run of its request,
the view of the cluster, or what other routers have asked and answered.

The module decides nothing. Messages of requests and members that are not there any more are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fabric.contracts import (
    EncoderReport,
    FeatureEvents,
    FeatureNeeded,
    KvEvents,
    KvSnapshot,
    MetricsQuestion,
    MetricsReply,
    PlaneMessage,
    RequestId,
    RouterNews,
    StageFrames,
    StageReport,
    TokenFrames,
    TraceQuestion,
    TraceReply,
    WorkerReport,
)
from router.member_feeds import MemberFeeds
from router.observe import MemberReports
from router.run import CapacityGate, RequestRun, RouterContext


class RouterTalk(NamedTuple):
    """Holds who takes the messages of other routers."""

    news: Callable[[RouterNews], None]
    metrics: Callable[[MetricsQuestion | MetricsReply], None]
    traces: Callable[[TraceQuestion | TraceReply], None]


class Arrivals:
    """An `Arrivals` belongs to the event loop of one router."""

    def __init__(
        self,
        context: RouterContext,
        runs: Mapping[RequestId, RequestRun],
        feeds: MemberFeeds,
        reports: MemberReports,
        gate: CapacityGate,
        talk: RouterTalk,
    ) -> None:
        """`runs` are the router's own requests; the mapping changes as they come and go."""
        self._context, self._runs, self._feeds = context, runs, feeds
        self._reports, self._gate, self._talk = reports, gate, talk

    def take(self, message: PlaneMessage) -> None:
        if isinstance(message, (WorkerReport, EncoderReport, KvEvents, KvSnapshot, FeatureEvents)):
            self._learn(message)  # In a large cluster, nearly all messages are of these types.
            return
        match message:
            case TokenFrames(worker_id=worker_id, frames=frames):
                for frame in frames:
                    if (run := self._run_of(frame.request_id)) is not None:
                        run.on_frame(worker_id, frame)
            case StageFrames(member_id=member_id, frames=pieces):
                for piece in pieces:
                    if (run := self._run_of(piece.request_id)) is not None:
                        run.on_samples(member_id, piece)
            case FeatureNeeded(request_id=request_id):
                if (run := self._runs.get(request_id)) is not None:
                    run.on_feature_needed(message)
            case StageReport():
                self._learn_stage(message)
            case RouterNews():
                self._talk.news(message)
            case MetricsQuestion() | MetricsReply():
                self._talk.metrics(message)
            case TraceQuestion() | TraceReply():
                self._talk.traces(message)
            case _:
                pass

    def _run_of(self, request_id: RequestId) -> RequestRun | None:
        run = self._runs.get(request_id)
        if run is None:
            self._context.metrics.frames_dropped.labels("unknown_request").inc()
        return run

    def _learn(self, message: WorkerReport | EncoderReport | KvEvents | KvSnapshot | FeatureEvents) -> None:
        """Applies a message to the view of the cluster. Ignores messages of members that have left."""
        context = self._context
        member_id = message.encoder_id if isinstance(message, (EncoderReport, FeatureEvents)) else message.worker_id
        if member_id not in context.members:
            return
        if isinstance(message, (WorkerReport, EncoderReport)):
            self._reports.put(message)
            self._feeds.took_report(message)
            if isinstance(message, WorkerReport) and message.is_lost:
                context.exclude(member_id)  # Keeps plans off the worker until it leaves the directory, which is soon.
        elif isinstance(message, KvSnapshot) and not message.is_last:
            self._feeds.took_page(member_id)
        elif isinstance(message, KvSnapshot) or (isinstance(message, FeatureEvents) and message.is_snapshot):
            self._feeds.took_snapshot(member_id)
        for lagging in context.cluster.apply(message, context.clock.now()):
            self._feeds.want_snapshot(lagging)
        if isinstance(message, WorkerReport):
            self._gate.blocks_freed()

    def _learn_stage(self, report: StageReport) -> None:
        context = self._context
        if report.member_id in context.members:
            context.stages.take_report(report)
            self._reports.put(report)
            self._feeds.took_report(report)
            if report.is_lost:
                context.stages.exclude(report.member_id, context.clock.now() + context.config.exclusion_s)
            context.stage_news.changed()
