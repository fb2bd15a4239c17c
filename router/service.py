"""The router service takes requests, renews the router's leases at members, and keeps its view of the cluster.

It runs in one event loop, without Ray and without HTTP. It makes no decisions itself: `PromptBuilder`, the planner and
the requests' runs do.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fabric.contracts import (
    Aborted,
    Clock,
    Member,
    MemberId,
    RequestId,
    ScalingReport,
    WeftError,
)
from fabric.process_meter import ProcessMeter
from fabric.transport import Plane
from kv_index import is_known_scheme
from modalities.text import IncrementalDetokenizer, token_bytes
from router.api import check_scores, num_prompt_scores
from router.arrivals import Arrivals, RouterTalk
from router.cost_file import CostFile
from router.fetch import SHARED_TENANT
from router.fetch_log import FetchLog
from router.leaving_members import LeavingMembers
from router.member_feeds import MemberFeeds
from router.observe import (
    MAX_LINKS,
    ClusterMetrics,
    MemberReports,
    MembershipSeries,
    PictureParts,
    PlannerSeries,
    RequestTrace,
    RouterMetrics,
    SpanExport,
    TraceRing,
    TraceSearch,
    listed_members,
    picture_of,
    scrape_targets,
)
from router.peer_feed import PeerFeed
from router.planning import ClusterState, SavedCosts, StageState, member_links, member_standings
from router.prompt import (
    Draft,
    Prompt,
    PromptBuilder,
    PromptRequest,
    check_not_empty,
    media_seconds,
    salted,
    wanted_policy,
)
from router.router_config import RouterConfig
from router.run import (
    Admission,
    AudioTrack,
    Caller,
    CapacityGate,
    ChoiceOutput,
    DegradationPolicy,
    KeyBook,
    Pools,
    RequestRun,
    RequestStream,
    RequestTerms,
    RouterContext,
    TenantLedger,
    Ticket,
)

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
STOP_TIMEOUT_S = 5.0
MAX_JOINS_PER_TURN = 50
"""Limits the members that one turn of the event loop adds to the router's view."""


