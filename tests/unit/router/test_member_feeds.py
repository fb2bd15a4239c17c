"""Tests the router's feeds from its members: paced heartbeats, confirmed reports, and few snapshots at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fabric.contracts import (
    EngineStats,
    FeatureStats,
    ManualClock,
    Member,
    MemberId,
    PlaneMessage,
    RouterHeartbeat,
    SnapshotRequest,
    WorkerReport,
)
from router.member_feeds import (
    HEARTBEATS_PER_TURN,
    MAX_HEARTBEATS_PER_S,
    MAX_REPORTS_PER_S,
    MAX_SNAPSHOTS,
    SNAPSHOT_TIMEOUT_S,
    MemberFeeds,
)
from router.router_config import RouterConfig


def member(name: str) -> Member:
    return Member(MemberId(name), name.split("-")[0], f"tcp://{name}", "host", 1)


class Sent:
    """Stands for a router's context: it records what is sent to members."""

    def __init__(self, *names: str) -> None:
        self.member_id = MemberId("router-0")
        self.config = RouterConfig("m", capacity_wait_s=1.0, block_size=16)
        self.clock = ManualClock()
        self.plane = SimpleNamespace(address="tcp://router")
        self.members = {MemberId(name): member(name) for name in names}
        self.messages: list[tuple[str, PlaneMessage]] = []
        self.feeds = MemberFeeds(cast(Any, self))

    def send(self, member_id: MemberId, message: PlaneMessage) -> bool:
        self.messages.append((member_id, message))
        return True

    def take(self, kind: type) -> list[tuple[str, Any]]:
        taken = [each for each in self.messages if isinstance(each[1], kind)]
        self.messages = [each for each in self.messages if not isinstance(each[1], kind)]
        return taken

    def asked(self) -> list[str]:
        return [name for name, _ in self.take(SnapshotRequest)]


def workers(number: int) -> list[str]:
    return [f"worker-{index}" for index in range(number)]


def test_members_that_join_get_a_heartbeat_and_workers_are_asked_for_their_blocks() -> None:
    context = Sent("worker-0", "encoder-0")
    context.feeds.joined(context.members.values())
    beats = context.take(RouterHeartbeat)
    assert [name for name, _ in beats] == ["worker-0", "encoder-0"]
    spacing_s = 2 / MAX_REPORTS_PER_S
    assert beats[0][1] == RouterHeartbeat(MemberId("router-0"), "tcp://router", 5.0, spacing_s, 0, 0)
    assert context.asked() == ["worker-0"], "an encoder's answer to the heartbeat contains its snapshot"


def test_few_snapshots_are_awaited_at_once() -> None:
    context = Sent(*workers(MAX_SNAPSHOTS + 5))
    context.feeds.joined(context.members.values())
    assert context.asked() == workers(MAX_SNAPSHOTS)
    assert context.feeds.num_snapshots_missing == MAX_SNAPSHOTS + 5
    context.feeds.took_snapshot(MemberId("worker-3"))
    assert context.asked() == [f"worker-{MAX_SNAPSHOTS}"]
    context.feeds.want_snapshot(MemberId("worker-5"))
    context.feeds.want_snapshot(MemberId(f"worker-{MAX_SNAPSHOTS + 2}"))
    assert context.asked() == [], "one is on its way, the other has its turn later"
    context.feeds.left(MemberId("worker-7"))
    assert context.asked() == [f"worker-{MAX_SNAPSHOTS + 1}"], "a member that left makes room"
    for index in range(MAX_SNAPSHOTS + 5):
        context.feeds.took_snapshot(MemberId(f"worker-{index}"))
    assert context.feeds.num_snapshots_missing == 0


def test_a_snapshot_that_does_not_come_is_asked_for_again_after_the_others() -> None:
    context = Sent(*workers(MAX_SNAPSHOTS + 1))
    context.feeds.joined(context.members.values())
    context.asked()
    context.clock.advance(SNAPSHOT_TIMEOUT_S)
    context.feeds.want_snapshot(MemberId("worker-0"))
    assert context.asked() == [f"worker-{MAX_SNAPSHOTS}", *workers(MAX_SNAPSHOTS - 1)]


def test_a_snapshot_of_which_pages_come_is_not_asked_for_again() -> None:
    context = Sent("worker-0", "worker-1")
    context.feeds.joined(context.members.values())
    assert context.asked() == ["worker-0", "worker-1"]
    for _ in range(3):
        context.clock.advance(0.9 * SNAPSHOT_TIMEOUT_S)
        context.feeds.took_page(MemberId("worker-0"))
        context.feeds.took_snapshot(MemberId("worker-1"))
        assert context.asked() == []
    context.clock.advance(SNAPSHOT_TIMEOUT_S)
    context.feeds.took_page(MemberId("worker-1"))
    context.feeds.want_snapshot(MemberId("worker-0"))
    assert context.asked() == ["worker-0"], "its next page did not come"


def test_a_heartbeat_confirms_the_newest_report() -> None:
    context = Sent("worker-0")
    for epoch, seq in ((1, 4), (1, 3), (2, 1), (1, 9)):
        report = WorkerReport(MemberId("worker-0"), epoch, seq, (), EngineStats(), FeatureStats())
        context.feeds.took_report(report)
    context.feeds.joined(context.members.values())
    [(_, beat)] = context.take(RouterHeartbeat)
    assert (beat.taken_epoch, beat.taken_seq) == (2, 1)
    context.feeds.left(MemberId("worker-0"))
    context.feeds.joined(context.members.values())
    [(_, beat)] = context.take(RouterHeartbeat)
    assert (beat.taken_epoch, beat.taken_seq) == (0, 0), "what returns under the id starts from nothing"


async def test_heartbeats_are_spread_over_a_period_that_grows_with_the_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_members = 6000
    context = Sent(*workers(num_members))
    sleeps: list[float] = []
    turn_sizes: list[int] = []

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        turn_sizes.append(len(context.take(RouterHeartbeat)))
        if sum(turn_sizes) == num_members:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await context.feeds.run()
    assert max(turn_sizes) == HEARTBEATS_PER_TURN
    assert sum(sleeps) == pytest.approx(num_members / MAX_HEARTBEATS_PER_S)
    context.feeds.joined([member("worker-1")])
    [(_, beat)] = context.take(RouterHeartbeat)
    assert beat.lease_s == 3 * num_members / MAX_HEARTBEATS_PER_S, "a lease lasts several of these periods"
    assert beat.report_spacing_s * MAX_REPORTS_PER_S == num_members


def test_each_page_of_a_snapshot_gives_the_next_one_time() -> None:
    context = Sent("worker-0")
    context.feeds.joined(context.members.values())
    assert context.asked() == ["worker-0"]
    for _ in range(3):
        context.clock.advance(SNAPSHOT_TIMEOUT_S - 1)
        context.feeds.took_page(MemberId("worker-0"))
        context.feeds.want_snapshot(MemberId("worker-0"))
    assert context.asked() == [], "the pages are coming"
    context.clock.advance(SNAPSHOT_TIMEOUT_S)
    context.feeds.want_snapshot(MemberId("worker-0"))
    assert context.asked() == ["worker-0"]
    context.feeds.took_page(MemberId("worker-0"))
    context.feeds.took_snapshot(MemberId("worker-0"))
    assert context.feeds.num_snapshots_missing == 0
