"""A table of routers tells new routers from known ones, ends what is silent, and sends to those that remain."""

from __future__ import annotations

from fabric.contracts import ManualClock, MemberId, PlaneMessage, RouterHeartbeat, SnapshotRequest
from fabric.transport import RouterTable
from fabric.transport.membership import FIRST_HEARTBEAT_S

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
