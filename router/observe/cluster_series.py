"""Exports series of the cluster behind a router: what members report, how well the planner predicts them, and who is
there. `ClusterMetrics` puts the series of all routers together, so that a scrape answers the same whichever router it
reaches; `merged` does that for any expositions.

The series are computed from the last reports and the planner's sums at the moment of a scrape, so a member that left
has no series. The fields of the reports declare their metrics themselves (`fabric.contracts.metrics_of`). The module
knows nothing of how requests are served, or of HTTP.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Count
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fabric.contracts import (
    EncodeCost,
    EncoderReport,
    LinkStats,
    Member,
    MemberId,
    MetricsQuestion,
    MetricsReply,
    ProcessStats,
    StageReport,
    WorkerReport,
    metrics_of,
)
from fabric.transport import Plane
from router.observe.router_metrics import RouterMetrics, written
from router.planning import ClusterState

REPLY_S = 1.0
"""A scrape waits this long for the other routers."""
KINDS = ("router", "encoder", "worker", "stage")


class MemberReports(Collector):
    """Holds the last report of each member that is there, and exports the metrics that the report declares, unless
    members show their own (`shows_members`)."""

    def __init__(self, shows_members: bool = True) -> None:
        self._shows_members = shows_members
        self.workers: dict[MemberId, WorkerReport] = {}
        self.encoders: dict[MemberId, EncoderReport] = {}
        self.stages: dict[MemberId, StageReport] = {}
        self.own_process: tuple[MemberId, Callable[[], ProcessStats]] | None = None
        """Holds the name of the router and what its own process takes."""

    def put(self, report: WorkerReport | EncoderReport | StageReport) -> None:
        if isinstance(report, WorkerReport):
            self.workers[report.worker_id] = report
        elif isinstance(report, StageReport):
            self.stages[report.member_id] = report
        else:
            self.encoders[report.encoder_id] = report

    def remove(self, member_id: MemberId) -> None:
        self.workers.pop(member_id, None)
        self.encoders.pop(member_id, None)
        self.stages.pop(member_id, None)

    def collect(self) -> Iterator[Metric]:
        is_shown = self._shows_members
        workers, encoders = (dict(self.workers), dict(self.encoders)) if is_shown else ({}, {})
        yield from _reported(WorkerReport, ["worker"], [([name], report) for name, report in workers.items()])
        links = [([name, link.link], link) for name, report in workers.items() for link in report.links]
        yield from _reported(LinkStats, ["worker", "link"], links)
        yield from _reported(EncoderReport, ["encoder"], [([name], report) for name, report in encoders.items()])
        costs = [([name, cost.modality], cost) for name, report in encoders.items() for cost in report.costs]
        yield from _reported(EncodeCost, ["encoder", "modality"], costs)
        stages = dict(self.stages) if is_shown else {}
        stage_rows = [([name, report.model_stage], report) for name, report in stages.items()]
        yield from _reported(StageReport, ["member", "stage"], stage_rows)
        processes = [([name, "worker"], report.process) for name, report in workers.items()]
        processes += [([name, "stage"], report.process) for name, report in stages.items()]
        processes += [([name, "encoder"], report.process) for name, report in encoders.items()]
        if self.own_process is not None:
            member_id, read = self.own_process
            processes.append(([member_id, "router"], read()))
        yield from _reported(ProcessStats, ["member", "kind"], processes)


class PlannerSeries(Collector):
    """Exports sums of predicted and actual values per stage, and the state of the prefix and feature indexes. They show
    if requests no longer go to the members that already hold their data: members' events are missing from an index (a
    source out of step), or predicted hits are not found."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        stages = self._cluster.accuracy()
        for field, name, text in (
            ("num_observations", "observations", "Predictions that were compared with what happened."),
            ("predicted", "predicted", "Sum of the predicted values."),
            ("actual", "actual", "Sum of the actual values."),
            ("abs_error", "abs_error", "Sum of the absolute differences between the predicted and the actual values."),
        ):
            metric = CounterMetricFamily(f"weft_planner_{name}", text, labels=["stage"])
            for stage, error in stages.items():
                metric.add_metric([stage], getattr(error, field))
            yield metric
        indexes = {"prefix": self._cluster.prefix_stats(), "feature": self._cluster.feature_stats()}
        for field, name, text in (
            ("num_keys", "keys", "Keys in the index."),
            ("num_out_of_step", "sources_out_of_step", "Members whose events are missing from the index."),
            ("num_bytes", "bytes", "Memory of the index in bytes."),
        ):
            gauge = GaugeMetricFamily(f"weft_index_{name}", text, labels=["index"])
            for index, stats in indexes.items():
                gauge.add_metric([index], getattr(stats, field))
            yield gauge
        for field, name, text in (
            ("num_refused", "refused_keys", "Keys that were not recorded, because the key ahead of them was evicted."),
            ("num_evicted", "evicted_keys", "Keys that were evicted to make room for others."),
        ):
            counter = CounterMetricFamily(f"weft_index_{name}", text, labels=["index"])
            for index, stats in indexes.items():
                counter.add_metric([index], getattr(stats, field))
            yield counter


