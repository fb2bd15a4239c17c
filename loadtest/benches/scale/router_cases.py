"""Measures the router's queue for capacity with many requests in it: one more request joins, passes, leaves, or is
released.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from fabric.contracts import MemberId
from loadtest.benches.scale.scale_case import ScaleCase
from router.planning import CapacityNeed, CapacityQueue, KvRoom, RoomNeed, Waiter

NUM_EVENTS = 200
IMAGE, AUDIO, TEXT = (frozenset(names) for names in (("image",), ("audio",), ()))


class SomeMembers:
    """Implements `Supply` with a worker and with encoders for the modalities in `served` only."""

    def __init__(self) -> None:
        self.served: frozenset[str] = frozenset()

    def can_serve(self, modalities: frozenset[str], excluded: frozenset[MemberId], now: float) -> bool:
        return modalities <= self.served

    def room(self, need: RoomNeed, excluded: frozenset[MemberId], now: float) -> KvRoom:
        return KvRoom("now")

    def next_return_s(self, now: float) -> float | None:
        return None


def waiting_line(num_waiting: int) -> tuple[CapacityQueue, SomeMembers, count[int]]:
    """Makes a queue of requests about pictures that no member can serve."""
    members, numbers = SomeMembers(), count()
    queue = CapacityQueue(members)
    for _ in range(num_waiting):
        queue.join(Waiter((float(next(numbers)), ""), CapacityNeed(IMAGE), 120.0))
    return queue, members, numbers


def pass_by(num_waiting: int) -> Callable[[], int]:
    """Measures a request that needs no encoder and arrives while all others wait for one."""
    queue, _, numbers = waiting_line(num_waiting)

    def run() -> int:
        for _ in range(NUM_EVENTS):
            assert not queue.must_wait(Waiter((float(next(numbers)), ""), CapacityNeed(TEXT), 120.0), 1.0)
        return NUM_EVENTS

    return run


def join_and_leave(num_waiting: int) -> Callable[[], int]:
    queue, _, numbers = waiting_line(num_waiting)

    def run() -> int:
        for _ in range(NUM_EVENTS):
            waiter = Waiter((float(next(numbers)), ""), CapacityNeed(IMAGE), 120.0)
            queue.join(waiter)
            assert queue.take(1.0) is None
            assert queue.next_at_s(1.0) == 120.0
            queue.leave(waiter)
        return NUM_EVENTS

    return run


def release_behind(num_waiting: int) -> Callable[[], int]:
    """Measures the release of a request about a sound that is behind all requests that wait for another encoder."""
    queue, members, numbers = waiting_line(num_waiting)
    members.served = AUDIO

    def run() -> int:
        for _ in range(NUM_EVENTS):
            queue.join(Waiter((float(next(numbers)), ""), CapacityNeed(AUDIO), 120.0))
            turn = queue.take(1.0)
            assert turn is not None
            queue.leave(turn.waiter, has_arrived=True)
        return NUM_EVENTS

    return run


CASES = (
    ScaleCase("router: pass by the line for capacity, requests in it", 200, pass_by),
    ScaleCase("router: join the line for capacity and leave, requests in it", 200, join_and_leave),
    ScaleCase("router: release one behind the line for capacity, requests in it", 200, release_behind),
)
