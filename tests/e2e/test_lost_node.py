"""Joins a Ray of three nodes (`ray.cluster_utils`) with an encoder and a worker on each of two of them, loses one of
these nodes under load, and gets another one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from cluster_process import ClusterProcess, eventually, pids, start_cluster
from mixed_requests import assert_all_right, questions, run_mixed
from ray_nodes import RayNode, RayOfNodes, ray_of_nodes

pytestmark = [pytest.mark.ray, pytest.mark.nixl, pytest.mark.torch]

MEMBERS = {"eyes": 1, "back": 1}
"""A node with these resources has room for one encoder and one worker."""
SECTIONS: dict[str, dict[str, object]] = {
    "router": {"ray_resources": {"front": 1}},
    "encoders": {
        "replicas": 2,
        "ray_resources": {"eyes": 1},
        "decode_processes": 1,
        "encode_delay_s": 0.05,
        "max_batch_cost": 1,
        "arena_bytes": 2**19,
    },
    "workers": {"replicas": 2, "ray_resources": {"back": 1}},
}
NUM_QUESTIONS = 60
NUM_AT_ONCE = 12


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayOfNodes]:
    with ray_of_nodes({"front": 1}) as running:
        yield running


@pytest.fixture(scope="module")
def pair(nodes: RayOfNodes) -> tuple[RayNode, RayNode]:
    return nodes.add(MEMBERS), nodes.add(MEMBERS)


@pytest.fixture(scope="module")
def serving(nodes: RayOfNodes, pair: tuple[RayNode, RayNode]) -> Iterator[ClusterProcess]:
    with start_cluster(90, ray={"address": nodes.address}, **SECTIONS) as running:
        yield running


def holders(node: RayNode, cluster: ClusterProcess) -> dict[str, int]:
    """Returns how many members of each kind run on a node."""
    return {kind: sum(map(node.has, pids(cluster, kind).values())) for kind in ("encoder", "worker")}


def test_the_demos_questions_are_answered_by_members_of_both_nodes(
    serving: ClusterProcess, pair: tuple[RayNode, RayNode]
) -> None:
    for node in pair:
        assert holders(node, serving) == {"encoder": 1, "worker": 1}
    asked = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "demo", "--url", serving.url], capture_output=True, text=True, timeout=300
    )
    assert "10 of 10 answers are right" in asked.stdout, asked.stdout + asked.stderr


def test_a_lost_node_costs_no_answer_and_a_new_one_takes_its_members(
    nodes: RayOfNodes, serving: ClusterProcess, pair: tuple[RayNode, RayNode]
) -> None:
    lost, kept = pair
    before = {kind: set(pids(serving, kind)) for kind in ("encoder", "worker")}
    outcome = run_mixed(serving, list(questions(NUM_QUESTIONS, 5)), NUM_AT_ONCE, lambda: nodes.kill(lost))
    assert serving.total("weft_router_attempts_total") > NUM_QUESTIONS, "nothing was under way on the lost node"
    for kind, names in before.items():
        eventually(lambda kind=kind: len(pids(serving, kind)) == 1)
        assert set(pids(serving, kind)) < names, "no node has room for another"
    assert holders(kept, serving) == {"encoder": 1, "worker": 1}
    added = nodes.add(MEMBERS)
    eventually(lambda: holders(added, serving) == {"encoder": 1, "worker": 1}, 180)
    assert_all_right(serving, outcome)
    for kind, work in (("worker", "tokens_generated_total"), ("encoder", "items_encoded_total")):
        (name,) = (name for name, pid in pids(serving, kind).items() if added.has(pid))
        eventually(
            lambda kind=kind, work=work, name=name: serving.metrics()[f'weft_{kind}_{work}{{{kind}="{name}"}}'] > 0
        )
