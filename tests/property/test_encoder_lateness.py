"""Checks, on a clock that the test moves, that an encoder answers within the time that a call has left, whichever stage
its items are in.

The tests use the pipeline of `test_encoder_pipeline`, whose decoders and forward pass are driven by hand.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_encoder_pipeline as rig

from fabric.contracts import ErrorInfo, MemberId
from router.api import http_error

TIME_LEFT_S = 10.0


def built() -> rig.PipelineMachine:
    machine = rig.PipelineMachine()
    machine.build(0.01)
    return machine


def error_of(machine: rig.PipelineMachine, number: int, index: int = 0) -> ErrorInfo | None:
    return machine.calls[number].task.result().items[index].error


# ---------------------------------------------------------------- the stage an item is in when its time is over


def waits_for_a_decoder(machine: rig.PipelineMachine) -> None:
    machine.call([("small", 0)], "worker-2")
    machine.call([("word", 0)], "worker-2")
    machine.call([("small", 1)], "worker-1", time_left_s=TIME_LEFT_S)
    assert len(machine.decoder.open) == machine.decoder.num_parallel
    assert "small-1" not in {one.item.mm_hash for one in machine.decoder.open}


def is_decoded(machine: rig.PipelineMachine) -> None:
    machine.call([("small", 1)], "worker-1", time_left_s=TIME_LEFT_S)
    assert [one.item.mm_hash for one in machine.decoder.open] == ["small-1"]


def waits_for_the_forward(machine: rig.PipelineMachine) -> None:
    machine.call([("small", 0)], "worker-2")
    machine._end_decode(machine.decoder.open[0], "ok")
    machine.call([("small", 1)], "worker-1", time_left_s=TIME_LEFT_S)
    machine._end_decode(machine.decoder.open[0], "ok")
    assert machine.pipeline.jobs.totals.num_units_queued == 1


def waits_for_the_device_to_hear_it(machine: rig.PipelineMachine) -> None:
    machine.call([("small", 0)], "worker-2")
    machine._end_decode(machine.decoder.open[0], "ok")
    machine.call([("word", 1)], "worker-1", time_left_s=TIME_LEFT_S)
    machine._end_decode(machine.decoder.open[0], "ok")
    assert len(list(machine.pipeline.jobs.queued_sounds())) == 1


def is_in_the_forward(machine: rig.PipelineMachine) -> None:
    machine.call([("small", 1)], "worker-1", time_left_s=TIME_LEFT_S)
    machine._end_decode(machine.decoder.open[0], "ok")
    assert machine.forward.job is not None


def waits_for_room_in_the_arena(machine: rig.PipelineMachine) -> None:
    """Lets the item wait for the arena; its worker is the only one, so that no share delays it."""
    machine.table.end_worker(MemberId("worker-2"))
    machine.call([("wide", 0)], "worker-1")
    machine.work_well(2)
    machine.call([("wide", 1)], "worker-1", time_left_s=TIME_LEFT_S)
    machine.work_well(1)
    assert machine.forward.job is None
    assert machine.pipeline.jobs.totals.num_units_queued == 1


@pytest.mark.parametrize(
    "stand",
    [
        waits_for_a_decoder,
        is_decoded,
        waits_for_the_forward,
        waits_for_the_device_to_hear_it,
        is_in_the_forward,
        waits_for_room_in_the_arena,
    ],
    ids=lambda stand: stand.__name__,
)
def test_an_item_is_answered_as_busy_before_its_time_is_over(stand: Callable[[rig.PipelineMachine], None]) -> None:
    machine = built()
    stand(machine)
    late = machine.calls[-1]
    machine.pass_time(TIME_LEFT_S - 0.1)
    assert not late.task.done()
    others = [call for call in machine.calls[:-1] if not call.task.done()]
    machine.pass_time(0.1)
    (result,) = late.task.result().items
    assert result.error is not None
    assert (result.error.code, result.error.param) == ("machine_busy", f"part.{machine.num_calls}.0")
    assert "within 10 s" in result.error.message
    answer = http_error(result.error.to_error())
    assert (answer.status, int(answer.headers["retry-after"]) >= 1) == (503, True)
    assert not any(call.task.done() for call in others), "they have no limit"
    machine.everything_is_accounted_for()
    machine.teardown()
    assert [error_of(machine, number) for number in range(len(machine.calls) - 1)] == [None] * len(machine.calls[:-1])


@pytest.mark.parametrize("is_made", [False, True])
def test_what_is_late_for_the_share_of_its_worker_is_blamed_on_that_worker(is_made: bool) -> None:
    """The item is decoded but not encoded, or it was encoded for another worker and not announced: the error does not
    call the encoder busy, because it is not, and so the request goes to another worker."""
    machine = built()
    for number in range(4):
        machine.call([("small", number)], "worker-1")
        machine.work_well(2)
    assert machine.table.usage().num_leases == 4, "the share is used up"
    if is_made:
        machine.call([("small", 9)], "worker-2")
        machine.work_well(2)
    machine.call([("small", 9)], "worker-1", time_left_s=5.0)
    machine.work_well(2)
    machine.pass_time(5.0)
    error = error_of(machine, -1)
    assert error is not None
    assert error.code == "worker_backed_up"
    assert "worker-1" in error.message
    assert error.retry_after_s is not None
    machine.everything_is_accounted_for()
    machine.teardown()


def test_a_late_item_leaves_what_it_took_to_others() -> None:
    """Its decoder is free, its pixels no longer count in the line, and no part of it is decoded any more."""
    machine = built()
    for number in range(2):
        machine.call([("small", number)], "worker-1", time_left_s=TIME_LEFT_S)
    machine.call([("word", 0)], "worker-1")
    assert {one.item.mm_hash for one in machine.decoder.open} == {"small-0", "small-1"}
    machine.pass_time(TIME_LEFT_S)
    assert [one.item.mm_hash for one in machine.decoder.open] == ["word-0"]
    assert machine.pipeline.num_pending == 1
    machine.teardown()


def test_who_has_more_time_waits_on_for_the_same_content() -> None:
    machine = built()
    machine.call([("small", 0)], "worker-1", time_left_s=TIME_LEFT_S)
    machine.call([("small", 0)], "worker-2", time_left_s=2 * TIME_LEFT_S)
    machine.pass_time(TIME_LEFT_S)
    error = error_of(machine, 0)
    assert error is not None
    assert error.code == "machine_busy"
    assert not machine.calls[1].task.done()
    machine.work_well(2)
    assert error_of(machine, 1) is None
    machine.teardown()


def test_what_was_done_in_time_is_kept() -> None:
    machine = built()
    machine.call([("small", 0), ("wide", 0)], "worker-1", time_left_s=TIME_LEFT_S)
    small = next(one for one in machine.decoder.open if one.item.mm_hash == "small-0")
    machine._end_decode(small, "ok")
    machine._end_forward(set())
    machine.pass_time(TIME_LEFT_S)
    error = error_of(machine, 0, 1)
    assert error is not None
    assert (error_of(machine, 0, 0), error.code) == (None, "machine_busy")
    machine.teardown()


def test_a_late_call_says_when_the_line_will_have_been_worked_off() -> None:
    """The estimate covers forward passes only, because the time that decoding takes is not known."""
    machine = built()
    for cost in (4, 40):
        machine.pipeline.costs.observe("image", cost, 2.0 * cost)
    machine.call([("small", 0)], "worker-2")
    machine.call([("wide", 0)], "worker-2")
    machine.call([("small", 1)], "worker-1", time_left_s=TIME_LEFT_S)
    queued_s = machine.pipeline.jobs.queued_s
    assert queued_s > TIME_LEFT_S
    machine.pass_time(TIME_LEFT_S)
    error = error_of(machine, 2)
    assert error is not None
    assert error.retry_after_s is not None
    assert queued_s / 2 < error.retry_after_s <= queued_s
    machine.teardown()


def test_calls_that_have_ended_are_late_for_nothing() -> None:
    machine = built()
    machine.call([("small", 0)], "worker-1", time_left_s=TIME_LEFT_S)
    machine.work_well(2)
    assert error_of(machine, 0) is None
    machine.pass_time(TIME_LEFT_S)
    assert error_of(machine, 0) is None
    assert machine.pipeline.stats.num_failed == 0
    machine.teardown()
