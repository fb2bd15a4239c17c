"""Tests that each number of a stage's report appears as the metric that it declares."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from fabric.contracts import MemberId, StageReport
from router.observe import report_exposition

REPORT = StageReport(
    MemberId("stage-1"),
    2,
    "code2wav",
    epoch=1,
    seq=1,
    num_waiting=3,
    num_running=4,
    num_waiting_for_chunk=5,
    step_s=0.25,
    num_steps=7,
    num_chunks_in=8,
    num_chunks_out=9,
    num_outputs=10,
    num_stalls=11,
    pool_used=12,
    pool_size=13,
)
NAME_TO_VALUE = {
    "weft_stage_waiting_requests": 3,
    "weft_stage_running_requests": 4,
    "weft_stage_requests_waiting_for_chunk": 5,
    "weft_stage_step_seconds": 0.25,
    "weft_stage_steps_total": 7,
    "weft_stage_chunks_received_total": 8,
    "weft_stage_chunks_sent_total": 9,
    "weft_stage_outputs_total": 10,
    "weft_stage_stalls_total": 11,
    "weft_stage_pool_used": 12,
    "weft_stage_pool_size": 13,
}


def test_each_number_of_a_report_has_its_metric() -> None:
    families = text_string_to_metric_families(report_exposition(REPORT).decode())
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("weft_stage_")]
    assert {sample.name: sample.value for sample in samples} == NAME_TO_VALUE
    assert {(sample.labels["member"], sample.labels["stage"]) for sample in samples} == {("stage-1", "code2wav")}