class MembershipSeries(Collector):
    """Exports how many members of each kind the directory lists, how many the config asks for, and how many of those
    that are listed refused the last change of the config."""

    def __init__(self, expected: Mapping[str, int]) -> None:
        self.expect(expected)
        self.kind_to_number: Count[str] = Count()
        self._kind_to_refusing: Count[str] = Count()

    def expect(self, expected: Mapping[str, int]) -> None:
        """Sets how many members of each kind the config asks for."""
        self._expected = expected

    def update_members(self, members: Iterable[Member]) -> None:
        """Takes the directory's list of members."""
        members = list(members)
        self.kind_to_number = Count(member.kind for member in members)
        self._kind_to_refusing = Count(member.kind for member in members if member.config_flaw)

    def collect(self) -> Iterator[Metric]:
        for name, text, numbers in (
            ("members", "Members that the directory lists, by kind.", self.kind_to_number),
            (
                "members_expected",
                "Members that the config asks for, by kind; with autoscaling, the fewest.",
                self._expected,
            ),
            (
                "members_refusing_config",
                "Members that refused the last change of the config, so their former values stay, by kind.",
                self._kind_to_refusing,
            ),
        ):
            gauge = GaugeMetricFamily(f"weft_router_{name}", text, labels=["kind"])
            for kind in KINDS:
                gauge.add_metric([kind], numbers.get(kind, 0))
            yield gauge


class ClusterMetrics:
    """Answers a scrape with the series of every router of the cluster. It asks the other routers over the message plane
    and belongs to the event loop of its router."""

    def __init__(self, member_id: MemberId, plane: Plane, metrics: RouterMetrics, has_members: bool) -> None:
        self._member_id, self._plane, self._metrics, self._has_members = member_id, plane, metrics, has_members
        self._peers: dict[MemberId, str] = {}
        self._questions: dict[int, asyncio.Future[bytes]] = {}
        self._num_asked = 0
        self._num_silent = 0
        metrics.watch_silent(lambda: self._num_silent)

    def own_exposition(self) -> bytes:
        """Returns this router's own series alone, with the label `router`, for the scrape endpoint of its node."""
        return self._metrics.exposition(self._member_id, has_members=False)

    def update_members(self, members: Iterable[Member]) -> None:
        """Takes the directory's list of members, of which only the other routers matter here."""
        routers = (member for member in members if member.kind == "router" and member.member_id != self._member_id)
        self._peers = {member.member_id: member.address for member in routers}

    def handle(self, message: MetricsQuestion | MetricsReply) -> None:
        """Answers another router's question, or takes its reply."""
        if isinstance(message, MetricsQuestion):
            text = self._metrics.exposition(self._member_id, has_members=False)
            self._plane.send(message.address, MetricsReply(self._member_id, message.number, text))
        elif (question := self._questions.get(message.number)) is not None and not question.done():
            question.set_result(message.text)

    async def exposition(self) -> bytes:
        """Returns the series of all routers in Prometheus text format, with the label `router` if there are several. A
        router that does not answer within `REPLY_S` is missing and counted (`weft_router_num_silent`)."""
        numbers = []
        for address in self._peers.values():
            self._num_asked += 1
            numbers.append(self._num_asked)
            self._questions[self._num_asked] = asyncio.get_running_loop().create_future()
            self._plane.send(address, MetricsQuestion(self._member_id, self._plane.address, self._num_asked))
        try:
            questions = [self._questions[number] for number in numbers]
            if questions:
                await asyncio.wait(questions, timeout=REPLY_S)
            texts = [question.result() for question in questions if question.done()]
        finally:
            for number in numbers:
                del self._questions[number]
        self._num_silent = len(numbers) - len(texts)
        own_label = self._member_id if self._peers else None
        families = list(self._metrics.families(own_label, self._has_members))
        return await asyncio.to_thread(lambda: merged([written(families), *texts]))


def up_exposition(member_to_kind: Mapping[str, str], up: Iterable[str]) -> bytes:
    """Returns the series `weft_member_up` of the members of a node: 1 for those in `up`, which have answered, and 0 for
    the others."""
    gauge = GaugeMetricFamily("weft_member_up", UP_TEXT, labels=["member", "kind"])
    answered = set(up)
    for name, kind in sorted(member_to_kind.items()):
        gauge.add_metric([name, kind], float(name in answered))
    return written([gauge])


UP_TEXT = (
    "Whether the scrape endpoint of a node reached this member of the node (1) or got no answer in time (0). Only that "
    "endpoint has it."
)


def merged(texts: Sequence[bytes]) -> bytes:
    """Puts expositions together: the samples of one metric stand together, as the text format demands, with the help
    text of the first exposition that has it."""
    name_to_parts: dict[bytes, list[bytes]] = {}
    for text in texts:
        for block in text.split(b"# HELP ")[1:]:
            name = block.split(b" ", 1)[0]
            if name not in name_to_parts:
                name_to_parts[name] = [b"# HELP ", block]
            else:
                lines = block.splitlines(keepends=True)
                name_to_parts[name] += [line for line in lines[1:] if not line.startswith(b"#")]
    return b"".join(part for parts in name_to_parts.values() for part in parts)


def report_exposition(report: WorkerReport | EncoderReport | StageReport) -> bytes:
    """Returns the series of one worker, encoder or stage in Prometheus text format, as the member itself shows them."""
    registry, reports = CollectorRegistry(auto_describe=False), MemberReports()
    reports.put(report)
    registry.register(reports)
    kinds = {"weft_worker_": WorkerReport, "weft_encoder_": EncoderReport, "weft_stage_": StageReport}
    others = tuple(prefix for prefix, kind in kinds.items() if not isinstance(report, kind))
    own = [metric for metric in registry.collect() if not metric.name.startswith(others)]
    return written(own)


KIND_TO_FAMILY = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}


def _reported(
    struct: type[msgspec.Struct], labels: Sequence[str], rows: Iterable[tuple[Sequence[str], msgspec.Struct]]
) -> Iterator[Metric]:
    """Yields every metric that the struct declares. A row holds the values of the labels, and the struct with the
    numbers."""
    rows = list(rows)
    for path, declared in metrics_of(struct):
        read = attrgetter(path)
        metric = KIND_TO_FAMILY[declared.kind](declared.name, declared.text, labels=labels)
        for values, numbers in rows:
            metric.add_metric(values, read(numbers))
        yield metric