class RouterService:
    """A `RouterService` is one router. `wall_time` (seconds since 1970) gives each request the time by which requests
    are ordered by age."""

    def __init__(
        self,
        member_id: MemberId,
        config: RouterConfig,
        prompt_builder: PromptBuilder,
        plane: Plane,
        pools: Pools,
        clock: Clock,
        wall_time: Callable[[], float] = time.time,
    ) -> None:
        self.config = config
        self.family = prompt_builder.family
        self.spans = SpanExport(config.tracing, {"service.namespace": config.cluster_name})
        self.traces = TraceRing(config.max_traces, self.spans.end)
        self.wall_time = wall_time
        self.admission = Admission(config, clock)
        self.keys = KeyBook(config.tenants, clock, config.keys_file, config.operator_digests)
        shape = prompt_builder.family.shape
        self._codec, self._prompt_builder = prompt_builder.codec, prompt_builder
        self._answer_thread = ThreadPoolExecutor(1, thread_name_prefix="answer")
        self._runs: dict[RequestId, RequestRun] = {}
        self._heartbeats: asyncio.Task[None] | None = None
        self._cost_file = CostFile(config.costs_file, config.model_name, wall_time)
        saved = self._cost_file.read()
        self._members: tuple[Member, ...] = ()
        """Holds the directory's newest list of members."""
        self._is_taking_members = False
        self._pool_to_size: dict[str, int] = {}
        self._leaving = LeavingMembers(config.leave_grace_s, self._move_from)
        metrics = RouterMetrics(lambda: self.admission.num_in_flight, lambda: self.admission.bodies_bytes)
        self._context = RouterContext(
            member_id=member_id,
            config=config,
            feature_row_bytes=shape.hidden_size * config.feature_itemsize,
            cluster=ClusterState(shape, config.block_size, random.Random(str(member_id)), config.planner, saved),
            plane=plane,
            pools=pools,
            clock=clock,
            metrics=metrics,
            num_levels=shape.num_levels,
            ledger=TenantLedger(config, metrics),
            stages=StageState(config.planner.stage_costs, 0 if config.speech is None else config.speech.num_stages),
        )
        self._feeds = MemberFeeds(self._context)
        self._peer_feed = PeerFeed(member_id, plane, self._context.cluster, clock)
        self.search = TraceSearch(member_id, plane.address, self.traces, plane.send)
        self.reports = MemberReports(config.shows_members)
        self.reports.own_process = member_id, ProcessMeter(clock).read
        self._membership = MembershipSeries(config.kind_to_expected)
        for series in (self.reports, self._membership, PlannerSeries(self._context.cluster), self.spans):
            metrics.registry.register(series)
        metrics.begin(config.model_name, self.modalities)
        self._gate = CapacityGate(self._context.cluster, clock, metrics, self._context.ledger.shares)
        self.waiting_work = self._gate.waiting_work
        metrics.watch_waiting(lambda: self._gate.num_waiting)
        metrics.watch_prompts(lambda: self.admission.prompt_tokens)
        self._cluster_metrics = ClusterMetrics(member_id, plane, metrics, config.shows_members)
        talk = RouterTalk(self._peer_feed.handle, self._cluster_metrics.handle, self.search.handle)
        self.arrivals = Arrivals(self._context, self._runs, self._feeds, self.reports, self._gate, talk)

    def reconfigure(self, config: RouterConfig) -> None:
        """Takes the limits and policies of `config`, which differs in nothing else, for requests that come from now on.
        Raises ConfigError, and changes nothing, if its file of keys has a flaw, or it serves a modality without which
        this router has started."""
        keys = KeyBook(config.tenants, self._context.clock, config.keys_file, config.operator_digests)
        self._prompt_builder.reconfigure(config)
        self.admission.reconfigure(config)
        self._context.ledger.reconfigure(config)
        self._membership.expect(config.kind_to_expected)
        self.spans.reconfigure(config.tracing)
        self.keys, self.config = keys, config
        self._context = dataclasses.replace(self._context, config=config)

    # ------------------------------------------------------------ start, stop and members

    async def start(self) -> None:
        """Starts to receive messages and to renew the router's leases at members."""
        await self._prompt_builder.start()
        self._context.plane.start(self.arrivals.take)
        self._heartbeats = self._context.tasks.spawn(self._feeds.run(), "router heartbeats")
        self._context.tasks.spawn(self._cost_file.keep(self._learned), "router learned costs")

    async def drain(self, limit_s: float) -> int:
        """Stops admitting requests and waits until every request in flight has ended, up to `limit_s`. Returns how many
        have not ended."""
        is_empty = asyncio.Event()
        self.admission.close(is_empty.set)
        try:
            async with asyncio.timeout(limit_s):
                await is_empty.wait()
        except TimeoutError:
            pass
        return self.admission.num_in_flight

    async def stop(self) -> None:
        """Ends every request (its client gets an error) and every task, and writes the learned costs. The message plane
        stays open; its owner closes it."""
        self._leaving.close()
        for run in list(self._runs.values()):
            run.cancel()
        await self._context.tasks.cancel_all(STOP_TIMEOUT_S)
        await self._cost_file.write(self._learned)
        await self._prompt_builder.close()
        await asyncio.to_thread(self.spans.close)
        self._answer_thread.shutdown(wait=False, cancel_futures=True)

    def _learned(self, wall_s: float) -> SavedCosts:
        return self._context.cluster.learned(self._context.clock.now(), wall_s)

    def check_health(self) -> None:
        """Raises WeftError if the router can serve no more because its heartbeat has ended or its message plane has
        died."""
        if self._heartbeats is not None and self._heartbeats.done():
            raise WeftError("the router no longer sends heartbeats, because their task has ended")
        if not self._context.plane.is_alive:
            raise WeftError("the message plane of the router has stopped")

    def update_members(self, members: Sequence[Member]) -> None:
        """Takes the directory's current list of members. New members get a heartbeat, which subscribes this router to
        them, and later a request for a snapshot of what they hold. For members that left, the connection and the metric
        series are removed, and open calls end as lost. Requests that wait for members are then checked again. Quotas of
        keys and tenants are divided among the routers that are there."""
        self._members = tuple(members)
        self._cluster_metrics.update_members(members)
        self._membership.update_members(members)
        self._peer_feed.update_members(members)
        self.admission.share(sum(each.kind == "router" for each in members))
        for address in self.search.update_members(members):
            self._context.plane.forget(address)
        self._take_members()

    def update_leaving(self, member_ids: Iterable[MemberId]) -> None:
        """Takes the ids of all members that are being stopped, or were. Plans no longer use them, and nothing that they
        have cached is found, although they are in the directory until they have finished."""
        if self._leaving.update(member_ids):
            self._take_members()

    def take_scaling(self, reports: Sequence[ScalingReport]) -> None:
        """Takes the newest decisions about the sizes of the pools, for the metrics. The first router of the cluster
        logs those that change a size."""
        routers = [each.member_id for each in self._members if each.kind == "router"]
        is_first = self._context.member_id == min(routers, default=self._context.member_id)
        for report in reports if is_first else ():
            before = self._pool_to_size.get(report.pool)
            if before is not None and before != report.num_desired:
                _LOG.info("the %ss %s", report.pool, report.told)
        self._pool_to_size = {report.pool: report.num_desired for report in reports}
        self._context.metrics.scaling.take(reports)

    def _move_from(self, worker_id: MemberId) -> None:
        for run in list(self._runs.values()):
            run.worker_leaves(worker_id)

    def _take_members(self) -> None:
        """Takes the newest list of members. Of the members that join at once, each turn of the loop takes some, because
        a thousand would keep the requests waiting."""
        new = [each for each in self._members if self._is_new(each)]
        later = set(new[MAX_JOINS_PER_TURN:])
        if later and not self._is_taking_members:
            self._is_taking_members = True
            asyncio.get_running_loop().call_soon(self._take_more_members)
        members = [each for each in self._members if each not in later]
        staying = self._leaving.staying(members)
        change = self._context.cluster.update_members(staying)
        self._context.stages.update_members(staying)
        self._use_schemes(change.joined)
        for member in self._context.set_members(members):
            self.reports.remove(member.member_id)
            self._context.plane.forget(member.address)
            self._feeds.left(member.member_id)
            for run in list(self._runs.values()):
                run.member_left(member.member_id)
        self._feeds.joined([*change.joined, *(each for each in new if each.kind == "stage" and each not in later)])
        self._gate.changed()
        self._context.stage_news.changed()

    def _take_more_members(self) -> None:
        self._is_taking_members = False
        self._take_members()

    def _is_new(self, member: Member) -> bool:
        known = self._context.members.get(member.member_id)
        return member.kind != "router" and (known is None or known.epoch != member.epoch)

    def _use_schemes(self, joined: Sequence[Member]) -> None:
        """Has prompts hashed by the schemes of the workers that are there, and logs the workers that joined whose
        scheme is unknown."""
        for member in joined:
            if member.kind == "worker" and (member.kv_scheme is None or not is_known_scheme(member.kv_scheme)):
                known = "no scheme" if member.kv_scheme is None else f"the unknown scheme {member.kv_scheme.name!r}"
                _LOG.warning("worker %s hashes its KV by %s, so no prefix is found there", member.member_id, known)
        self._prompt_builder.use_schemes(self._context.cluster.kv_schemes())

    def readiness(self) -> tuple[bool, dict[str, object]]:
        """Returns whether a request could be served, and which members are there. Serving needs a worker, and an
        encoder for each served modality, that is not being stopped. A router that drains is not ready."""
        encoders = self._leaving.staying(self._context.of_kind("encoder"))
        served = {modality for each in encoders for modality in each.modalities}
        missing = sorted(set(self._prompt_builder.max_items) - served)
        missing_stages = self._context.stages.missing_stages
        num_workers = len(self._leaving.staying(self._context.of_kind("worker")))
        is_draining = self.admission.is_closed
        is_ready = num_workers > 0 and not missing and not missing_stages and not is_draining
        state: dict[str, object] = {
            "status": "draining" if is_draining else "ready" if is_ready else "waiting",
            "num_workers": num_workers,
            "num_encoders": len(encoders),
            "modalities_without_encoder": missing,
        }
        if self.config.speech is not None:
            state |= {"stages_without_replica": missing_stages}
        return is_ready, state

    def members(self) -> list[dict[str, object]]:
        """Lists the workers and encoders that this router plans with, for people to read: id, kind, host, process, and
        why they refused the last change of the config (an empty text if they did not)."""
        return listed_members(self._context.members.values())

    def routers(self) -> list[dict[str, object]]:
        """Lists the routers of the cluster in the same way, this one included."""
        return listed_members(each for each in self._members if each.kind == "router")

    def picture(self) -> dict[str, object]:
        """Returns what every member does at this moment, as far as this router knows, and its own load."""
        context, now = self._context, self._context.clock.now()
        columns = context.cluster.columns(now)
        parts = PictureParts(
            context.members.values(),
            self.reports.workers,
            self.reports.encoders,
            member_standings(columns, now),
            member_links(columns, MAX_LINKS),
        )
        own = {
            "model": self.config.model_name,
            "version": self.config.version,
            "router_id": context.member_id,
            "num_in_flight": self.admission.num_in_flight,
            "num_waiting": self._gate.num_waiting,
            "routers": self.routers(),
        }
        return own | picture_of(parts)

    def prometheus_targets(self) -> list[dict[str, object]]:
        """Lists what answers `GET /metrics` besides the routers' own server, as Prometheus' HTTP service discovery
        expects it: the scrape endpoint of each node if the config gives them a port, and otherwise each worker and
        encoder."""
        return scrape_targets(self._members, self.config.metrics_port, self.config.cluster_name)

    def own_exposition(self) -> bytes:
        """Returns this router's own series in Prometheus text format."""
        return self._cluster_metrics.own_exposition()

    async def metrics_exposition(self) -> bytes:
        """Returns the series of all routers, and those of the members if the config says so, in Prometheus text
        format."""
        return await self._cluster_metrics.exposition()

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token as a client sees it; for a control token these are the bytes of its name."""
        return token_bytes(self._codec, token_id)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids as a client sees it."""
        return self._codec.decode(token_ids, skip_special_tokens)

    async def tokenize(self, request: PromptRequest, ticket: Ticket) -> list[int]:
        """Returns the token ids of the prompt that a request becomes. It counts for the tenant as a request that is
        served does. Raises what `open` raises for a request that can't be served."""
        if request.has_media:
            ticket.enter_media()
        trace = self._trace(ticket, request, None)
        account = self._fetch_log(ticket, trace)
        try:
            draft = await self._prompt_builder.read(salted(request, ticket.tenant.cache_salt), account)
            prompt = await self._prompt_builder.plan(draft)
            ticket.take_prompt(len(prompt.token_ids), sum(media_seconds(draft.media).values()))(len(prompt.token_ids))
        except WeftError as error:
            trace.end(outcome=error.code)
            raise
        trace.end(outcome="tokenized")
        return list(prompt.token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids, control tokens included. Raises InvalidRequest for an id that is none, and for
        more ids than the context has."""
        return await self._prompt_builder.detokenize(token_ids)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token."""
        return await self._prompt_builder.token_texts(token_ids)

    @property
    def modalities(self) -> tuple[str, ...]:
        """Names the modalities of the media that the model takes here, in alphabetical order."""
        return tuple(sorted(self._prompt_builder.max_items))

    @property
    def cluster(self) -> ClusterState:
        """Returns what the router believes about the cluster. Callers may only read it."""
        return self._context.cluster

    @property
    def metrics(self) -> RouterMetrics:
        return self._context.metrics

    # ------------------------------------------------------------ requests

    def count_refusal(self, caller: Caller | None, error: WeftError) -> None:
        """Counts a request that was refused before it had a trace; the caller is None if its key is unknown."""
        tenant = None if caller is None else caller.tenant
        metrics = self._context.metrics
        metrics.requests.labels(error.code).inc()
        name, service_class = ("unknown", "unknown") if tenant is None else (tenant.name, tenant.service_class)
        metrics.observe_admission(name, service_class, error.code)

    async def parse(self, read: Callable[[bytes], T], body: bytes) -> T:
        """Returns what `read` makes of a request's body. Raises the InvalidRequest that `read` raises."""
        return await self._prompt_builder.parse(read, body)

    async def write(self, make: Callable[[], bytes]) -> bytes:
        """Returns the large answer that `make` writes, in a thread. There is one, because the interpreter runs one at a
        time; answers beyond it wait."""
        return await asyncio.get_running_loop().run_in_executor(self._answer_thread, make)

    async def open(
        self,
        request: PromptRequest,
        ticket: Ticket | None = None,
        label: str | None = None,
        news: asyncio.Event | None = None,
        num_scores: int = 0,
    ) -> RequestStream:
        """Starts a request. Raises Overloaded, Draining, or a RequestRefused; Busy or Unavailable if a medium can't be
        read now. Later errors (also a lack of capacity, and a deadline out of reach) come through the stream. Without a
        ticket the request takes one, and releases it at its terminal event; the caller that gives a ticket also
        releases it. `label` is the client's own name for the request, `news` the event that the stream sets (see
        `JoinedStreams`), and `num_scores` counts the log-probabilities of the answer's earlier prompts."""
        own = self.admission.admit() if ticket is None else None
        ticket = ticket or own
        assert ticket is not None
        trace = self._trace(ticket, request, label)
        admitted_at_s = self._context.clock.now()
        terms = RequestTerms.of(request, ticket.caller, self.config.batch_wait_s, admitted_at_s)
        terms = terms._replace(spend_tokens=self.admission.rates.spender(ticket.caller))
        trace.note(tenant=ticket.tenant.name, service_class=terms.service_class)
        try:
            if request.has_media:
                ticket.enter_media()
            account = self._fetch_log(ticket, trace)
            draft = await self._prompt_builder.read(salted(request, ticket.tenant.cache_salt), account)
            read_at_s = self._context.clock.now()
            trace.add("read", from_s=admitted_at_s)
            prompt = await self._prompt_builder.plan(draft)
            check_not_empty(prompt, request)
            check_scores(request, len(prompt.token_ids), num_scores, self.config)
            modality_to_s = media_seconds(draft.media)
            keep_prompt = ticket.take_prompt(len(prompt.token_ids), sum(modality_to_s.values()))
            terms = terms._replace(keep_prompt=keep_prompt)
            trace.add("prompted", from_s=read_at_s)
        except (Exception, asyncio.CancelledError) as error:
            # This is the top of a request that has no task yet; the HTTP server's loop logs what is not a WeftError.
            self._refused(trace, error, terms)
            if own is not None:
                own.release()
            raise
        trace.note(**prompt.facts, ignored=prompt.ignored_fields)
        self._observe_media(draft, prompt)
        caller = ticket.caller
        self._context.metrics.usage.observe_media(caller.tenant.name, caller.key_name, modality_to_s)
        return self._launch(draft, prompt, trace, terms, admitted_at_s, own, news)

    def _launch(
        self,
        draft: Draft,
        prompt: Prompt,
        trace: RequestTrace,
        terms: RequestTerms,
        admitted_at_s: float,
        own: Ticket | None,
        news: asyncio.Event | None,
    ) -> RequestStream:
        request_id, prompt_builder = trace.request_id, self._prompt_builder
        shown = prompt_builder.shown_token_ids(draft)
        keeps_ends = draft.answer.reasoning is not None or draft.request.num_top_logprobs is not None
        choices = [
            ChoiceOutput(
                IncrementalDetokenizer(self._codec, draft.request.continues_text, shown),
                prompt.stop_strings,
                prompt.ending_token_ids,
                keeps_ends,
            )
            for _ in range(prompt.num_choices)
        ]
        stream = RequestStream(request_id, choices, lambda: run.cancel(), prompt.token_ids, news)
        if prompt.speech is not None and self.config.speech is not None:
            stream.audio = AudioTrack(self.config.speech.sample_rate)
            if prompt.given_answer:
                choices[0].push(0, prompt.given_answer, "stop")
        stream.record = trace.to_json if self._may_see_all(terms.caller) else trace.public_json
        stream.num_prompt_scores = num_prompt_scores(draft.request, len(prompt.token_ids))
        num_top = draft.request.num_top_logprobs
        stream.scores_per_token = 0 if num_top is None else 1 + num_top
        stream.answer, stream.media_s = draft.answer, sum(media_seconds(draft.media).values())
        degradation = DegradationPolicy(
            wanted_policy(draft.request) or self.config.on_encode_failure,
            lambda item, reduction: prompt_builder.is_reducible(draft, item, reduction),
            lambda losses: prompt_builder.plan(draft, losses),
        )
        age = (self.wall_time(), str(request_id))
        run = RequestRun(self._context, prompt, stream, age, trace, degradation, self._gate, terms)
        self._runs[request_id] = run
        run.start(admitted_at_s, on_end=lambda: self._ended(request_id, own))
        return stream

    def _may_see_all(self, caller: Caller) -> bool:
        return caller.is_operator or self.keys.is_open

    def _observe_media(self, draft: Draft, prompt: Prompt) -> None:
        items = Counter(item.modality for item in prompt.media)
        probes = [(medium.modality, medium.probe_s) for medium in draft.media]
        self._context.metrics.observe_media(probes, items, prompt.modality_to_tokens)

    def _ended(self, request_id: RequestId, own: Ticket | None) -> None:
        self._runs.pop(request_id, None)
        if own is not None:
            own.release()

    def _fetch_log(self, ticket: Ticket, trace: RequestTrace) -> FetchLog:
        """Returns the account of what a request fetches. Without keys, all clients have one tenant, and that may use
        all of the fetcher."""
        tenant = SHARED_TENANT if self.keys.is_open else ticket.tenant.name
        return FetchLog(ticket, tenant, trace, self._context.clock, self._context.metrics)

    def _trace(self, ticket: Ticket, request: PromptRequest, label: str | None) -> RequestTrace:
        context = self._context
        host, num_events = context.machine_of(context.member_id), self.config.max_trace_events
        trace = RequestTrace(ticket.request_id, context.member_id, context.clock, num_events, host, self.wall_time())
        trace.span = ticket.span
        trace.keeps_pairs = request.wants_pairs and self._may_see_all(ticket.caller)
        trace.add("received")
        trace.note(label=label, model=request.model, num_choices=request.num_choices, is_streamed=bool(request.stream))
        self.traces.put(trace)
        return trace

    def _refused(self, trace: RequestTrace, error: Exception | asyncio.CancelledError, terms: RequestTerms) -> None:
        if isinstance(error, WeftError):
            known = error
        elif isinstance(error, asyncio.CancelledError):
            known = Aborted("the client left")
        else:
            known = WeftError(f"an internal error occurred ({type(error).__name__})")
        trace.add("finished", code=known.code)
        trace.end(outcome=known.code, message=known.message)
        metrics = self._context.metrics
        metrics.requests.labels(known.code).inc()
        metrics.observe_admission(terms.tenant.name, terms.service_class, known.code)
