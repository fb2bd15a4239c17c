"""A worker that gives nothing back keeps its share, and no more: others go on, and nobody waits for ever.

The real pipeline and feature table, driven by hand on a fake clock.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_encoder_pipeline import CONFIG, PipelineMachine

from encoder_pool.planning.lease_book import LeaseKey
from encoder_pool.planning.shares import is_within_share
from fabric.ids import AttemptId, MemberId
from fabric.messages import UnitReady

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
    """Whether a worker that releases what it was told of gets one more item, without any time passing."""
    num_calls, num_sent = len(machine.calls), len(machine.plane.sent)
    machine.call([(kind, number)], worker)
    if len(machine.calls) == num_calls:
        return False  # refused
    machine.work_well(3)
    release(machine, worker, machine.plane.sent[num_sent:])
    machine.everything_is_accounted_for()
    task = machine.calls[-1].task
    return task.done() and task.result().items[0].error is None


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60)), max_size=60))
def test_holders_that_give_nothing_back_leave_a_part_of_the_pool_free(steps: list[tuple[int, int]]) -> None:
    """Each of k ends with no more than half of what the others leave it, but for one thing that it always may have."""
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
    """It asks for more than the arena holds, and for more than may wait; no lease ends, no time passes."""
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
    machine.teardown()  # leases end by time, and every call does


def test_cached_features_are_leased_within_the_share_too() -> None:
    """What is announced from the cache takes no new memory, but nobody may evict it."""
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


def test_the_only_worker_may_have_all() -> None:
    machine = machine_of_two()
    machine.table.end_worker(MemberId(WELL))
    for number in range(6):
        machine.call([("small", number)], STUCK)
        machine.work_well(2)
    assert machine.table.usage().num_leases == 6, "as many as the arena holds"
    machine.teardown()


def test_what_finds_no_room_in_one_piece_is_passed_by_what_does() -> None:
    """Leases that nobody ends lie in the way of a large feature: small ones of a third worker go before it, in
    any number, and once those leases have run out it has its room."""
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
    """It takes two thirds of the arena in one piece. Small ones of another worker keep coming and hold their leases for
    a while. They go on while it waits; then it has its turn."""
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
