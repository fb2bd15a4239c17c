"""Tests the acknowledgements in reports under loss, reordering and restarts of either side: a router settles a dispatch
only after the member has received it, settles each one once a report and a heartbeat get through, and is told no more
about it after that."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fabric.contracts import (
    AttemptId,
    EngineStats,
    FeatureStats,
    ManualClock,
    Member,
    MemberId,
    PlaneMessage,
    RequestId,
    RouterHeartbeat,
    WorkerReport,
)
from fabric.transport import RouterTable
from router.planning.member_columns import EncoderColumns, WorkerColumns
from router.planning.member_shares import WorkerShare
from router.planning.member_state import InFlight
from router.planning.report_age import Freshness

WORKER = MemberId("worker-0")
ROUTERS = ("router-0", "router-1")


class Wire:
    """A `Wire` is a plane that keeps what is sent, by address."""

    def __init__(self) -> None:
        self.address_to_messages: dict[str, list[PlaneMessage]] = {}

    def send(self, address: str, message: PlaneMessage) -> bool:
        self.address_to_messages.setdefault(address, []).append(message)
        return True

    def forget(self, address: str) -> None:
        self.address_to_messages.pop(address, None)


class RouterSide:
    """A `RouterSide` is what one router keeps of the worker's reports."""

    def __init__(self, name: str) -> None:
        self.name = MemberId(name)
        workers = WorkerColumns()
        workers.add(Member(WORKER, "worker", "", "", 1), 0)
        self.in_flight = InFlight(workers, EncoderColumns())
        self.freshness = Freshness()
        self.mark = (0, 0)

    def take(self, report: WorkerReport) -> None:
        if self.freshness.accept(report.epoch, report.seq):
            self.mark = (report.epoch, report.seq)
            self.in_flight.acknowledge(WORKER, report.acknowledged)

    def heartbeat(self) -> RouterHeartbeat:
        return RouterHeartbeat(self.name, f"to-{self.name}", 30.0, 0.0, *self.mark)

    def is_pending(self, attempt_id: AttemptId) -> bool:
        share = self.in_flight._attempt_to_shares.get(attempt_id, {}).get(WORKER)
        return share is not None and share.is_pending


class Acknowledgements(RuleBasedStateMachine):
    names = st.sampled_from(ROUTERS)

    def __init__(self) -> None:
        super().__init__()
        self.routers = {name: RouterSide(name) for name in ROUTERS}
        self.epoch, self.number = 0, 0
        self.restart_worker()

    def restart_worker(self) -> None:
        self.epoch += 1
        self.seq = 0
        self.wire = Wire()
        self.table = RouterTable(self.wire, ManualClock())
        self.received: set[AttemptId] = set()
        self.travelling: list[tuple[str, AttemptId]] = []
        self.reports: dict[str, list[WorkerReport]] = {name: [] for name in ROUTERS}
        self.heartbeats: list[RouterHeartbeat] = []

    def send_report(self) -> None:
        self.seq += 1
        self.table.send_report(WorkerReport(WORKER, self.epoch, self.seq, (), EngineStats(), FeatureStats()))
        for name in ROUTERS:
            sent = self.wire.address_to_messages.pop(f"to-{name}", [])
            self.reports[name] += [each for each in sent if isinstance(each, WorkerReport)]

    @rule(name=names)
    def dispatch(self, name: str) -> None:
        self.number += 1
        attempt_id = AttemptId(RequestId(f"req-{self.number}"), 1)
        self.routers[name].in_flight.add_worker(attempt_id, WORKER, WorkerShare(10.0, 1))
        self.travelling.append((name, attempt_id))

    @precondition(lambda self: self.travelling)
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        name, attempt_id = self.travelling.pop(data.draw(st.integers(0, len(self.travelling) - 1)))
        self.received.add(attempt_id)
        self.table.received(MemberId(name), attempt_id)

    @rule()
    def report(self) -> None:
        self.send_report()

    @rule(name=names, data=st.data(), is_lost=st.booleans())
    def deliver_report(self, name: str, data: st.DataObject, is_lost: bool) -> None:
        """Delivers or loses any report that is on its way, also one behind a newer one."""
        waiting = self.reports[name]
        if waiting:
            report = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            if not is_lost:
                self.routers[name].take(report)

    @rule(name=names)
    def beat(self, name: str) -> None:
        self.heartbeats.append(self.routers[name].heartbeat())

    @rule(data=st.data(), is_lost=st.booleans())
    def deliver_heartbeat(self, data: st.DataObject, is_lost: bool) -> None:
        if self.heartbeats:
            beat = self.heartbeats.pop(data.draw(st.integers(0, len(self.heartbeats) - 1)))
            if not is_lost:
                self.table.heartbeat(beat)

    @rule()
    def restart_of_the_worker(self) -> None:
        """A router forgets a worker that has restarted, but its heartbeats may still confirm reports of the old one."""
        old_heartbeats = self.heartbeats
        self.restart_worker()
        self.heartbeats = old_heartbeats
        for router in self.routers.values():
            router.in_flight.forget_member(WORKER)

    @rule(name=names)
    def restart_of_a_router(self, name: str) -> None:
        self.routers[name] = RouterSide(name)
        self.travelling = [each for each in self.travelling if each[0] != name]

    @rule()
    def exchange(self) -> None:
        """Lets a heartbeat, a report and another heartbeat through; after that nothing is left to tell."""
        for router in self.routers.values():
            self.table.heartbeat(router.heartbeat())
        self.send_report()
        for name, router in self.routers.items():
            router.take(self.reports[name].pop())
            for attempt_id in self.received:
                assert not router.is_pending(attempt_id)
            self.table.heartbeat(router.heartbeat())
        self.send_report()
        for name in ROUTERS:
            assert self.reports[name][-1].acknowledged == (), "confirmed dispatches are not repeated"

    @invariant()
    def nothing_is_settled_before_it_arrived(self) -> None:
        for name, attempt_id in self.travelling:
            assert self.routers[name].is_pending(attempt_id)
        for router in self.routers.values():
            router.in_flight.check_invariants()

    @invariant()
    def each_router_hears_of_its_own_dispatches(self) -> None:
        for name, waiting in self.reports.items():
            own = self.routers[name].in_flight._attempt_to_shares
            others = [side.in_flight._attempt_to_shares for other, side in self.routers.items() if other != name]
            for report in waiting:
                for attempt_id in report.acknowledged:
                    assert attempt_id in own or not any(attempt_id in shares for shares in others)


TestAcknowledgements = Acknowledgements.TestCase
TestAcknowledgements.settings = settings(deadline=None, max_examples=80, stateful_step_count=40)
