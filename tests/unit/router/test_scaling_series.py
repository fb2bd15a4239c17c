"""Decisions about the sizes of pools, as every router shows them."""

from __future__ import annotations

import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.testing import FakeCluster, fake_cluster
from fabric.contracts import Member, MemberId, ScalingReport

REPORT = ScalingReport(
    pool="encoder",
    reason="queue",
    told="go from 2 to 5 (queue): ...",
    reason_to_count={"queue": 1, "steady": 7},
    num_desired=5,
    num_running=2,
    num_starting=3,
    num_silent=1,
    queue_s=12.5,
    work_rate=2.75,
    memory_use=0.25,
    for_work=3.9,
    for_queue=4.6,
    for_memory=0.3,
    num_enough=2,
    startup_s=31.5,
    waiting_s=6.5,
    waiting_memory=1.75,
)
NAME_TO_VALUE = {
    "weft_autoscaling_desired_replicas": 5,
    "weft_autoscaling_running_replicas": 2,
    "weft_autoscaling_starting_replicas": 3,
    "weft_autoscaling_silent_replicas": 1,
    "weft_autoscaling_queue_seconds": 12.5,
    "weft_autoscaling_work_replicas": 2.75,
    "weft_autoscaling_memory_replicas": 0.25,
    "weft_autoscaling_needed_for_work_replicas": 3.9,
    "weft_autoscaling_needed_for_queue_replicas": 4.6,
    "weft_autoscaling_needed_for_memory_replicas": 0.3,
    "weft_autoscaling_enough_replicas": 2,
    "weft_autoscaling_startup_seconds": 31.5,
    "weft_autoscaling_waiting_seconds": 6.5,
    "weft_autoscaling_waiting_memory_replicas": 1.75,
}


async def shown(cluster: FakeCluster) -> dict[tuple[str, str, str], float]:
    """Returns the values of the series, by name, pool and reason."""
    text = (await cluster.service.metrics_exposition()).decode()
    families = [each for each in text_string_to_metric_families(text) if each.name.startswith("weft_autoscaling")]
    samples = [sample for family in families for sample in family.samples]
    return {(each.name, each.labels["pool"], each.labels.get("reason", "")): each.value for each in samples}


async def test_the_newest_decision_of_each_pool_is_shown() -> None:
    async with fake_cluster() as cluster:
        assert await shown(cluster) == {}
        cluster.service.take_scaling([REPORT, ScalingReport("worker", "steady", "", {"steady": 2}, num_desired=4)])
        values = await shown(cluster)
    for name, value in NAME_TO_VALUE.items():
        assert values[name, "encoder", ""] == value
    assert values["weft_autoscaling_desired_replicas", "worker", ""] == 4
    decisions = {key[1:]: value for key, value in values.items() if key[0] == "weft_autoscaling_decisions_total"}
    assert decisions == {("encoder", "queue"): 1, ("encoder", "steady"): 7, ("worker", "steady"): 2}


@pytest.mark.parametrize(("other", "is_logged"), [("router-1", True), ("a-router", False)])
async def test_one_router_logs_the_decisions_that_change_a_size(
    other: str, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_cluster() as cluster:
        routers = [Member(MemberId(name), "router", f"local://{name}", "h", 1) for name in ("router-0", other)]
        cluster.service.update_members([*cluster.members, *routers])
        with caplog.at_level(logging.INFO, "router.service"):
            cluster.service.take_scaling([ScalingReport("encoder", "steady", "stay", {}, num_desired=2)])
            cluster.service.take_scaling([REPORT])
            cluster.service.take_scaling([REPORT])
    lines = [record.getMessage() for record in caplog.records if "encoders" in record.getMessage()]
    assert lines == ["the encoders go from 2 to 5 (queue): ..."] * is_logged
