"""Checks that a worker that releases nothing keeps its share and gets no more: other workers continue, and none waits
forever.

The tests drive the real pipeline and feature table by hand on a fake clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_encoder_pipeline import CONFIG, OpenCall, PipelineMachine

from encoder_pool.planning import LeaseKey
from encoder_pool.planning.call_queue import is_within_share
from fabric.contracts import AttemptId, MemberId, MmHash, UnitKey, UnitReady

STUCK, WELL = "worker-1", "worker-2"


def machine_of_two() -> PipelineMachine:
    machine = PipelineMachine()
    machine.build(0.0)
    return machine


def release(machine: PipelineMachine, worker: str, messages: list[UnitReady]) -> None:
    for message in messages:
        key = LeaseKey(MemberId(worker), AttemptId(message.request_id, message.attempt), message.unit)
        machine.table.release(key, message.ticket.generation)
    machine.in_loop(machine.pipeline.pump)


def is_served(machine: PipelineMachine, worker: str, kind: str, number: int) -> bool:
    """Returns whether a worker that releases every feature it is notified of gets one more item without any time
    passing."""
    num_calls, num_sent = len(machine.calls), len(machine.plane.sent)
    machine.call([(kind, number)], worker)
    if len(machine.calls) == num_calls:
        return False  # the encoder refuses the call
    machine.work_well(3)
    release(machine, worker, machine.plane.sent[num_sent:])
    machine.everything_is_accounted_for()
    task = machine.calls[-1].task
    return task.done() and task.result().items[0].error is None


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60)), max_size=60))
def test_holders_that_give_nothing_back_leave_a_part_of_the_pool_free(steps: list[tuple[int, int]]) -> None:
    """Each of k holders ends with at most half of what the others leave, except that one thing is always allowed."""
    held, largest, total = [0] * 4, [0] * 4, 1000
    for holder, more in steps:
        free = total - sum(held)
        if more <= free and is_within_share(held[holder], more, free):
            held[holder] += more
            largest[holder] = max(largest[holder], more)
    for holder in range(4):
        others = sum(held) - held[holder]
        assert held[holder] <= max(largest[holder], total / 2)
        assert held[holder] - largest[holder] <= total - others
    assert total - sum(held) >= total / 16 - 4 * max(largest)


@pytest.mark.parametrize("kind", ["small", "clip", "word"])
def test_a_worker_that_never_pulls_stalls_nobody_else(kind: str) -> None:
    """The stuck worker asks for more than the arena holds and for more than may wait; no lease ends and no time
    passes."""
    machine = machine_of_two()
    for number in range(20):
        machine.call([(kind, number)], STUCK)
        machine.work_well(2)
    usage = machine.table.usage()
    assert 0 < usage.used_bytes <= usage.total_bytes / 2
    assert any(not call.task.done() for call in machine.calls), "some of it waits"
    for number in range(100, 115):
        assert is_served(machine, WELL, "small", number), f"number {number} waits for another worker's leases"
    assert is_served(machine, WELL, "film", 100) or machine.table.usage().num_leases > 0
    machine.teardown()  # leases end by time, and every call ends


def test_cached_features_are_leased_within_the_share_too() -> None:
    """An announcement from the cache takes no new memory, but its lease keeps others from evicting the feature."""
    machine = machine_of_two()
    for number in range(6):
        assert is_served(machine, WELL, "small", number)
    assert machine.table.usage().num_cached == 6
    num_sent = len(machine.plane.sent)
    for number in range(6):
        machine.call([("small", number)], STUCK)
    usage = machine.table.usage()
    assert 0 < usage.used_bytes <= usage.total_bytes / 2
    told = len(machine.plane.sent) - num_sent
    assert 0 < told < 6
    for number in range(100, 110):
        assert is_served(machine, WELL, "small", number)
    release(machine, STUCK, [one for one in machine.plane.sent if one.request_id == "req-7"])
    machine.work_well(3)
    waiting = [call for call in machine.calls if not call.task.done()]
    assert len(waiting) == 6 - told - 1, "a lease that ends makes room for the next"
    machine.calls[-1].task.cancel()
    machine.teardown()


def test_a_call_that_is_held_back_can_be_aborted() -> None:
    machine = machine_of_two()
    for number in range(6):
        assert is_served(machine, WELL, "small", number)
    for number in range(6):
        machine.call([("small", number)], STUCK)
    waiting = next(call for call in machine.calls if not call.task.done())
    waiting.task.cancel()
    machine.settle()
    assert waiting.task.cancelled()
    machine.worker_leaves()
    machine.teardown()
    assert not machine.pipeline._held_back


def test_what_was_made_for_a_worker_that_left_is_leased_within_its_share() -> None:
    """A unit is exempt from the share that it was reserved from only while the requests that waited for it are
    notified, not permanently."""
    machine = machine_of_two()
    machine.call([("small", 0)], STUCK)
    machine._end_decode(machine.decoder.open[0], "ok")
    machine.calls[-1].task.cancel()
    machine.work_well(1)
    assert machine.table.is_ready(UnitKey(MmHash("small-0"), 0))
    for number in range(1, 6):
        machine.call([("small", number)], STUCK)
        machine.work_well(2)
    num_sent = len(machine.plane.sent)
    assert 0 < num_sent < 5, "its share is used up"
    machine.call([("small", 0)], STUCK)
    assert len(machine.plane.sent) == num_sent
    machine.teardown()


def test_a_video_that_is_held_back_keeps_what_was_decoded_of_it() -> None:
    """Two workers wanted the video: one left while the first unit was made, and the share of the other is used up."""
    machine = machine_of_two()
    for number in range(4):
        machine.call([("small", number)], STUCK)
        machine.work_well(2)
    num_sent = len(machine.plane.sent)
    machine.call([("clip", 0)], WELL)
    leaving = machine.calls[-1]
    machine.call([("clip", 0)], STUCK)
    staying = machine.calls[-1]
    machine._end_decode(next(one for one in machine.decoder.open if one.item.mm_hash == "clip-0"), "ok")
    leaving.task.cancel()
    machine.settle()
    machine._end_forward(set())
    assert len(machine.plane.sent) == num_sent, "it is held back"
    assert not staying.task.done()
    machine.everything_is_accounted_for()
    for _ in range(4):
        release(machine, STUCK, machine.plane.sent)
        machine.work_well(3)
        machine.everything_is_accounted_for()
    result = staying.task.result().items[0]
    assert result.error is None
    assert not result.times.is_cache_hit
    assert machine.decoder.hash_to_num_started["clip-0"] == 1
    machine.teardown()


@pytest.mark.parametrize("kind", ["small", "clip", "word"])
def test_what_lies_decoded_for_a_stuck_worker_holds_up_no_other(kind: str) -> None:
    """A video finds no room in addition to the stuck worker's items: others pass it at once, and soon it gets the
    room."""
    machine = machine_of_two()
    for number in range(8):
        machine.call([(kind, number)], STUCK)
        machine.work_well(2)
    assert machine.pipeline.jobs.totals.num_units_queued
    machine.call([("film", 0)], WELL)
    film = machine.calls[-1]
    assert not any(one.item.mm_hash == "film-0" for one in machine.decoder.open), "it has no room"
    for number in range(100, 104):
        assert is_served(machine, "worker-3", "small", number), f"number {number} waits behind the video"
    machine.pass_time(CONFIG.passed_s)
    for _ in range(8):
        machine.work_well(1)
        release(machine, WELL, machine.plane.sent)
    assert film.task.result().items[0].error is None
    assert any(not call.task.done() for call in machine.calls), "the stuck worker's items wait on"
    machine.teardown()


def test_what_was_put_back_is_made_once_its_worker_takes_features_again() -> None:
    machine = machine_of_two()
    for number in range(6):
        machine.call([("small", number)], STUCK)
        machine.work_well(2)
    decoded = {hash_: number for hash_, number in machine.decoder.hash_to_num_started.items() if number}
    machine.call([("film", 0)], WELL)
    machine.pass_time(CONFIG.passed_s)
    assert any(one.item.mm_hash == "film-0" for one in machine.decoder.open)
    for _ in range(8):
        machine.work_well(1)
        release(machine, WELL, machine.plane.sent)
        release(machine, STUCK, machine.plane.sent)
    assert all(call.task.result().items[0].error is None for call in machine.calls)
    again = [hash_ for hash_, number in machine.decoder.hash_to_num_started.items() if number > 1]
    assert len(again) == 1
    assert set(again) <= decoded.keys()
    machine.teardown()


def test_all_that_is_late_for_a_stuck_worker_is_its_fault_and_no_other_item() -> None:
    """This includes items that were not decoded, because they could not be encoded anyway."""
    machine = machine_of_two()
    for number in range(12):
        machine.call([("small", number)], STUCK, time_left_s=5.0)
        machine.work_well(2)
    machine.call([("small", 100)], WELL, time_left_s=5.0)
    late = [call for call in machine.calls if not call.task.done()]
    assert len(late) > 3
    assert [one.item.mm_hash for one in machine.decoder.open] == ["small-100"]
    machine.clock.advance(5.0)
    machine.in_loop(machine.pipeline.end_overdue)
    codes = [call.task.result().items[0].error.code for call in late]
    assert codes == ["worker_backed_up"] * (len(late) - 1) + ["machine_busy"]
    machine.teardown()


def test_a_worker_that_takes_no_announcements_is_at_fault_and_holds_nothing() -> None:
    machine = machine_of_two()
    machine.worker_stops_or_begins_to_listen()
    machine.call([("small", 0)], STUCK)
    machine.work_well(2)
    error = machine.calls[-1].task.result().items[0].error
    assert error is not None
    assert (error.code, STUCK in error.message) == ("worker_backed_up", True)
    assert machine.table.usage().num_leases == 0
    machine.teardown()


def test_what_has_no_memory_to_be_decoded_in_is_passed_by_what_has() -> None:
    machine = machine_of_two()
    machine.call([("small", 0)], WELL)
    machine.call([("clip", 0)], WELL)
    machine.call([("word", 0)], STUCK)
    assert sorted(one.item.mm_hash for one in machine.decoder.open) == ["small-0", "word-0"]
    machine.teardown()


def test_the_only_worker_may_have_all() -> None:
    machine = machine_of_two()
    machine.table.end_worker(MemberId(WELL))
    for number in range(6):
        machine.call([("small", number)], STUCK)
        machine.work_well(2)
    assert machine.table.usage().num_leases == 6, "as many as the arena holds"
    for number in range(6, 21):
        machine.call([("small", number)], STUCK)
        while machine.decoder.open:
            machine._end_decode(machine.decoder.open[0], "ok")
    totals = machine.pipeline.jobs.totals
    assert totals.num_prepared == CONFIG.max_items_in_flight, "as many as may lie decoded"
    assert totals.queued_cost == CONFIG.max_queue_cost, "as much as may wait"
    machine.teardown()


def test_what_finds_no_room_in_one_piece_is_passed_by_what_does() -> None:
    """Leases that never end block the room of a large feature: small features of a third worker, in any number, go
    before it, and it gets its room once those leases have expired."""
    machine = machine_of_two()
    for number in range(2):
        machine.call([("small", number)], STUCK)
        machine.work_well(2)
    machine.call([("wide", 0)], WELL)
    machine.work_well(2)
    large = machine.calls[-1].task
    for number in range(100, 110):
        assert is_served(machine, "worker-3", "small", number)
    assert not large.done()
    machine.pass_time(CONFIG.lease_s)
    machine.work_well(1)
    assert large.result().items[0].error is None
    machine.teardown()


@settings(deadline=None, max_examples=25)
@given(
    held_s=st.integers(2, int(CONFIG.lease_s)),
    step_s=st.sampled_from([0.5, 1.0, 2.0]),
    num_before=st.integers(1, 4),
)
def test_a_large_feature_is_passed_by_small_ones_but_not_for_ever(held_s: int, step_s: float, num_before: int) -> None:
    """The feature takes two thirds of the arena in one piece. Small features of another worker keep coming and hold
    their leases for a while. They continue while the large one waits; then it gets its turn."""
    machine = machine_of_two()
    now_s, sent_s = 0.0, list[float]()
    large = None
    for number in range(int(4 * CONFIG.lease_s / step_s)):
        if number == num_before:
            machine.call([("wide", 0)], WELL)
            large, large_s = machine.calls[-1], now_s
        num_sent = len(machine.plane.sent)
        machine.call([("small", number)], STUCK)
        machine.work_well(3)
        sent_s += [now_s] * (len(machine.plane.sent) - num_sent)
        if large is not None and large.task.done():
            break
        now_s += step_s
        machine.pass_time(step_s)
        over = [one for one, at_s in zip(machine.plane.sent, sent_s, strict=False) if at_s + held_s <= now_s]
        release(machine, STUCK, over)
    assert large is not None
    assert large.task.done(), "a large feature is starved"
    assert now_s - large_s <= 2 * CONFIG.lease_s + 2 * step_s
    machine.teardown()


class Crowd:
    """Drives several workers: one pulls nothing and asks for more all the time; each of the others has one request at a
    time and releases at once the features that it is notified of. A tick is one turn of the decoders and the
    forward."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self.machine = machine_of_two()
        self.machine.table.worker_came(MemberId("worker-3"))
        self.kinds = kinds
        self.worker_to_open: dict[str, tuple[OpenCall, int, str]] = {}
        self.kind_to_waits: dict[str, list[int]] = {}
        """Holds the waits of each kind in ticks."""
        self.num_items = self.num_ticks = self.num_sent = 0
        self.refused: list[str] = []

    def ask(self, worker: str, kind: str, time_left_s: float = 0.0) -> OpenCall | None:
        num_calls = len(self.machine.calls)
        self.num_items += 1
        self.machine.call([(kind, self.num_items)], worker, time_left_s=time_left_s)
        return self.machine.calls[-1] if len(self.machine.calls) > num_calls else None

    def tick(self, stuck_kinds: Sequence[str], kinds: Sequence[str]) -> None:
        for kind in stuck_kinds:
            self.ask(STUCK, kind, time_left_s=CONFIG.lease_s)
        for worker, kind in zip((WELL, "worker-3"), kinds, strict=True):
            if worker not in self.worker_to_open and (call := self.ask(worker, kind)) is not None:
                self.worker_to_open[worker] = call, self.num_ticks, kind
        self.machine.work_well(1)
        told = self.machine.plane.sent[self.num_sent :]
        self.num_sent = len(self.machine.plane.sent)
        request_to_worker = {one.request_id: one.destination.worker_id for one in self.machine.all_requests()}
        for worker in (WELL, "worker-3"):
            release(self.machine, worker, [one for one in told if request_to_worker[one.request_id] == worker])
        self.num_ticks += 1
        self.machine.pass_time(TICK_S)
        self.machine.everything_is_accounted_for()
        for worker, (call, since, kind) in list(self.worker_to_open.items()):
            if call.task.done():
                assert call.task.result().items[0].error is None
                self.kind_to_waits.setdefault(kind, []).append(self.num_ticks - since)
                del self.worker_to_open[worker]

    def longest_wait(self) -> int:
        waits = [wait for waits in self.kind_to_waits.values() for wait in waits]
        return max([*waits, *(self.num_ticks - since for _, since, _ in self.worker_to_open.values())])

    def close(self) -> None:
        self.machine.teardown()


