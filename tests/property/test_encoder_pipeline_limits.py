"""Checks which limits of its config the pipeline enforces, and what it reports, on the machine of
`test_encoder_pipeline`."""

from __future__ import annotations

import dataclasses

import pytest
import test_encoder_pipeline as rig

from encoder_pool.encoder_service import encoder_report
from fabric.contracts import EncoderReport, MemberId


def report(machine: rig.PipelineMachine) -> EncoderReport:
    config = rig.CONFIG
    return encoder_report(MemberId("encoder-1"), 1, 1, machine.pipeline, machine.table, config.max_items_in_flight)


@pytest.mark.parametrize("max_items", [1, 2, 3])
def test_no_more_items_lie_decoded_than_may_be_in_flight(max_items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is busy with a first item and there is room for the pixels of all items; still only `max_items` are
    decoded."""
    monkeypatch.setattr(rig, "CONFIG", dataclasses.replace(rig.CONFIG, max_items_in_flight=max_items))
    machine = rig.PipelineMachine()
    machine.build(0.01)
    machine.call([("small", 0)], "worker-1")
    machine._end_decode(machine.decoder.open[0], "ok")
    assert machine.forward.job is not None
    machine.call([("small", 1), ("word", 0)], "worker-1")
    machine.call([("word", 1), ("wide", 0)], "worker-2")
    decoded = []
    while machine.decoder.open:
        assert len(machine.decoder.open) <= max_items - len(decoded)
        decoded.append(machine.decoder.open[0].item.mm_hash)
        machine._end_decode(machine.decoder.open[0], "ok")
    assert decoded == ["small-1", "word-0", "word-1"][:max_items]
    assert report(machine).max_in_flight == max_items
    machine._end_forward(set())
    machine.work_well(4)
    machine.teardown()


def test_an_item_beyond_the_whole_decode_budget_is_refused_before_anything_queues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The item is refused although a decoder is free; the other item of its call continues."""
    monkeypatch.setitem(rig.MODALITY_TO_DECODE_BYTES, "video", rig.TOTAL_BYTES + 1)
    machine = rig.PipelineMachine()
    machine.build(0.01)
    machine.call([("clip", 0), ("small", 0)], "worker-1")
    assert [one.item.mm_hash for one in machine.decoder.open] == ["small-0"]
    assert (machine.pipeline.num_pending, machine.pipeline.jobs.totals.num_items_queued) == (1, 1)
    machine.work_well(2)
    large, small = machine.calls[0].task.result().items
    assert small.error is None
    assert large.error is not None
    assert (large.error.code, large.error.param) == ("invalid_media", "part.1.0")
    assert f"takes {rig.TOTAL_BYTES + 1} bytes" in large.error.message
    assert f"have only {rig.TOTAL_BYTES}" in large.error.message
    machine.teardown()


def test_the_busy_share_of_the_device_is_reported() -> None:
    machine = rig.PipelineMachine()
    machine.build(0.01)
    assert report(machine).busy_fraction == 0.0
    machine.call([("small", 0)], "worker-1")
    for busy_s, idle_s in ((0.75, 0.25), (0.25, 1.0)):
        machine._end_decode(machine.decoder.open[0], "ok")
        assert machine.forward.job is not None
        machine.clock.advance(busy_s)
        machine._end_forward(set())
        machine.clock.advance(idle_s)
        machine.call([("small", 1)], "worker-1")  # any event moves the window forward
        assert report(machine).busy_fraction == pytest.approx(busy_s / (busy_s + idle_s))
    machine.teardown()
