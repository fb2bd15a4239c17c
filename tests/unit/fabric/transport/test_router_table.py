"""A table of routers tells new routers from known ones, ends what is silent, and sends to those that remain."""

from __future__ import annotations

from fabric.contracts import (
    AttemptId,
    EngineStats,
    FeatureStats,
    ManualClock,
    MemberId,
    PlaneMessage,
    RequestId,
    RouterHeartbeat,
    SnapshotRequest,
    WorkerReport,
)
from fabric.transport import RouterTable
from fabric.transport.membership import BEAT_S, FIRST_HEARTBEAT_S, MAX_UNCONFIRMED

ONE, OTHER = MemberId("router-1"), MemberId("router-2")


class RecordingPlane:
    """Records what a `RouterTable` asks of its plane."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, PlaneMessage]] = []
        self.forgotten: list[str] = []

    def send(self, address: str, message: PlaneMessage) -> bool:
        self.sent.append((address, message))
        return True

    def forget(self, address: str) -> None:
        self.forgotten.append(address)


def table() -> tuple[RouterTable, RecordingPlane, ManualClock]:
    plane, clock = RecordingPlane(), ManualClock()
    return RouterTable(plane, clock), plane, clock


def heartbeat(router_id: MemberId, address: str, lease_s: float = 2.0) -> RouterHeartbeat:
    return RouterHeartbeat(router_id=router_id, address=address, lease_s=lease_s)


def test_a_router_is_new_once_and_again_at_another_address() -> None:
    routers, _, _ = table()
    assert routers.heartbeat(heartbeat(ONE, "a"))
    assert not routers.heartbeat(heartbeat(ONE, "a"))
    assert routers.heartbeat(heartbeat(ONE, "b"))
    assert list(routers) == [ONE]


def test_a_message_goes_to_every_router_at_its_address() -> None:
    routers, plane, _ = table()
    for router_id, address in ((ONE, "a"), (OTHER, "b"), (ONE, "c")):
        routers.heartbeat(heartbeat(router_id, address))
    message = SnapshotRequest(ONE, "x")
    routers.broadcast(message)
    assert plane.sent == [("c", message), ("b", message)]


def test_heartbeats_renew_a_lease_and_silence_ends_it() -> None:
    routers, plane, clock = table()
    routers.heartbeat(heartbeat(ONE, "a"))
    routers.heartbeat(heartbeat(OTHER, "b"))
    clock.advance(1.5)
    routers.heartbeat(heartbeat(ONE, "a"))
    assert routers.take_expired() == []
    clock.advance(1.5)
    assert routers.take_expired() == [OTHER]
    assert routers.take_expired() == []
    assert (list(routers), plane.forgotten) == ([ONE], ["b"])
    assert routers.heartbeat(heartbeat(OTHER, "b")), "a router that comes back knows nothing"


def test_a_router_that_has_left_is_not_reported_as_expired() -> None:
    routers, plane, clock = table()
    routers.heartbeat(heartbeat(ONE, "a"))
    routers.forget(ONE)
    routers.forget(OTHER)
    clock.advance(2.0)
    assert routers.take_expired() == []
    assert (len(routers), plane.forgotten) == (0, ["a"])


def test_a_router_that_only_calls_has_a_lease() -> None:
    routers, plane, clock = table()
    routers.expect(ONE)
    assert len(routers) == 0, "nothing can be sent to it"
    clock.advance(FIRST_HEARTBEAT_S)
    assert (routers.take_expired(), plane.forgotten) == ([ONE], [])


def test_a_call_does_not_change_the_lease_of_a_known_router() -> None:
    routers, _, clock = table()
    routers.heartbeat(heartbeat(ONE, "a"))
    routers.expect(ONE)
    clock.advance(2.0)
    assert routers.take_expired() == [ONE]


def report(seq: int, epoch: int = 1, num_running: int = 0) -> WorkerReport:
    return WorkerReport(MemberId("w"), epoch, seq, (), EngineStats(num_running=num_running), FeatureStats())


def attempt(name: str) -> AttemptId:
    return AttemptId(RequestId(name), 1)


def acknowledged(plane: RecordingPlane) -> list[tuple[str, tuple[AttemptId, ...]]]:
    sent = [(address, each.acknowledged) for address, each in plane.sent if isinstance(each, WorkerReport)]
    plane.sent.clear()
    return sent


def test_a_dispatch_is_acknowledged_to_its_own_router_until_that_router_confirms_it() -> None:
    routers, plane, _ = table()
    routers.heartbeat(heartbeat(ONE, "a"))
    routers.heartbeat(heartbeat(OTHER, "b"))
    routers.received(ONE, attempt("x"))
    routers.send_report(report(1))
    assert acknowledged(plane) == [("a", (attempt("x"),)), ("b", ())]
    routers.received(ONE, attempt("y"))
    routers.send_report(report(2))
    assert acknowledged(plane) == [("a", (attempt("x"), attempt("y"))), ("b", ())]
    routers.heartbeat(RouterHeartbeat(ONE, "a", 2.0, taken_epoch=1, taken_seq=1))
    routers.send_report(report(3))
    assert acknowledged(plane) == [("a", (attempt("y"),)), ("b", ())]
    routers.heartbeat(RouterHeartbeat(ONE, "a", 2.0, taken_epoch=1, taken_seq=3))
    routers.send_report(report(4))
    assert acknowledged(plane) == [("a", ()), ("b", ())]


def test_a_second_part_of_an_attempt_is_acknowledged_again() -> None:
    routers, plane, _ = table()
    routers.heartbeat(heartbeat(ONE, "a"))
    routers.received(ONE, attempt("x"))
    routers.send_report(report(1))
    routers.received(ONE, attempt("x"))
    routers.heartbeat(RouterHeartbeat(ONE, "a", 2.0, taken_epoch=1, taken_seq=1))
    acknowledged(plane)
    routers.send_report(report(2))
    assert acknowledged(plane) == [("a", (attempt("x"),))]


def test_a_confirmation_of_an_earlier_start_counts_for_nothing() -> None:
    routers, plane, _ = table()
    routers.received(ONE, attempt("x"))
    routers.heartbeat(heartbeat(ONE, "a"))
    routers.send_report(report(1, epoch=2))
    routers.heartbeat(RouterHeartbeat(ONE, "a", 2.0, taken_epoch=1, taken_seq=900))
    routers.send_report(report(2, epoch=2))
    assert acknowledged(plane) == [("a", (attempt("x"),))] * 2, "also a call before the first heartbeat is kept"


def test_dispatches_of_a_router_that_confirms_nothing_are_bounded() -> None:
    routers, plane, _ = table()
    routers.heartbeat(heartbeat(ONE, "a"))
    for number in range(MAX_UNCONFIRMED + 10):
        routers.received(ONE, attempt(str(number)))
    routers.send_report(report(1))
    [(_, attempts)] = acknowledged(plane)
    assert (len(attempts), attempts[0]) == (MAX_UNCONFIRMED, attempt("10"))


def test_a_report_is_needed_for_news_and_as_a_slow_beat() -> None:
    routers, _, clock = table()
    assert not routers.needs(report(1)), "no router listens"
    routers.heartbeat(heartbeat(ONE, "a", 60.0))
    assert routers.needs(report(1))
    routers.send_report(report(1))
    assert not routers.needs(report(2)), "only the number of the report differs"
    assert routers.needs(report(2, num_running=1))
    routers.received(ONE, attempt("x"))
    assert routers.needs(report(2))
    routers.send_report(report(2))
    clock.advance(BEAT_S - 0.01)
    assert not routers.needs(report(3))
    clock.advance(0.01)
    assert routers.needs(report(3))


def test_reports_keep_the_longest_spacing_that_a_router_asks_for() -> None:
    plane, clock = RecordingPlane(), ManualClock()
    routers = RouterTable(plane, clock, min_spacing_s=0.125)
    assert routers.report_wait_s() == 0
    routers.heartbeat(RouterHeartbeat(ONE, "a", 60.0, report_spacing_s=0.25))
    routers.heartbeat(RouterHeartbeat(OTHER, "b", 60.0, report_spacing_s=0.5))
    routers.send_report(report(1))
    assert routers.report_wait_s() == 0.5
    clock.advance(0.125)
    assert routers.report_wait_s() == 0.375
    routers.forget(OTHER)
    assert routers.report_wait_s() == 0.125
    routers.forget(ONE)
    assert routers.report_wait_s() == 0