TICK_S = 0.25
WORK_TICKS = 8
"""Limits the ticks that the work itself takes: a film takes six forward passes, and other items take turns with it."""


def test_smaller_features_of_its_own_worker_do_not_keep_the_largest_from_its_turn() -> None:
    """A worker that asks for small features all the time always holds some, so a share that it may have all at once
    must be kept for its largest feature."""
    machine = machine_of_two()
    machine.call([("small", 0)], STUCK)
    machine.work_well(2)
    machine.call([("wide", 0)], WELL)
    wide = machine.calls[-1]
    for number in range(1, 3 * ticks_of(CONFIG.lease_s)):
        for each in (2 * number, 2 * number + 1):
            machine.call([("small", each)], WELL, time_left_s=2.0)
        num_sent = len(machine.plane.sent)
        machine.work_well(1)
        release(machine, WELL, machine.plane.sent[: num_sent - 1])  # its release is a little late each time
        machine.pass_time(TICK_S)
        machine.in_loop(machine.pipeline.end_overdue)
        if wide.task.done():
            break
    assert wide.task.result().items[0].error is None
    machine.teardown()


def test_what_waits_for_room_takes_no_place_in_the_forwards_of_others() -> None:
    """The pipeline chooses the batch again without the waiting unit, so that the batch is as full as possible."""
    machine = PipelineMachine()
    machine.build(0.01)  # the overhead is large enough to make fusing worthwhile
    for number in range(2):
        machine.call([("small", number)], STUCK)
        machine.work_well(2)
    machine.call([("wide", 0)], WELL)
    machine.call([("small", 100)], "worker-3")
    while machine.decoder.open:
        machine._end_decode(machine.decoder.open[0], "ok")
    assert machine.forward.job is not None
    for number in range(101, 103):
        machine.call([("small", number)], "worker-3")
    while machine.decoder.open:
        machine._end_decode(machine.decoder.open[0], "ok")
    machine._end_forward(set())
    assert machine.forward.job is not None
    assert len(machine.forward.job[0]) == 2
    machine.teardown()


def ticks_of(seconds: float) -> int:
    return math.ceil(seconds / TICK_S)


@settings(deadline=None, max_examples=12)
@given(st.data())
def test_with_room_for_its_features_nobody_waits_for_a_stuck_worker(data: st.DataObject) -> None:
    """All features have one size, so that all free memory is usable. Other workers then wait only for the time in which
    others pass them and for no lease to end; this holds also for pictures that need most of the room for decoded
    ones."""
    crowd = Crowd(["small", "dear", "word"])
    kinds = st.sampled_from(crowd.kinds)
    for _ in range(ticks_of(3 * CONFIG.lease_s)):
        crowd.tick(data.draw(st.lists(kinds, max_size=2)), (data.draw(kinds), data.draw(kinds)))
        assert crowd.longest_wait() <= ticks_of(CONFIG.passed_s) + WORK_TICKS, crowd.kind_to_waits
    crowd.close()


@settings(deadline=None, max_examples=12)
@given(st.data())
def test_the_largest_feature_has_its_turn_while_a_worker_is_stuck(data: st.DataObject) -> None:
    """The leases of a stuck worker may leave no room in one piece. The largest feature then waits for the existing
    leases to end, and another feature that finds no room waits for the leases that came meanwhile."""
    crowd = Crowd(["small", "wide", "film", "clip", "song", "dear"])
    kinds = st.sampled_from(crowd.kinds)
    for _ in range(ticks_of(4 * CONFIG.lease_s)):
        crowd.tick(data.draw(st.lists(kinds, max_size=2)), (data.draw(kinds), data.draw(kinds)))
        assert crowd.longest_wait() <= ticks_of(3 * CONFIG.lease_s + CONFIG.passed_s) + WORK_TICKS, crowd.kind_to_waits
    crowd.close()
